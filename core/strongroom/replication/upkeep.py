"""One target beside a training job: what is known of it, and a thread while there is something to copy.

What fails is tried again for as long as the job lives, after pauses; a target that holds another run, or that
another writer has taken over, is left alone for good.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Final

from strongroom.auditing import Act, Action, Outcome, Phase, new_operation
from strongroom.config import Clock
from strongroom.errors import (
    ConfigError,
    FencedError,
    IntegrityError,
    ReplicationError,
    StrongroomError,
    UnsupportedFormatError,
)
from strongroom.events import Emitter, ReplicationFailed
from strongroom.layout import CheckpointName
from strongroom.manifest import Commit
from strongroom.parallel import start
from strongroom.replication.courier import Courier, Outlook, Target
from strongroom.replication.lag import LagWatch, lag_s
from strongroom.signing import Guard
from strongroom.stores.base import Store

__all__ = ["TargetState", "Upkeep"]

_LOG: Final = logging.getLogger("strongroom")

_TURN_TAKEN_S: Final = 60.0
"""How long another process is left alone that copies to the same target."""
_CLEAR_UP_S: Final = 600.0
"""How often it is looked for signatures and keyrings that came later."""
_PATIENCE_S: Final = 60.0
"""How long a target that fails is waited for by who ends a job: its copies are made by the next one."""
_SLICE_S: Final = 1.0
"""How late the end of the main thread is seen at most."""
_FAILURES_A_PASS: Final = 2
"""One checkpoint that fails must not hold up the others; of a target that is down not all need be tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetState:
    """How far one target is.

    Attributes:
        uri: the target.
        pending: checkpoints of the first tier that it is to have, and is not known to have, verified.
        lag_s: how long ago the oldest of them was committed on the first tier.
        last_step: of the newest checkpoint that is known to stand there, verified; None: of none.
        last_error: why the last try failed; None: it did not.
        failures: tries that failed, of this process.
        is_stopped: nothing more is copied there by this process: it holds another run, or another writer
            has taken the run over.
    """

    uri: str
    pending: tuple[CheckpointName, ...]
    lag_s: float
    last_step: int | None
    last_error: str | None
    failures: int
    is_stopped: bool


