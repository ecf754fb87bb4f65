"""Staging: one copy of every tensor into host memory that training never touches.

The copy goes straight to where the bytes will stand in their shard, so that a shard is one
piece of memory when the background comes to hash and write it. Buffers are kept from save to
save while the state's shape stays the same: only the first save pays for fresh pages. CPU
tensors are copied like any other, since the optimizer's next step changes them in place.

What lies on an accelerator is copied into pinned memory by `strongroom.devicecopy`, and may still be
under way when `Stage.copy` returns.

A `Stage` serves one save at a time; the checkpointer sees to that.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from strongroom import dtypes
from strongroom.devicecopy import DeviceCopier, Pending
from strongroom.errors import ConfigError, StateEncodingError
from strongroom.shards import ChunkSpec, ShardLayout, lay_out

__all__ = ["Stage", "StagedShard", "check_tensor", "is_freed", "local_tensor", "picker"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedShard:
    """A shard's bytes in host memory, its header's place included."""

    layout: ShardLayout
    image: memoryview

    def pieces(self, metadata: Mapping[str, str]) -> list[memoryview]:
        """The file's bytes, bound to one checkpoint by its header."""
        self.image[: self.layout.header_bytes] = self.layout.header(metadata)
        return [self.image]


_CAT_DTYPES: Final = frozenset({"F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL", "C64"})
"""What `torch.cat` joins on every supported torch: not each knows the eight-bit floats and wide unsigned."""


