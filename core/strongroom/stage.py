"""Staging: one copy of every tensor into host memory that training never touches.

The copy goes straight to where the bytes will stand in their shard, so that a shard is one
piece of memory when the background comes to hash and write it. Buffers are kept from save to
save while the state's shape stays the same: only the first save pays for fresh pages. CPU
tensors are copied like any other, since the optimizer's next step changes them in place.

A `Stage` serves one save at a time; the checkpointer sees to that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from strongroom import dtypes
from strongroom.errors import StateEncodingError
from strongroom.shards import ChunkSpec, ShardLayout, lay_out

__all__ = ["Stage", "StagedShard", "check_tensor", "local_tensor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedShard:
    """A shard's bytes in host memory, its header's place included."""

    layout: ShardLayout
    image: memoryview

    def pieces(self, metadata: Mapping[str, str]) -> list[memoryview]:
        """The file's bytes, bound to one checkpoint by its header."""
        self.image[: self.layout.header_bytes] = self.layout.header(metadata)
        return [self.image]


class Stage:
    """Reusable host buffers for one rank's chunks."""

    def __init__(self, *, rank: int, parts: int) -> None:
        self._rank = rank
        self._parts = parts
        self._key: tuple[ChunkSpec, ...] | None = None
        self._shards: list[StagedShard] = []
        self._views: list[torch.Tensor] = []

    @property
    def size_bytes(self) -> int:
        """Host memory held."""
        return sum(len(shard.image) for shard in self._shards)

    def prepare(self, specs: Sequence[ChunkSpec], metadata: Mapping[str, str]) -> None:
        """Lay out and allocate for chunks of these shapes; does nothing where they are the last ones."""
        key = tuple(specs)
        if key == self._key:
            return
        # Free the old buffers first, so that two states are never held at once.
        self._key, self._shards, self._views = None, [], []
        shards = []
        places: dict[ChunkSpec, torch.Tensor] = {}
        for shard in lay_out(key, rank=self._rank, parts=self._parts, metadata=metadata):
            # Named, since a program may have set another default device.
            buffer = torch.empty(shard.size_bytes, dtype=torch.uint8, device="cpu")
            for chunk, start in zip(shard.chunks, shard.starts, strict=True):
                raw = buffer[start : start + chunk.size_bytes]
                places[chunk] = raw.view(dtypes.torch_dtype(chunk.dtype)).view(chunk.sizes)
            shards.append(StagedShard(layout=shard, image=buffer.numpy().data))
        self._key, self._shards, self._views = key, shards, [places[spec] for spec in key]

    def copy(
        self, specs: Sequence[ChunkSpec], tensors: Sequence[torch.Tensor], metadata: Mapping[str, str]
    ) -> list[StagedShard]:
        """Copy each chunk's tensor; on return the originals may change freely.

        Args:
            specs: what is stored, one a tensor.
            tensors: the chunks' data, on any device, of any stride.
            metadata: any binding of the run.
        """
        self.prepare(specs, metadata)
        with torch.no_grad():
            targets, sources = [], []
            for target, source in zip(self._views, tensors, strict=True):
                if target.numel():
                    targets.append(target)
                    sources.append(source)
            if targets:
                torch._foreach_copy_(targets, sources)
        return self._shards


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a (possibly distributed) tensor that this process holds."""
    to_local = getattr(tensor, "to_local", None)
    return to_local() if to_local is not None else tensor.detach()


def _problem(tensor: torch.Tensor) -> str | None:
    """Why a tensor cannot be stored, or None where it can."""
    if isinstance(tensor, torch.nn.UninitializedParameter | torch.nn.UninitializedBuffer):
        return "a lazy module that was never called has no data here; call it once before saving"
    # By exact type: a parameter made from a subclass, or subclassed itself, may carry more than its data.
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        from torch.distributed.tensor import DTensor

        if not isinstance(tensor, DTensor):
            return (
                f"a tensor of the subclass {type(tensor).__qualname__} is not carried; store what it is made "
                f"of, or teach an encoding with strongroom.register_codec"
            )
    if tensor.is_meta:
        return "a tensor on the meta device has no data; materialize it before saving"
    if tensor.layout is not torch.strided or tensor.is_nested:
        return f"a tensor of layout {tensor.layout} is not carried; store its dense form or its parts"
    if dtypes.dtype_name(tensor.dtype) is None:
        hint = " (torch.view_as_real gives one that is)" if tensor.dtype.is_complex else ""
        return f"a tensor of {tensor.dtype} is not carried by safetensors{hint}; store it in another dtype"
    return None


def check_tensor(tensor: torch.Tensor, key_path: str) -> None:
    """Raise StateEncodingError where a tensor cannot be stored."""
    problem = _problem(tensor)
    if problem is not None:
        raise StateEncodingError(key_path, problem)