class Upkeep:
    """One target: what is known of it, and the thread that copies to it.

    All of it but the thread's own work is used with ``changed`` held.

    Args:
        changed: held by whoever looks; told of every change.

    Attributes:
        error: why the last try failed; None: it did not.
        stopped_by: why nothing more is copied there by this process; None: something is.
    """

    def __init__(
        self,
        source: Store,
        target: Target,
        *,
        clock: Clock,
        emitter: Emitter,
        guard: Guard,
        pause_s: Callable[[int], float],
        is_main_alive: Callable[[], bool],
        linger_s: float,
        changed: threading.Condition,
    ) -> None:
        self.error: str | None = None
        self.stopped_by: StrongroomError | None = None
        self._clock = clock
        self._emitter = emitter
        self._pause_s = pause_s
        self._is_main_alive = is_main_alive
        self._linger_s = linger_s
        self._changed = changed
        self._stopping = threading.Event()
        self._source = source
        self._auditor = guard.auditor
        self._said: dict[CheckpointName | None, str] = {}
        self._courier = Courier(
            source,
            target,
            clock=clock,
            emitter=emitter,
            guard=guard,
            check=self._check,
            sleep=self._sleep,
        )
        self._thread: Future[None] | None = None
        self._is_news = False
        self._launch: int | None = None
        self._pending: dict[CheckpointName, Commit] = {}
        self._expected: set[CheckpointName] = set()
        self._standing: dict[CheckpointName, Commit] = {}
        self._ever_verified: set[CheckpointName] = set()
        self._passed_over: dict[CheckpointName, str] = {}
        self._conflicts: dict[CheckpointName, str] = {}
        self._left_out: dict[CheckpointName, str] = {}
        self._gone: dict[CheckpointName, str] = {}
        self._ranks: dict[CheckpointName, int] = {}
        self._last: CheckpointName | None = None
        self._wrong_there: set[CheckpointName] = set()
        self._has_to_take_turn = False
        self._is_answering = False
        self._looking: Future[Collection[Commit]] | None = None
        self._failures = 0
        self._in_a_row = 0
        self._failing_since = 0.0
        self._watch = LagWatch()
        self._cleared_up_at: float | None = None
        self._alone_since: float | None = None

    # Asked and told from outside

    @property
    def uri(self) -> str:
        return self._courier.uri

    @property
    def is_busy(self) -> bool:
        return self._thread is not None

    @property
    def is_worth_waiting_for(self) -> bool:
        """Whether somebody who ends it may wait: it copies, or began to fail a short while ago."""
        if not self.is_busy or self._in_a_row == 0:
            return self.is_busy
        return bool(self._pending) and time.monotonic() - self._failing_since < _PATIENCE_S

    @property
    def is_going_well(self) -> bool:
        """Whether what is expected there is likely to come soon."""
        return self._in_a_row == 0 and self.stopped_by is None

    def begin(self, launch: int | None) -> None:
        """Go on, for a writer's turn, or, where a process has none any more, for nobody's."""
        is_new = launch is not None and launch > (self._launch or 0)
        is_let_go = launch is None and isinstance(self.stopped_by, FencedError)
        if self.stopped_by is not None and (is_new or is_let_go):
            # Whoever was fenced has restored: the turn that was taken from it is not its turn any more.
            self.stopped_by, self.error = None, None
            self._in_a_row = 0
            self._has_to_take_turn = True
        if launch is None:
            self._launch = None
        self.wake(None, launch)

    def wake(self, commit: Commit | None, launch: int | None) -> None:
        if launch is not None:
            self._launch = max(launch, self._launch or 0)
        if self.stopped_by is not None or self._stopping.is_set():
            return
        if commit is not None:
            self._pending.setdefault(commit.name, commit)
            self._expected.add(commit.name)
        self._is_news = True
        self._changed.notify_all()
        self._watch_lag()
        if self._thread is None:
            try:
                self._thread = start(self._work, name="strongroom-replicate")
            except RuntimeError as error:
                # No thread is to be had: what was committed stands, and the next commit asks again.
                self.error = f"no thread could be started: {error}"
                _LOG.warning("nothing is copied to %s for now: %s", self.uri, self.error)

    def expect(self, name: CheckpointName) -> None:
        """Somebody waits for a checkpoint."""
        if name not in self._ever_verified and self.why_never(name) is None and name not in self._pending:
            self._expected.add(name)
            self.wake(None, None)

    def has(self, name: CheckpointName) -> bool:
        """Whether a checkpoint was verified there at some time."""
        return name in self._ever_verified

    def stands(self, name: CheckpointName) -> bool:
        """Whether it stood there, verified, when it was last looked."""
        return name in self._standing

    def look_again(self, commits: Collection[Commit]) -> Future[Collection[Commit]] | None:
        """Begin to look which of some that stood there still do; None: that cannot be found out now."""
        if self._stopping.is_set() or self.stopped_by is not None or not self._is_answering:
            return None
        if self._looking is not None and not self._looking.done():
            # That one may have looked before what is asked about now.
            return None
        try:
            self._looking = start(lambda: self._courier.confirm(commits), name="strongroom-confirm")
        except RuntimeError:
            return None
        return self._looking

    def note_lost(self, names: Collection[CheckpointName]) -> None:
        """They do not stand there any more, or not whole: they are looked at by whoever copies."""
        for name in names:
            self._standing.pop(name, None)
        self._ever_verified -= set(names)
        self.wake(None, None)

    def has_newer(self, name: CheckpointName) -> bool:
        """Whether one stands there, verified, that a restore would prefer to this one."""
        best = self.best()
        return best is not None and best.name in self._ranks and self._is_before(best.name, name)

    def best(self) -> Commit | None:
        """What a restore would take first of all that stands there, verified."""
        last = len(self._ranks)
        return min(
            self._standing.values(), key=lambda commit: self._ranks.get(commit.name, last), default=None
        )

    def _is_before(self, one: CheckpointName, other: CheckpointName) -> bool:
        return other in self._ranks and self._ranks[one] < self._ranks[other]

    def is_unwanted(self, name: CheckpointName) -> bool:
        """Whether a checkpoint is not to come there, by the target's policy or as it is damaged here.

        Where it was found damaged there, or another one stands in its place, it is wanted all the same.
        """
        if name in self._conflicts or name in self._wrong_there:
            return False
        return name in self._left_out or name in self._gone or name in self._passed_over

    def why_passed(self, name: CheckpointName) -> str | None:
        """Why a checkpoint by itself is not to come there; None: it is, or has."""
        for reasons in (self._left_out, self._conflicts, self._gone):
            if name in reasons:
                return reasons[name]
        # Only then: should the newer one turn out damaged, this one is copied in its place.
        return self._passed_over.get(name) if self.has_newer(name) else None

    def why_never(self, name: CheckpointName) -> str | None:
        """Why a checkpoint will not come there by this process; None: it will, or has."""
        if self.has(name):
            return None
        return self.why_passed(name) or (str(self.stopped_by) if self.stopped_by is not None else None)

    def state(self) -> TargetState:
        self._watch_lag()
        return TargetState(
            uri=self.uri,
            pending=tuple(self._pending),
            lag_s=self._lag_s(),
            last_step=self._last.step if self._last is not None else None,
            last_error=self.error,
            failures=self._failures,
            is_stopped=self.stopped_by is not None,
        )

    def stop(self) -> None:
        self._stopping.set()

    def _lag_s(self) -> float:
        return lag_s(self._pending.values(), self._clock.now_ms())

    def _watch_lag(self) -> None:
        lag = self._lag_s()
        level = self._watch.passed(lag)
        if level is not None:
            _LOG.log(
                level,
                "%s is %.1f h behind: %d checkpoints wait for it%s",
                self.uri,
                lag / 3600,
                len(self._pending),
                f"; {self.error}" if self.error else "",
            )

    # The thread

    def _work(self) -> None:
        try:
            while self._goes_on():
                try:
                    self._pass()
                except (ConfigError, FencedError) as error:
                    self._end_for_good(error)
                    return
                except CancelledError:
                    return
                except Exception as error:  # noqa: BLE001 - whatever it is: told, and tried again
                    if not self._pause_after(error):
                        return
        finally:
            with self._changed:
                self._thread = None
                # What came between the last look and this.
                if self._is_news and not self._stopping.is_set() and self.stopped_by is None:
                    self.wake(None, None)
                self._changed.notify_all()

    def _goes_on(self) -> bool:
        with self._changed:
            goes_on = (self._is_news or self._in_a_row > 0) and not self._stopping.is_set()
            self._is_news = False
            return goes_on

    def _pass(self) -> None:
        """Look, and deliver what waits, until something newer comes."""
        with self._changed:
            self._courier.launch = self._launch
            left_out, expected = set(self._left_out), set(self._expected)
            has_to_take_turn, self._has_to_take_turn = self._has_to_take_turn, False
        if has_to_take_turn:
            self._courier.leave()
        self._courier.name_tier()
        outlook = self._courier.look(left_out)
        self._note(outlook, expected)
        waiting = outlook.plan.waiting
        first_error: Exception | None = None
        if waiting:
            self._courier.begin(outlook)
        elif self._courier.launch is not None:
            self._courier.announce(outlook)
        failed = 0
        for commit in waiting:
            try:
                self._deliver(commit, outlook)
            except (ConfigError, FencedError, CancelledError, ReplicationError):
                raise
            except (IntegrityError, UnsupportedFormatError) as error:
                self._leave_out(commit, error, is_wrong_there=commit in outlook.plan.to_verify)
            except Exception as error:  # noqa: BLE001 - as in `_work`
                first_error = first_error or error
                failed += 1
                if failed == _FAILURES_A_PASS:
                    break
            if self._is_news:
                # The newest comes first.
                break
        else:
            self._clear_up(outlook)
        if first_error is not None:
            raise first_error
        with self._changed:
            self._in_a_row = 0
            self._alone_since = None
            self.error = None

    def _deliver(self, commit: Commit, outlook: Outlook) -> None:
        self._check()
        self._intend(commit.run, commit.name)
        # Known before it is told: who hears of it may ask what the first tier need not keep any more.
        self._courier.deliver(
            commit, outlook, settle=lambda: self._settle(commit), operation=self._operation(commit.name)
        )
        self._said.pop(commit.name, None)

    def _intend(self, run: str, name: CheckpointName | None) -> None:
        """Put on record that a checkpoint is read, to be copied here; once, however often it is tried.

        Args:
            name: None: the run as a whole.

        Raises:
            AuditError: it was not accepted, and nothing is read until a later try.
        """
        if not self._auditor.is_on or name in self._said:
            return
        # No `Activity`: that it is copied as it stands must not pass for leave to unwrap its keys.
        act = Act(
            action=Action.REPLICATE,
            phase=Phase.INTENDED,
            outcome=Outcome.UNKNOWN,
            operation=new_operation(),
            root=self._source.uri,
            run=run,
            checkpoint=name,
            details={"tier": self.uri},
        )
        self._auditor.intend(act)
        self._said[name] = act.operation

    def _operation(self, name: CheckpointName) -> str:
        """What joins the end of a copy to what was said before it."""
        return self._said.get(name, "")

    def _settle(self, commit: Commit) -> int:
        """Note that a checkpoint stands there, verified; how many others wait."""
        name = commit.name
        with self._changed:
            self._pending.pop(name, None)
            self._standing[name] = commit
            self._ever_verified.add(name)
            self._is_answering = True
            if self._last is None or name > self._last:
                self._last = name
            self._changed.notify_all()
            return len(self._pending)

    def _clear_up(self, outlook: Outlook) -> None:
        now = self._clock.monotonic()
        if self._cleared_up_at is None or now - self._cleared_up_at >= _CLEAR_UP_S:
            keyed = next((commit for commit in outlook.plan.standing if commit.keyring is not None), None)
            if keyed is not None:
                self._intend(keyed.run, None)
            self._courier.clear_up(outlook)
            self._cleared_up_at = now

    def _note(self, outlook: Outlook, expected: set[CheckpointName]) -> None:
        """Take in what a look has shown.

        Args:
            expected: what was expected before it: what came meanwhile it may not have seen.
        """
        plan = outlook.plan
        verified = set(self._courier.ever_verified())
        with self._changed:
            source = outlook.source.commits
            newer = {
                name: commit for name, commit in self._pending.items() if self._is_news and name not in source
            }
            self._pending = {**newer, **{commit.name: commit for commit in plan.waiting}}
            self._standing = {commit.name: commit for commit in plan.standing}
            self._is_answering = True
            # Also of what is gone from here since, and so is noted no more.
            self._ever_verified |= verified
            if outlook.target is not None:
                if not outlook.target.has_commits:
                    # Somebody has emptied it.
                    self._ever_verified.clear()
                # What it has lost, or may have lost, counts again once it has come again.
                self._ever_verified -= {commit.name for commit in plan.waiting}
                self._ever_verified -= plan.conflicts.keys()
            self._passed_over, self._conflicts = dict(plan.passed_over), dict(plan.conflicts)
            self._ranks = {name: rank for rank, name in enumerate(plan.ranked)}
            self._left_out = {name: why for name, why in self._left_out.items() if name in source}
            self._wrong_there &= self._left_out.keys()
            if plan.standing:
                self._last = max(commit.name for commit in plan.standing)
            for name in expected - source.keys() - newer.keys():
                if name not in self._ever_verified:
                    self._gone[name] = "it was gone from the first tier before it was copied"
            # What is settled need not be remembered for ever.
            self._expected -= {
                name for name in expected if name not in self._pending and name not in self._passed_over
            }
            self._watch_lag()
            self._changed.notify_all()

    def _leave_out(self, commit: Commit, error: StrongroomError, *, is_wrong_there: bool) -> None:
        """A checkpoint that cannot be copied: the others go on."""
        why = "it was gone from the first tier before it was copied"
        if not self._courier.is_gone(commit):
            why = str(error)
        with self._changed:
            self._left_out[commit.name] = why
            self._standing.pop(commit.name, None)
            self._ever_verified.discard(commit.name)
            if is_wrong_there:
                self._wrong_there.add(commit.name)
            # Of the others the target's policy may choose another one now.
            self._is_news = True
            self._pending.pop(commit.name, None)
            self._failures += 1
            self._changed.notify_all()
        self._tell(commit, why, error)
        self._said.pop(commit.name, None)

    def _end_for_good(self, error: StrongroomError) -> None:
        _LOG.error("nothing more is copied to %s by this process: %s", self.uri, error)
        with self._changed:
            self.stopped_by, self.error = error, str(error)
            self._failures += 1
            newest = next(iter(self._pending.values()), None)
            self._changed.notify_all()
        if newest is not None:
            self._tell(newest, str(error), error)

    def _pause_after(self, error: Exception) -> bool:
        """Note a failure, and wait before the next try; whether there is to be one."""
        if isinstance(error, ReplicationError):
            self._courier.leave()
        told = str(error) if isinstance(error, StrongroomError) else f"{type(error).__name__}: {error}"
        with self._changed:
            self._failures += 1
            self._in_a_row += 1
            if self._in_a_row == 1:
                self._failing_since = time.monotonic()
            self._is_answering = False
            is_first = self._in_a_row == 1
            self.error = told
            newest = next(iter(self._pending.values()), None)
            self._changed.notify_all()
        if is_first:
            # Once for as long as it goes on failing: the state tells the rest.
            if newest is not None:
                self._tell(newest, told, error)
            else:
                _LOG.warning("%s could not be looked at: %s", self.uri, told)
        pause = _TURN_TAKEN_S if isinstance(error, ReplicationError) else 0.0
        return self._wait(max(pause, self._pause_s(self._in_a_row)))

    def _wait(self, pause: float) -> bool:
        """Wait before another try, but no longer than a program that ends can wait for it."""
        end = time.monotonic() + pause
        while True:
            if not self._is_main_alive():
                now = time.monotonic()
                self._alone_since = self._alone_since if self._alone_since is not None else now
                if now - self._alone_since >= self._linger_s:
                    _LOG.error(
                        "%d checkpoints are not on %s, and the program ends: whoever opens the run again "
                        "copies them, or `strongroom replicate` does; %s",
                        len(self._pending),
                        self.uri,
                        self.error,
                    )
                    with self._changed:
                        self._is_news = False
                    return False
            with self._changed:
                self._watch_lag()
            left_s = end - time.monotonic()
            if left_s <= 0:
                return True
            if self._stopping.wait(min(_SLICE_S, left_s)):
                return False

    def _tell(self, commit: Commit, why: str, error: Exception) -> None:
        with self._changed:
            failures, lag, pending = self._failures, self._lag_s(), len(self._pending)
        self._emitter.emit(
            ReplicationFailed(
                run=commit.run,
                step=commit.name.step,
                launch=commit.name.launch,
                attempt=commit.name.attempt,
                tier=self.uri,
                reason=why,
                error=type(error).__name__,
                failures=failures,
                lag_s=lag,
                pending=pending,
                operation=self._operation(commit.name),
            )
        )

    def _check(self) -> None:
        """Raise CancelledError once the work is to end."""
        if self._stopping.is_set():
            raise CancelledError

    def _sleep(self, seconds: float) -> None:
        self._stopping.wait(seconds)
