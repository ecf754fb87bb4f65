"""A restore that does not happen: what it would read, and all that would keep it from fitting.

`plan_restore` holds a state against a checkpoint as a restore does, and stops before the first
shard is opened. Nothing of the state is written to; index and documents are read and verified.
What a job would read without any state at hand is `strongroom.shares`'.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch.distributed.checkpoint.planner import ReadItem

from strongroom import layout
from strongroom.auditing import Activity
from strongroom.candidates import Candidates
from strongroom.catalog import Checkpoint, History
from strongroom.course import Source, check_origin
from strongroom.dtypes import DTYPE_BYTES
from strongroom.errors import IntegrityError, NoWholeCheckpointError, StateMismatchError
from strongroom.fill import Filling, match
from strongroom.index import Chunk, TensorRecord
from strongroom.layout import CheckpointName
from strongroom.manifest import FileRecord
from strongroom.metadata import narrowed
from strongroom.opened import OpenedCheckpoint, open_checkpoint
from strongroom.plan import chunk_of, plan_read
from strongroom.ranks import Ranks
from strongroom.selection import Selection
from strongroom.signing import Guard

__all__ = ["ReadOfFile", "RestorePlan", "extents_by_file", "is_part", "plan_newest", "plan_restore"]

_NAMES_SHOWN: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOfFile:
    """What this rank would read of one shard.

    Attributes:
        path: the shard, under ``data/``.
        tensors: stored names of the tensors that it would take bytes of.
        size_bytes: whole blocks, since each is verified; with ``sha256`` the whole shard.
    """

    path: str
    tensors: tuple[str, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorePlan:
    """What a restore on this rank would do. ``str()`` of it is for people.

    Attributes:
        checkpoint: which checkpoint.
        rank, world_size: whose plan it is, and of how many.
        problem: why the checkpoint does not fit the state; None: it does.
        missing: names that the state has and the checkpoint lacks.
        unexpected: names that the checkpoint has and the state has no place for.
        different: a sentence for each name whose shape, dtype or kind differs.
        reads: what would be read, by shard; empty where the state does not fit. Of a sealed shard,
            without its header of 74 bytes.
        missing_per_rank: names of values of each rank's own, of which the checkpoint holds none
            for this rank: the state's stay.
        ownerless: ranks that stored values of their own and that this job does not have.
    """

    checkpoint: Checkpoint
    rank: int
    world_size: int
    problem: str | None
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    different: tuple[str, ...]
    reads: tuple[ReadOfFile, ...]
    missing_per_rank: tuple[str, ...]
    ownerless: tuple[int, ...]

    @property
    def step(self) -> int:
        return self.checkpoint.step

    @property
    def fits(self) -> bool:
        """Whether `Checkpointer.restore` with the same arguments would go on to read."""
        return self.problem is None

    @property
    def size_bytes(self) -> int:
        """Of all shards; index and documents are not counted."""
        return sum(read.size_bytes for read in self.reads)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterable[str]:
        if not self.fits:
            yield f"step {self.step} does not fit this state"
            for what, names in (
                ("missing in the checkpoint", self.missing),
                ("in the checkpoint and not in the state", self.unexpected),
                ("different", self.different),
            ):
                yield from _listed(what, names)
            if not (self.missing or self.unexpected or self.different):
                yield f"  {self.problem}"
        else:
            tensors = {name for read in self.reads for name in read.tensors}
            yield (
                f"step {self.step} fits: rank {self.rank} of {self.world_size} would read "
                f"{self.size_bytes:,} bytes of {len(tensors)} tensors from {len(self.reads)} files"
            )
            for read in self.reads:
                yield f"  {read.path}: {read.size_bytes:,} bytes of {len(read.tensors)} tensors"
        yield from _listed("kept as they are, since this rank stored none", self.missing_per_rank)
        yield from _listed("read by no rank, the values of rank", tuple(map(str, self.ownerless)))


def _listed(what: str, names: tuple[str, ...]) -> Iterable[str]:
    if names:
        yield f"  {what}:"
        yield from (f"    {name}" for name in names[:_NAMES_SHOWN])
    if len(names) > _NAMES_SHOWN:
        yield f"    and {len(names) - _NAMES_SHOWN} more"


def plan_restore(
    opened: OpenedCheckpoint,
    state: Any,
    *,
    checkpoint: Checkpoint,
    rank: int,
    world_size: int,
    selection: Selection,
) -> RestorePlan:
    """Say what a restore of a checkpoint into a state would do on this rank.

    Args:
        opened: the checkpoint.
        state: what would be filled; None: everything anew. As in a restore, memory is set aside
            for what has no place in it, and nothing is written there.
        checkpoint: as users see it.
        selection: which part is wanted.

    Raises:
        IntegrityError: the index or a document is missing, damaged or malformed.
        StoreError: the store could not be asked.
    """
    problem: StateMismatchError | None = None
    filling = Filling()
    try:
        own_values = opened.rank_state(opened.owner_for(rank, selection.stand_in))
        filling = match(state, opened.state, own_values, opened.index, selection)
    except StateMismatchError as error:
        problem = error
    return RestorePlan(
        checkpoint=checkpoint,
        rank=rank,
        world_size=world_size,
        problem=str(problem) if problem is not None else None,
        missing=problem.missing if problem is not None else (),
        unexpected=problem.unexpected if problem is not None else (),
        different=problem.different if problem is not None else (),
        reads=_reads(opened, filling),
        missing_per_rank=tuple(filling.missing_per_rank),
        ownerless=tuple(
            other
            for other in range(world_size, opened.manifest.world_size)
            if layout.rank_state_path(other) in opened.files
        ),
    )


def plan_newest(
    sources: Sequence[Source],
    state: Any,
    *,
    step: int | None,
    selection: Selection,
    guard: Guard,
    ranks: Ranks,
    activity: Activity,
) -> RestorePlan | None:
    """Plan for the checkpoint that a restore would take, as far as index and documents tell.

    Args:
        sources: as `strongroom.restore.restore` takes them.
        step: this very step, without fall-back; None: the newest whole one.
        guard: what a checkpoint is held to, by this rank for itself. The floor is not: nothing is restored.
        activity: says of each checkpoint that it is read, before it is.

    Returns:
        None only where nothing was ever committed.

    Raises:
        AuditError: it could not be put on record first, and was not read.
        IntegrityError: that step is damaged; or, as `NoWholeCheckpointError`, all are.
        CheckpointNotFoundError: no checkpoint of that step.
        StoreError: the store could not be asked.
    """
    for source in sources:
        history = source.read_history()
        if step is not None:
            name = history.at_step(step)
            return _planned(source, history, name, state, selection, guard, ranks, activity)
        if not history.has_commits:
            continue
        reasons = []
        candidates = Candidates(history)
        for name in candidates:
            try:
                return _planned(source, candidates.history, name, state, selection, guard, ranks, activity)
            except IntegrityError as error:
                candidates.tell(name, error)
                reasons.append((name.step, str(error)))
        told = "; ".join(f"step {number}: {reason}" for number, reason in reasons)
        raise NoWholeCheckpointError(
            f"checkpoints were committed here, and none is whole: {told}", reasons=reasons
        )
    check_origin(sources)
    return None


def _planned(
    source: Source,
    history: History,
    name: CheckpointName,
    state: Any,
    selection: Selection,
    guard: Guard,
    ranks: Ranks,
    activity: Activity,
) -> RestorePlan:
    activity.about(checkpoint=name)
    commit = history.whole(name)
    store, *others = source.stores(source.tiers.holders(commit))
    activity.intend(commit.run, name, root=store.uri)
    return plan_restore(
        open_checkpoint(store, commit, guard, others=tuple(others)),
        state,
        checkpoint=Checkpoint.of(commit, is_superseded=name not in history.line.newest_first),
        rank=ranks.rank,
        world_size=ranks.world_size,
        selection=selection,
    )


def _reads(opened: OpenedCheckpoint, filling: Filling) -> tuple[ReadOfFile, ...]:
    tensors: dict[str, dict[str, None]] = defaultdict(dict)
    extents: dict[str, list[tuple[int, int]]] = defaultdict(list)
    records = narrowed(filling.targets, filling.records)
    for item, target in plan_read(filling.targets, records):
        if target.numel() == 0:
            continue
        record = records[item.dest_index.fqn]
        chunk = chunk_of(records, item)
        tensors[chunk.path][record.name] = None
        extents[chunk.path].append(_extent(item, chunk, record.dtype))
    return tuple(
        ReadOfFile(
            path=path,
            tensors=tuple(tensors[path]),
            size_bytes=_amount(
                extents[path], opened.record(path), is_whole=opened.manifest.algorithm == "sha256"
            ),
        )
        for path in sorted(extents)
    )


def extents_by_file(
    reads: Sequence[tuple[ReadItem, Any]], records: Mapping[str, TensorRecord]
) -> dict[str, tuple[int, int]]:
    """From which byte to which one each shard is read, as it was before it was sealed."""
    found: dict[str, tuple[int, int]] = {}
    for item, target in reads:
        if target.numel() == 0:
            continue
        chunk = chunk_of(records, item)
        start, end = _extent(item, chunk, records[item.dest_index.fqn].dtype)
        low, high = found.get(chunk.path, (start, end))
        found[chunk.path] = min(low, start), max(high, end)
    return found


def is_part(opened: OpenedCheckpoint, extents: Mapping[str, tuple[int, int]]) -> bool:
    """Whether reads leave out a shard that holds something, or a part of one, as far as its ends tell."""
    for path in opened.index.used_paths:
        if path not in extents:
            return True
    stored: dict[str, list[int]] = defaultdict(list)
    for record in opened.index.tensors.values():
        for chunk in record.chunks:
            size = math.prod(chunk.sizes) * DTYPE_BYTES[record.dtype]
            if size:
                stored[chunk.path] += [chunk.start, chunk.start + size]
    return any(
        (min(stored[path]), max(stored[path])) != extent for path, extent in extents.items() if stored[path]
    )


def _extent(item: ReadItem, chunk: Chunk, dtype: str) -> tuple[int, int]:
    """The bytes of a shard that a read needs: whole rows of the chunk (`strongroom.fetch`)."""
    row_bytes = math.prod(chunk.sizes[1:]) * DTYPE_BYTES[dtype]
    offsets, lengths = tuple(item.storage_offsets), tuple(item.lengths)
    first, rows = (offsets[0], lengths[0]) if lengths else (0, 1)
    start = chunk.start + first * row_bytes
    return start, start + rows * row_bytes


def _amount(extents: list[tuple[int, int]], record: FileRecord, *, is_whole: bool) -> int:
    """The stored bytes that are read so that extents can be verified: each block or segment once."""
    if record.header is None and is_whole:
        return record.size_bytes
    unit, overhead = record.unit_bytes, record.unit_overhead_bytes
    amount = reached = 0
    for start, end in sorted(extents):
        low = max(reached, start // unit * unit)
        reached = max(reached, min(-(-end // unit) * unit, record.plain_bytes))
        if reached > low:
            amount += reached - low + overhead * -(-(reached - low) // unit)
    return amount
