"""Rules about who touches checkpoints, and about the log itself. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from strongroom.auditing import Action, Outcome, Phase
from strongroom_security.auditlog.alerting.alert import (
    DAY_MS,
    HOUR_MS,
    Alert,
    Events,
    Period,
    Severity,
    actor_of,
    alert_of,
    by_run,
    is_done,
    span,
    writer_of,
)
from strongroom_security.auditlog.alerting.settings import BreakGlass, DeniedBurst, LogTrouble, UnusualReader
from strongroom_security.auditlog.format.events import Recorded
from strongroom_security.auditlog.reconciling.identities import principal

__all__ = ["READS", "break_glass", "denied_burst", "log_trouble", "unusual_reader"]

READS: Final = frozenset(
    each.value
    for each in (
        Action.RESTORE,
        Action.READ,
        Action.VERIFY,
        Action.EXPORT,
        Action.IMPORT,
        Action.UNWRAP,
        Action.SHOW,
        Action.PROVENANCE,
    )
)


@dataclass(slots=True)
class _Reads:
    before: int = 0
    usual: set[tuple[str, str]] = field(default_factory=set)
    unusual: dict[tuple[str, str], list[Recorded]] = field(default_factory=dict)


def unusual_reader(events: Events, settings: UnusualReader, period: Period) -> list[Alert]:
    """Reads by a role, an identity, a user or a host that has not read this run, or that may not."""
    begin = period.since_ms - settings.baseline_days * DAY_MS
    allowed = {
        "role": settings.roles,
        "identity": tuple(principal(each) for each in settings.identities),
        "user": settings.users,
        "host": settings.hosts,
    }
    runs: dict[str, _Reads] = {}
    for run, event in by_run(events):
        is_read = event.phase == Phase.INTENDED.value or is_done(event)
        is_judged = period.judges(event)
        is_before = begin <= event.time < period.since_ms and period.counts(event)
        if event.action not in READS or not is_read or not (is_judged or is_before):
            continue
        seen = runs.setdefault(run, _Reads())
        told = _told(event)
        if not is_judged:
            seen.before += 1
            seen.usual |= {(what, told[what]) for what in settings.by}
            continue
        for what in _BY:
            value = told[what]
            if allowed[what]:
                is_unusual = value not in allowed[what]
            else:
                is_unusual = what in settings.by and (what, value) not in seen.usual
            if is_unusual:
                seen.unusual.setdefault((what, value), []).append(event)
    alerts = []
    for run, seen in runs.items():
        for (what, value), found in seen.unusual.items():
            if not allowed[what] and seen.before < settings.baseline_reads:
                continue
            last = found[-1]
            why = (
                "is not among those that may"
                if allowed[what]
                else f"had not read this run in the {settings.baseline_days:g} days before"
            )
            named = value or f"no {what}"
            reason = (
                f"{what} {named} {why}, and has: {len(found)} events, the last {last.action} of "
                f"{last.checkpoint or 'the run'} from {last.ip or last.host} by {actor_of(last)}"
            )
            alerts.append(
                alert_of("unusual-reader", Severity.HIGH, run, last.time, reason, [each.id for each in found])
            )
    return alerts


_BY: Final = ("role", "identity", "user", "host")


def _told(event: Recorded) -> dict[str, str]:
    return {
        "role": event.role or "",
        "identity": "" if event.identity is None else principal(event.identity),
        "user": event.user,
        "host": event.host,
    }


def denied_burst(events: Events, settings: DeniedBurst, period: Period) -> list[Alert]:
    """Many refusals of one actor within a short time, whatever they are about."""
    recent: dict[str, deque[Recorded]] = {}
    worst: dict[str, list[Recorded]] = {}
    window = settings.minutes * 60_000
    for event in events:
        if event.outcome != Outcome.DENIED.value or event.time > period.now_ms:
            continue
        actor = actor_of(event)
        found = recent.setdefault(actor, deque())
        found.append(event)
        while found[0].time < event.time - window:
            found.popleft()
        # One that began before, and is told of only now, is a burst as well.
        if len(found) > len(worst.get(actor, ())) and any(map(period.judges, found)):
            worst[actor] = list(found)
    alerts = []
    for actor, burst in worst.items():
        if len(burst) < settings.denials:
            continue
        runs = {event.run for event in burst}
        actions = ", ".join(sorted({event.action for event in burst}))
        reason = (
            f"{actor} was refused {len(burst)} times within {settings.minutes:g} min ({actions}); expected "
            f"fewer than {settings.denials}"
        )
        run = burst[0].run if len(runs) == 1 else None
        ids = [event.id for event in burst]
        alerts.append(alert_of("denied-burst", Severity.HIGH, run, burst[-1].time, reason, ids))
    return alerts


def break_glass(events: Events, settings: BreakGlass, period: Period) -> list[Alert]:
    """Every use of a break-glass grant."""
    uses: dict[str, list[Recorded]] = {}
    for event in events:
        if event.action == Action.BREAK_GLASS.value and period.judges(event):
            uses.setdefault(event.operation, []).append(event)
    alerts = []
    for found in uses.values():
        first, last = found[0], found[-1]
        reason = (
            f"a break-glass grant was used by {actor_of(first)} from {first.ip or first.host} on "
            f"{first.checkpoint or first.root or 'a run'}: {last.outcome}"
        )
        ids = [event.id for event in found]
        alerts.append(alert_of("break-glass", Severity.HIGH, first.run, last.time, reason, ids))
    return alerts


def log_trouble(events: Events, settings: LogTrouble, period: Period) -> list[Alert]:
    """Segments that were touched, events that were lost, and writers that fell silent without an end."""
    lasts: dict[str, Recorded] = {}
    alerts = [
        alert_of(
            "log-trouble",
            each.severity,
            period.run,
            period.now_ms,
            f"{each.count} segment{'s' if each.count != 1 else ''} of the log {each.what}: "
            f"{', '.join(each.keys)}{', ...' if each.count > len(each.keys) else ''}; "
            "see 'strongroom audit verify'",
            (),
        )
        for each in period.troubles
    ]
    for event in events:
        if event.time > period.now_ms:
            continue
        if period.counts(event):
            lasts[writer_of(event)] = event
        # What a command on the log came to is an act of a person: the log's own word is what it observed.
        is_the_logs = event.action == Action.AUDIT.value and event.phase == Phase.OBSERVED.value
        if not is_the_logs or not period.judges(event):
            continue
        told = event.details.get("lost_events")
        lost = told if type(told) is int else 0
        if lost or event.outcome in (Outcome.FAILURE.value, Outcome.DENIED.value):
            what = f"{lost} events were lost" if lost else f"the log tells of {event.outcome}"
            why = event.reason or "no reason told"
            reason = f"{what} by the writer on {event.host}, process {event.pid}: {why}"
            severity = Severity.HIGH if lost else Severity.MEDIUM
            alerts.append(alert_of("log-trouble", severity, event.run, event.time, reason, [event.id]))
    silent = settings.silent_hours * HOUR_MS
    for writer, last in lasts.items():
        # In whose time it became too long: it is told of once, by whoever asks regularly.
        is_due = last.time + silent >= period.since_ms or period.judges(last)
        if is_due and last.time + silent <= period.now_ms and not period.has_ended(writer):
            reason = (
                f"nothing has come from the writer on {last.host}, process {last.pid}, for "
                f"{span(period.now_ms - last.time)}, and it has not ended: it idles, or was killed and what "
                "it had to say lies on that machine, or its last segments were taken away"
            )
            alerts.append(alert_of("log-trouble", Severity.LOW, last.run, last.time, reason, [last.id]))
    return alerts
