"""Rules about how a run's checkpoints come and go: removed, validated, stopped, failed. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Final

from strongroom.auditing import Action, Phase
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
    is_commit,
    is_done,
    is_failed_save,
    span,
    writer_of,
)
from strongroom_security.auditlog.alerting.settings import (
    FailedSaves,
    RemovedFast,
    SavesStopped,
    ValidatorSilent,
)
from strongroom_security.auditlog.format.events import Recorded
from strongroom_security.auditlog.reconciling.identities import principal

__all__ = ["failed_saves", "removed_fast", "saves_stopped", "validator_silent"]

_INTERVALS: Final = 20
"""Of a run's newest commits: what is usual there."""


@dataclass(slots=True)
class _Removals:
    usual: dict[int, int] = field(default_factory=dict)
    recent: deque[tuple[int, str]] = field(default_factory=deque)
    most: list[tuple[int, str]] = field(default_factory=list)
    removed: set[str] = field(default_factory=set)
    commits: dict[str, tuple[int, int]] = field(default_factory=dict)
    launch: int = 0


def removed_fast(events: Events, settings: RemovedFast, period: Period) -> list[Alert]:
    """Checkpoints removed faster than usual, the newest removed, or many left behind by going back."""
    runs: dict[str, _Removals] = {}
    alerts: list[Alert] = []
    for run, event in by_run(events):
        seen = runs.setdefault(run, _Removals())
        name = event.checkpoint
        if name is None or event.launch is None or event.step is None:
            continue
        if is_commit(event):
            if name in seen.commits or not period.counts(event):
                continue
            alerts += _left_behind(seen, run, event, settings, period)
            seen.commits[name] = (event.launch, event.step)
        elif event.action == Action.REMOVE.value and is_done(event):
            if event.details.get("kind") == "orphan" or name in seen.removed:
                continue
            seen.removed.add(name)
            is_newest = name in seen.commits and seen.commits[name] == max(seen.commits.values())
            if is_newest and period.judges(event):
                reason = (
                    f"the newest checkpoint on record, {name}, was removed by {actor_of(event)}, which "
                    "retention never does"
                )
                alerts.append(alert_of("removed-fast", Severity.HIGH, run, event.time, reason, [event.id]))
            seen.commits.pop(name, None)
            if not period.judges(event):
                if event.time < period.since_ms and period.counts(event):
                    hour = event.time // HOUR_MS
                    seen.usual[hour] = seen.usual.get(hour, 0) + 1
            else:
                seen.recent.append((event.time, event.id))
                while seen.recent[0][0] <= event.time - HOUR_MS:
                    seen.recent.popleft()
                if len(seen.recent) > len(seen.most):
                    seen.most = list(seen.recent)
    for run, seen in runs.items():
        usual = median(seen.usual.values()) if seen.usual else None
        bound = settings.per_hour
        if usual is not None:
            bound = min(bound, max(settings.at_least, int(settings.factor * usual)))
        if len(seen.most) > bound:
            told = (
                "none were on record before"
                if usual is None
                else f"the median of the hours before is {usual:g}"
            )
            reason = (
                f"{len(seen.most)} checkpoints were removed within one hour; expected at most {bound}: {told}"
            )
            ids = [each for _, each in seen.most]
            alerts.append(alert_of("removed-fast", Severity.HIGH, run, seen.most[-1][0], reason, ids))
    return alerts


def _left_behind(
    seen: _Removals, run: str, event: Recorded, settings: RemovedFast, period: Period
) -> list[Alert]:
    if event.launch is None or event.step is None or event.launch <= seen.launch:
        return []
    seen.launch = event.launch
    step, launch = event.step, event.launch
    behind = [name for name, (was, at) in seen.commits.items() if was < launch and at >= step]
    if len(behind) <= settings.superseded or not period.judges(event):
        return []
    reason = (
        f"launch {launch} went on at step {step} and left {len(behind)} newer checkpoints behind; expected "
        f"at most {settings.superseded}"
    )
    return [alert_of("removed-fast", Severity.MEDIUM, run, event.time, reason, [event.id])]


@dataclass(slots=True)
class _Validated:
    last: int | None = None
    commits: dict[str, str] = field(default_factory=dict)
    first: int | None = None
    newest: int = 0
    is_fresh: bool = False


