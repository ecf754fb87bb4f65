"""Rotation: who can open checkpoints that stand, changed for all of them without touching a shard.

It owns the work over many checkpoints: in parallel, at a bounded rate, told as it goes on. One that fails
does not keep the others from their turn. How one checkpoint's next keyring comes about is
`strongroom_security.rewrapping`'s; what is to be done, `strongroom_security.changes`'.

It may be killed anywhere and done again: checkpoints that are as wanted are found by their keyrings'
recipients, and no key service is asked about them.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from strongroom.auditing import Action, Activity, Detail, outcome_of
from strongroom.auditing import Outcome as Ending
from strongroom.config import SYSTEM_CLOCK, Clock, check_seconds
from strongroom.errors import ConfigError
from strongroom.manifest import Commit
from strongroom.pace import Pace
from strongroom.parallel import run_all
from strongroom.signing import Trust
from strongroom.stores.base import Store
from strongroom_security.changes import AddRecipient, Change, RemoveRecipient, SetRecipients
from strongroom_security.generations import FoundKeyring, find_keyring
from strongroom_security.intents import auditor_of
from strongroom_security.keyrequests import Requests, collecting
from strongroom_security.recipients.base import Identity
from strongroom_security.rewrapping import Options, Outcome, Result, Rewrapping
from strongroom_security.unwrapping import Calls

__all__ = [
    "AddRecipient",
    "Change",
    "FoundKeyring",
    "Outcome",
    "Progress",
    "RemoveRecipient",
    "Report",
    "Result",
    "SetRecipients",
    "find_keyring",
    "rotate",
]

_WORKERS: Final = 8
"""Calls to a key service wait for the network for most of their time."""
_MAX_WORKERS: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a rotation is: checkpoints done, of how many, and calls to key services so far."""

    done: int
    total: int
    calls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a rotation came to.

    Attributes:
        outcomes: one a checkpoint, in the order given.
        since_ms: with a new checkpoint key, or ``again``: what goes on with this very rotation says
            ``since_ms`` is this; else None.
    """

    outcomes: tuple[Outcome, ...]
    since_ms: int | None = None

    @property
    def calls(self) -> int:
        """Calls to key services; in a dry run, those that it would take."""
        return sum(outcome.calls for outcome in self.outcomes)

    @property
    def failed(self) -> tuple[Outcome, ...]:
        return tuple(outcome for outcome in self.outcomes if outcome.result == "failed")

    def count(self, result: Result) -> int:
        """How many checkpoints came to a result."""
        return sum(outcome.result == result for outcome in self.outcomes)


def rotate(
    store: Store,
    commits: Iterable[Commit],
    change: Change,
    *,
    identities: Sequence[Identity] = (),
    within_s: float = 30.0,
    workers: int = _WORKERS,
    calls_per_second: float | None = None,
    verify: bool = False,
    remove_old: bool = False,
    dry_run: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
    clock: Clock = SYSTEM_CLOCK,
    trust: Trust | None = None,
    activity: Activity | None = None,
) -> Report:
    """Make the keyrings of checkpoints as a change wants them.

    Args:
        store: the run's root.
        commits: of the checkpoints.
        change: who shall be able to open.
        identities: who can open now. Recipients of the change that can open need not be named.
        within_s: seconds that one call to a key service may take.
        workers: checkpoints at once.
        calls_per_second: to key services, of all workers together; None: as many as there are.
        verify: have key services open what was made, too: one call more a service and checkpoint.
            Keys that are here always do.
        remove_old: remove older generations, once the newest was opened; this asks the services too.
        dry_run: read, say what would be done, and do nothing.
        on_progress: told after each checkpoint, from several threads, one at a time.
        clock: the time.
        trust: who judges a checkpoint's signatures before its keys are touched; None: nobody.
        activity: of which this is a part, by whose auditor each checkpoint is put on record before its keys
            are touched, and what became of it. None: one of its own, where the identities, the recipients
            or ``trust`` are of a policy that keeps a record; else nothing is recorded.

    Returns:
        What became of each; one that failed is told there, and the others go on.

    Raises:
        AuditError: a checkpoint could not be put on record first: its keys were not touched, and no further
            one's.
        ConfigError: an argument cannot work.
    """
    check_seconds("within_s", within_s)
    _check_workers(workers)
    if calls_per_second is not None:
        _check_rate(calls_per_second)
    since_ms: int | None = None
    if isinstance(change, SetRecipients) and (change.new_checkpoint_key or change.again):
        # One more than now: what was made in this very millisecond was not made by this rotation.
        since_ms = clock.now_ms() + 1 if change.since_ms is None else change.since_ms
        change = replace(change, since_ms=since_ms)
    options = Options(
        change=change,
        identities=_identities(change, identities),
        verify=verify,
        remove_old=remove_old,
        dry_run=dry_run,
        clock=clock,
        trust=trust,
    )
    stopped = threading.Event()

    def pause(pause_s: float) -> None:
        stopped.wait(pause_s)

    own: Activity | None = None
    if activity is None:
        own = activity = _own_activity(store, change, (*options.identities, *_recipients(change), trust))
    recording: Activity = activity
    pace = Pace(calls_per_second, sleep=pause)
    chosen = list(commits)
    telling = _Telling(len(chosen), on_progress)

    def one(commit: Commit) -> Outcome | None:
        if stopped.is_set():
            return None
        if commit.keyring is not None and not dry_run:
            recording.intend(commit.run, commit.name, root=store.uri)
        requests = Requests()
        with collecting(requests):
            outcome = Rewrapping(store, commit, options, Calls(pace, within_s, root=store.uri)).carry_out()
        _record(recording, store, commit, outcome, {**requests.details, "is_dry_run": dry_run})
        telling.tell(outcome)
        return outcome

    with own or contextlib.nullcontext():
        try:
            found = run_all(
                [lambda commit=commit: one(commit) for commit in chosen],  # type: ignore[misc]
                workers=workers,
                name="strongroom-rotate",
            )
        finally:
            # After an interrupt nothing new is begun behind the caller's back.
            stopped.set()
        report = Report(outcomes=tuple(each for each in found if each is not None), since_ms=since_ms)
        if own is not None and report.failed:
            own.conclude(Ending.FAILURE, f"{len(report.failed)} of {len(report.outcomes)} checkpoints failed")
    return report


def _own_activity(store: Store, change: Change, keepers: Sequence[object]) -> Activity:
    """What a rotation is on record as that is no part of anything."""
    action = Action.ROTATE if isinstance(change, SetRecipients) else Action.RECIPIENTS
    return Activity(auditor_of(*keepers), action, root=store.uri)


def _record(
    activity: Activity, store: Store, commit: Commit, outcome: Outcome, details: dict[str, Detail]
) -> None:
    """Put on record what became of one checkpoint's keyring."""
    details |= {"calls": outcome.calls, "result": outcome.result}
    if outcome.source is not None:
        details["keyring_before"] = outcome.source
    if outcome.generation is not None:
        details["keyring"] = outcome.generation
    if outcome.removed:
        details["keyrings_removed"] = ",".join(map(str, outcome.removed))
    error = outcome.error
    if error is not None:
        details["error"] = type(error).__name__
    activity.tell(
        Ending.SUCCESS if error is None else outcome_of(error),
        checkpoint=commit.name,
        run=commit.run,
        root=store.uri,
        reason=None if error is None else str(error),
        details=details,
    )


