"""A checkpoint's tensors as the bytes of files, in order and a piece at a time, each byte verified.

Tensors may lie in any number of chunks, cut along any dimension, in any number of shards: they are
put together here, whatever mesh they came from. Memory does not grow with tensors or files: a piece
holds `PIECE_BYTES`, or one row of a tensor where a row is longer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Final

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from strongroom import layout
from strongroom.columns import TensorRecord
from strongroom.digest import BLOCK_BYTES, Digest, block_digest
from strongroom.dtypes import torch_dtype
from strongroom.errors import FormatError, IntegrityError, ObjectNotFoundError
from strongroom.fetch import fetch
from strongroom.index import Index, ShardFile
from strongroom.manifest import FileRecord
from strongroom.metadata import dcp_metadata
from strongroom.opened import ADVICE, OpenedCheckpoint
from strongroom.parallel import run_all

__all__ = ["PIECE_BYTES", "Piece", "PieceReader", "pieces_of"]

PIECE_BYTES: Final = 128 << 20
"""Enough that threads have work and disks read in long runs; two pieces are in memory at a time."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Some rows of a tensor: all of it, mostly."""

    name: str
    record: TensorRecord
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Neighbouring bytes of one file's tensors."""

    parts: tuple[_Part, ...]
    size_bytes: int


def pieces_of(tensors: Sequence[tuple[str, TensorRecord]], piece_bytes: int = PIECE_BYTES) -> Iterator[Piece]:
    """Cut a file's tensors, in their order, into pieces."""
    parts: list[_Part] = []
    filled = 0
    for name, record in tensors:
        for first, rows, size in _rows(record, piece_bytes):
            if parts and filled + size > piece_bytes:
                yield Piece(parts=tuple(parts), size_bytes=filled)
                parts, filled = [], 0
            offsets = (first, *[0] * (len(record.shape) - 1)) if record.shape else ()
            sizes = (rows, *record.shape[1:]) if record.shape else ()
            parts.append(_Part(name, record, offsets, sizes, filled, size))
            filled += size
    if parts:
        yield Piece(parts=tuple(parts), size_bytes=filled)