def validator_silent(events: Events, settings: ValidatorSilent, period: Period) -> list[Alert]:
    """Commits go on, and nobody has verified or restored one for too many of them, or for too long."""
    runs: dict[str, _Validated] = {}
    for run, event in by_run(events):
        if event.time > period.now_ms:
            continue
        seen = runs.setdefault(run, _Validated())
        if is_commit(event) and event.checkpoint is not None:
            seen.commits.setdefault(event.checkpoint, event.id)
            seen.newest = max(seen.newest, event.time)
            seen.is_fresh |= period.judges(event)
            seen.first = event.time if seen.first is None else seen.first
        elif is_done(event) and _validates(event, settings) and period.counts(event):
            seen.last = event.time
            seen.commits.clear()
            seen.first = None
    alerts = []
    for run, seen in runs.items():
        if not seen.commits or not seen.is_fresh or (seen.last is None and not settings.required):
            continue
        since = seen.last if seen.last is not None else seen.first
        waited = period.now_ms - (since if since is not None else period.now_ms)
        if len(seen.commits) < settings.commits and waited < settings.hours * HOUR_MS:
            continue
        told = "never" if seen.last is None else f"{span(waited)} ago"
        reason = (
            f"{len(seen.commits)} checkpoints were committed since a validator last looked ({told}); "
            f"expected fewer than {settings.commits}, and at most {settings.hours:g} h"
        )
        alerts.append(
            alert_of(
                "validator-silent", Severity.MEDIUM, run, seen.newest, reason, reversed(seen.commits.values())
            )
        )
    return alerts


def _validates(event: Recorded, settings: ValidatorSilent) -> bool:
    if event.action == Action.VERIFY.value:
        return True
    if event.action != Action.RESTORE.value:
        return False
    return event.role in settings.roles or _is_among(event, settings.actors)


def _is_among(event: Recorded, actors: tuple[str, ...]) -> bool:
    return any(
        event.user == each or (event.identity is not None and principal(event.identity) == principal(each))
        for each in actors
    )


def saves_stopped(events: Events, settings: SavesStopped, period: Period) -> list[Alert]:
    """A run whose commits came regularly, and have not come for several intervals, without an end."""
    runs: dict[str, deque[Recorded]] = {}
    known: dict[str, set[str]] = {}
    for run, event in by_run(events):
        if not is_commit(event) or event.phase != Phase.FINISHED.value or event.time > period.now_ms:
            continue
        names = known.setdefault(run, set())
        if event.checkpoint is None or event.checkpoint in names or not period.counts(event):
            continue
        names.add(event.checkpoint)
        runs.setdefault(run, deque(maxlen=_INTERVALS + 1)).append(event)
    alerts = []
    for run, commits in runs.items():
        last = commits[-1]
        waited = period.now_ms - last.time
        if len(commits) < max(2, settings.commits) or waited > settings.forget_days * DAY_MS:
            continue
        times = [event.time for event in commits if event.launch == last.launch]
        if len(times) < 2:
            times = [event.time for event in commits]
        usual = median(after - before for before, after in pairwise(times))
        bound = max(settings.factor * usual, settings.at_least_minutes * 60_000)
        if waited <= bound or period.has_ended(writer_of(last)):
            continue
        reason = (
            f"the last checkpoint, {last.checkpoint}, was committed {span(waited)} ago; they came every "
            f"{span(usual)}, and whoever saved it has not said that it ended"
        )
        alerts.append(alert_of("saves-stopped", Severity.MEDIUM, run, last.time, reason, [last.id]))
    return alerts


@dataclass(slots=True)
class _Saves:
    failed: dict[object, Recorded] = field(default_factory=dict)
    worst: list[Recorded] = field(default_factory=list)
    observed: dict[str, Recorded] = field(default_factory=dict)
    recorded: set[str] = field(default_factory=set)


def failed_saves(events: Events, settings: FailedSaves, period: Period) -> list[Alert]:
    """Saves that fail in a row, and commits that a later launch found."""
    runs: dict[str, _Saves] = {}
    for run, event in by_run(events):
        if event.time > period.now_ms:
            continue
        seen = runs.setdefault(run, _Saves())
        if is_failed_save(event):
            # Ranks each tell of it: one save is one failure.
            name = event.checkpoint or event.details.get("step", event.operation)
            seen.failed.setdefault(name, event)
            if period.judges(event) and len(seen.failed) > len(seen.worst):
                seen.worst = list(seen.failed.values())
        elif is_commit(event) and event.checkpoint is not None:
            if event.phase == Phase.OBSERVED.value:
                if period.judges(event):
                    seen.observed.setdefault(event.checkpoint, event)
            elif period.counts(event):
                seen.failed.clear()
                seen.recorded.add(event.checkpoint)
    alerts = []
    for run, seen in runs.items():
        if len(seen.worst) >= settings.in_a_row:
            last = seen.worst[-1]
            reason = (
                f"{len(seen.worst)} saves failed in a row; expected fewer than {settings.in_a_row}; "
                f"the last: {(last.reason or last.outcome)[:300]}"
            )
            ids = [event.id for event in seen.worst]
            alerts.append(alert_of("failed-saves", Severity.MEDIUM, run, last.time, reason, ids))
        found = [event for name, event in seen.observed.items() if name not in seen.recorded]
        if settings.observed and found:
            reason = (
                f"{len(found)} commits were found by a later launch and are not on record by whoever made "
                "them: it was killed in that moment, kept no record, or was not Strongroom"
            )
            ids = [event.id for event in found]
            alerts.append(alert_of("failed-saves", Severity.MEDIUM, run, found[-1].time, reason, ids))
    return alerts
