"""A shard's bytes straight from the tensors, a few MiB at a time, without a copy of the whole.

For what is written while training waits: nothing may change the tensors meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import torch

from strongroom.dtypes import bytes_of
from strongroom.shards import ChunkSpec, ShardLayout

__all__ = ["streamed_pieces"]

_PIECE_BYTES: Final = 4 << 20


def streamed_pieces(
    layout: ShardLayout, tensors: Mapping[ChunkSpec, torch.Tensor], metadata: Mapping[str, str]
) -> Iterator[bytes | memoryview]:
    """The bytes of a shard, in order.

    Args:
        layout: what lies where.
        tensors: the memory of each of its chunks, on any device, of any stride.
        metadata: the binding of the checkpoint.
    """
    yield layout.header(metadata)
    for chunk in layout.chunks:
        yield from _pieces(tensors[chunk].detach())


def _pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    if tensor.numel() == 0:
        return
    is_plain = tensor.device.type == "cpu" and tensor.is_contiguous()
    if is_plain and not tensor.is_conj() and not tensor.is_neg():
        flat = bytes_of(tensor)
        for start in range(0, len(flat), _PIECE_BYTES):
            yield flat[start : start + _PIECE_BYTES]
    elif tensor.nbytes <= _PIECE_BYTES or tensor.dim() == 0:
        host = tensor.cpu().resolve_conj().resolve_neg().contiguous()
        yield bytes_of(host)
    elif len(tensor) == 1:
        yield from _pieces(tensor[0])
    else:
        rows = max(1, _PIECE_BYTES * len(tensor) // tensor.nbytes)
        for start in range(0, len(tensor), rows):
            part = tensor[start : start + rows]
            yield from _pieces(part if len(part) > 1 else part[0])