def _rows(record: TensorRecord, piece_bytes: int) -> Iterator[tuple[int, int, int]]:
    """First row, number of rows and bytes of each part of a tensor; none of one without elements."""
    size = record.size_bytes
    if size == 0:
        return
    count = record.shape[0] if record.shape else 1
    row_bytes = size // count
    step = count if size <= piece_bytes else max(1, piece_bytes // row_bytes)
    for first in range(0, count, step):
        rows = min(step, count - first)
        yield first, rows, rows * row_bytes


class PieceReader:
    """Reads pieces of one checkpoint.

    Args:
        opened: the checkpoint.
        tensors: all that is going to be read.
        is_at_once: whether all of it is one piece.
        workers: threads.
        advance: told of bytes that were verified before anything is read.
    """

    def __init__(
        self,
        opened: OpenedCheckpoint,
        tensors: Collection[TensorRecord],
        *,
        is_at_once: bool,
        workers: int,
        advance: Callable[[int], None],
    ) -> None:
        self._workers = workers
        self._opened = opened
        if not is_at_once and needs_first_pass(opened):
            self._opened = _by_blocks(opened, shards_of(tensors), workers, advance)

    def read(self, piece: Piece, memory: torch.Tensor) -> None:
        """Fill memory, which is bytes and as long as the piece.

        Raises:
            IntegrityError: a shard is missing, cut short or wrong; names it.
            StoreError, NoKeyError, KeyServiceError: it could not be read.
        """
        reads: list[tuple[ReadItem, torch.Tensor]] = []
        records: dict[str, TensorRecord] = {}
        for part in piece.parts:
            own = memory[part.start : part.start + part.size_bytes]
            target = own.view(torch_dtype(part.record.dtype)).view(part.sizes)
            # Without the chunks that hold nothing of it: there may be as many as ranks.
            records[part.name] = part.record.reached_by([(part.offsets, part.sizes)])
            reads += _reads_of(part, records[part.name], target)
        fetch(self._opened, reads, records, workers=self._workers, touched=set())


def shards_of(tensors: Collection[TensorRecord]) -> list[str]:
    """The shards that hold something of some tensors."""
    return sorted({chunk.path for record in tensors for chunk in record.chunks if 0 not in chunk.sizes})


def needs_first_pass(opened: OpenedCheckpoint) -> bool:
    """Whether a part of a file can be verified only with all of it: then a first pass makes it possible."""
    return opened.manifest.algorithm == "sha256" and not opened.manifest.is_sealed


def _reads_of(part: _Part, record: TensorRecord, target: torch.Tensor) -> list[tuple[ReadItem, torch.Tensor]]:
    stored = dcp_metadata({part.name: record}).state_dict_metadata[part.name]
    if not isinstance(stored, TensorStorageMetadata):
        raise FormatError(f"{part.name!r:.80} is no tensor")
    wanted = [ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.sizes))]
    reads = []
    for item in create_read_items_for_chunk_list(part.name, stored, wanted):
        view = target
        for dimension, (start, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            view = view.narrow(dimension, start, length)
        reads.append((item, view))
    return reads


# ------------------------------------------------------------------------ files with one digest


@dataclass(frozen=True, kw_only=True)
class _ByBlocks(OpenedCheckpoint):
    """A checkpoint whose files have one digest each, with those of their blocks, taken as it was verified.

    A block that is read again is held against what the very bytes had whose digest was the manifest's.
    """

    verified: Index

    @cached_property
    def index(self) -> Index:
        return self.verified


def _by_blocks(
    opened: OpenedCheckpoint, paths: Sequence[str], workers: int, advance: Callable[[int], None]
) -> OpenedCheckpoint:
    """Verify whole shards, and make it possible to read them in parts.

    Else each part would cost a read of the whole file.
    """
    tasks = [partial(_blocks_of, opened, opened.record(path), advance) for path in paths]
    blocks = dict(zip(paths, run_all(tasks, workers=workers, name="strongroom-verify"), strict=True))
    return _ByBlocks(
        store=opened.store,
        commit=opened.commit,
        manifest=replace(opened.manifest, algorithm="blake3"),
        verified=_with_blocks(opened.index, blocks),
    )


def _with_blocks(index: Index, blocks: Mapping[str, bytes]) -> Index:
    files = [ShardFile(path, blocks.get(path, b"")) for path in index.files]
    return Index.of_columns(index.columns, files, index.aliases)


def _blocks_of(opened: OpenedCheckpoint, record: FileRecord, advance: Callable[[int], None]) -> bytes:
    """The digests of a file's blocks, once its own was found right. Runs on any thread."""
    what = f"{record.path} of {opened.name}"
    whole = hashlib.sha256()
    digests = bytearray()
    scratch = memoryview(bytearray(BLOCK_BYTES))
    try:
        reader = opened.store.open_reader(layout.data_key(opened.name, record.path))
    except ObjectNotFoundError:
        raise opened.missing(record) from None
    with reader:
        if reader.size_bytes != record.size_bytes:
            raise IntegrityError(
                f"{what} has {reader.size_bytes} bytes, the manifest says {record.size_bytes}; {ADVICE}"
            )
        for start in range(0, record.size_bytes, BLOCK_BYTES):
            block = scratch[: min(BLOCK_BYTES, record.size_bytes - start)]
            filled = reader.read_into(start, block)
            if filled != len(block):
                raise IntegrityError(
                    f"{what} ends at byte {start + filled}; the manifest says {record.size_bytes}; {ADVICE}"
                )
            whole.update(block)
            digests += block_digest(block)
            advance(len(block))
    found = Digest("sha256", whole.digest())
    if not found.matches(record.digest):
        raise IntegrityError(f"{what}: stored digest {found} is not the manifest's {record.digest}; {ADVICE}")
    return bytes(digests)
