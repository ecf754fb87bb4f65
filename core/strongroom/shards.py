"""Shards: which chunk lies where in which file, and writing a file in one pass.

A shard is a safetensors file with one entry a stored chunk. Its layout is decided from names,
shapes and dtypes alone, before any tensor is copied; the copy then goes straight to where the
bytes will stand in the file (`strongroom.stage`), and the writer here hashes and writes one
block after the other while it is in cache. `docs/format.md`, clause 6.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from strongroom import layout, tensorfile
from strongroom.digest import BLOCK_BYTES, DigestAlgorithm, FileHasher
from strongroom.dtypes import DTYPE_BYTES
from strongroom.errors import FormatError, IntegrityError
from strongroom.layout import CheckpointName
from strongroom.manifest import FORMAT, FileRecord
from strongroom.pace import Pace
from strongroom.sealing import Sealer
from strongroom.stores.base import Store

__all__ = [
    "ChunkSpec",
    "ShardLayout",
    "WrittenFile",
    "binding",
    "check_binding",
    "lay_out",
    "write_file",
]

Buffer = bytes | bytearray | memoryview

MIN_PART_BYTES: Final = 8 << 20
"""A rank's state is not split into parts smaller than this: a file costs an fsync."""

WRITE_BYTES: Final = 16 * BLOCK_BYTES
"""Handed to a store at once: a disk that is written to past the page cache wants large writes."""

PACED_BYTES: Final = 4 * BLOCK_BYTES
"""The same where writing is slowed down on purpose, so that it goes on evenly."""

MAX_PART_ENTRIES: Final = 250_000
"""Keeps a part's header well below what stock safetensors reads."""


@dataclass(frozen=True, slots=True)
class ChunkSpec:
    """A chunk of a tensor that one rank stores: what it is, not its bytes.

    Attributes:
        tensor: the tensor's name.
        dtype: a name of `strongroom.dtypes`.
        offsets, sizes: elements per dimension, within the whole tensor.
        is_whole: whether the chunk is the whole tensor.
    """

    tensor: str
    dtype: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    is_whole: bool

    @property
    def entry(self) -> str:
        """The chunk's name in its shard: the tensor's, and ``@offsets`` where it is a part.

        ``@`` never occurs in a tensor's name (`strongroom.paths` escapes it).
        """
        if self.is_whole:
            return self.tensor
        return f"{self.tensor}@{','.join(map(str, self.offsets))}"

    @property
    def size_bytes(self) -> int:
        return math.prod(self.sizes) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLayout:
    """One file of one rank: its chunks in the order of their bytes, and where each starts."""

    path: str
    chunks: tuple[ChunkSpec, ...]
    starts: tuple[int, ...]
    header_bytes: int
    size_bytes: int

    def header(self, metadata: Mapping[str, str]) -> bytes:
        """The file's header; its length is `header_bytes` for every binding of the run."""
        data, _ = tensorfile.build_header(_described(self.chunks), metadata)
        if len(data) != self.header_bytes:
            raise FormatError(
                f"{self.path}: a header of {len(data)} bytes where {self.header_bytes} were laid out"
            )
        return data


def binding(run: str, name: CheckpointName) -> dict[str, str]:
    """What ties a shard to its checkpoint, as safetensors metadata; of constant length in a run."""
    return {
        "strongroom.attempt": name.attempt,
        "strongroom.format": FORMAT,
        "strongroom.launch": f"{name.launch:06d}",
        "strongroom.run": run,
        "strongroom.step": f"{name.step:012d}",
    }


def check_binding(metadata: Mapping[str, str], run: str, name: CheckpointName, what: str) -> None:
    """Raise IntegrityError where a shard or index says that it belongs to another checkpoint."""
    expected = binding(run, name)
    if metadata != expected:
        found = {key: metadata.get(key) for key in expected if metadata.get(key) != expected[key]}
        raise IntegrityError(
            f"{what} belongs to another checkpoint: it says {found or sorted(metadata)}, and {name} of run "
            f"{run} was expected; copy the right file from another tier, or restore an older step"
        )


