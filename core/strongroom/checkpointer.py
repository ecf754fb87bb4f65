"""The object that users hold: save, restore, list, wait, close.

It owns the order of things: one save in flight, a launch claimed before the first, what the ranks
of a job agree on when, the background thread, and what a background failure does. How a save or a
restore works is elsewhere.
"""

from __future__ import annotations

import functools
import logging
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, TypeVar

from strongroom import parallel
from strongroom import restore as restoring
from strongroom.acts import ActSink, reconcile
from strongroom.alike import check_alike, given
from strongroom.arguments import (
    check_best,
    check_class,
    check_launch,
    check_parent,
    check_run,
    check_step,
    check_tiers,
    check_told,
    selection_of,
)
from strongroom.auditing import NO_AUDIT, Action, Activity, Outcome, check_apart_from_sink, reason_of
from strongroom.budget import check_budget
from strongroom.catalog import Checkpoint, History
from strongroom.config import (
    SYSTEM_CLOCK,
    Clock,
    OnFailure,
    RaiseAtOnce,
    Tolerate,
    check_count,
    check_keep,
    check_seconds,
    choose_digest,
    load_policy,
)
from strongroom.course import Source
from strongroom.dryrun import RestorePlan, plan_newest
from strongroom.errors import (
    ClosedError,
    ConfigError,
    FencedError,
    RanksDisagreeError,
    SaveError,
    StoreFullError,
    StrongroomError,
    WaitTimeoutError,
)
from strongroom.events import (
    CheckpointCommitted,
    Emitter,
    EventSink,
    LaunchClaimed,
    SaveFailed,
    SaveRefused,
    SaveSkipped,
    SaveStarted,
)
from strongroom.handle import Failures, SaveHandle
from strongroom.keeping import Keeper, check_may_remove
from strongroom.layout import ATTEMPT_HEX_DIGITS, CheckpointName, check_scatter
from strongroom.manifest import (
    MAX_DEADLINE_S,
    CheckpointRef,
    Commit,
)
from strongroom.messages import Message, text_of
from strongroom.ownership import Owners
from strongroom.pace import Pace
from strongroom.parts import fail_together, write_together
from strongroom.provenance.comparing import Change, OnChange
from strongroom.provenance.recording import Given, Recorder
from strongroom.ranks import Ranks, Verdict, check_same_call
from strongroom.replicating import Replicating
from strongroom.restore import Restored
from strongroom.retention import RetentionPolicy
from strongroom.saturation import Gauge, why_full
from strongroom.saving import NO_PROVENANCE, Provenance, Stager
from strongroom.shards import binding
from strongroom.signing import NO_GUARD
from strongroom.stores.base import Store
from strongroom.tiers import Tier, Tiers
from strongroom.transaction import Attempt, Deadline
from strongroom.turns import Turn, Turns
from strongroom.workers import reading_workers, writing_workers

if TYPE_CHECKING:
    from typing_extensions import Self

    from strongroom.opened import OpenedCheckpoint
    from strongroom.replication import TargetState
    from strongroom.sealing import OneOff

__all__ = ["Checkpointer", "SaveHandle"]

_LOG: Final = logging.getLogger("strongroom")

_RAISE_AT_ONCE: Final = RaiseAtOnce()

_GRACE_S: Final = 60.0
"""How much longer than a save's deadline a wait for it lasts: retention runs after the commit."""

_DRAIN_S: Final = 30.0
"""How long leaving the context with an exception pending waits for the save in flight."""


@dataclass(slots=True, kw_only=True)
class _Intent:
    """What one call of ``save`` turned out to mean.

    Attributes:
        is_told: whether how it ended is told elsewhere than by what it raises.
    """

    began: float
    waited: float = 0.0
    step: int | None = None
    extras: Provenance = NO_PROVENANCE
    best: tuple[int, ...] = ()
    is_told: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _InFlight:
    """The save in the background: until ``job`` ends, its buffers are in use."""

    name: CheckpointName
    handle: SaveHandle
    job: Future[None]
    deadline: Deadline


_SECURING_S: Final = 5.0
"""How long the end waits at most until the record is out of this process's hands."""

_FAREWELL_S: Final = 10.0
"""How long rank 0 waits at the end for ranks that are still reading its last word."""

_SAVED_ALREADY: Final = "step {step} is saved already, or being saved, by this launch"
_BUSY: Final = "the save before it is still being written, and when_busy='skip' was asked for"

_P = ParamSpec("_P")
_T = TypeVar("_T")


