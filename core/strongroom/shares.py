"""What each rank of a job would read of a checkpoint, without a state to hold it against. No torch.

Every tensor is taken to be sharded evenly along its first dimension, as ``torch.chunk`` divides it
(FSDP's ``Shard(0)``); one without dimensions is read by every rank; what a rank stored as its own is
read by the rank of that number. Index and documents are read and verified; no shard is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from strongroom import layout
from strongroom.columns import Columns, Integers, spans
from strongroom.consistency import references
from strongroom.errors import ConfigError
from strongroom.opened import OpenedCheckpoint

__all__ = ["MAX_RANKS", "FileShare", "RankShare", "Shares", "shares_of"]

MAX_RANKS: Final = 100_000
"""As many as the names of shards have digits for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileShare:
    """What is read of a shard: whole blocks, since each is verified; with ``sha256`` the whole shard."""

    path: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShare:
    """What one rank would read.

    Attributes:
        files: the shards that hold something for it, in the index's order.
        has_own_state: whether the checkpoint holds values of this rank's own.
    """

    rank: int
    files: tuple[FileShare, ...]
    has_own_state: bool

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """What a job of so many ranks would read.

    Attributes:
        ranks: each rank's part, in order.
        common_bytes: what every rank reads besides: manifest, index, the common document.
        lacking: ranks for which the checkpoint holds no value of their own, although it does for
            others: they keep what they have.
        ownerless: ranks that stored values of their own, and that the job does not have: nobody
            reads these.
    """

    ranks: tuple[RankShare, ...]
    common_bytes: int
    lacking: tuple[int, ...]
    ownerless: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Of all ranks together, without what is common."""
        return sum(rank.size_bytes for rank in self.ranks)


def shares_of(opened: OpenedCheckpoint, world_size: int) -> Shares:
    """Divide a checkpoint among the ranks of a job.

    Raises:
        ConfigError: a job of so many ranks cannot be.
        IntegrityError: the index or a document is missing or damaged.
        StoreError: the store could not be asked.
    """
    if not 1 <= world_size <= MAX_RANKS:
        raise ConfigError(f"a job has 1 to {MAX_RANKS:,} ranks, got {world_size}")
    owners = [
        rank for rank in range(opened.manifest.world_size) if layout.rank_state_path(rank) in opened.files
    ]
    owner_of = _owners(opened, owners)
    shares = _divided(opened, owner_of, world_size)
    own = set(owners)
    return Shares(
        ranks=tuple(
            RankShare(rank=rank, files=shares.get(rank, ()), has_own_state=rank in own)
            for rank in range(world_size)
        ),
        common_bytes=len(opened.manifest.encode())
        + sum(opened.record(path).size_bytes for path in (layout.INDEX, layout.STATE)),
        lacking=tuple(rank for rank in range(world_size) if own and rank not in own),
        ownerless=tuple(rank for rank in owners if rank >= world_size),
    )


def _owners(opened: OpenedCheckpoint, ranks: list[int]) -> Integers:
    """Of each tensor, the rank whose own value it belongs to; -1: it is common."""
    index = opened.index
    numbers = {name: number for number, name in enumerate(index.columns.names)}
    owners = np.full(len(numbers), -1, np.int64)
    common = {index.aliases.get(name, name) for name in references(opened.state).tensors}
    for rank in ranks:
        document = opened.rank_state(rank)
        for name in references(list(document.values())).tensors:
            stored = index.aliases.get(name, name)
            if stored in numbers and stored not in common:
                owners[numbers[stored]] = rank
    return owners


def _divided(
    opened: OpenedCheckpoint, owner_of: Integers, world_size: int
) -> dict[int, tuple[FileShare, ...]]:
    """Each rank's part of each shard, for ranks that have any, owners that the job lacks among them."""
    columns = opened.index.columns
    chunks, ranks, begins, ends = _extents(columns, owner_of, world_size)
    if not len(chunks):
        return {}
    files = columns.files[chunks]
    order = np.lexsort((begins, files, ranks))
    files, ranks, begins, ends = files[order], ranks[order], begins[order], ends[order]
    is_first = np.append(True, (files[1:] != files[:-1]) | (ranks[1:] != ranks[:-1]))
    records = [opened.record(path) for path in columns.paths]
    sizes = np.array([record.plain_bytes for record in records], np.int64)[files]
    if opened.manifest.algorithm == "sha256" and not opened.manifest.is_sealed:
        amounts = np.where(is_first, sizes, 0)
    else:
        # All files have the same units, since all are sealed or none is.
        unit, overhead = records[0].unit_bytes, records[0].unit_overhead_bytes
        low = begins // unit * unit
        high = np.minimum(-(-ends // unit) * unit, sizes)
        # Chunks share no byte, so units end in the order in which chunks begin: one that the
        # chunk before has asked for is read once.
        asked = np.where(is_first, 0, np.append(0, high[:-1]))
        amounts = np.maximum(high - np.maximum(low, asked), 0)
        amounts += overhead * -(-amounts // unit)
    first = np.flatnonzero(is_first)
    shares: dict[int, list[FileShare]] = {}
    for rank, file, amount in zip(
        ranks[first].tolist(), files[first].tolist(), np.add.reduceat(amounts, first).tolist(), strict=True
    ):
        shares.setdefault(rank, []).append(FileShare(path=columns.paths[file], size_bytes=amount))
    return {rank: tuple(files_of_rank) for rank, files_of_rank in shares.items()}


def _extents(
    columns: Columns, owner_of: Integers, world_size: int
) -> tuple[Integers, Integers, Integers, Integers]:
    """What is read: of which chunk, by which rank, from which byte of its shard to which."""
    filled = columns.chunk_elements > 0
    owner = owner_of[columns.tensor_of]
    flat = columns.chunk_dimensions == 0
    everyone = np.flatnonzero(filled & flat & (owner < 0))
    one = np.flatnonzero(filled & (owner >= 0))
    divided = np.flatnonzero(filled & ~flat & (owner < 0))

    rows = columns.shape[columns.first_size[columns.tensor_of[divided]]]
    piece = -(-rows // world_size)
    begin = columns.offsets[columns.first_extent[divided]]
    end = begin + columns.sizes[columns.first_extent[divided]]
    first = begin // piece
    count = (end - 1) // piece - first + 1
    chunk = np.repeat(np.arange(len(divided)), count)
    rank = spans(first, count)
    low = np.maximum(begin[chunk], rank * piece[chunk]) - begin[chunk]
    high = np.minimum(end[chunk], (rank + 1) * piece[chunk]) - begin[chunk]
    divided_chunks = divided[chunk]
    row_bytes = _size_bytes(columns, divided_chunks) // (end - begin)[chunk]

    whole = np.concatenate([np.repeat(everyone, world_size), one])
    whole_ranks = np.concatenate([np.tile(np.arange(world_size), len(everyone)), owner[one]])
    starts = columns.starts
    return (
        np.concatenate([divided_chunks, whole]),
        np.concatenate([rank, whole_ranks]),
        np.concatenate([starts[divided_chunks] + low * row_bytes, starts[whole]]),
        np.concatenate(
            [starts[divided_chunks] + high * row_bytes, starts[whole] + _size_bytes(columns, whole)]
        ),
    )


def _size_bytes(columns: Columns, chunks: Integers) -> Integers:
    sizes: Integers = columns.chunk_elements[chunks] * columns.item_bytes[columns.tensor_of[chunks]]
    return sizes