class Stage:
    """Reusable host buffers for one rank's chunks.

    Args:
        rank: the rank.
        parts: files wanted at most.
        is_pinned: whether the buffers are pinned, which copies from a device run beside training from.
        copier: copies what lies on an accelerator; None: it is copied like anything else.
        scatter: over how many folders files are spread; 0: over none.

    Attributes:
        pending: copies from accelerators that the last `copy` left under way; None: all is there.
    """

    def __init__(
        self,
        *,
        rank: int,
        parts: int,
        is_pinned: bool = False,
        copier: DeviceCopier | None = None,
        scatter: int = 0,
    ) -> None:
        self.pending: Pending | None = None
        self._rank = rank
        self._parts = parts
        self._scatter = scatter
        self._is_pinned = is_pinned
        self._copier = copier
        self._key: tuple[ChunkSpec, ...] | None = None
        self._shards: list[StagedShard] = []
        self._buffers: list[torch.Tensor] = []
        self._rows: list[_Rows] = []
        self._single: _Singles = _Singles((), ())

    @property
    def size_bytes(self) -> int:
        """Host memory held."""
        return sum(len(shard.image) for shard in self._shards)

    def prepare(self, specs: Sequence[ChunkSpec], metadata: Mapping[str, str]) -> None:
        """Lay out and allocate for chunks of these shapes; does nothing where they are the last ones.

        Every page is touched, so that the copy that follows waits for no page fault.
        """
        if self._lay_out(specs, metadata):
            for buffer in self._buffers:
                buffer[:: mmap.PAGESIZE].zero_()

    def copy(
        self,
        specs: Sequence[ChunkSpec],
        tensors: Sequence[torch.Tensor],
        metadata: Mapping[str, str],
        *,
        early: Collection[int] = (),
    ) -> list[StagedShard]:
        """Copy each chunk's tensor; once nothing is `pending`, the originals may change freely.

        Args:
            specs: what is stored, one a tensor.
            tensors: the chunks' data, of the chunks' sizes and dtypes, on any device, of any stride.
            metadata: any binding of the run.
            early: numbers of chunks that training changes soon: where they lie on an accelerator,
                its work that is queued from now on waits for their copies.
        """
        self._lay_out(specs, metadata)
        if len(tensors) != len(specs):
            raise ConfigError(f"{len(tensors)} tensors were given for {len(specs)} chunks")
        with torch.no_grad():
            left: list[_Rows] = []
            for rows in self._rows:
                try:
                    torch.cat(rows.pick(tensors), out=rows.target)
                except (RuntimeError, TypeError):
                    # They lie on several devices, or not on the CPU: one by one they can be copied.
                    left.append(rows)
            self.pending = None
            singles = (self._single, *(rows.singles for rows in left))
            if self._copier is None:
                for single in singles:
                    if single.targets:
                        torch._foreach_copy_(single.targets, single.pick(tensors))
            else:
                self._copy_from_anywhere(self._copier, singles, tensors, early)
        return self._shards

    def _copy_from_anywhere(
        self,
        copier: DeviceCopier,
        singles: Iterable[_Singles],
        tensors: Sequence[torch.Tensor],
        early: Collection[int],
    ) -> None:
        near: list[tuple[torch.Tensor, torch.Tensor]] = []
        soon: list[tuple[torch.Tensor, torch.Tensor]] = []
        late: list[tuple[torch.Tensor, torch.Tensor]] = []
        for single in singles:
            for target, number in zip(single.targets, single.numbers, strict=True):
                source = tensors[number]
                kind = soon if number in early else late
                kind = kind if copier.is_far(source) else near
                kind.append((target, source))
        if soon:
            first = copier.start([target for target, _ in soon], [source for _, source in soon])
            first.fence()
            self.pending = first
        if late:
            # Behind the first on the same streams: when these are done, so are those.
            self.pending = copier.start([target for target, _ in late], [source for _, source in late])
        if near:
            torch._foreach_copy_([target for target, _ in near], [source for _, source in near])

    def _lay_out(self, specs: Sequence[ChunkSpec], metadata: Mapping[str, str]) -> bool:
        """Lay out and allocate, where these are not the last ones; whether it did."""
        key = tuple(specs)
        if key is self._key or key == self._key:
            return False
        # Free the old buffers first, so that two states are never held at once.
        self._key, self._shards, self._buffers, self._rows = None, [], [], []
        self._single = _Singles((), ())
        shards, buffers, rows = [], [], []
        targets: list[torch.Tensor] = []
        numbers: list[int] = []
        number_of = {spec: number for number, spec in enumerate(key)}
        laid_out = lay_out(key, rank=self._rank, parts=self._parts, metadata=metadata, scatter=self._scatter)
        for shard in laid_out:
            buffer = _page_aligned(shard.size_bytes, is_pinned=self._is_pinned)
            places = [
                (chunk, start, number_of[chunk])
                for chunk, start in zip(shard.chunks, shard.starts, strict=True)
                if chunk.size_bytes
            ]
            for group in _groups(places):
                if len(group) >= _MIN_ROWS:
                    rows.append(_Rows.of(buffer, group))
                    continue
                for chunk, start, number in group:
                    targets.append(_view(buffer, chunk, start))
                    numbers.append(number)
            shards.append(StagedShard(layout=shard, image=buffer.numpy().data))
            buffers.append(buffer)
        self._single = _Singles(tuple(targets), tuple(numbers))
        self._key, self._shards, self._buffers, self._rows = key, shards, buffers, rows
        return True


_Place = tuple[ChunkSpec, int, int]
"""A chunk that is not empty, where it starts in its shard, and its number among the chunks given."""

_MAX_ROW_BYTES: Final = 16 << 10
"""Of a chunk that is copied with its neighbours: below, what a copy costs is mostly the call."""

_MAX_ROWS_ELEMENTS: Final = (1 << 15) - 1
"""Copied by one call. From 32,768 elements on (``at::internal::GRAIN_SIZE``) `torch.cat` shares the work
between threads, and has no fast path for many inputs."""

_MIN_ROWS: Final = 8
"""Neighbours that are worth a call of their own."""


def _groups(places: Sequence[_Place]) -> Iterator[list[_Place]]:
    """Cut a shard's chunks into runs of neighbours that one `torch.cat` along the first dimension joins."""
    group: list[_Place] = []
    kind: object = None
    elements = 0
    for place in places:
        chunk = place[0]
        size = math.prod(chunk.sizes)
        is_small = chunk.sizes and chunk.size_bytes <= _MAX_ROW_BYTES and chunk.dtype in _CAT_DTYPES
        found = (chunk.dtype, chunk.sizes[1:]) if is_small else None
        if group and (found is None or found != kind or elements + size > _MAX_ROWS_ELEMENTS):
            yield group
            group, elements = [], 0
        group.append(place)
        kind = found
        elements += size
    if group:
        yield group