def _alone(
    method: Callable[Concatenate[Checkpointer, _P], _T],
) -> Callable[Concatenate[Checkpointer, _P], _T]:
    """Refuse a call from within another one, or from a fork: two would fill the same buffers."""

    @functools.wraps(method)
    def guarded(self: Checkpointer, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        if self._is_busy:
            raise self._turned_away(
                method.__name__,
                f"{method.__name__} was called while another save or restore of this Checkpointer is under "
                "way, from a signal handler or another thread; let a handler set a flag that the training "
                "loop looks at, and call it from one thread",
            )
        if self._process_id != os.getpid():
            raise self._turned_away(
                method.__name__,
                f"this Checkpointer was made by process {self._process_id}, of which this one is a fork; "
                "build a new one here, with a root of its own if both save",
            )
        # A flag and no lock: an interrupt can come right after a lock was taken, but not in between here.
        self._is_busy = True
        try:
            return method(self, *args, **kwargs)
        finally:
            self._is_busy = False

    return guarded


class Checkpointer:
    """Saves and restores one run's state under one root.

    Building one touches nothing: the root is created by the first save. Methods are called
    from one thread.

    Args:
        root: a path, a ``file://`` or ``s3://`` URI or a `Store`; one run each.
        keep: which checkpoints stay after each commit, such as ``KeepLast(count=3)``; None: all. Where
            ``replicate_to`` is given, none goes before it stands elsewhere.
        replicate_to: further tiers, the fastest first: roots, or `Tier` values. What was committed is
            copied to each in the background (`SaveHandle.replicated`), and a restore sees them all.
        accept_missing_tiers: go on without a tier that is out of reach, where what is newest may be.
        security: a policy or its file's path; None: the file that ``STRONGROOM_CONFIG`` names,
            if it is set.
        digest: ``"blake3"`` or ``"sha256"``; None: the policy's, else ``"blake3"``.
        timeout_s: seconds after which a save gives up and never commits, and after which ranks wait
            no longer for one of theirs.
        on_failure: when a failed background save raises: ``RaiseAtOnce()`` or
            ``Tolerate(consecutive=3)``.
        max_fallback: damaged checkpoints that `restore` may skip.
        events: who else listens to what happens.
        run_id: the run's id where the platform gives one; None: the policy's role's, else the root's, or a
            random one. A root of another run is refused.
        launch: the number of this writer's turn where the platform gives one, for a writer that may not
            look at the root. None: the policy's role's, else the next free one.
        parent: the checkpoint that this run goes on from where another process has restored it: its
            `Restored.checkpoint`, or ``FOLDER@DIGEST`` with the manifest's. A restore here counts more.
        retention_class: a name that goes into each manifest, in clear, for rules of retention to go by.
        provenance: where this run comes from, recorded with each checkpoint: ``hyper_parameters``,
            ``data`` (``version``, ``manifest_digest``), ``model``, and what else is worth knowing. A dict,
            or a function that returns one, which rank 0 asks at each save and restore.
        collect_provenance: whether rank 0 gathers what it can by itself: code, versions, host, job.
        on_change: what a restore does where ``provenance``, or what is gathered, is not the checkpoint's.
        init_from: another run's root, which is only read: `restore` takes that run's newest whole
            checkpoint for as long as nothing was committed under ``root``.
        process_group: the processes that save together; None: all of the job's. It is used once,
            by the first save or restore, to meet; afterwards ranks talk over a connection of
            their own.
        when_busy: what a save does while the one before it is still being written: ``"wait"``, or
            ``"skip"`` (a handle with ``skipped`` set, and a `SaveSkipped` event).
        memory_budget: bytes of host memory that this process's copy of the state may take. What
            has no room is written while `save` waits. None: what the host has available.
        max_bytes_per_second: how fast this process writes at most, so that training keeps some of a
            shared disk or network. None: as fast as it can.
        reserve_bytes: what is to stay free on the root's file system. A save that does not fit beside it
            fails before anything is written; so does one that does not fit at all.
        scatter: over how many folders a checkpoint's shards are spread, 2 to 256, for a store that takes only
            so many requests a second of names which begin alike; None: over none.
        overlap_device_copy: whether `save` returns while tensors on an accelerator are still being
            copied. The next step of the state's optimizers then waits for the copy, on the
            device; change such tensors in no other way before `SaveHandle.wait_staged`.
        clock: the time.
        draw: random hex digits for ``n`` bytes.

    Raises:
        ConfigError: an argument cannot work; the root is a file; the job has several processes and
            torch.distributed is not initialized.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | Store,
        *,
        keep: RetentionPolicy | None = None,
        security: Any = None,
        digest: str | None = None,
        timeout_s: float = 1800.0,
        on_failure: OnFailure = _RAISE_AT_ONCE,
        max_fallback: int = 3,
        replicate_to: Sequence[str | os.PathLike[str] | Store | Tier] = (),
        accept_missing_tiers: bool = False,
        events: Sequence[EventSink] = (),
        run_id: str | None = None,
        launch: int | None = None,
        parent: Checkpoint | str | None = None,
        retention_class: str | None = None,
        provenance: Given | None = None,
        collect_provenance: bool = True,
        on_change: OnChange | None = None,
        init_from: str | os.PathLike[str] | Store | None = None,
        process_group: Any = None,
        when_busy: str = "wait",
        memory_budget: int | None = None,
        max_bytes_per_second: float | None = None,
        reserve_bytes: int = 0,
        scatter: int | None = None,
        overlap_device_copy: bool = False,
        clock: Clock = SYSTEM_CLOCK,
        draw: Callable[[int], str] = secrets.token_hex,
    ) -> None:
        if not isinstance(on_failure, RaiseAtOnce | Tolerate):
            raise ConfigError(
                f"on_failure must be RaiseAtOnce() or Tolerate(consecutive=...), got {on_failure!r}"
            )
        check_keep(keep)
        policy = load_policy(security)
        role = policy.role if policy is not None else None
        self._guard = policy.guard if policy is not None else NO_GUARD
        self._auditor = policy.auditor if policy is not None else NO_AUDIT
        self._ranks = Ranks.of_this_process(process_group)
        self._tiers = Tiers(
            root,
            check_tiers(replicate_to),
            role=role,
            trust=self._guard.trust,
            accepts_missing=accept_missing_tiers,
        )
        self._store = self._tiers.first
        if (keep is not None and not self._tiers.is_own) or any(tier.keep for tier in self._tiers.settings):
            check_may_remove(role)
        self._algorithm = choose_digest(digest, policy)
        self._given = given(self._algorithm, policy)
        self._sealing = policy.sealing if policy is not None else None
        self._signing = policy.signing if policy is not None else None
        self._retention_class = check_class(retention_class)
        self._recorder = Recorder(
            provenance,
            collects=collect_provenance and self._ranks.is_coordinator,
            on_change=on_change,
        )
        self._one_off: OneOff | None = None
        self._timeout_s = check_seconds("timeout_s", timeout_s, at_most=MAX_DEADLINE_S)
        self._max_fallback = check_count("max_fallback", max_fallback)
        check_apart_from_sink(self._auditor, self._tiers.uris)
        self._acts = ActSink(self._auditor, self._store.uri)
        self._emitter = Emitter((self._acts, *events) if self._auditor.is_on else events)
        if when_busy not in ("wait", "skip"):
            raise ConfigError(f"when_busy must be 'wait' or 'skip', got {when_busy!r}")
        self._when_busy = when_busy
        self._clock = clock
        self._draw = draw
        self._workers = writing_workers()
        self._pace = Pace(max_bytes_per_second)
        self._reserve_bytes = check_count("reserve_bytes", reserve_bytes)
        self._gauge = Gauge(self._emitter)

        self._run_id = check_run(check_told("run_id", run_id, role, role.run_id if role else None))
        self._sources = [Source(tiers=self._tiers)]
        if init_from is not None:
            other = Tiers(init_from, role=role, trust=self._guard.trust)
            if other.first.uri == self._store.uri:
                raise ConfigError(
                    f"init_from is the root itself, {self._store.uri}; it must be another run's"
                )
            self._sources.append(Source(tiers=other, is_other=True))
        self._stager = Stager(
            self._ranks,
            parts=self._workers,
            budget_bytes=check_budget(memory_budget),
            is_overlapped=overlap_device_copy,
            scatter=check_scatter(0 if scatter is None else scatter),
        )
        self._owners = Owners(self._ranks.world_size)
        self._replicating = (
            Replicating(
                self._tiers,
                self._ranks,
                emitter=self._emitter,
                clock=clock,
                guard=self._guard,
                timeout_s=self._timeout_s,
                on_arrival=self._tidy,
            )
            if replicate_to
            else None
        )
        self._keeper = Keeper(
            self._store,
            self._tiers.own_catalog,
            keep,
            clock=clock,
            emitter=self._emitter,
            guard=self._guard,
            held=self._replicating.held if self._replicating is not None else None,
        )
        self._turns = Turns(
            self._tiers,
            self._ranks,
            run_id=self._run_id,
            launch=check_launch(check_told("launch", launch, role, role.launch if role else None)),
            timeout_s=self._timeout_s,
            clock=clock,
            draw=draw,
            signing=self._signing,
            guard=self._guard,
        )
        self._accepts_older = False
        self._restored: CheckpointRef | None = check_parent(parent)
        self._verified: set[CheckpointName] = set()
        self._last: SaveHandle | None = None
        self._in_flight: _InFlight | None = None
        self._committed: SaveHandle | None = None
        self._newest: CheckpointRef | None = None
        self._is_busy = False
        self._process_id = os.getpid()
        self._is_closed = False
        self._failures = Failures(on_failure)
        self._found: History | None = None
        self._fenced: FencedError | None = None

    def _turned_away(self, method: str, reason: str) -> ConfigError:
        """What a call raises that may not even begin, once it is on record."""
        error = ConfigError(reason)
        if self._auditor.is_on:
            activity = Activity(
                self._auditor, Action(method), root=self._store.uri, run=self._run_name or None
            )
            activity.note(error=type(error).__name__)
            activity.conclude(Outcome.DENIED, reason)
        return error

    # ------------------------------------------------------------------------------------ save

    @_alone
    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        metrics: Mapping[str, Any] | None = None,
        provenance: Mapping[str, Any] | None = None,
        tags: Iterable[str] = (),
        best: Iterable[int] = (),
    ) -> SaveHandle:
        """Copy ``state`` and save it in the background.

        When this returns, the state may be changed freely. The first save of a checkpointer
        also claims its launch, so that a root that cannot be written to is found here.

        In a job of several ranks every rank calls this, with the same step. Each stores its own
        shards of distributed tensors; what all have alike is stored once; what differs by rank
        is wrapped in `PerRank`. ``metrics``, ``provenance``, ``tags`` and
        ``best`` are rank 0's.

        Args:
            step: of the optimizer; grows from save to save.
            state: a dict of modules, optimizers, anything with ``state_dict`` and
                ``load_state_dict``, tensors, plain values and containers of these.
            metrics: figures of this step, kept with the checkpoint for people and tools.
            provenance: where it comes from, kept likewise.
            tags: words to find it by, kept likewise.
            best: the steps that are the run's best now, the best first, perhaps this one among them. They
                stand in the manifest, in clear, so that `strongroom gc` knows what else is to stay.

        Raises:
            StateEncodingError: a value has no safe encoding.
            ConfigError: the step is lower than one that this line has; or the call comes from within
                another one (a signal handler, a second thread), or from a fork.
            SaveError, FencedError: an earlier save failed in the background.
            RanksError: another rank is missing, failed, or was asked for something else.
            ClosedError: the checkpointer was closed.
        """
        intent = _Intent(began=self._clock.monotonic())
        try:
            return self._save(intent, step, state, metrics, provenance, tags, best)
        except BaseException as error:
            if not intent.is_told:
                self._emitter.emit(
                    SaveRefused(
                        run=self._run_name,
                        step=intent.step,
                        reason=reason_of(error),
                        error=type(error).__name__,
                    )
                )
            raise

    def _save(
        self,
        intent: _Intent,
        step: Any,
        state: Mapping[str, Any],
        metrics: Mapping[str, Any] | None,
        provenance: Mapping[str, Any] | None,
        tags: Iterable[str],
        best: Iterable[int],
    ) -> SaveHandle:
        """The call of ``save``; what it raises is told by the caller of this."""
        try:
            said, own = self._ranks.lane("main").agree(
                "deciding on a save",
                lambda: self._propose(intent, step, state, provenance, metrics, tags, best),
                self._decide,
                timeout_s=self._timeout_s,
            )
        except BaseException:
            self._stager.forget()
            raise
        step = check_step(step)
        if said.members["do"] == "skip":
            self._stager.forget()
            return self._skip(step, said.members["reason"])
        self._tiers.stop_reading()
        if said.members["is_new"]:
            self._turns.meet(said.pieces["launch"])
        staging = self._clock.monotonic()
        turn = self._turns.join(said.pieces["launch"])
        name = CheckpointName(launch=turn.launch.launch, step=step, attempt=said.members["attempt"])
        one_off, self._one_off = self._one_off, None
        sealing = self._sealing
        parent = self._newest or turn.parent
        attempt = Attempt(
            self._store,
            launch=turn.launch,
            name=name,
            parent=parent,
            algorithm=self._algorithm,
            world_size=self._ranks.world_size,
            deadline=Deadline.after(self._timeout_s, self._clock.monotonic),
            now_ms=self._clock.now_ms,
            seal=None if sealing is None else sealing.seal_save(turn.launch.run, name, one_off),
            signing=self._signing,
            retention_class=self._retention_class,
            best=intent.best,
            pace=self._pace,
            auditor=self._auditor,
        )
        invitation = said.pieces.get("invitation", b"")
        try:
            self._stager.learn(said, own)
            if "full" in said.members:
                return self._refuse(attempt, said.members["full"])
            staged = self._stager.take(
                binding(turn.launch.run, name),
                lambda layout, pieces: attempt.write(layout.path, pieces, length_bytes=layout.size_bytes),
            )
        except BaseException as error:
            # Where others wait for this rank's part, it fails in the background, and is told there.
            intent.is_told = not self._ranks.is_alone
            self._give_up(attempt, error)
            raise
        self._emitter.emit(
            SaveStarted(
                run=turn.launch.run,
                step=step,
                launch=name.launch,
                attempt=name.attempt,
                size_bytes=staged.size_bytes,
                wait_s=intent.waited - intent.began,
                stage_s=self._clock.monotonic() - staging,
            )
        )
        await_copies = self._replicating.wait if self._replicating is not None else None
        handle = SaveHandle(step, staged.pending, await_copies)
        extras = replace(intent.extras, facts=self._facts(turn, parent))
        self._start(
            attempt,
            lambda: write_together(
                attempt, staged, extras, self._ranks, workers=self._workers, invitation=invitation
            ),
            handle,
        )
        return handle

    def _facts(self, turn: Turn, parent: CheckpointRef | None) -> dict[str, Any]:
        """What provenance says of a checkpoint besides what is given and gathered."""
        return {
            "began_at_ms": turn.launch.created_at_ms,
            "parent": None if parent is None else parent.to_json(),
            "retention_class": self._retention_class,
            "saved_at_ms": self._clock.now_ms(),
            "world_size": self._ranks.world_size,
        }

    def _refuse(self, attempt: Attempt, reason: str) -> SaveHandle:
        """Fail a save for which there is no room, on every rank alike: nothing is copied, nothing written."""
        self._stager.forget()
        if attempt.seal is not None:
            attempt.seal.discard()
        handle = self._last = SaveHandle(attempt.name.step)
        self._fail(attempt, handle, StoreFullError(reason))
        return handle

    def _give_up(self, attempt: Attempt, error: BaseException) -> None:
        """Let the other ranks know that this one could not stage its part; they wait for it already."""
        self._stager.forget()
        if self._ranks.is_alone:
            attempt.abort()
            return
        handle = SaveHandle(attempt.name.step)
        # The caller is about to see the error itself.
        handle.mark_told()
        self._start(attempt, lambda: fail_together(attempt, self._ranks, error), handle)

    @_alone
    def prepare(self, state: Mapping[str, Any]) -> int:
        """Plan for a state, and allocate its buffers and touch their pages, before the first save.

        The first save then stalls training no longer than the later ones. Nothing is written, and
        nothing of the state is kept. In a job of several ranks every rank calls this.

        Returns:
            bytes of host memory that this rank's buffers take.

        Raises:
            StateEncodingError: a value has no safe encoding.
            RanksError: another rank is missing, failed, or was asked for something else.
        """

        with Activity(self._auditor, Action.PREPARE, root=self._store.uri) as activity:
            size_bytes = self._prepare(state)
            activity.about(run=self._run_name or None)
            activity.note(size_bytes=size_bytes)
        return size_bytes

    def _prepare(self, state: Mapping[str, Any]) -> int:
        def propose() -> Message:
            self._check_open()
            self._join()
            looked = self._stager.look(state)
            return Message(members={"call": "prepare", "step": None, **looked.members}, pieces=looked.pieces)

        def decide(said: list[Message]) -> Verdict:
            check_same_call(_calls(said), "deciding")
            generation, told = self._owners.decide(said)
            return Verdict(
                shared=Message(members={"generation": generation, "run": self._turns.likely_run()}), own=told
            )

        said, own = self._ranks.lane("main").agree("preparing", propose, decide, timeout_s=self._timeout_s)
        self._stager.learn(said, own)
        name = CheckpointName(launch=1, step=0, attempt="0" * ATTEMPT_HEX_DIGITS)
        return self._stager.prepare(binding(said.members["run"], name))

    def _propose(
        self,
        intent: _Intent,
        step: Any,
        state: Mapping[str, Any],
        provenance: Mapping[str, Any] | None,
        metrics: Mapping[str, Any] | None,
        tags: Iterable[str],
        best: Iterable[int],
    ) -> Message:
        """This rank's word on a save: whether it can take part, and what it holds."""
        self._check_open()
        step = intent.step = check_step(step)
        recorder = self._recorder if self._ranks.is_coordinator else None
        intent.extras = Provenance.of(provenance, metrics, tags, recorder)
        intent.best = check_best(best)
        turn = self._turns.current.launch.launch if self._turns.current else None
        about = {
            "call": "save",
            "step": step,
            "turn": turn,
            **self._given,
        }
        if self._earlier(step) is not None:
            return Message(members={**about, "skip": _SAVED_ALREADY.format(step=step)})
        if self._fenced is None and self._replicating is not None:
            self._replicating.check_fenced()
        if self._fenced is not None:
            # Nothing that this turn writes could be committed any more.
            self._failures.raise_untold()
            raise self._fenced
        if self._when_busy == "skip" and self._is_saving:
            return Message(members={**about, "skip": _BUSY})
        self._join()
        self._failures.raise_untold()
        self._check_order(step)
        intent.waited = self._clock.monotonic()
        looked = self._stager.look(state)
        return Message(members={**about, **looked.members}, pieces=looked.pieces)

    def _decide(self, said: list[Message]) -> Verdict:
        """The coordinator's decision on a save."""
        check_same_call(_calls(said), "deciding")
        check_alike(said)
        skips = [reason for message in said if (reason := message.members.get("skip"))]
        if skips:
            return Verdict(shared=Message(members={"do": "skip", "reason": skips[0]}))
        # Only now, when every rank is known to be able: a launch is claimed for good.
        turn = self._turns.current or self._begin_turn()
        # Also for one that lost its way into a launch which the others are in.
        is_new = any(message.members["turn"] != turn.launch.launch for message in said)
        generation, told = self._owners.decide(said)
        members = {
            "do": "save",
            "attempt": self._draw(ATTEMPT_HEX_DIGITS // 2),
            "generation": generation,
            "is_new": is_new,
        }
        needed_bytes = self._stager.held_bytes if self._ranks.is_alone else self._owners.size_bytes
        full = why_full(self._store, needed_bytes, reserve_bytes=self._reserve_bytes)
        if full is not None and self._replicating is not None:
            # What had to stay until it stood elsewhere may have been all that fills it.
            self._tidy()
            full = why_full(self._store, needed_bytes, reserve_bytes=self._reserve_bytes)
        if full is not None:
            members["full"] = full
        pieces = {"launch": turn.launch.encode()}
        if self._sealing is not None and not self._ranks.is_alone:
            self._one_off = self._sealing.one_off()
            pieces["invitation"] = self._one_off.public
        return Verdict(shared=Message(members=members, pieces=pieces), own=told)

    def _earlier(self, step: int) -> SaveHandle | None:
        """The handle of a save of this step that has not failed."""
        for earlier in (self._last, self._committed):
            if earlier is not None and earlier.step == step and not earlier.has_failed:
                return earlier
        return None

    def _skip(self, step: int, reason: str) -> SaveHandle:
        self._emitter.emit(SaveSkipped(run=self._run_name, step=step, reason=reason))
        earlier = self._earlier(step) or self._last
        if earlier is None:
            raise RanksDisagreeError(
                f"step {step} is saved already on another rank, and not on this one", phase="deciding"
            )
        return SaveHandle.skip(earlier, reason, step=step)

    @property
    def _is_saving(self) -> bool:
        return self._in_flight is not None and not self._in_flight.job.done()

    def _start(self, attempt: Attempt, finish: Callable[[], Commit], handle: SaveHandle) -> None:
        """Start the background half."""
        job: Future[None] = Future()
        before = self._last
        if not self._ranks.is_alone:
            # Connected here, where a fault is still the caller's to see.
            self._ranks.lane("background").open(within_s=self._timeout_s)
        try:
            # Known before it begins: an interrupt must not lose sight of what uses the buffers.
            self._in_flight = _InFlight(name=attempt.name, handle=handle, job=job, deadline=attempt.deadline)
            self._last = handle
            parallel.start(lambda: self._finish(attempt, finish, handle), name="strongroom-save", future=job)
        except BaseException:
            if job.cancelled():
                self._in_flight, self._last = None, before
            raise

    def _begin_turn(self) -> Turn:
        # The newest, where a launch that this line has saved in could not be gone on with.
        parent = self._newest or self._restored
        turn = self._turns.begin(parent, accept_older=self._accepts_older)
        if self._replicating is not None:
            self._replicating.begin(turn.launch.launch)
        parent_step = parent.step if parent else None
        self._emitter.emit(
            LaunchClaimed(
                run=turn.launch.run,
                launch=turn.launch.launch,
                parent_step=parent_step,
                requests=turn.requests,
            )
        )
        self._found = self._turns.found
        return turn

    def _tidy(self) -> None:
        """Retention on the first tier where nothing was committed, but something may stand elsewhere now."""
        turn = self._turns.current
        if self._replicating is not None and turn is not None and self._ranks.is_coordinator:
            self._keeper.tidy(turn.launch.run, turn.launch.launch, tuple(self._verified))

    def _check_order(self, step: int) -> None:
        turn = self._turns.current
        newest = self._newest or (turn.parent if turn else self._restored)
        if newest is not None and step < newest.step:
            raise ConfigError(
                f"step {step} is lower than step {newest.step}, which this run has reached: it would never "
                "be the newest. To go back, restore(step=...) first: the next save then begins a new line"
            )

    def _finish(self, attempt: Attempt, finish: Callable[[], Commit], handle: SaveHandle) -> None:
        """The background half of a save; what it raises is kept for the training thread."""
        began = self._clock.monotonic()
        found, self._found = self._found, None
        if found is not None:
            # A start before this one may have died between a commit and its record.
            reconcile(self._auditor, found, self._store.uri, own=self._acts.committed)
        try:
            commit = finish()
        except BaseException as error:
            self._fail(attempt, handle, error)
            if not isinstance(error, Exception):
                raise
            return
        finally:
            if attempt.seal is not None:
                attempt.seal.discard()
        self._failures.end_row()
        self._newest = commit.ref
        self._emitter.emit(
            CheckpointCommitted(
                run=attempt.run,
                step=attempt.name.step,
                launch=attempt.name.launch,
                attempt=attempt.name.attempt,
                size_bytes=commit.size_bytes,
                background_s=self._clock.monotonic() - began,
                manifest_digest=str(commit.manifest),
                requests=attempt.requests,
                signer=attempt.signer,
            )
        )
        if self._replicating is not None:
            self._replicating.follow(commit)
        handle.settle(Checkpoint.of(commit))
        self._committed = handle
        if self._ranks.is_coordinator:
            for uri in self._tiers.uris:
                self._guard.remember(uri, commit)
            self._keeper.retain(commit, self._verified)
            self._gauge.measure(attempt.run, (self._store,))
            self._gauge.measure_aside(attempt.run, self._tiers.stores[1:])

    def _fail(self, attempt: Attempt, handle: SaveHandle, error: BaseException) -> None:
        if self._ranks.is_coordinator:
            attempt.abort()
        step = attempt.name.step
        told: StrongroomError
        if isinstance(error, FencedError | SaveError):
            told = error
        else:
            kept = f"step {self._newest.step}" if self._newest else "what was committed before"
            why = text_of(error) or type(error).__name__
            told = SaveError(
                f"the save of step {step} failed in the background: {why}. "
                f"It was not committed; {kept} is untouched"
            )
            told.__cause__ = error
        if isinstance(told, FencedError):
            self._fenced = told
        failures = self._failures.note(handle, told)
        self._emitter.emit(
            SaveFailed(
                run=attempt.run,
                step=step,
                launch=attempt.name.launch,
                attempt=attempt.name.attempt,
                reason=str(told),
                error=type(error).__name__,
                failures=failures,
            )
        )
        handle.fail(told)

    # --------------------------------------------------------------------------------- confer

    @_alone
    def confer(
        self, about: str, say: Callable[[], Any], *, timeout_s: float | None = None
    ) -> tuple[Any, ...]:
        """Hear what every rank says about something, in rank order, the same on every rank.

        For what all ranks must decide alike, and each sees a little otherwise: whether an interval by a
        clock has passed, whether one of them was told to stop. For all ranks, as `save` is.

        Args:
            about: what it is about, in a word or two; the same on every rank.
            say: gives this rank's word, of what JSON can hold. What it raises is raised on every rank.
            timeout_s: how long the others are waited for; None: the checkpointer's own ``timeout_s``.

        Raises:
            RanksError: another rank is missing, failed, or was asked about something else.
            ClosedError: the checkpointer was closed.
        """

        def propose() -> Message:
            self._check_open()
            return Message(members={"about": about, "word": say()})

        def decide(said: list[Message]) -> Verdict:
            check_same_call([f"confer({message.members['about']!r})" for message in said], "conferring")
            return Verdict(shared=Message(members={"words": [message.members["word"] for message in said]}))

        within_s = self._timeout_s if timeout_s is None else check_seconds("timeout_s", timeout_s)
        said, _ = self._ranks.lane("main").agree("conferring", propose, decide, timeout_s=within_s)
        return tuple(said.members["words"])

    # --------------------------------------------------------------------------------- restore

    @_alone
    def restore(
        self,
        state: Mapping[str, Any] | None = None,
        *,
        step: int | None = None,
        strict: bool = True,
        only: str | Sequence[str] | None = None,
        rename: Mapping[str, str] | None = None,
        stand_in: int | None = None,
        accept_older: bool = False,
        accept_changes: bool = False,
    ) -> Restored | None:
        """Fill ``state`` from the newest whole checkpoint; None only where nothing was committed.

        Every byte is verified before it is used. A damaged checkpoint is skipped and told
        (`Restored.skipped`), and all that it had touched is overwritten by the next older one.
        The next save begins a launch that goes on from what was restored.

        Args:
            state: what to fill; of every rank its own, of any layout. Modules, optimizers, objects
                with ``load_state_dict``, tensors and generators are filled in place; any other
                value only names its key and is replaced. None: everything comes back on the CPU.
            step: this step and no other; a rewind.
            strict: whether a name that only one side has is an error.
            only: patterns of names to restore; the rest stays as it is.
            rename: your name or prefix -> the checkpoint's.
            stand_in: the rank whose own values a rank is given of which the checkpoint holds none, since it
                was saved by fewer; `Restored.missing` names them all the same. None: it keeps its own.
            accept_older: allow more than ``max_fallback`` damaged checkpoints, and one below the floor
                of the policy, or of another run than this root had before.
            accept_changes: go on whatever has changed since it was saved; changes are told all the same.

        Raises:
            StateMismatchError: the checkpoint does not fit; lists every difference.
            ProvenanceMismatchError: it was saved with other data than this run has, or with what else
                ``on_change`` refuses; nothing was changed, and no older one is tried.
            IntegrityError: ``step`` is damaged, or every checkpoint is; or, as `UnsealedError` or
                `UntrustedError`, it is not sealed or signed as the policy demands.
            NoKeyError, KeyServiceError: it is sealed, and cannot be opened here; never taken for damage.
            RollbackError: more than ``max_fallback`` checkpoints would be skipped, or the newest whole
                one lies below the policy's floor.
            CheckpointNotFoundError: no checkpoint of that step, or none where ``init_from`` says.
            AuditError: the policy has ``[audit]``, and a checkpoint could not be put on record first, on this
                rank or another one: it was not read, and no older one is tried.
            StoreError: the store could not be asked; never taken for damage.
        """

        def ready() -> int | None:
            self._check_open()
            if state is not None and not isinstance(state, Mapping):
                raise ConfigError(
                    f"state must be a dict such as {{'model': model}}, got a {type(state).__name__}"
                )
            self._join()
            return None if step is None else check_step(step)

        def judge(opened: OpenedCheckpoint) -> Sequence[Change]:
            return self._recorder.changes(
                opened,
                world_size=self._ranks.world_size,
                accepts=accept_changes,
                within_s=self._timeout_s,
            )

        result = restoring.restore(
            self._sources,
            state,
            ready=ready,
            selection=selection_of(strict, only, rename, stand_in),
            max_fallback=self._max_fallback,
            accept_older=accept_older,
            guard=self._guard,
            ranks=self._ranks,
            timeout_s=self._timeout_s,
            workers=reading_workers(),
            emitter=self._emitter,
            run_id=self._run_id,
            judge=judge,
        )
        self._accepts_older = accept_older
        if self._replicating is not None:
            # What an earlier job has left, though this one may save nothing.
            self._replicating.begin(None)
        if result is None:
            return None
        restored, commit = result
        is_own = restored.init_from is None
        # Another run's checkpoint begins a line here; it is no part of it.
        self._restored = commit.ref if is_own else None
        if is_own:
            self._verified.add(commit.name)
        # What comes next is a new line, whatever this writer has saved until now.
        self._turns.leave()
        self._newest = self._last = self._committed = self._fenced = None
        return restored

    def plan_restore(
        self,
        state: Mapping[str, Any] | None = None,
        *,
        step: int | None = None,
        strict: bool = True,
        only: str | Sequence[str] | None = None,
        rename: Mapping[str, str] | None = None,
    ) -> RestorePlan | None:
        """Say what `restore` with the same arguments would do on this rank, and touch nothing.

        What this rank would read of which shard, and all that is missing, unexpected or different.
        Index and documents are verified; shards are not opened, so a restore may still find one of
        them damaged. Concerns no other rank: each has a plan of its own.

        Returns:
            the plan for the newest checkpoint whose index and documents are whole; None only where
            nothing was committed. ``print(plan)`` is for people.

        Raises:
            IntegrityError: that of ``step``, or of every checkpoint, is damaged.
            CheckpointNotFoundError: no checkpoint of that step.
            AuditError: the policy has ``[audit]``, and it could not be put on record first.
            StoreError: the store could not be asked.
        """
        with Activity(self._auditor, Action.PLAN, root=self._store.uri) as activity:
            self._check_open()
            return plan_newest(
                self._sources,
                state,
                step=None if step is None else check_step(step),
                selection=selection_of(strict, only, rename),
                guard=self._guard,
                ranks=self._ranks,
                activity=activity,
            )

    def checkpoints(self) -> list[Checkpoint]:
        """Every committed checkpoint, on all tiers: the current line newest first, then superseded ones.

        Raises:
            IntegrityError: the run record is missing or damaged.
            StoreError: a store could not be asked.
        """
        with Activity(self._auditor, Action.LIST, root=self._store.uri) as activity:
            history = self._tiers.history()
            found = history.checkpoints()
            activity.about(run=history.run.run if history.run is not None else None)
            activity.note(checkpoints=len(found))
        return found

    def replication(self) -> tuple[TargetState, ...]:
        """How far each tier behind the first is, on rank 0: what waits, for how long, and what went wrong."""
        return self._replicating.state() if self._replicating is not None else ()

    # ---------------------------------------------------------------------------- wait and close

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the save in flight, its retention included.

        Args:
            timeout_s: seconds to wait; None: until the save ends, which its deadline bounds.

        Raises:
            SaveError, FencedError: a save failed in the background.
            WaitTimeoutError: it is still under way.
        """
        self._check_open()
        self._join(timeout_s)
        self._failures.raise_untold()

    def close(self, timeout_s: float | None = None) -> None:
        """Wait for the save in flight, and for what is still being copied to other tiers, and end.

        A second call does nothing.

        Args:
            timeout_s: seconds for each of the two; None: until the save ends, and then ``timeout_s`` of this
                checkpointer for the copies.

        Raises:
            SaveError, FencedError: as `wait`; closed all the same, unless the wait timed out.
            ReplicationError: not everything stands on every tier; closed all the same. The next start of the
                job goes on with it, and so does ``strongroom replicate``.
        """
        if self._is_closed:
            return
        self._join(timeout_s)
        self._is_closed = True
        self._ranks.part(_FAREWELL_S)
        try:
            if self._replicating is not None:
                self._replicating.close(self._timeout_s if timeout_s is None else timeout_s)
        finally:
            # What had to stay until it stood elsewhere may go now.
            self._tidy()
            self._secure()
            self._failures.raise_untold()

    def _secure(self) -> None:
        """See the record out of this process's hands; it goes on to be kept by whoever shares the policy."""
        if self._auditor.is_on:
            self._auditor.secure(within_s=min(_SECURING_S, self._timeout_s))

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        # The pending exception is what the user must see; a failure here was logged when it happened.
        drain_s = min(_DRAIN_S, self._timeout_s)
        try:
            self._join(drain_s)
            if self._replicating is not None:
                self._replicating.close(drain_s)
        except StrongroomError as late:
            _LOG.warning("leaving with %s pending: %s", type(error).__name__, late)
        self._is_closed = True
        self._ranks.part(0.0)
        self._secure()

    def _join(self, timeout_s: float | None = None) -> None:
        """Wait until nothing is in flight; says nothing of how it ended."""
        flight = self._in_flight
        if flight is None or self._process_id != os.getpid():  # threads do not live on in a fork
            return
        bound = max(0.0, flight.deadline.left_s) + _GRACE_S
        wait_s = bound if timeout_s is None else min(timeout_s, bound)
        try:
            flight.job.result(wait_s)
        except BaseException as error:
            if flight.job.done() and flight.job.exception() is error:
                # It was told as the save's failure, whatever it is: a thread's exit ends no program.
                self._in_flight = None
                return
            if not isinstance(error, FutureTimeoutError):
                raise
            raise WaitTimeoutError(
                f"the save of step {flight.name.step} is still under way after {wait_s:.0f} s: "
                f"{self._store.uri} does not answer in time. It goes on in the background and does not "
                f"commit after its deadline of {flight.deadline.timeout_s:g} s"
            ) from None
        self._in_flight = None

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("this Checkpointer was closed; build a new one to go on")

    @property
    def _run_name(self) -> str:
        return self._turns.current.launch.run if self._turns.current else ""


def _calls(said: Sequence[Message]) -> list[str]:
    """What each rank was called for, in words."""
    calls = [(message.members["call"], message.members["step"]) for message in said]
    return [f"{name}(step={step})" if step is not None else f"{name}()" for name, step in calls]
