"""Bringing an index up to date: which segments are new, or others than before, and taking them in."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from strongroom.errors import FormatError, ObjectNotFoundError
from strongroom.stores.base import Store
from strongroom_security.auditlog.index import Index
from strongroom_security.auditlog.lines import parse_segment_key
from strongroom_security.auditlog.listing import list_segments, read_segments
from strongroom_security.auditlog.plans import MAX_PLAN_BYTES, Plan, plan_key
from strongroom_security.auditlog.rows import ActorRow, EventRow, SegmentRows, rows_of
from strongroom_security.auditlog.segments import SegmentReading, read_segment
from strongroom_security.auditlog.spreading import spread
from strongroom_security.tlog.checkpoints import Checkpoint
from strongroom_security.tlog.notes import Note
from strongroom_security.tlog.reading import read_checkpoint

__all__ = ["Refreshed", "refresh"]

_LOG: Final = logging.getLogger("strongroom")


@dataclass(frozen=True, slots=True, kw_only=True)
class Refreshed:
    """What came of it.

    Attributes:
        segments, events: that were taken in.
        changed: keys of segments that were others before: somebody has changed them.
        removed: keys of those that are no more; their events stay in the index.
        damaged: what is wrong with segments that were taken in, by key, at its first place.
        unreadable: why segments could not be taken in at all, by key.
    """

    segments: int
    events: int
    changed: tuple[str, ...]
    removed: tuple[str, ...]
    damaged: Mapping[str, str]
    unreadable: Mapping[str, str]


def refresh(
    index: Index,
    store: Store,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Refreshed:
    """Bring an index up to date. What was taken in stays, whatever ends it.

    Args:
        progress: told of how many segments of how many were read.

    Raises:
        StoreError: the sink could not be listed, or a segment not be read.
        sqlite3.Error: the index could not be written, or is damaged.
    """
    with index.refreshing():
        # Before the segments are listed: those that are in the tree are all there then.
        leaves, planned = _planned(store, index.planned)
        known = index.segments()
        listed = list_segments(store).segments
        fresh = [
            key for key, info in listed.items() if key not in known or known[key].version != info.version
        ]
        events, changed = 0, []
        damaged: dict[str, str] = {}
        unreadable: dict[str, str] = {}
        size_bytes = sum(listed[key].size_bytes for key in fresh)
        read = spread(_read, read_segments(store, fresh), size_bytes=size_bytes)
        for done, (key, found) in enumerate(zip(fresh, read, strict=True), 1):
            if progress is not None:
                progress(done, len(fresh))
            if isinstance(found, str):
                unreadable[key] = found
                continue
            if key in known and known[key].digest == found.digest:
                index.note_version(key, listed[key].version)
                continue
            if key in known:
                changed.append(key)
            index.put(found, version=listed[key].version, has_changed=key in known)
            events += len(found.events)
            if found.problem is not None:
                damaged[key] = found.problem
        removed = [key for key, each in known.items() if key not in listed and not each.is_removed]
        back = [key for key, each in known.items() if key in listed and each.is_removed]
        if removed:
            index.note_removed(removed)
        if back:
            index.note_removed(back, is_removed=False)
        if leaves:
            index.note_sequenced(leaves, planned)
        if fresh or not known:
            index.finish()
    return Refreshed(
        segments=len(fresh) - len(unreadable),
        events=events,
        changed=tuple(changed),
        removed=tuple(removed),
        damaged=damaged,
        unreadable=unreadable,
    )


def _read(read: tuple[str, bytes | str]) -> SegmentRows | str:
    """A segment's rows; in words why there are none. In another process, perhaps."""
    key, data = read
    parts = parse_segment_key(key)
    if isinstance(data, str) or parts is None:
        return data if isinstance(data, str) else "it is no segment"
    run, _, writer, number = parts
    digest = hashlib.sha256(data).digest()
    lines, first_seq = 0, 0
    events: tuple[tuple[int, EventRow, ActorRow], ...] = ()
    problem: str | None
    try:
        # Whether it is spelled canonically is verified elsewhere: without that this takes half the time.
        reading = read_segment(key, data, is_canonical=False)
    except FormatError as error:
        problem = str(error)
    else:
        lines, first_seq = len(reading.lines), reading.first_seq
        events, problem = _events(reading)
    return SegmentRows(
        key=key,
        run=run,
        writer=writer,
        number=number,
        digest=digest,
        lines=lines,
        first_seq=first_seq,
        events=events,
        problem=problem,
    )


def _events(reading: SegmentReading) -> tuple[tuple[tuple[int, EventRow, ActorRow], ...], str | None]:
    """A segment's events, those that are any; and what is wrong with it, at its first place."""
    wrong = [(problem.line, str(problem)) for problem in reading.problems]
    events: list[tuple[int, EventRow, ActorRow]] = []
    # What many events say alike goes from process to process once.
    alike: dict[Any, Any] = {}
    for line, value in reading.events():
        try:
            event, actor = rows_of(value, reading.writer)
        except FormatError as error:
            wrong.append((line, f"{reading.key}, line {line}: {error}"))
            continue
        shared = tuple([alike.setdefault(each, each) if type(each) is str else each for each in event])
        events.append((line, shared, alike.setdefault(actor, actor)))
    return tuple(events), min(wrong)[1][:500] if wrong else None


def _planned(store: Store, since: int) -> tuple[dict[str, tuple[int, bytes]], int]:
    """What went into the tree since it had so many entries, by its plans, which nothing vouches for here.

    Returns:
        the leaf and the digest of each segment, by key; and the size up to which that goes.
    """
    leaves: dict[str, tuple[int, bytes]] = {}
    note = read_checkpoint(store)
    if note is None:
        return leaves, since
    try:
        size = Checkpoint.parse(Note.parse(note, "the checkpoint").text, "the checkpoint").size
        while since < size:
            key = plan_key(since)
            plan = Plan.parse(store.read(key, limit_bytes=MAX_PLAN_BYTES), since, key)
            if plan.end > size:
                break
            for segment in plan.segments:
                leaves[segment.key] = (since, bytes.fromhex(segment.digest))
                since += segment.lines
    except (FormatError, ObjectNotFoundError) as error:
        _LOG.warning(
            "what the log's tree holds is not known any further than its entry %d: %s; see 'strongroom audit "
            "verify'",
            since,
            error,
        )
    return leaves, since
