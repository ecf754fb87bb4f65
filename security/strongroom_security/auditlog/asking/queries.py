"""Questions to an index: who read this checkpoint, when and from where; and what happened to this run.

A `Question` becomes one statement over the index (pure), and what comes back becomes events, or operations:
an intent and how it ended, as one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from strongroom.auditing import Action, Outcome, Phase
from strongroom_security.auditlog.asking.index import Index
from strongroom_security.auditlog.asking.rows import recorded_from
from strongroom_security.auditlog.format.events import Recorded
from strongroom_security.auditlog.verifying.trusting import Vouchers

__all__ = [
    "READS",
    "WRITES",
    "Entry",
    "Operation",
    "Question",
    "ask_events",
    "ask_operations",
    "is_on_record",
    "operations_of",
    "statement_of",
]

READS: Final = frozenset(
    each.value
    for each in (
        Action.RESTORE,
        Action.READ,
        Action.PLAN,
        Action.SHOW,
        Action.PROVENANCE,
        Action.VERIFY,
        Action.EXPORT,
        Action.IMPORT,
        Action.UNWRAP,
        Action.BREAK_GLASS,
    )
)
"""What reads a checkpoint's content; and so does whatever was intended first (`Phase.INTENDED`)."""

WRITES: Final = frozenset(
    each.value
    for each in (
        Action.LAUNCH,
        Action.SAVE,
        Action.IMPORT,
        Action.REPLICATE,
        Action.ROTATE,
        Action.RECIPIENTS,
        Action.SIGN,
        Action.REMOVE,
        Action.COLLECT,
    )
)

_AT_ONCE: Final = 400
"""Operations asked for in one statement; SQLite takes 999 values at least."""

NOBODY: Final = Vouchers()
"""Nobody was named whose word on writers counts."""

AGAIN: Final = "first_recorded_as"
"""The detail of an event that was recorded again: its id before."""

_FIRST: Final = (
    "SELECT e.time, e.action, e.phase, e.outcome, e.operation, e.run, e.step, e.path FROM segments s "
    "CROSS JOIN events e ON e.row >= s.first_row AND e.row < s.first_row + s.events WHERE s.writer = ?1 "
    "AND s.first_seq <= ?2 AND s.first_seq + s.lines > ?2 AND e.seq = ?2 AND s.problem IS NULL "
    "AND s.doubt IS NULL AND NOT s.has_changed"
)

_ON_RECORD: Final = (
    "SELECT 1 WHERE EXISTS (SELECT 1 FROM events WHERE run = ?1 AND action <> 'alert' AND (action <> 'audit' "
    "OR phase = 'observed')) OR EXISTS (SELECT 1 FROM segments WHERE run = ?1 AND problem IS NOT NULL)"
)

_COLUMNS: Final = (
    "e.seq, e.prev, e.time, e.action, e.phase, e.outcome, e.operation, e.root, e.run, e.step, e.launch, "
    "e.attempt, e.path, e.range_begin, e.range_end, e.reason, e.details, a.user, a.host, a.ip, a.pid, "
    "a.identity, a.role, a.rank, a.job, s.id, s.writer, s.key, e.line, s.leaf, s.problem IS NOT NULL OR "
    "s.doubt IS NOT NULL OR s.has_changed OR s.is_removed, s.opened, s.salvager, w.public, w.host, w.pid"
)
_FROM: Final = (
    "events e CROSS JOIN actors a ON a.id = e.actor CROSS JOIN segments s ON s.id = e.segment "
    "LEFT JOIN writers w ON w.id = s.opened"
)
"""In this order: an index over events says which, and the others are looked up by number."""

