"""Copies beside a training job: a thread for each target, for as long as there is something to copy.

What fails is tried again for as long as the job lives; training never waits for any of it, and hears of it
through events, the log and `Replicator.wait`. Nothing of the first tier is ever removed here but notes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Final

from strongroom.catalog import History
from strongroom.config import SYSTEM_CLOCK, Clock
from strongroom.errors import (
    ConfigError,
    FencedError,
    ReplicationError,
    StrongroomError,
    WaitTimeoutError,
)
from strongroom.events import Emitter
from strongroom.layout import CheckpointName
from strongroom.manifest import Commit
from strongroom.replication.courier import Target
from strongroom.replication.lag import random_pause_s
from strongroom.replication.upkeep import TargetState, Upkeep
from strongroom.signing import NO_GUARD, Guard
from strongroom.stores.base import Store

__all__ = ["Replicator"]

_LINGER_S: Final = 60.0
"""How long a failing target keeps an interpreter that would otherwise end."""
_STOP_S: Final = 5.0
"""How long `Replicator.close` waits for threads that were told to stop."""
_LOOK_S: Final = 10.0
"""How long retention waits for a target to say what stands there."""
_SLICE_S: Final = 1.0
"""How late the end of the main thread is seen at most."""


class Replicator:
    """Brings the checkpoints of a first tier to others.

    Args:
        source: the first tier.
        targets: the others.
        clock: the time.
        emitter: hears of what was copied and what failed.
        guard: whose launches count.
        pause_s: how long to wait after so many failures in a row.
        is_main_alive: whether the program's main thread still runs.
        linger_s: how long a failing target keeps a program whose main thread has ended.

    Raises:
        ConfigError: a target is the first tier itself, or stands twice.
    """

    def __init__(
        self,
        source: Store,
        targets: Sequence[Target],
        *,
        clock: Clock = SYSTEM_CLOCK,
        emitter: Emitter | None = None,
        guard: Guard = NO_GUARD,
        pause_s: Callable[[int], float] = random_pause_s,
        is_main_alive: Callable[[], bool] = lambda: threading.main_thread().is_alive(),
        linger_s: float = _LINGER_S,
    ) -> None:
        uris = [target.store.uri for target in targets]
        twice = next((uri for uri in uris if uris.count(uri) > 1), None)
        if twice is not None:
            raise ConfigError(f"{twice} is given twice as a tier to copy to; once is enough")
        # Of threads, waiters and callers alike.
        self._changed = threading.Condition()
        self._lines = [
            Upkeep(
                source,
                target,
                clock=clock,
                emitter=emitter if emitter is not None else Emitter(),
                guard=guard,
                pause_s=pause_s,
                is_main_alive=is_main_alive,
                linger_s=linger_s,
                changed=self._changed,
            )
            for target in targets
        ]
        self._is_closed = False

    def begin(self, launch: int | None = None) -> None:
        """Go on with what an earlier process has left; returns at once.

        Args:
            launch: the writer's turn for whom copies are made: where a target has a later one, nothing more
                is committed there. None: nobody is writing, or not any more. A target that was given up
                is taken up again for a newer turn, and, where another writer had it, for none.
        """
        with self._changed:
            if not self._is_closed:
                for line in self._lines:
                    line.begin(launch)

    def wake(self, commit: Commit) -> None:
        """Copy what the writer has committed on the first tier just now; returns at once."""
        with self._changed:
            if not self._is_closed:
                for line in self._lines:
                    line.wake(commit, commit.name.launch)

    @property
    def fenced(self) -> StrongroomError | None:
        """What has ended the copying to a target for good; None: nothing has.

        That another writer has taken the run over there comes first; else it may be another run's, or the
        first tier itself.
        """
        with self._changed:
            errors = [line.stopped_by for line in self._lines if line.stopped_by is not None]
        return next((error for error in errors if isinstance(error, FencedError)), next(iter(errors), None))

    def wait(self, name: CheckpointName, timeout_s: float | None = None) -> None:
        """Return once a checkpoint stands on every target, verified.

        Args:
            timeout_s: seconds to wait; None: for as long as it takes. A target that is out of reach is tried
                again for ever.

        Raises:
            ReplicationError: some target will not have it: another writer has taken the run over there, it is
                damaged on the first tier, or a newer one has made it superfluous.
            WaitTimeoutError: it does not yet.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            for line in self._lines:
                if not self._is_closed:
                    line.expect(name)
            while True:
                refused = {line.uri: why for line in self._lines if (why := line.why_never(name)) is not None}
                missing = [line for line in self._lines if not line.has(name) and line.uri not in refused]
                if refused or not missing:
                    break
                left_s = None if end is None else end - time.monotonic()
                if self._is_closed or (left_s is not None and left_s <= 0):
                    raise WaitTimeoutError(_still_missing(name, missing, timeout_s, self._is_closed))
                # In turns: a Ctrl-C that comes just as a wait begins is heard only when that wait ends.
                self._changed.wait(_SLICE_S if left_s is None else min(_SLICE_S, left_s))
        if refused:
            told = "; ".join(f"{uri}: {why}" for uri, why in refused.items())
            raise ReplicationError(f"{name} is not on every tier: {told}", tiers=tuple(refused))

    def state(self) -> tuple[TargetState, ...]:
        """How far each target is, in the order that they were given in."""
        with self._changed:
            return tuple(line.state() for line in self._lines)

    def is_verified_elsewhere(self, name: CheckpointName) -> bool:
        """Whether the first tier may lose a checkpoint: it is known to stand on some target, verified.

        Or no target is to have it, and each has a newer one, verified.
        """
        with self._changed:
            if any(line.stands(name) for line in self._lines):
                return True
            return all(line.is_unwanted(name) and line.has_newer(name) for line in self._lines)

    def held(self, history: History) -> Mapping[CheckpointName, str]:
        """Which checkpoints of the first tier must not be removed from it yet, and why.

        One may go once it is verified on some target and every other one has it too, has passed it over, or
        fails at the moment. One that no target is to have may go once each has a newer one, verified. Where
        one may go by what was seen before, the targets are looked at once more, and only what stands there
        now counts; whoever asks waits for that, for a bounded time.
        """
        reasons = self._why_held_each(history, {})
        released = [commit for name, commit in history.commits.items() if reasons[name] is None]
        if released:
            reasons = self._why_held_each(history, self._look_again(released))
        return {name: why for name, why in reasons.items() if why is not None}

    def _why_held_each(
        self, history: History, seen: Mapping[str, frozenset[CheckpointName]]
    ) -> dict[CheckpointName, str | None]:
        with self._changed:
            return {name: self._why_held(name, seen) for name in history.commits}

    def _look_again(self, commits: Sequence[Commit]) -> Mapping[str, frozenset[CheckpointName]]:
        """What stands on each target just now, of some checkpoints, by its URI; nothing: it is not known."""
        began = {}
        with self._changed:
            for line in self._lines:
                asked = {commit for commit in commits if line.stands(commit.name)}
                if (best := line.best()) is not None:
                    # For its sake what is not to come there may go.
                    asked.add(best)
                if asked:
                    began[line] = (line.look_again(asked), asked)
        end = time.monotonic() + _LOOK_S
        seen = dict.fromkeys((line.uri for line in self._lines), frozenset[CheckpointName]())
        for line, (looking, asked_of) in began.items():
            if looking is None:
                continue
            try:
                there = set(looking.result(max(0.0, end - time.monotonic())))
            except (StrongroomError, FutureTimeoutError):
                continue
            seen[line.uri] = frozenset(commit.name for commit in there)
            lost = [commit.name for commit in asked_of - there]
            if lost:
                with self._changed:
                    line.note_lost(lost)
        return seen

    def _why_held(self, name: CheckpointName, seen: Mapping[str, frozenset[CheckpointName]]) -> str | None:
        standing = [line for line in self._lines if line.stands(name)]
        expecting = [line for line in self._lines if line not in standing and line.why_passed(name) is None]
        wanting = [line for line in self._lines if line not in standing and not line.is_unwanted(name)]
        if standing and not any(name in seen.get(line.uri, (name,)) for line in standing):
            return f"it stood on {standing[0].uri}, and it cannot be seen whether it still does"
        if not standing:
            if expecting:
                return f"it is not verified on another tier yet, such as {expecting[0].uri}"
            if wanting:
                why = wanting[0].why_passed(name)
                return f"it is not verified on {wanting[0].uri}, where it cannot be put: {why}"
            behind = next((line for line in self._lines if not _has_newer_now(line, name, seen)), None)
            return None if behind is None else f"no newer one is verified on {behind.uri} yet"
        coming = [line for line in expecting if line.is_going_well]
        return f"it is on its way to {coming[0].uri}" if coming else None

    def close(self, timeout_s: float = 0.0) -> None:
        """End the copying; once more is fine.

        Args:
            timeout_s: how long to wait until all is copied; for a target that fails, a minute at most.

        Raises:
            ReplicationError: something still waits: whoever opens the run again goes on with it.
        """
        end = time.monotonic() + timeout_s
        with self._changed:
            while (
                any(line.is_worth_waiting_for for line in self._lines)
                and (left_s := end - time.monotonic()) > 0
            ):
                self._changed.wait(min(_SLICE_S, left_s))
            was_closed, self._is_closed = self._is_closed, True
            for line in self._lines:
                line.stop()
            self._changed.notify_all()
            end = time.monotonic() + _STOP_S
            while any(line.is_busy for line in self._lines) and (left_s := end - time.monotonic()) > 0:
                self._changed.wait(min(_SLICE_S, left_s))
            left = [state for line in self._lines if (state := line.state()).pending]
        if left and not was_closed:
            told = "; ".join(
                f"{len(state.pending)} for {state.uri}, the newest of step {state.pending[0].step}"
                f"{f' ({state.last_error})' if state.last_error is not None else ''}"
                for state in left
            )
            raise ReplicationError(
                f"checkpoints still wait to be copied: {told}. Whoever opens the run again copies them, or "
                f"`strongroom replicate` does",
                tiers=tuple(state.uri for state in left),
            )


def _has_newer_now(line: Upkeep, name: CheckpointName, seen: Mapping[str, frozenset[CheckpointName]]) -> bool:
    best = line.best()
    return best is not None and line.has_newer(name) and best.name in seen.get(line.uri, (best.name,))


def _still_missing(
    name: CheckpointName, missing: Sequence[Upkeep], timeout_s: float | None, is_closed: bool
) -> str:
    told = "; ".join(f"{line.uri}{f' ({line.error})' if line.error is not None else ''}" for line in missing)
    if is_closed:
        return f"{name} is not on every tier, and this process copies nothing any more; it lacks: {told}"
    return f"{name} is not on every tier after {timeout_s:g} s; it is still to come to: {told}"
