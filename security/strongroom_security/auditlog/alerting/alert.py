"""What an early warning is, and the words that rules share: of which events they speak. Pure."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from strongroom.auditing import Action, Outcome, Phase
from strongroom_security.auditlog.format.events import Recorded
from strongroom_security.auditlog.reconciling.identities import principal

__all__ = [
    "DAY_MS",
    "HOUR_MS",
    "Alert",
    "Events",
    "Period",
    "Severity",
    "Trouble",
    "actor_of",
    "alert_of",
    "by_run",
    "is_commit",
    "is_done",
    "is_failed_save",
    "span",
    "writer_of",
]

HOUR_MS: Final = 3_600_000
DAY_MS: Final = 24 * HOUR_MS
_EVIDENCE: Final = 20
"""Events that an alert names; its reason tells how many there were."""


class Severity(enum.Enum):
    """How soon somebody should look."""

    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """Something that somebody should look at.

    Attributes:
        rule: its name.
        run: None: it is about no single run.
        time: of what it is about, or of the last of it, in ms since the epoch.
        reason: what was found, with the numbers and the bounds.
        evidence: ids of the events that show it, the first few.
    """

    rule: str
    severity: Severity
    run: str | None
    time: int
    reason: str
    evidence: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """Segments of the log of which something is wrong, whatever events they hold.

    Attributes:
        what: is wrong with them.
        keys: the first few of ``count``.
    """

    what: str
    count: int
    keys: tuple[str, ...]
    severity: Severity = Severity.HIGH


@dataclass(frozen=True, slots=True, kw_only=True)
class Period:
    """What is judged, in ms since the epoch; what was before is what is usual.

    Attributes:
        has_ended: whether a writer has said that it ended, or somebody for it.
        is_late: whether an event came to the index only since rules were asked the last time. It is judged
            whatever its time: nobody has seen it yet.
        run: the one that is looked at; None: all.
        troubles: what is wrong with segments, whenever that came to be.
        counts: whether an event may keep a rule silent. Where it is known who vouches for writers, what
            anybody may have made up does not.
    """

    since_ms: int
    now_ms: int
    has_ended: Callable[[str], bool] = field(default=lambda writer: False)
    is_late: Callable[[Recorded], bool] = field(default=lambda event: False)
    counts: Callable[[Recorded], bool] = field(default=lambda event: True)
    run: str | None = None
    troubles: tuple[Trouble, ...] = ()

    def judges(self, event: Recorded) -> bool:
        """Whether an event is among what is judged."""
        return event.time <= self.now_ms and (event.time >= self.since_ms or self.is_late(event))


Events = Iterable[Recorded]


def is_commit(event: Recorded) -> bool:
    """Whether an event says that a checkpoint was committed."""
    return (
        event.action == Action.SAVE.value
        and event.phase in (Phase.FINISHED.value, Phase.OBSERVED.value)
        and event.outcome == Outcome.SUCCESS.value
        and event.checkpoint is not None
        and not event.details.get("is_skipped")
    )


def is_failed_save(event: Recorded) -> bool:
    """Whether an event says that a save failed, or was refused."""
    return (
        event.action == Action.SAVE.value
        and event.phase == Phase.FINISHED.value
        and event.outcome in (Outcome.FAILURE.value, Outcome.DENIED.value)
    )


def is_done(event: Recorded) -> bool:
    """Whether an event says that something came off."""
    return event.phase == Phase.FINISHED.value and event.outcome == Outcome.SUCCESS.value


def writer_of(event: Recorded) -> str:
    """The id of the writer of an event."""
    return event.id.rpartition("-")[0]


def actor_of(event: Recorded) -> str:
    """Who did it, in a few words: an identity without its session, else a user of a host."""
    return principal(event.identity) if event.identity is not None else f"{event.user}@{event.host}"


def by_run(events: Events) -> Iterator[tuple[str, Recorded]]:
    """Events of runs, each with its run."""
    for event in events:
        if event.run is not None:
            yield event.run, event


def _few(ids: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(ids))[:_EVIDENCE]


def span(ms: float) -> str:
    """A length of time, for people."""
    seconds = ms / 1000
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7_200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 2 * 86_400 else f"{seconds / 86_400:.1f} days"


def alert_of(
    rule: str, severity: Severity, run: str | None, time: int, reason: str, ids: Iterable[str]
) -> Alert:
    """An alert; of many events it names the first few."""
    return Alert(rule=rule, severity=severity, run=run, time=time, reason=reason, evidence=_few(ids))