class _Telling:
    """Counts checkpoints and calls, and tells of them one at a time."""

    def __init__(self, total: int, on_progress: Callable[[Progress], None] | None) -> None:
        self._lock = threading.Lock()
        self._total = total
        self._done = 0
        self._calls = 0
        self._on_progress = on_progress

    def tell(self, outcome: Outcome) -> None:
        with self._lock:
            self._done += 1
            self._calls += outcome.calls
            if self._on_progress is not None:
                self._on_progress(Progress(done=self._done, total=self._total, calls=self._calls))


def _identities(change: Change, given: Sequence[Identity]) -> tuple[Identity, ...]:
    """Each key once: those given, then recipients of the change that can open."""
    by_id: dict[str, Identity] = {}
    for each in (*given, *_recipients(change)):
        if isinstance(each, Identity):
            by_id.setdefault(each.id, each)
    return tuple(by_id.values())


def _recipients(change: Change) -> tuple[object, ...]:
    """Who is added."""
    if isinstance(change, SetRecipients):
        return tuple(change.recipients)
    return (change.recipient,) if isinstance(change, AddRecipient) else ()


def _check_workers(value: object) -> None:
    if type(value) is not int or not 1 <= value <= _MAX_WORKERS:
        raise ConfigError(f"workers must be a whole number from 1 to {_MAX_WORKERS}, got {value!r:.60}")


def _check_rate(value: object) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:  # type: ignore[operator]
        raise ConfigError(f"calls_per_second must be a positive number, got {value!r:.60}")