def lay_out(
    chunks: Iterable[ChunkSpec],
    *,
    rank: int,
    parts: int,
    metadata: Mapping[str, str],
    first_part: int = 0,
    scatter: int = 0,
) -> list[ShardLayout]:
    """Spread one rank's chunks over files of about equal size.

    Args:
        chunks: what this rank stores, in any order; the result does not depend on it.
        rank: the rank.
        parts: files wanted at most (one a worker); fewer where the state is small.
        metadata: any `binding` of the run: only its length matters.
        first_part: the number of the first file.
        scatter: over how many folders files are spread; 0: over none.
    """
    ordered = sorted(chunks, key=lambda chunk: (-chunk.size_bytes, chunk.entry))
    total = sum(chunk.size_bytes for chunk in ordered)
    wanted = max(1, min(parts, total // MIN_PART_BYTES), -(-len(ordered) // MAX_PART_ENTRIES))
    # Longest first into the emptiest part: at most a third above the best possible spread.
    bins: list[list[ChunkSpec]] = [[] for _ in range(wanted)]
    filled = [0] * wanted
    for chunk in ordered:
        emptiest = min(range(wanted), key=lambda number: (filled[number], len(bins[number])))
        bins[emptiest].append(chunk)
        # An entry costs header bytes too, which spreads many small tensors by count.
        filled[emptiest] += chunk.size_bytes + 128
    return [
        _lay_out_part(part, layout.shard_path(rank, number, scatter=scatter), metadata)
        for number, part in enumerate(bins, start=first_part)
    ]


def _lay_out_part(chunks: Sequence[ChunkSpec], path: str, metadata: Mapping[str, str]) -> ShardLayout:
    ordered = sorted(chunks, key=lambda chunk: (-DTYPE_BYTES[chunk.dtype], chunk.entry))
    _, header = tensorfile.build_header(_described(ordered), metadata)
    return ShardLayout(
        path=path,
        chunks=tuple(ordered),
        starts=tuple(entry.start for entry in header.entries),
        header_bytes=header.data_start,
        size_bytes=header.end,
    )


def _described(chunks: Sequence[ChunkSpec]) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(chunk.entry, chunk.dtype, chunk.sizes) for chunk in chunks]


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFile:
    """A file on stable storage: its record, and its block digests where it has any."""

    record: FileRecord
    block_digests: bytes


def write_file(
    store: Store,
    name: CheckpointName,
    path: str,
    pieces: Iterable[Buffer],
    *,
    length_bytes: int,
    algorithm: DigestAlgorithm,
    sealer: Sealer | None = None,
    pace: Pace | None = None,
) -> WrittenFile:
    """Write one file under ``data/`` in one pass, a few blocks at a time: sealed, hashed, then written.

    Args:
        path: as stored.
        pieces: what the file holds, in order, in pieces of any size; none is copied.
        length_bytes: their sum.
        sealer: seals it; None: it is stored as it is.
        pace: how fast this process may write, all its files together.

    Raises:
        StoreError: the file was not written whole; it must not be used.
    """
    if sealer is not None:
        pieces = sealer.seal(pieces, length_bytes=length_bytes)
        length_bytes = sealer.sealed_bytes(length_bytes)
    step = WRITE_BYTES if pace is None or pace.is_unbounded else PACED_BYTES
    hasher = FileHasher(algorithm)
    with store.open_writer(layout.data_key(name, path), length_bytes=length_bytes) as writer:
        for piece in pieces:
            view = memoryview(piece).cast("B")
            for start in range(0, len(view), step):
                part = view[start : start + step]
                hasher.update(part)
                if pace is not None:
                    pace.spend(len(part))
                writer.write(part)
        writer.finish()
    digest = hasher.digest()
    header = sealer.header if sealer is not None else None
    return WrittenFile(
        record=FileRecord(path=path, size_bytes=length_bytes, digest=digest, header=header),
        # A sealed file's segments vouch for themselves.
        block_digests=hasher.block_digests if sealer is None else b"",
    )
