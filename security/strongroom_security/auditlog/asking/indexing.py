"""Bringing an index up to date: which segments are new, or others than before, and taking them in."""

from __future__ import annotations

import contextlib
import gc
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from strongroom.errors import FormatError
from strongroom.stores.base import Store
from strongroom_security.auditlog.asking.index import Index
from strongroom_security.auditlog.asking.leaves import Held, HeldLeaves, leaves_digest, look_up, read_on
from strongroom_security.auditlog.asking.rows import ActorRow, EventRow, Opening, SegmentRows, rows_of
from strongroom_security.auditlog.format.lines import FIRST_PREV, parse_segment_key
from strongroom_security.auditlog.format.segments import MAX_SEGMENT_LINES, SegmentReading, read_segment
from strongroom_security.auditlog.listing import list_segments, read_segments
from strongroom_security.auditlog.verifying.spreading import spread
from strongroom_security.tlog.merkle import leaf_hashes
from strongroom_security.tlog.reading import TreeReader
from strongroom_security.tlog.witnesses import LogKeys

__all__ = ["Refreshed", "refresh"]


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
    log: LogKeys | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Refreshed:
    """Bring an index up to date. What was taken in stays, whatever ends it.

    Args:
        log: who must have signed the log's tree; None: nobody was named.
        progress: told of how many segments of how many were read.

    Raises:
        StoreError: the sink could not be listed, or a segment not be read.
        sqlite3.Error: the index could not be written, or is damaged.
    """
    with index.refreshing():
        # Before the segments are listed: those that are in the tree are all there then.
        reader, held = look_up(store, index.tree, log)
        known = index.segments()
        listed = list_segments(store).segments
        fresh = [
            key for key, info in listed.items() if key not in known or known[key].version != info.version
        ]
        events, changed = 0, []
        damaged: dict[str, str] = {}
        unreadable: dict[str, str] = {}
        size_bytes = sum(listed[key].size_bytes for key in fresh)
        work = partial(_read, {key: each.leaves for key, each in held.segments.items()})
        read = spread(work, read_segments(store, fresh, listed), size_bytes=size_bytes)
        with index.taking_in(), _uncollected():
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
        index.note_unreadable(list(unreadable))
        removed = [key for key, each in known.items() if key not in listed and not each.is_removed]
        back = [key for key, each in known.items() if key in listed and each.is_removed]
        if removed:
            index.note_removed(removed)
        if back:
            index.note_removed(back, is_removed=False)
        has_grown = _note_tree(index, reader, held, log)
        if fresh or has_grown:
            index.judge()
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


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Without the collector: lines make no cycles, and to look for some takes a tenth of the time."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _note_tree(index: Index, reader: TreeReader | None, held: HeldLeaves, log: LogKeys | None) -> bool:
    """Note what the tree holds; whether that is something else than before."""
    before, tree = index.tree, held.tree
    if reader is None or tree is None:
        if before.size:
            index.note_held({}, None, begin=0)
        return before.size > 0
    if held.segments or tree.size < reader.size:
        known = index.segments()
        wrong = [
            key for key, each in held.segments.items() if key not in known or known[key].leaves != each.leaves
        ]
        if wrong:
            # The plan names another segment than the tree holds; or that one was changed, or is no more.
            held = read_on(reader, held.begin, log)
        elif tree.size < reader.size:
            more = read_on(reader, tree.size, log)
            segments: dict[str, Held] = {**more.segments, **held.segments}
            held = HeldLeaves(tree=more.tree, begin=held.begin, segments=segments)
    if held.tree != before:
        index.note_held(held.segments, held.tree, begin=held.begin)
    return held.tree != before


def _read(held: Mapping[str, bytes], read: tuple[str, bytes | str]) -> SegmentRows | str:
    """A segment's rows; in words why there are none. In another process, perhaps."""
    key, data = read
    parts = parse_segment_key(key)
    if isinstance(data, str) or parts is None:
        return data if isinstance(data, str) else "it is no segment"
    run, _, writer, number = parts
    rows = partial(
        SegmentRows, key=key, run=run, writer=writer, number=number, digest=hashlib.sha256(data).digest()
    )
    try:
        # What the tree holds was spelled canonically when it was sequenced: without a look at that it takes
        # half the time.
        leaves = b""
        if key in held and data.count(b"\n") <= MAX_SEGMENT_LINES:
            leaves = leaves_digest(leaf_hashes(data.split(b"\n")[:-1]))
        is_held = held.get(key) == leaves
        reading = read_segment(key, data, is_canonical=not is_held, checks_events=False)
    except FormatError as error:
        return rows(
            leaves=b"",
            lines=0,
            first_seq=0,
            first_prev=FIRST_PREV,
            last_hash=FIRST_PREV,
            opened=None,
            salvager=None,
            is_last=False,
            events=(),
            problem=str(error),
        )
    events, problem = _events(reading)
    close = reading.close
    salvaged = None if close is None else close.salvaged
    return rows(
        leaves=leaves or leaves_digest(leaf_hashes(reading.lines)),
        lines=len(reading.lines),
        first_seq=reading.first_seq,
        first_prev=reading.first_prev,
        last_hash=reading.last_hash,
        opened=None if reading.opened is None else Opening.of(reading.opened),
        salvager=None if salvaged is None else Opening.of(salvaged),
        is_last=close is not None and close.is_last and problem is None,
        events=events,
        problem=problem,
    )


def _events(reading: SegmentReading) -> tuple[tuple[tuple[int, EventRow, ActorRow], ...], str | None]:
    """A segment's events, those that are any; and what is wrong with it, at its first place."""
    wrong = [(problem.line, str(problem)) for problem in reading.problems]
    events: list[tuple[int, EventRow, ActorRow]] = []
    # What many events say alike goes from process to process once.
    alike: dict[Any, Any] = {}
    last = len(reading.lines) if reading.close is not None else 0
    for line, value in enumerate(reading.values, 1):
        if value is None or line in (1, last):
            continue
        try:
            event, actor = rows_of(value, reading.writer)
            if reading.run is not None and event[8] != reading.run:
                wrong.append(
                    (line, f"{reading.key}, line {line}: the event is about another run than its segment")
                )
        except FormatError as error:
            if value.get("kind") != "close":
                wrong.append((line, f"{reading.key}, line {line}: {error}"))
            continue
        events.append((line, event, alike.setdefault(actor, actor)))
    return tuple(events), min(wrong)[1][:500] if wrong else None
