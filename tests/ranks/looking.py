"""What a checkpoint on a file system holds, for tests to look at."""

from __future__ import annotations

from pathlib import Path

from strongroom.catalog import Catalog
from strongroom.index import Index
from strongroom.opened import OpenedCheckpoint, open_checkpoint
from strongroom.signing import NO_GUARD
from strongroom.stores.local import LocalStore

__all__ = ["chunks", "index_of", "open_newest", "stored_bytes"]


def open_newest(root: Path) -> OpenedCheckpoint:
    """The newest checkpoint, its index and documents verified."""
    store = LocalStore(root)
    history = Catalog(store).history()
    return open_checkpoint(store, history.commits[history.line.newest_first[0]], NO_GUARD)


def index_of(root: Path) -> Index:
    return open_newest(root).index


def chunks(root: Path, tensor: str) -> dict[tuple[int, ...], tuple[int, tuple[int, ...]]]:
    """A stored tensor's chunks by offset: the rank that stored each, and its sizes."""
    found = index_of(root).tensors[tensor].chunks
    return {chunk.offsets: (int(chunk.path[:5]), chunk.sizes) for chunk in found}


def stored_bytes(root: Path, ranks: int) -> list[int]:
    """Bytes of tensors that each rank stored."""
    totals = [0] * ranks
    for record in index_of(root).tensors.values():
        width = record.size_bytes // max(1, _elements(record.shape))
        for chunk in record.chunks:
            totals[int(chunk.path[:5])] += width * _elements(chunk.sizes)
    return totals


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
