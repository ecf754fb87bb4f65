"""Retention and garbage collection: what is looked at when, and what is told of it.

Who decides is `strongroom.retention` and `strongroom.sweep`. A `Keeper` goes by them after each commit of a
writer; `find_garbage` does for whoever comes from outside, and knows of no writer.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from strongroom import retention, sweep
from strongroom.auditing import new_operation
from strongroom.candidates import Candidates
from strongroom.catalog import Catalog, History
from strongroom.config import Clock
from strongroom.errors import ConfigError, IntegrityError, StrongroomError, UnsupportedFormatError
from strongroom.events import CheckpointRemoved, Emitter, OrphanRemoved, RemovalFailed, RemovalStarted
from strongroom.layout import CheckpointName
from strongroom.manifest import Commit
from strongroom.opened import open_checkpoint
from strongroom.retention import Decision, KeepAll, RetentionPolicy
from strongroom.roles import Duty, Operation, Role
from strongroom.signing import NO_GUARD, Guard
from strongroom.stores.base import Store
from strongroom.sweep import Outcome, Plan, Removal

__all__ = ["Held", "Keeper", "check_may_remove", "event_of", "find_garbage", "start_of"]

_LOG: Final = logging.getLogger("strongroom")

Held = Callable[[History], Mapping[CheckpointName, str]]
"""Says which checkpoints must not go yet, and why: where they are nowhere else, for one."""

_FOLLOWS_NO_POLICY: Final = KeepAll()


def check_may_remove(role: Role | None) -> None:
    """Raise ConfigError where a retention policy is given to a process that may not delete."""
    if role is None or role.may(Operation.DELETE, Duty.SAVE):
        return
    raise ConfigError(
        f"keep= removes checkpoints after each commit, and the role {role.name} may not delete any: leave it "
        "out, and have `strongroom gc ROOT --keep-last N` run under the role retention from time to time"
    )


@dataclass(frozen=True, slots=True)
class _Counting:
    """A root's checkpoints, as far as they are this run's by the policy.

    Attributes:
        ranked: those that count, in the line's order: launches that a stranger planted have no say in it.
        strange: the whole ones that do not, with the reason.
    """

    ranked: tuple[CheckpointName, ...]
    strange: Mapping[CheckpointName, StrongroomError]


class _Judge:
    """Tells checkpoints of this run from what anybody may have planted; each is judged once.

    Args:
        guard: where it demands signatures, a checkpoint without them counts for nothing and is left alone:
            whoever plants some must not make retention remove the true ones.
    """

    def __init__(self, store: Store, guard: Guard) -> None:
        self._store = store
        self._trust = guard.trust
        self._judged: dict[Commit, IntegrityError | UnsupportedFormatError | None] = {}

    def vouch(self, commit: Commit) -> None:
        """Take a checkpoint for one of this run: its writer asks."""
        self._judged[commit] = None

    def count(self, history: History) -> _Counting:
        there = set(history.commits.values())
        self._judged = {commit: why for commit, why in self._judged.items() if commit in there}
        candidates = Candidates(history)
        for name in candidates:
            problem = self._problem(history, name)
            # What is in another format was found to be signed before it was parsed.
            candidates.tell(name, problem if isinstance(problem, IntegrityError) else None)
        line = candidates.history.line
        problems = {name: self._problem(history, name) for name in history.commits}
        return _Counting(
            ranked=tuple(name for name in line.ranked if name in problems and problems[name] is None),
            strange={name: problem for name, problem in problems.items() if problem is not None},
        )

    def _problem(
        self, history: History, name: CheckpointName
    ) -> IntegrityError | UnsupportedFormatError | None:
        """Why a checkpoint counts for nothing; None: it does."""
        commit = history.commits.get(name)
        if commit is None:
            return IntegrityError(history.damaged[name])
        if self._trust is None:
            return None
        if commit not in self._judged:
            # Noted once it is known: where the store could not be asked, nothing is.
            self._judged[commit] = self._look_into(commit)
        return self._judged[commit]

    def _look_into(self, commit: Commit) -> IntegrityError | UnsupportedFormatError | None:
        try:
            open_checkpoint(self._store, commit, Guard(trust=self._trust))
        except (IntegrityError, UnsupportedFormatError) as error:
            return error
        return None


class Keeper:
    """Removes what a policy lets go of, and what dead saves left behind.

    Args:
        keep: the policy; None: nothing is ever removed.
        guard: what the policy demands of a checkpoint that counts.
        held: what must not go yet.
        is_copied_to: whether others may be copying to this root from another tier.
    """

    def __init__(
        self,
        store: Store,
        catalog: Catalog,
        keep: RetentionPolicy | None,
        *,
        clock: Clock,
        emitter: Emitter,
        guard: Guard = NO_GUARD,
        held: Held | None = None,
        is_copied_to: bool = False,
    ) -> None:
        self._store = store
        self._catalog = catalog
        self._keep = keep
        self._clock = clock
        self._emitter = emitter
        self._judge = _Judge(store, guard)
        self._held = held
        self._is_copied_to = is_copied_to
        self._lock = threading.Lock()
        self._half_removed: set[CheckpointName] = set()
        self._told: frozenset[CheckpointName] = frozenset()

    def retain(self, commit: Commit, verified: Collection[CheckpointName]) -> None:
        """Look at the root after a commit; never raises into training.

        Args:
            commit: what this writer has just committed.
            verified: checkpoints that it has restored, and so found whole.
        """
        self._look(commit.run, commit.name.launch, verified, commit)

    def tidy(self, run: str, launch: int, verified: Collection[CheckpointName]) -> None:
        """As `retain`, where nothing was committed: what had to stay may go now. Never raises.

        Args:
            launch: the writer's turn.
        """
        self._look(run, launch, verified, None)

    def _look(
        self, run: str, launch: int, verified: Collection[CheckpointName], commit: Commit | None
    ) -> None:
        if self._keep is None:
            return
        try:
            # A save that has committed and a copy that has arrived may both be followed by a look.
            with self._lock:
                for plan in self._plans(self._keep, launch, verified, commit):
                    self._carry_out(plan, run)
        except Exception as error:  # noqa: BLE001
            # A store that cannot be listed, or a policy with a bug: the checkpoint stands all the same.
            self._emitter.emit(RemovalFailed(run=run, folder="", root=self._store.uri, reason=str(error)))

    def _plans(
        self,
        keep: RetentionPolicy,
        launch: int,
        verified: Collection[CheckpointName],
        commit: Commit | None,
    ) -> Iterator[Plan]:
        """What is to go, one matter after another: where one cannot be looked into, the others were done."""
        history = self._catalog.history()
        if max(history.launch_numbers, default=0) > launch:
            # A later writer slipped in between the fence and the commit: what stays is its to say.
            return
        name = commit.name if commit is not None else None
        in_flight = (name,) if name is not None else ()
        if commit is not None:
            self._judge.vouch(commit)
        counting = self._judge.count(history)
        for strange, why in counting.strange.items():
            if strange not in self._told:
                _LOG.warning("%s counts for nothing in retention, and is left alone: %s", strange, why)
        self._told = frozenset(counting.strange)
        half_removed = self._half_removed.intersection(history.uncommitted)
        self._half_removed = set(half_removed)
        decisions = retention.plan(
            counting.ranked,
            keep,
            verified=history.verified.union(verified),
            just_committed=name,
            held={} if self._held is None else self._held(history),
        )
        yield sweep.of_checkpoints(decisions, history)
        now_ns = self._clock.now_ns()
        yield sweep.orphans(
            self._store,
            history,
            launch=launch,
            now_ns=now_ns,
            in_flight=in_flight,
            half_removed=half_removed,
        )
        yield sweep.abandoned_uploads(self._store, history, launch=launch, now_ns=now_ns, in_flight=in_flight)

    def _carry_out(self, plan: Plan, run: str) -> None:
        for unknown in plan.unknown:
            told = f"it is not known {unknown}"
            self._emitter.emit(RemovalFailed(run=run, folder="", root=self._store.uri, reason=told))
        for removal in plan.removals:
            start = start_of(run, self._store.uri, removal)
            self._emitter.emit(start)
            outcome = sweep.remove(self._store, removal, marks=self._is_copied_to, now_ns=self._clock.now_ns)
            if outcome.is_half_done:
                self._half_removed.add(removal.name)
            self._emitter.emit(event_of(run, self._store.uri, outcome, operation=start.operation))


def start_of(run: str, root: str, removal: Removal) -> RemovalStarted:
    """What is told before a removal.

    Args:
        root: from which it is removed.
    """
    return RemovalStarted(
        run=run, folder=removal.path, root=root, reason=removal.reason, operation=new_operation()
    )


def event_of(
    run: str, root: str, outcome: Outcome, *, operation: str = ""
) -> CheckpointRemoved | OrphanRemoved | RemovalFailed:
    """What is told of a removal.

    Args:
        root: from which it was removed.
        operation: that of `start_of`.
    """
    removal = outcome.removal
    if outcome.error is not None:
        return RemovalFailed(
            run=run, folder=removal.path, root=root, reason=outcome.error, operation=operation
        )
    if removal.kind == "checkpoint":
        return CheckpointRemoved(
            run=run,
            step=removal.name.step,
            launch=removal.name.launch,
            attempt=removal.name.attempt,
            root=root,
            reason=removal.reason,
            operation=operation,
        )
    return OrphanRemoved(run=run, folder=removal.path, root=root, reason=removal.reason, operation=operation)


def find_garbage(
    store: Store,
    history: History,
    keep: RetentionPolicy | None,
    *,
    now_ns: int,
    guard: Guard = NO_GUARD,
    held: Held | None = None,
    best: int | None = None,
) -> Plan:
    """What may go from a root, for somebody who is not its writer; nothing is removed.

    A writer may be at work meanwhile: what it could still commit stays, and so does what it began from.

    Args:
        history: the root, launch records judged by the guard's trust.
        keep: which checkpoints stay; None: all of them.
        now_ns: the time, by the clock that the store's times are from.
        guard: what the policy demands of a checkpoint that counts.
        held: what must not go yet.
        best: how many of those stay that the run itself names as its best, where some go; None: all of them.

    Raises:
        StoreError: the store could not be asked.
    """
    counting = _Judge(store, guard).count(history)
    named = {} if keep is None else _named_best(store, history, counting.ranked, guard, best)
    decisions = retention.plan(
        counting.ranked,
        keep if keep is not None else _FOLLOWS_NO_POLICY,
        verified=history.verified,
        held={**_taken_up(history), **({} if held is None else held(history)), **named},
    )
    strange = {**history.damaged, **{name: str(why) for name, why in counting.strange.items()}}
    launch = max(history.launch_numbers, default=0)
    return (
        sweep.of_checkpoints(decisions, history)
        + Plan(
            kept=tuple(
                Decision(name=name, is_kept=True, reason=f"counts for nothing, and is left alone: {why}")
                for name, why in strange.items()
            )
        )
        + sweep.orphans(store, history, launch=launch, now_ns=now_ns)
        + sweep.abandoned_uploads(store, history, launch=launch, now_ns=now_ns)
    )


def _named_best(
    store: Store, history: History, ranked: Sequence[CheckpointName], guard: Guard, count: int | None
) -> dict[CheckpointName, str]:
    """What the newest checkpoint whose manifest can be read says to be the best."""
    for newest in ranked:
        try:
            manifest = open_checkpoint(store, history.commits[newest], Guard(trust=guard.trust)).manifest
        except (IntegrityError, UnsupportedFormatError):
            continue
        at_step: dict[int, CheckpointName] = {}
        for name in ranked:
            # A step may have been saved once more on a later line: that one was measured last.
            at_step.setdefault(name.step, name)
        chosen = [at_step[step] for step in manifest.best[:count] if step in at_step]
        return {
            name: f"number {place} of the best, by step {newest.step}"
            for place, name in enumerate(chosen, start=1)
        }
    return {}


def _taken_up(history: History) -> dict[CheckpointName, str]:
    """What the newest launch goes on from, which has perhaps not committed anything yet."""
    launch = history.launches.get(max(history.launches, default=0))
    if launch is None or launch.parent is None:
        return {}
    return {launch.parent.name: f"launch {launch.launch} goes on from it"}
