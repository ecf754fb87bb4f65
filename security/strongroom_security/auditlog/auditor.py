"""Fills the core's seam: acts go into the log beside the program; what reads waits for the sink, what writes
never does.

A process has one writer for each run. Two threads serve them all: one seals segments and sees them to stable
storage here, one sends them. A forked child begins anew, and only once it records something. How a line is
written is `writing`'s to say, and what a dead process left `salvage`'s.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing.process
import multiprocessing.util
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NoReturn, TypeVar

from strongroom.auditing import Act, Action, Outcome, Phase
from strongroom.errors import AuditError, FormatError, StrongroomError
from strongroom.manifest import check_run_id
from strongroom.stores.base import Store
from strongroom_security.auditlog.actors import Actors
from strongroom_security.auditlog.certifying import Certifying
from strongroom_security.auditlog.forwarding import Forwarding, receiver_of
from strongroom_security.auditlog.salvage import Event, Salvaged, Salvager, missing_events, recorded_again
from strongroom_security.auditlog.segments import WriterKey, read_segment
from strongroom_security.auditlog.sending import Pace, Teller
from strongroom_security.auditlog.settings import AuditState, Settings
from strongroom_security.auditlog.spool import Spool, default_base, temporary_base
from strongroom_security.auditlog.uploading import upload
from strongroom_security.auditlog.writing import RunWriter, Segment, WriterEndedError

__all__ = ["LogAuditor"]

_LOG: Final = logging.getLogger("strongroom")
_T = TypeVar("_T")

_UPLOAD_S: Final = 60.0
_IDLE_S: Final = 60.0
_SPOOL_AGAIN_S: Final = 1.0
_IDENTITY_S: Final = 10.0
_AT_EXIT_S: Final = 5.0
_SALVAGE_EVERY_S: Final = 900.0
_SALVAGE_AGAIN_S: Final = 60.0
_NO_OPERATION: Final = "0" * 16
_ANY_ROOM: Final = sys.maxsize


class LogAuditor:
    """Keeps the record; see `strongroom.auditing.Auditor`. Building one touches and starts nothing."""

    is_on = True

    def __init__(self, settings: Settings) -> None:
        self.settings: Final = settings
        self._process: _Process | None = None

    def record(self, act: Act) -> None:
        """See `strongroom.auditing.Auditor.record`."""
        try:
            self._with(lambda process: process.record(act))
        except Exception as error:  # noqa: BLE001 - what is recorded must not fail for it
            _LOG.error("an event of the audit log was lost: %s: %s", type(error).__name__, error)

    def intend(self, act: Act) -> None:
        """See `strongroom.auditing.Auditor.intend`."""
        until = time.monotonic() + self.settings.intent_s
        try:
            self._with(lambda process: process.intend(act, until))
        except AuditError:
            raise
        except Exception as error:  # what cannot be put on record is not read, whatever the reason
            raise AuditError(
                f"{_what(act)} could not be put on record first ({type(error).__name__}: {error}); nothing "
                f"was read"
            ) from error

    def secure(self, *, within_s: float) -> None:
        """See `strongroom.auditing.Auditor.secure`."""
        process = self._process
        if process is not None and process.is_here:
            process.secure(time.monotonic() + within_s)

    def close(self, *, within_s: float) -> None:
        """See `strongroom.auditing.Auditor.close`. It is done at the end of the program, too."""
        process, self._process = self._process, None
        if process is not None and process.is_here:
            process.close(time.monotonic() + within_s)

    def state(self) -> AuditState:
        """How it stands, for whoever watches."""
        process = self._process
        return process.state() if process is not None and process.is_here else AuditState()

    def salvage(self) -> Salvaged:
        """Send what dead processes left here for this sink; on this thread, however long it takes."""
        return self._with(lambda process: process.salvage())

    def _with(self, work: Callable[[_Process], _T]) -> _T:
        while True:
            process = self._here()
            try:
                return work(process)
            except WriterEndedError:
                with _STATE.lock:
                    if self._process is process:
                        self._process = None

    def _here(self) -> _Process:
        process = self._process
        if process is not None and process.is_here:
            return process
        with _STATE.lock:
            process = self._process
            if process is None or not process.is_here:
                process = self._process = _Process(self.settings)
                _STATE.live.add(process)
            return process


class _Process:
    """An auditor in this process, from its first event until it is closed."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._writers: dict[str | None, RunWriter] = {}
        self._ended: list[RunWriter] = []
        self._paces: dict[str, Pace] = {}
        self._waiting: Counter[str | None] = Counter()
        self._lost: Counter[tuple[str | None, str]] = Counter()
        self._all_lost = 0
        self._failures = 0
        self._failed_tries = 0
        self._error: str | None = None
        self._is_closing = False
        self._stop = threading.Event()
        self._has_work = False
        self._has_threads = False
        self._salvage_s = 0.0 if settings.salvages else float("inf")
        self._store: Store | None = None
        self._actors = Actors(
            role=settings.role, session_of=settings.session_of, environment=dict(os.environ)
        )
        self._forwarding = Forwarding([receiver_of(text) for text in settings.also])
        self._spool = _find_spool(settings)
        self._sink_teller = Teller(
            f"the audit log's sink {settings.sink} takes nothing; events wait here",
            f"the audit log's sink {settings.sink} takes events again",
        )
        self._spool_teller = Teller(
            "the audit log's spool takes nothing; events wait in memory, and are lost with this process",
            "the audit log's spool takes events again",
        )
        self._lost_teller = Teller("the audit log has no room left for", "the audit log has room again")
        _at_the_end_of_this_process()

    @property
    def is_here(self) -> bool:
        """Whether this is its process, and not a fork of it."""
        return self._pid == os.getpid()

    # ---------------------------------------------------------------------------------------------- recording

    def record(self, act: Act) -> None:
        added = self._append(act)
        if added is None:
            self._lose(act)
            return
        segment, line = added
        self._forwarding.put(line[:-1])
        if segment.events == 1 or segment.is_closed:
            self._wake()

    def intend(self, act: Act, until: float) -> None:
        writer = self._writer(act.run)
        if writer.certifying.is_lacking:
            with self._changed:
                self._changed.wait_for(lambda: not writer.certifying.is_lacking, until - time.monotonic())
            if writer.certifying.is_lacking:
                self.record(act)  # that it was tried
                why = writer.certifying.error or "it did not answer"
                self._refuse(act, f"the signer of the audit log vouches for no writer here: {why}")
        self._actors.wait_for_identity(min(_IDENTITY_S, max(0.0, (until - time.monotonic()) / 2)))
        actor = self._actors.of(act.action)
        writer, added = self._with(act.run, lambda each: each.append_alone(act, actor, room=self._room()))
        if added is None:
            self._lose(act)
            self._refuse(act, f"neither the spool nor memory has room for it ({self._error or 'no error'})")
        segment, line = added
        self._forwarding.put(line[:-1])
        with self._changed:
            self._waiting[writer.key.run] += 1
            self._pace(writer).hurry()
            self._has_work = True
            self._changed.notify_all()
            try:
                self._changed.wait_for(
                    lambda: segment.is_settled or segment.is_lost, until - time.monotonic()
                )
            finally:
                self._waiting[writer.key.run] -= 1
        if segment.is_lost:
            self._refuse(act, "somebody removed it from the spool")
        if not segment.is_settled:
            self._refuse(
                act,
                f"the sink {self._settings.sink} did not take it within {self._settings.intent_s:g} s "
                f"({self._error or 'it did not answer'})",
            )

    def _refuse(self, act: Act, why: str) -> NoReturn:
        raise AuditError(
            f"{_what(act)} could not be put on record first: {why}. Nothing was read; see that the sink can "
            f"be reached and that this identity may create objects under segments/ there, then do it again"
        )

    def _append(self, act: Act) -> tuple[Segment, bytes] | None:
        actor = self._actors.of(act.action)
        return self._with(act.run, lambda writer: writer.append(act, actor, room=self._room()))[1]

    def _with(self, run: str | None, work: Callable[[RunWriter], _T]) -> tuple[RunWriter, _T]:
        """What comes of something with the writer of a run, whoever that is by then."""
        while True:
            writer = self._writer(run)
            try:
                return writer, work(writer)
            except WriterEndedError:
                continue  # it gave its id up just now

    def _writer(self, run: str | None) -> RunWriter:
        run = _usable(run)
        writer = self._writers.get(run)
        if writer is not None and not writer.has_ended:
            return writer
        with self._changed:
            writer = self._writers.get(run)
            if writer is not None and not writer.has_ended:
                return writer
            if self._is_closing:
                raise WriterEndedError
            writer = self._writers[run] = self._new_writer(run)
            self._start()
            return writer

    def _new_writer(self, run: str | None) -> RunWriter:
        drawn, private = self._settings.draw()
        key = WriterKey(writer=drawn, run=run, private=private, host=self._actors.host, pid=self._pid)
        return RunWriter(
            key,
            certifying=Certifying(self._settings.signer, key, then=self._wake, wait=self._stop.wait),
            spool=self._spool,
            seal_events=self._settings.seal_events,
            now_ms=self._settings.now_ms,
        )

    def _room(self) -> int:
        return self._settings.spool_bytes - sum(each.pending_bytes for each in self._all_writers())

    def _all_writers(self) -> list[RunWriter]:
        return [*self._ended, *self._writers.copy().values()]

    def _lose(self, act: Act) -> None:
        with self._changed:
            self._lost[_usable(act.run), act.action.value] += 1
            self._all_lost += 1
        self._lost_teller.failing(f"{act.action.value}; what is lost is counted, and told in the log later")

    def _tell_what_was_lost(self) -> None:
        """Record the gap, as soon as there is room for that."""
        if not self._lost or self._room() <= 0:
            return
        with self._changed:
            lost, self._lost = self._lost, Counter()
        for run in dict.fromkeys(run for run, _ in lost):
            kinds = {f"lost_{action}": count for (each, action), count in lost.items() if each == run}
            act = Act(
                action=Action.AUDIT,
                phase=Phase.OBSERVED,
                outcome=Outcome.FAILURE,
                operation=_NO_OPERATION,
                run=run,
                reason=f"{sum(kinds.values())} events were lost: no room, or the spool was removed",
                details={"lost_events": sum(kinds.values()), **kinds},
            )
            added = self._append(act)
            if added is None:
                with self._changed:
                    self._lost += Counter({key: count for key, count in lost.items() if key[0] == run})
                return
            self._forwarding.put(added[1][:-1])
        self._lost_teller.working()

    # ------------------------------------------------------------------------------------------------ waiting

    def secure(self, until: float) -> None:
        for writer in list(self._writers.values()):
            writer.seal()
        self._wait_for_all(until)

    def close(self, until: float) -> None:
        if self._lost:
            # What goes into the sink makes the room in which to say that something was lost.
            self.secure(time.monotonic() + max(0.0, (until - time.monotonic()) / 2))
        self._tell_what_was_lost()
        with self._changed:
            self._is_closing = True
            writers = list(self._writers.values())
            self._changed.wait_for(
                lambda: not any(each.certifying.is_on_its_way for each in writers),
                max(0.0, (until - time.monotonic()) / 2),
            )
            self._ended += writers
            self._writers.clear()
        for writer in writers:
            writer.seal(is_last=True)
        self._wait_for_all(until)
        self._forwarding.drain(max(0.0, min(1.0, until - time.monotonic())))
        if all(each.is_done for each in self._ended):
            self._end()

    def _end(self) -> None:
        """Nothing is left to do, and the threads end."""
        self._stop.set()
        self._wake()
        _STATE.live.discard(self)

    def _wait_for_all(self, until: float) -> None:
        """Return once the sink has what is sealed; or once it failed again, and local storage has it."""
        segments = [segment for writer in self._all_writers() for segment in writer.sealed()]
        if not segments:
            return
        with self._changed:
            tries = self._failed_tries
            for writer in self._all_writers():
                self._pace(writer).hurry()
            self._has_work = True
            self._changed.notify_all()

            def is_safe() -> bool:
                left = [each for each in segments if not each.is_settled and not each.is_lost]
                return not left or (self._failed_tries > tries and all(each.is_synced for each in left))

            self._changed.wait_for(is_safe, max(0.0, until - time.monotonic()))

    def state(self) -> AuditState:
        writers = self._all_writers()
        oldest = [since for since in (each.oldest_s for each in writers) if since is not None]
        spool_error = next((each.spool_error for each in writers if each.spool_error is not None), None)
        return AuditState(
            pending_events=sum(each.pending_events for each in writers),
            pending_bytes=sum(each.pending_bytes for each in writers),
            oldest_s=max(0.0, time.monotonic() - min(oldest)) if oldest else 0.0,
            failures=self._failures,
            error=self._error or spool_error,
            lost=self._all_lost,
        )

    # ------------------------------------------------------------------------------------- beside the program

    def _wake(self) -> None:
        with self._changed:
            self._has_work = True
            self._changed.notify_all()

    def _start(self) -> None:
        if self._has_threads:
            return
        self._has_threads = True
        for name, work in (("strongroom-audit-keep", self._keep), ("strongroom-audit-send", self._send)):
            try:
                threading.Thread(target=work, name=name, daemon=True).start()
            except RuntimeError:
                return  # the program is ending: the next start sends what it leaves

    def _keep(self) -> None:
        """Seal what is due, and see it to stable storage; until the process is closed."""
        while not self._stop.is_set():
            with self._changed:
                self._changed.wait_for(lambda: self._has_work or self._stop.is_set(), self._next_due_s())
                self._has_work = False
            try:
                self._keep_once()
            except Exception as error:  # noqa: BLE001 - this thread must not die of one writer's trouble
                self._spool_teller.failing(f"{type(error).__name__}: {error}")
                self._stop.wait(_SPOOL_AGAIN_S)

    def _keep_once(self) -> None:
        now = time.monotonic()
        self._tell_what_was_lost()
        self._actors.refresh()
        for writer in self._all_writers():
            current = writer.current
            if current is not None and current.events and current.recorded_s + self._settings.seal_s <= now:
                writer.seal()
            writer.flush()
            for segment in writer.sealed():
                writer.sync(segment)
            if not self._is_closing:
                writer.open_next()
            if writer.spool_error is not None and self._spool is not None:
                self._spool_teller.failing(writer.spool_error)
            else:
                self._spool_teller.working()
        with self._changed:
            self._changed.notify_all()

    def _next_due_s(self) -> float:
        due = _IDLE_S
        for writer in self._all_writers():
            current = writer.current
            if current is not None and current.events:
                due = min(due, current.recorded_s + self._settings.seal_s - time.monotonic())
            if writer.spool_error is not None or self._lost:
                due = min(due, _SPOOL_AGAIN_S)
        return max(0.0, due)

    def _send(self) -> None:
        """Send what is sealed, oldest first, and what dead processes left; until the process is closed."""
        while not self._stop.is_set():
            with self._changed:
                found = self._next_to_send()
                if found is None and self._salvage_s > time.monotonic():
                    self._changed.wait(self._next_try_s())
                    continue
            if found is not None:
                self._send_one(*found)
                continue
            done = self.salvage()
            pause_s = _SALVAGE_AGAIN_S if done.left or done.error else _SALVAGE_EVERY_S
            self._salvage_s = time.monotonic() + pause_s

    def _next_to_send(self) -> tuple[RunWriter, Segment] | None:
        now = time.monotonic()
        # Whoever waits to read goes first; of one writer the oldest always does.
        for writer in sorted(self._all_writers(), key=lambda each: -self._waiting[each.key.run]):
            if self._pace(writer).next_s <= now:
                for segment in writer.sealed()[:1]:
                    if segment.instead is None:
                        return writer, segment
        self._ended = [each for each in self._ended if not each.is_done]
        if self._is_closing and not self._ended:
            self._end()
        return None

    def _next_try_s(self) -> float:
        now = time.monotonic()
        due = [self._pace(each).next_s - now for each in self._all_writers() if each.sealed()]
        return max(0.0, min([_IDLE_S, self._salvage_s - now, *due]))

    def _pace(self, writer: RunWriter) -> Pace:
        return self._paces.setdefault(writer.key.writer, Pace())

    def _send_one(self, writer: RunWriter, segment: Segment) -> None:
        pace = self._pace(writer)
        is_urgent = self._waiting[writer.key.run] > 0
        try:
            writer.sync(segment)
            try:
                data = writer.content(segment)
            except FileNotFoundError as error:
                self._begin_anew(writer, b"", f"its spool was removed ({error.filename})")
                return
            found = self._put(segment.key, data, is_urgent=is_urgent)
            if found is None:
                writer.accepted(segment)
            else:
                # A copy of this machine's memory, or of its spool.
                self._begin_anew(writer, found, "another process writes under its id")
        except Exception as error:  # noqa: BLE001 - a sink is anybody's code, and this thread must not die of it
            self._store = (
                None  # a folder's store refuses for good after a failed fsync; a new one looks again
            )
            with self._changed:
                pace.failed(in_a_hurry=self._waiting[writer.key.run] > 0)
                self._failures += 1
                self._failed_tries += 1
                self._error = f"{type(error).__name__}: {error}"[:500]
                self._changed.notify_all()
            self._sink_teller.failing(self._error)
            return
        with self._changed:
            pace.succeeded()
            self._failures, self._error = 0, None
            self._changed.notify_all()
        self._sink_teller.working()

    def _put(self, key: str, data: bytes, *, is_urgent: bool) -> bytes | None:
        store = self._store
        if store is None:
            store = self._store = self._settings.open_sink()
        return upload(store, key, data, within_s=self._settings.intent_s if is_urgent else _UPLOAD_S)

    # ----------------------------------------------------------------------------------------- another id

    def _begin_anew(self, writer: RunWriter, found: bytes, why: str) -> None:
        """Go on under another id, and record again what did not get into the sink under this one.

        Args:
            found: what stands there in the place of the first segment that did not.
            why: the id cannot be used any more.
        """
        left = writer.give_up()
        with self._changed:
            if self._writers.get(writer.key.run) is writer:
                del self._writers[writer.key.run]
            self._ended.append(writer)
        _LOG.warning(
            "the audit log's writer %s goes on under another id, since %s; what it wrote is recorded again",
            writer.key.writer,
            why,
        )
        missing: list[tuple[Segment, Sequence[Event]]] = []
        for segment in left:
            try:
                data = writer.content(segment)
            except FileNotFoundError:
                writer.replaced(segment, None, is_lost=True)
                with self._changed:
                    self._lost[writer.key.run, "removed"] += segment.events
                    self._all_lost += segment.events
            else:
                missing.append((segment, missing_events(read_segment(segment.key, data), found)))
        all_missing = [event for _, events in missing for event in events]
        last = self._record_again(writer.key.run, writer.key.writer, all_missing, why=why)
        for segment, events in missing:
            writer.replaced(segment, last if events else None)
        writer.release()
        self._wake()

    def _record_again(
        self, run: str | None, writer: str, events: Iterable[Event], *, why: str
    ) -> Segment | None:
        """Record events again under a writer of this process; the last segment that they stand in."""
        again = list(events)
        act = Act(
            action=Action.AUDIT,
            phase=Phase.OBSERVED,
            outcome=Outcome.FAILURE,
            operation=_NO_OPERATION,
            run=run,
            reason=f"the writer {writer} is no more: {why}; {len(again)} events are recorded again",
            details={"ended_writer": writer, "events_again": len(again)},
        )
        try:
            fresh = self._writer(run)
        except WriterEndedError:
            # This process is being closed, and still has something to say.
            with self._changed:
                fresh = self._new_writer(_usable(run))
                self._ended.append(fresh)
        fresh.append(act, self._actors.of(act.action), room=_ANY_ROOM)
        for event in again:
            try:
                act, actor, time_ms = recorded_again(event)
            except (FormatError, ValueError) as error:
                _LOG.error("an event of the log's writer %s cannot be recorded again: %s", writer, error)
                continue
            if fresh.append(act, actor, time_ms=time_ms, room=_ANY_ROOM) is None:
                self._lose(act)
        fresh.seal(is_last=self._is_closing)
        fresh.flush()
        sealed = fresh.sealed()
        for segment in sealed:
            fresh.sync(segment)
        return sealed[-1] if sealed else None

    # ------------------------------------------------------------------------------------------------ salvage

    def salvage(self) -> Salvaged:
        """Send what dead processes left."""
        done = Salvaged()
        if self._spool is None:
            return done
        salvager: Salvager | None = None
        for folder in self._spool.orphans():
            try:
                if salvager is None:
                    salvager = self._salvager()
                if salvager.by.writer == folder.writer:
                    continue
                done += salvager.take(folder)
            except (StrongroomError, OSError, ValueError) as error:
                done += Salvaged(error=f"{type(error).__name__}: {error}", left=1)
            except WriterEndedError:
                return done
            finally:
                folder.release()
            if done.error is not None or self._stop.is_set():
                break
        return done

    def _salvager(self) -> Salvager:
        writer = self._writer(None)
        if writer.certifying.is_lacking:
            with self._changed:
                self._changed.wait_for(lambda: not writer.certifying.is_lacking, _IDENTITY_S)
        if writer.certifying.is_lacking:
            raise AuditError(f"nobody vouches for who salvages: {writer.certifying.error}")
        return Salvager(
            by=writer.key,
            certificate=writer.certifying.certificate,
            send=lambda key, data: self._put(key, data, is_urgent=False),
            record=self.record,
            again=self._again,
            now_ms=self._settings.now_ms,
            may_go_on=lambda: not self._stop.is_set() and not any(self._waiting.values()),
        )

    def _again(self, run: str | None, writer: str, events: list[Event]) -> None:
        self._record_again(run, writer, events, why="another process wrote under its id")

    # --------------------------------------------------------------------------------------------------- ends

    def disown(self) -> None:
        """After a fork, in the child: nothing here is the child's."""
        for writer in self._all_writers():
            writer.disown()