_HUGE_FROM_BYTES: Final = 8 << 20


def _page_aligned(size_bytes: int, *, is_pinned: bool) -> torch.Tensor:
    """Host memory that begins with a page: what lies so can be written past the page cache."""
    huge = getattr(mmap, "MADV_HUGEPAGE", None)
    if huge is not None and size_bytes >= _HUGE_FROM_BYTES and not is_pinned:
        # Mapped anew, so that the kernel may give it huge pages: a copy then waits for fewer translations.
        region = mmap.mmap(-1, size_bytes)
        with contextlib.suppress(OSError):  # a kernel without them
            region.madvise(huge)
        return torch.frombuffer(region, dtype=torch.uint8)
    # The device is named, since a program may have set another default one.
    buffer = torch.empty(size_bytes + mmap.PAGESIZE, dtype=torch.uint8, device="cpu", pin_memory=is_pinned)
    start = -buffer.data_ptr() % mmap.PAGESIZE
    return buffer[start : start + size_bytes]


def _view(buffer: torch.Tensor, chunk: ChunkSpec, start: int) -> torch.Tensor:
    """A chunk's place in a shard's buffer, as a tensor of the chunk's dtype and shape."""
    raw = buffer[start : start + chunk.size_bytes]
    return raw.view(dtypes.torch_dtype(chunk.dtype)).view(chunk.sizes)


class _Singles:
    """Chunks that are copied one by one, and which of the tensors go there."""

    def __init__(self, targets: tuple[torch.Tensor, ...], numbers: tuple[int, ...]) -> None:
        self.targets = targets
        self.numbers = numbers
        self.pick = picker(numbers)


class _Rows:
    """Small neighbours in a shard, which one call fills."""

    def __init__(self, target: torch.Tensor, singles: Callable[[], _Singles], numbers: Sequence[int]) -> None:
        self.target = target
        self.pick = picker(numbers)
        self._singles = singles

    @classmethod
    def of(cls, buffer: torch.Tensor, group: Sequence[_Place]) -> _Rows:
        first, start, _ = group[0]
        rows = sum(chunk.sizes[0] for chunk, _, _ in group)
        end = start + sum(chunk.size_bytes for chunk, _, _ in group)
        whole = buffer[start:end].view(dtypes.torch_dtype(first.dtype)).view(rows, *first.sizes[1:])
        numbers = tuple(number for _, _, number in group)

        def singles() -> _Singles:
            return _Singles(tuple(_view(buffer, chunk, at) for chunk, at, _ in group), numbers)

        return cls(whole, singles, numbers)

    @property
    def singles(self) -> _Singles:
        """The same, one by one."""
        return self._singles()


def picker(numbers: Sequence[int]) -> Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, ...]]:
    """Picks items of a sequence by their numbers, in one call."""
    if len(numbers) < 2:
        return lambda tensors: tuple(tensors[number] for number in numbers)
    return operator.itemgetter(*numbers)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a (possibly distributed) tensor that this process holds."""
    to_local = getattr(tensor, "to_local", None)
    if to_local is not None:
        return to_local()  # type: ignore[no-any-return]
    local_shards = getattr(tensor, "local_shards", None)
    if local_shards is not None:
        # torch's older ShardedTensor, of which a rank may hold nothing.
        held = [shard.tensor for shard in local_shards()]
        return held[0].detach() if held else torch.empty(0, dtype=tensor.dtype)
    return tensor.detach()


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
    if is_freed(tensor):
        return "the memory of this tensor was freed (its storage was resized); fill it again before saving"
    return None


def is_freed(tensor: torch.Tensor) -> bool:
    """Whether an ordinary tensor shows more than its storage has, as after ``untyped_storage().resize_(0)``.

    Whoever reads or fills such a tensor ends the process: torch does not look.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.numel() == 0:
        return False
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    end_bytes = (tensor.storage_offset() + reach + 1) * tensor.element_size()
    return end_bytes > tensor.untyped_storage().nbytes()


def check_tensor(tensor: torch.Tensor, key_path: str) -> None:
    """Raise StateEncodingError where a tensor cannot be stored."""
    problem = _problem(tensor)
    if problem is not None:
        raise StateEncodingError(key_path, problem)
