"""Questions to an index: who read this checkpoint, when and from where; and what happened to this run.

A `Question` becomes one statement over the index (pure), and what comes back becomes events, or operations:
an intent and how it ended, as one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from strongroom.auditing import Action, Outcome, Phase
from strongroom_security.auditlog.events import Recorded
from strongroom_security.auditlog.index import Index
from strongroom_security.auditlog.rows import recorded_from

__all__ = [
    "READS",
    "WRITES",
    "Entry",
    "Operation",
    "Question",
    "ask_events",
    "ask_operations",
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

_COLUMNS: Final = (
    "e.seq, e.prev, e.time, e.action, e.phase, e.outcome, e.operation, e.root, e.run, e.step, e.launch, "
    "e.attempt, e.path, e.range_begin, e.range_end, e.reason, e.details, a.user, a.host, a.ip, a.pid, "
    "a.identity, a.role, a.rank, a.job, s.writer, s.key, e.line, s.leaf, s.problem, s.has_changed, "
    "s.is_removed"
)
_FROM: Final = "events e CROSS JOIN actors a ON a.id = e.actor CROSS JOIN segments s ON s.id = e.segment"
"""In this order: an index over events says which, and the others are looked up by number."""


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
        leaf: in the tree; None: it is not known to be sequenced.
        is_doubtful: something is wrong with its segment, which was another one once, or is no more.
    """

    recorded: Recorded
    segment: str
    line: int
    leaf: int | None
    is_doubtful: bool

    def to_json(self) -> dict[str, Any]:
        recorded = self.recorded
        return {
            "action": recorded.action,
            "attempt": recorded.attempt,
            "byte_range": None if recorded.byte_range is None else list(recorded.byte_range),
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
    """The events of one activity of one writer: what it intended, and how it ended.

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

    def to_json(self) -> dict[str, Any]:
        begin, end = self.begin, self.end
        return {
            "action": begin.action,
            "attempt": begin.attempt,
            "begun": self.entries[0].recorded.time,
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


def statement_of(question: Question, what: str) -> tuple[str, list[Any]]:
    """The statement that answers a question, the newest first; and its values.

    Args:
        what: the columns that it gives.
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
    # Names of ours alone; all values are bound.
    return f"SELECT {what} FROM {_FROM}{where} ORDER BY {time} DESC, e.row DESC", values  # noqa: S608


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


def ask_events(index: Index, question: Question, *, limit: int | None = None) -> Iterator[Entry]:
    """The events that are asked for, the newest first.

    Args:
        limit: so many at most; None: all of them, as they are taken.
    """
    statement, values = statement_of(question, _COLUMNS)
    if limit is not None:
        statement, values = f"{statement} LIMIT ?", [*values, limit]
    return map(_entry, index.select(statement, values))


def ask_operations(index: Index, question: Question, *, limit: int | None = None) -> list[Operation]:
    """The operations of which an event is asked for, whole, the one first of which that event is the newest.

    Args:
        limit: so many at most.
    """
    wanted: dict[tuple[str, str], None] = {}
    statement, values = statement_of(question, "e.operation, s.writer")
    for row in index.select(statement, values):
        wanted[row] = None
        if limit is not None and len(wanted) == limit:
            break
    found = {_identity(each): each for each in operations_of(_of_operations(index, list(wanted)))}
    return [found[each] for each in wanted if each in found]


def operations_of(entries: Iterable[Entry]) -> list[Operation]:
    """Events put together by the operations that they are of, in the order of each one's first event.

    Those of two writers are never one: a process could else say how another's reading has ended.
    """
    together: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        together.setdefault((entry.recorded.operation, _writer_of(entry)), []).append(entry)
    return [Operation(entries=tuple(several)) for several in together.values()]


def _of_operations(index: Index, wanted: Sequence[tuple[str, str]]) -> Iterator[Entry]:
    names = list(dict.fromkeys(name for name, _ in wanted))
    for first in range(0, len(names), _AT_ONCE):
        some = names[first : first + _AT_ONCE]
        where = f"e.operation IN ({_marks(some)})"
        statement = f"SELECT {_COLUMNS} FROM {_FROM} WHERE {where} ORDER BY s.writer, e.seq"  # noqa: S608
        yield from map(_entry, index.select(statement, some))


def _identity(operation: Operation) -> tuple[str, str]:
    first = operation.entries[0]
    return first.recorded.operation, _writer_of(first)


def _writer_of(entry: Entry) -> str:
    return entry.recorded.id.partition("-")[0]


def _entry(row: tuple[Any, ...]) -> Entry:
    writer, key, line, leaf, problem, has_changed, is_removed = row[25:]
    return Entry(
        recorded=recorded_from(row[:17], row[17:25], writer),
        segment=key,
        line=line,
        leaf=None if leaf is None else leaf + line - 1,
        is_doubtful=problem is not None or bool(has_changed) or bool(is_removed),
    )