_OWN: Final = (
    f"SELECT {_COLUMNS} FROM {_FROM} WHERE e.run = ? AND e.step = ? AND e.launch = ? AND e.attempt = ? "  # noqa: S608
    "AND e.action = 'save' AND e.phase = 'finished' AND e.outcome = 'success'"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Which events are asked for; None and empty: any.

    Attributes:
        since_ms, until_ms: ms since the epoch; the second is not in it.
        actor: a user, an identity or a host, by the whole of it; of an identity a part will do.
        actions, outcomes: as `strongroom.auditing` spells them.
        or_intended: besides ``actions``, whatever was intended before it was done: all that reads is.
    """

    run: str | None = None
    step: int | None = None
    launch: int | None = None
    since_ms: int | None = None
    until_ms: int | None = None
    actor: str | None = None
    host: str | None = None
    role: str | None = None
    actions: frozenset[str] = frozenset()
    or_intended: bool = False
    outcomes: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An event, and where it stands.

    Attributes:
        segment: its key; ``segment_id`` is its number in the index.
        leaf: in the tree; None: it is not known to be sequenced.
        is_doubtful: something is wrong with its segment, it does not go on from its writer's others, was
            another one once, or is no more.
        is_certified: whether somebody trusted vouches for its writer; None: nobody was named.
        process: the key, host and process that its segment was opened by; None: that cannot be read.
    """

    recorded: Recorded
    segment: str
    segment_id: int
    line: int
    leaf: int | None
    is_doubtful: bool
    is_certified: bool | None
    process: tuple[bytes, str, int] | None

    @property
    def counts(self) -> bool:
        """Whether it is to be believed, as far as somebody was named whose word on writers counts."""
        return self.is_certified is None or (self.is_certified and not self.is_doubtful)

    def to_json(self) -> dict[str, Any]:
        recorded = self.recorded
        return {
            "action": recorded.action,
            "attempt": recorded.attempt,
            "byte_range": None if recorded.byte_range is None else list(recorded.byte_range),
            "certified": self.is_certified,
            "details": dict(recorded.details),
            "doubtful": self.is_doubtful,
            "host": recorded.host,
            "id": recorded.id,
            "identity": recorded.identity,
            "ip": recorded.ip,
            "job": dict(recorded.job),
            "launch": recorded.launch,
            "leaf": self.leaf,
            "line": self.line,
            "operation": recorded.operation,
            "outcome": recorded.outcome,
            "path": recorded.path,
            "phase": recorded.phase,
            "pid": recorded.pid,
            "rank": recorded.rank,
            "reason": recorded.reason,
            "role": recorded.role,
            "root": recorded.root,
            "run": recorded.run,
            "segment": self.segment,
            "step": recorded.step,
            "time": recorded.time,
            "user": recorded.user,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """The events of one activity of one process: what it intended, and how it ended.

    Attributes:
        entries: in the order of the log.
    """

    entries: tuple[Entry, ...]

    @property
    def begin(self) -> Recorded:
        """What says most of what it is about: the first event that names a checkpoint, else the first."""
        named = (each.recorded for each in self.entries if each.recorded.step is not None)
        return next(named, self.entries[0].recorded)

    @property
    def end(self) -> Recorded | None:
        """How it ended; None: nothing says so (yet), as where the process was killed."""
        ended = (
            each.recorded
            for each in reversed(self.entries)
            if each.recorded.phase in (Phase.FINISHED.value, Phase.OBSERVED.value)
        )
        return next(ended, None)

    @property
    def outcome(self) -> str:
        return Outcome.UNKNOWN.value if self.end is None else self.end.outcome

    @property
    def reason(self) -> str | None:
        return None if self.end is None else self.end.reason

    @property
    def is_sequenced(self) -> bool:
        """Whether the tree holds all of it."""
        return all(each.leaf is not None for each in self.entries)

    @property
    def is_doubtful(self) -> bool:
        return any(each.is_doubtful for each in self.entries)

    @property
    def is_certified(self) -> bool | None:
        """Whether somebody trusted vouches for all of it; None: nobody was named."""
        if self.entries[0].is_certified is None:
            return None
        return all(each.is_certified for each in self.entries)

    def to_json(self) -> dict[str, Any]:
        begin, end = self.begin, self.end
        return {
            "action": begin.action,
            "attempt": begin.attempt,
            "begun": self.entries[0].recorded.time,
            "certified": self.is_certified,
            "doubtful": self.is_doubtful,
            "ended": None if end is None else end.time,
            "events": [each.recorded.id for each in self.entries],
            "host": begin.host,
            "identity": next((e.recorded.identity for e in self.entries if e.recorded.identity), None),
            "ip": begin.ip,
            "job": dict(begin.job),
            "launch": begin.launch,
            "operation": begin.operation,
            "outcome": self.outcome,
            "path": begin.path,
            "phase": None if end is None else end.phase,
            "pid": begin.pid,
            "rank": begin.rank,
            "reason": self.reason,
            "role": begin.role,
            "root": begin.root,
            "run": begin.run,
            "sequenced": self.is_sequenced,
            "step": begin.step,
            "user": begin.user,
        }


def statement_of(question: Question, what: str, *, is_oldest_first: bool = False) -> tuple[str, list[Any]]:
    """The statement that answers a question, the newest first; and its values.

    Args:
        what: the columns that it gives.
        is_oldest_first: the other way round.
    """
    conditions: list[str] = []
    values: list[Any] = []

    def ask(condition: str, *these: Any) -> None:
        conditions.append(condition)
        values.extend(these)

    for column, value in (("run", question.run), ("step", question.step), ("launch", question.launch)):
        if value is not None:
            ask(f"e.{column} = ?", value)
    if question.since_ms is not None:
        ask("e.time >= ?", question.since_ms)
    if question.until_ms is not None:
        ask("e.time < ?", question.until_ms)
    if question.actions:
        several = f"e.action IN ({_marks(question.actions)})"
        if question.or_intended:
            ask(f"({several} OR e.phase = ?)", *sorted(question.actions), Phase.INTENDED.value)
        else:
            ask(several, *sorted(question.actions))
    if question.outcomes:
        ask(f"e.outcome IN ({_marks(question.outcomes)})", *sorted(question.outcomes))
    actors, whose = _actors(question)
    if actors:
        ask(f"e.actor IN (SELECT id FROM actors WHERE {actors})", *whose)  # noqa: S608 - names of ours
    where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    # SQLite would rather look at all events, in order of time, than sort those of an actor who did little.
    time = "+e.time" if actors and question.run is None else "e.time"
    way = "ASC" if is_oldest_first else "DESC"
    # Names of ours alone; all values are bound.
    return f"SELECT {what} FROM {_FROM}{where} ORDER BY {time} {way}, e.row {way}", values  # noqa: S608


def _actors(question: Question) -> tuple[str, list[Any]]:
    conditions, values = [], []
    if question.actor is not None:
        conditions.append("(user = ? OR host = ? OR instr(identity, ?) > 0)")
        values += [question.actor] * 3
    for column, value in (("host", question.host), ("role", question.role)):
        if value is not None:
            conditions.append(f"{column} = ?")
            values.append(value)
    return " AND ".join(conditions), values


def _marks(values: Iterable[object]) -> str:
    return ", ".join("?" for _ in values)


def ask_events(
    index: Index,
    question: Question,
    *,
    limit: int | None = None,
    vouchers: Vouchers = NOBODY,
    is_oldest_first: bool = False,
) -> Iterator[Entry]:
    """The events that are asked for, the newest first.

    What was recorded again under another writer, since nothing said whether the sink had it, is told once.

    Args:
        limit: so many at most; None: all of them, as they are taken.
        vouchers: whose word on writers counts; with no keys: nobody was named.
    """
    statement, values = statement_of(question, _COLUMNS, is_oldest_first=is_oldest_first)
    found = map(_Reading(index, vouchers).entry, index.select(statement, values))
    return islice((each for each in found if not _is_again(index, each)), limit)


def ask_operations(
    index: Index, question: Question, *, limit: int | None = None, vouchers: Vouchers = NOBODY
) -> Iterator[Operation]:
    """The operations of which an event is asked for, whole, the one first of which that event is the newest.

    They come as they are taken: of those that were told a number each is kept. A commit that a later launch
    found is left out where it is on record by who made it.

    Args:
        limit: so many at most.
        vouchers: whose word on writers counts; with no keys: nobody was named.
    """
    reading = _Reading(index, vouchers)
    statement, values = statement_of(question, _COLUMNS)
    told: set[int] = set()

    def fresh() -> Iterator[tuple[Any, ...]]:
        for row in index.select(statement, values):
            entry = reading.entry(row)
            name = _name(entry)
            if hash(name) not in told and not _is_told_by_its_own(reading, entry):
                told.add(hash(name))
                yield name

    wanted = islice(fresh(), limit)
    # The first few come at once: who asks for a page waits for no more than that.
    while some := list(islice(wanted, _AT_ONCE)):
        found = {_name(each.entries[0]): each for each in operations_of(_of_operations(reading, some))}
        yield from (found[name] for name in some if name in found)


def is_on_record(index: Index, run: str) -> bool:
    """Whether the log holds anything of a run but questions about it, or something that cannot be read."""
    return next(index.select(_ON_RECORD, [run]), None) is not None


def operations_of(entries: Iterable[Entry]) -> list[Operation]:
    """Events put together by the operations that they are of, in the order of each one's first event.

    Those of two processes are never one: one could else say how another's reading has ended. A process may
    have two writers, and of an operation the beginning under one and the end under the other.
    """
    together: dict[tuple[Any, ...], dict[int, list[Entry]]] = {}
    for entry in entries:
        by_writer = together.setdefault(_name(entry), {})
        by_writer.setdefault(hash((_writer_of(entry), entry.process)), []).append(entry)
    found = []
    for by_writer in together.values():
        # A clock may go back: of one writer the order of the log counts.
        several = sorted(by_writer.values(), key=lambda each: each[0].recorded.time)
        found.append(Operation(entries=tuple(entry for each in several for entry in each)))
    return found


def _name(entry: Entry) -> tuple[Any, ...]:
    """What all events of one operation of one process have in common, as far as it can be believed.

    What a doubtful segment holds is never joined to what another holds; nor what speaks of another process
    than its segment was opened by, unless it was recorded again, on the same machine.
    """
    told, process = entry.recorded, entry.process
    if process is not None and not entry.is_doubtful:
        key, host, pid = process
        if host == told.host and (pid == told.pid or AGAIN in told.details):
            return (told.operation, host, told.pid, told.user, told.identity, told.rank, entry.is_certified)
        return (told.operation, _writer_of(entry), key)
    return (told.operation, _writer_of(entry), process, entry.segment_id)


def _of_operations(reading: _Reading, wanted: Iterable[tuple[Any, ...]]) -> Iterator[Entry]:
    names = list(dict.fromkeys(name[0] for name in wanted))
    where = f"e.operation IN ({_marks(names)})"
    statement = f"SELECT {_COLUMNS} FROM {_FROM} WHERE {where} ORDER BY s.writer, e.seq"  # noqa: S608
    for row in reading.index.select(statement, names):
        entry = reading.entry(row)
        if not _is_again(reading.index, entry) and not _is_told_by_its_own(reading, entry):
            yield entry


def _is_told_by_its_own(reading: _Reading, entry: Entry) -> bool:
    """Whether a commit that was found is on record by who made it too, by a word that is to be believed."""
    told = entry.recorded
    if told.action != Action.SAVE.value or told.phase != Phase.OBSERVED.value or told.attempt is None:
        return False
    own = map(reading.entry, reading.index.select(_OWN, [told.run, told.step, told.launch, told.attempt]))
    return any(each.is_certified is not False and not each.is_doubtful for each in own)


def _is_again(index: Index, entry: Entry) -> bool:
    """Whether an event is told by the writer as well under which it was recorded first."""
    first = entry.recorded.details.get(AGAIN)
    if not isinstance(first, str):
        return False
    writer, _, seq = first.rpartition("-")
    if not (seq.isascii() and seq.isdigit() and len(seq) < 16):
        return False
    told = entry.recorded
    mine = (told.time, told.action, told.phase, told.outcome, told.operation, told.run, told.step, told.path)
    return any(tuple(row) == mine for row in index.select(_FIRST, [writer, int(seq)]))


def _writer_of(entry: Entry) -> str:
    return entry.recorded.id.partition("-")[0]


class _Reading:
    """Makes entries of rows."""

    def __init__(self, index: Index, vouchers: Vouchers) -> None:
        self.index = index
        self._trusted = index.trusted(vouchers)

    def entry(self, row: tuple[Any, ...]) -> Entry:
        number, writer, key, line, leaf, is_doubtful, opened, salvager, public, host, pid = row[25:]
        trusted = self._trusted
        is_certified = None
        if trusted is not None:
            is_certified = opened in trusted and (salvager is None or salvager in trusted)
        return Entry(
            recorded=recorded_from(row[:17], row[17:25], writer),
            segment=key,
            segment_id=number,
            line=line,
            leaf=None if leaf is None else leaf + line - 1,
            is_doubtful=bool(is_doubtful),
            is_certified=is_certified,
            process=None if public is None else (public, host, pid),
        )