class _State:
    """Of this process: which auditors live, and who may make another."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.live: set[_Process] = set()
        self.is_registered = False


_STATE = _State()


def _forget_after_fork() -> None:
    live = list(_STATE.live)
    # Whoever held the lock is not in the child.
    _STATE.lock = threading.Lock()
    _STATE.live = set()
    _STATE.is_registered = False
    for process in live:
        process.disown()


os.register_at_fork(after_in_child=_forget_after_fork)


def _at_the_end_of_this_process() -> None:
    if _STATE.is_registered:
        return
    _STATE.is_registered = True
    if multiprocessing.process.parent_process() is None:
        atexit.register(_close_all)
    else:
        # A child of multiprocessing ends without what atexit holds.
        multiprocessing.util.Finalize(None, _close_all, exitpriority=0)


def _close_all() -> None:
    until = time.monotonic() + _AT_EXIT_S
    for process in list(_STATE.live):
        if process.is_here:
            process.close(until)


def _usable(run: str | None) -> str | None:
    """A run as a segment's key can name it; what is none is about no run."""
    try:
        return None if run is None else check_run_id(run)
    except FormatError:
        return None


def _what(act: Act) -> str:
    about = "" if act.checkpoint is None else f" of {act.checkpoint.folder}"
    run = "" if act.run is None else f" (run {act.run})"
    return f"{act.action.value}{about}{run}"


def _find_spool(settings: Settings) -> Spool | None:
    """Where segments wait; the first place that can be written to."""
    if settings.spool is not None:
        spool = Spool(settings.spool, settings.sink)
        try:
            spool.prepare()
        except OSError as error:
            # It may come to be writable, and what waits in memory then goes there.
            _LOG.warning("the audit log's spool takes nothing: %s; events wait in memory alone", error)
        return spool
    usual, last = default_base(os.environ), temporary_base()
    problems = []
    for base in (usual, last):
        if base is None:
            continue
        spool = Spool(base, settings.sink)
        try:
            spool.prepare()
        except OSError as error:
            problems.append(str(error))
            continue
        if base == last:
            _LOG.warning(
                "the audit log's events wait in %s, which a restart of this machine empties%s; name another "
                "folder by spool in [audit]",
                spool.path,
                f" ({problems[0]})" if problems else "",
            )
        return spool
    _LOG.warning(
        "the audit log has no spool (%s): events wait in memory alone, and are lost with this process; name "
        "a folder by spool in [audit]",
        "; ".join(problems),
    )
    return None
