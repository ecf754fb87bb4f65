"""What one process puts on record, from its first event until it is closed: which writer takes what, and when
its segments are sealed, sent, or given up.

Two threads serve all writers of the process: one seals segments and sees them to stable storage here, one
sends them. How a line is written is `writing`'s to say, what comes of a try to send `delivering`'s, what a
dead process left `salvage`'s. A signal's handler may record, and may raise, wherever it comes in between:
locks are entered by ``with`` and may be entered again, and what wakes the threads is a queue.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NoReturn

from strongroom.auditing import Act
from strongroom.errors import AuditError
from strongroom.layout import CheckpointName
from strongroom_security.auditlog.format.events import Actor
from strongroom_security.auditlog.recording.actors import Actors
from strongroom_security.auditlog.recording.delivering import Delivery
from strongroom_security.auditlog.recording.forwarding import Forwarding, receiver_of
from strongroom_security.auditlog.recording.knowing import Known
from strongroom_security.auditlog.recording.losing import Losses
from strongroom_security.auditlog.recording.renewing import Renewing
from strongroom_security.auditlog.recording.salvage import Event, Salvaged, Salvager
from strongroom_security.auditlog.recording.sending import Teller
from strongroom_security.auditlog.recording.settings import AuditState, Settings
from strongroom_security.auditlog.recording.spool import WriterFolder, find_spool
from strongroom_security.auditlog.recording.threads import Bell, Threads
from strongroom_security.auditlog.recording.writers import IDLE_S, Writers, usable_run
from strongroom_security.auditlog.recording.writing import BusyError, RunWriter, Segment, WriterEndedError

__all__ = ["Recording", "about"]

_LOG: Final = logging.getLogger("strongroom")

_IDLE_S: Final = 60.0
_SPOOL_AGAIN_S: Final = 1.0
_LOOK_S: Final = 0.25
_IDENTITY_S: Final = 10.0
_SALVAGE_EVERY_S: Final = 900.0
_SALVAGE_AGAIN_S: Final = 60.0
_FAILED_FOLDERS: Final = 3
"""After which the sink is taken to be away, and not just closed to some run's segments."""
_UNHELD_S: Final = 10.0
"""After which the record of auditors ends that are all gone."""
_MAX_ASIDE: Final = 10_000
_ASIDE_S: Final = 0.01


class Recording:
    """What auditors of the same settings record in one process; used by all its threads, and by no fork of
    it.

    Args:
        settings: what the auditors were told.
        then: called once it was closed and everything is in the sink.
    """

    def __init__(self, settings: Settings, *, then: Callable[[Recording], None]) -> None:
        self._settings = settings
        self._then = then
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._bell = Bell()
        self._holders: set[weakref.ref[Any]] = set()
        self._unheld_s: float | None = None
        self._waiting: dict[object, str | None] = {}
        self._aside: deque[tuple[Act, Actor, int]] = deque()
        self._taking_up: set[int] = set()
        self._losses = Losses()
        self._stop = threading.Event()
        self._threads = Threads({"strongroom-audit-keep": self._keep, "strongroom-audit-send": self._send})
        self._salvage_s = 0.0 if settings.salvages else float("inf")
        self._salvaging: set[WriterFolder] = set()
        self._known = Known(settings.open_sink)
        self._actors = Actors(
            role=settings.role,
            session_of=settings.session_of,
            asks_aws=settings.asks_aws,
            environment=dict(os.environ),
        )
        self._forwarding = Forwarding([receiver_of(text) for text in settings.also])
        self._spool = find_spool(settings.spool, settings.sink)
        self._writers = Writers(
            settings,
            self._actors,
            self._spool,
            lock=self._lock,
            aside=self._put_aside,
            tell=self._tell,
            wait=self._stop.wait,
        )
        self._delivery = Delivery(settings, self._changed, self._lock, is_urgent=self._is_waited_for)
        self._renewing = Renewing(
            actors=self._actors,
            losses=self._losses,
            writer_of=self._writers.of_any_time,
            retire=self._writers.retire,
            is_closing=lambda: self._writers.is_closing,
        )
        self._spool_teller = Teller(
            "the audit log's spool takes nothing; events wait in memory, and are lost with this process",
            "the audit log's spool takes events again",
        )

    @property
    def is_here(self) -> bool:
        """Whether this is its process, and not a fork of it."""
        return self._pid == os.getpid()

    @property
    def is_open(self) -> bool:
        """Whether it takes events."""
        return not self._writers.is_closing

    # ---------------------------------------------------------------------------------------------- recording

    def record(self, act: Act) -> None:
        with contextlib.suppress(BusyError):  # it was put aside
            if not self._record(act, self._actors.of(act)):
                self.lose(act)

    def lose(self, act: Act) -> None:
        """Count what could not be recorded, for whatever reason; it is told in the log later."""
        self._losses.add(usable_run(act.run), act.action.value)
        self._wake()

    def knows(self, run: str, checkpoint: CheckpointName) -> bool | None:
        return None if usable_run(run) is None else self._known.knows(run, checkpoint)

    def intend(self, act: Act, until: float) -> None:
        writer = self._writers.of(act.run)
        if writer.certifying.is_lacking:
            with self._lock:
                self._changed.wait_for(lambda: not writer.certifying.is_lacking, until - time.monotonic())
            if writer.certifying.is_lacking:
                self.record(act)  # that it was tried
                why = writer.certifying.error or "it did not answer"
                self._refuse(act, f"the signer of the audit log vouches for no writer here: {why}")
        within_s = min(_IDENTITY_S, max(0.0, (until - time.monotonic()) / 2))
        self._actors.wait_for_identity(act, within_s)
        actor = self._actors.of(act)
        try:
            writer, added = self._writers.with_one(
                act.run, lambda each: each.append_alone(act, actor, room=self._writers.room)
            )
        except BusyError:
            self._refuse(act, "a signal's handler does it, which came in between an event's recording")
        if added is None:
            self.lose(act)
            self._refuse(
                act, f"neither the spool nor memory has room for it ({self._delivery.error or 'no error'})"
            )
        segment, line = added
        self._forwarding.put(line[:-1])
        self._wait_for(writer, segment, until)
        if segment.is_lost:
            self._refuse(act, "somebody removed it from the spool")
        if not segment.is_settled:
            self._refuse(
                act,
                f"the sink {self._settings.sink} did not take it within {self._settings.intent_s:g} s "
                f"({self._delivery.error or 'it did not answer'})",
            )

    def _wait_for(self, writer: RunWriter, segment: Segment, until: float) -> None:
        waits = object()
        try:
            self._waiting[waits] = writer.key.run
            with self._lock:
                self._delivery.pace(writer).hurry()
                self._wake()
                self._changed.notify_all()
                self._changed.wait_for(
                    lambda: segment.is_settled or segment.is_lost, until - time.monotonic()
                )
        finally:
            self._waiting.pop(waits, None)

    def _is_waited_for(self, run: str | None) -> bool:
        return run in list(self._waiting.values())

    def _refuse(self, act: Act, why: str) -> NoReturn:
        raise AuditError(
            f"{about(act)} could not be put on record first: {why}. Nothing was read; see that the sink can "
            f"be reached and that this identity may create objects under segments/ there, then do it again"
        )

    def _record(self, act: Act, actor: Actor, time_ms: int | None = None) -> bool:
        """Record an act, as of some time; whether there was room."""
        writer, added = self._writers.with_one(
            act.run, lambda each: each.append(act, actor, time_ms=time_ms, room=self._writers.room)
        )
        if added is None:
            return False
        self._threads.start()
        self._known.note(act)
        segment, line = added
        self._forwarding.put(line[:-1])
        if segment.events == 1 or segment.is_closed or writer.has_backlog:
            self._wake()
        return True

    def _put_aside(self, act: Act, actor: Actor, time_ms: int) -> None:
        """Keep an act that a signal's handler, or an exception out of one, came in between of."""
        if len(self._aside) >= _MAX_ASIDE:
            self.lose(act)
            return
        self._aside.append((act, actor, time_ms))
        self._wake()

    def _take_up(self) -> None:
        me = threading.get_ident()
        self._taking_up.add(me)
        try:
            for _ in range(len(self._aside)):
                try:
                    act, actor, time_ms = self._aside.popleft()
                except IndexError:
                    return
                with contextlib.suppress(BusyError):
                    if not self._record(act, actor, time_ms):
                        self.lose(act)
        finally:
            self._taking_up.discard(me)

    def _tell_what_was_lost(self) -> None:
        """Record the gap, as soon as there is room for that."""
        if not self._losses or self._writers.is_closing or self._writers.room <= 0:
            return
        untold = self._losses.take()
        try:
            while untold and self._record(untold[0], self._actors.of(untold[0])):
                del untold[0]
        except Exception as error:  # noqa: BLE001 - of whatever kind: what was lost stays counted
            _LOG.debug("what was lost of the audit log cannot be told yet: %s", error)
        for act in untold:
            self._losses.again(act)
        if not untold:
            self._losses.told()

    # ------------------------------------------------------------------------------------------------ waiting

    def secure(self, until: float) -> int:
        """See what is recorded to the sink, or to stable storage here; how many events are at neither."""
        self._take_up()
        for writer in self._writers.in_use():
            writer.seal()
        return self._wait_for_all(until, despairs=True)

    def close(self, until: float) -> None:
        self._take_up()
        # What another thread has in its hands is in no line yet.
        while (self._aside or self._taking_up) and time.monotonic() < until and not self._stop.wait(_ASIDE_S):
            self._wake()  # what this thread was stopped in the middle of is another's to undo
        if self._losses:
            # What goes into the sink makes the room in which to say that something was lost.
            self.secure(time.monotonic() + max(0.0, (until - time.monotonic()) / 2))
        self._tell_what_was_lost()
        with self._lock:
            self._changed.wait_for(
                lambda: not any(each.certifying.is_on_its_way for each in self._writers.in_use()),
                max(0.0, (until - time.monotonic()) / 2),
            )
        self._writers.close()
        self._wait_for_all(until)
        self._forwarding.drain(max(0.0, min(1.0, until - time.monotonic())))
        if self._writers.are_done:
            self._end()

    def _end(self) -> None:
        """Nothing is left to do, and the threads end."""
        self._stop.set()
        self._tell()
        self._then(self)

    def _wait_for_all(self, until: float, *, despairs: bool = False) -> int:
        """Return once the sink has what is sealed; or once it failed again, or hangs, and local storage
        has it.

        Args:
            despairs: return as well once neither will have it for now.

        Returns:
            how many events are at neither.
        """
        segments = [segment for writer in self._writers.all() for segment in writer.sealed()]
        if not segments:
            return 0
        delivery = self._delivery
        tries = delivery.failed_tries

        def left() -> list[Segment]:
            return [each for each in segments if not each.is_settled and not each.is_lost]

        def is_enough() -> bool:
            if not left():
                return True
            if delivery.failed_tries <= tries and not delivery.is_hanging:
                return False
            return all(each.is_synced for each in left()) or (despairs and self._spool_error() is not None)

        with self._lock:
            delivery.hurry(self._writers.all())
            self._wake()
            self._changed.notify_all()
            while not is_enough():
                left_s = until - time.monotonic()
                if left_s <= 0:
                    break
                self._changed.wait(min(left_s, _LOOK_S))
        return sum(each.events for each in left() if not each.is_synced)

    def _spool_error(self) -> str | None:
        """Why the spool takes nothing."""
        if self._spool is None:
            return "there is no spool"
        return self._writers.error

    def state(self) -> AuditState:
        writers = self._writers.all()
        oldest = [since for since in (each.oldest_s for each in writers) if since is not None]
        spool_error = None if self._spool is None else self._spool_error()
        return AuditState(
            pending_events=sum(each.pending_events for each in writers),
            pending_bytes=sum(each.pending_bytes for each in writers),
            oldest_s=max(0.0, time.monotonic() - min(oldest)) if oldest else 0.0,
            failures=self._delivery.failures,
            error=self._delivery.error or spool_error,
            lost=self._losses.total,
        )

    # ------------------------------------------------------------------------------------------- whose it is

    def hold(self, holder: object) -> None:
        """Count an auditor among those that use it, for as long as it lives."""
        self._holders.add(weakref.ref(holder, self._let_go))

    def let_go(self, holder: object) -> bool:
        """An auditor is done with it; whether nobody else is left."""
        self._let_go(weakref.ref(holder))
        return not self._holders

    def _let_go(self, reference: weakref.ref[Any]) -> None:
        self._holders = {
            each
            for each in list(self._holders)
            if each is not reference and each() is not None and each() is not reference()
        }
        self._bell.ring()

    # ------------------------------------------------------------------------------------- beside the program

    def _wake(self) -> None:
        self._bell.ring()
        self._threads.start()

    def _tell(self) -> None:
        with self._lock:
            self._changed.notify_all()
        self._bell.ring()

    def _works(self) -> dict[str, Callable[[], None]]:
        return {"strongroom-audit-keep": self._keep, "strongroom-audit-send": self._send}

    def _keep(self) -> None:
        """Seal what is due, and see it to stable storage; until the process is closed."""
        while not self._stop.is_set():
            self._bell.wait(self._next_due_s())
            try:
                self._keep_once()
            except Exception as error:  # noqa: BLE001 - this thread must not die of one writer's trouble
                self._spool_teller.failing(f"{type(error).__name__}: {error}")
                self._stop.wait(_SPOOL_AGAIN_S)

    def _keep_once(self) -> None:
        now = time.monotonic()
        self._take_up()
        self._tell_what_was_lost()
        self._actors.refresh()
        self._writers.end_idle()
        for writer in self._writers.all():
            current = writer.current
            if current is not None and current.events and current.recorded_s + self._settings.seal_s <= now:
                writer.seal()
            writer.flush()
            for segment in writer.sealed():
                writer.sync(segment)
            if not self._writers.is_closing and not writer.has_ended:
                writer.open_next()
        error = None if self._spool is None else self._spool_error()
        if error is not None:
            self._spool_teller.failing(error)
        else:
            self._spool_teller.working()
        with self._lock:
            self._changed.notify_all()
        self._end_if_unheld(now)

    def _end_if_unheld(self, now: float) -> None:
        if self._holders or self._writers.is_closing:
            self._unheld_s = None
            return
        if self._unheld_s is None:
            self._unheld_s = now
        if now - self._unheld_s < _UNHELD_S:
            return
        self._writers.close()
        self._tell()

    def _next_due_s(self) -> float:
        due = _IDLE_S
        if self._unheld_s is not None or not self._holders:
            due = min(due, _UNHELD_S)
        if self._writers.are_many:
            due = min(due, IDLE_S)
        for writer in self._writers.all():
            current = writer.current
            if current is not None and current.events:
                due = min(due, current.recorded_s + self._settings.seal_s - time.monotonic())
            if writer.spool_error is not None or self._losses or writer.has_backlog:
                due = min(due, _SPOOL_AGAIN_S)
        return max(0.0, due)

    def _send(self) -> None:
        """Send what is sealed, oldest first, and what dead processes left; until the process is closed."""
        while not self._stop.is_set():
            try:
                self._send_once()
            except Exception as error:  # noqa: BLE001 - nor must this one, of anybody's sink
                _LOG.error("the audit log's sending failed, and goes on: %s: %s", type(error).__name__, error)
                self._stop.wait(_SPOOL_AGAIN_S)

    def _send_once(self) -> None:
        with self._lock:
            found = self._next_to_send()
            if found is None and self._salvage_s > time.monotonic():
                self._changed.wait(self._next_try_s())
                return
        if found is not None:
            ended = self._delivery.send(*found)
            if ended is not None:
                self._renewing.begin_anew(found[0], *ended)
                self._tell()
            return
        done = self.salvage()
        pause_s = _SALVAGE_AGAIN_S if done.left or done.error else _SALVAGE_EVERY_S
        self._salvage_s = time.monotonic() + pause_s

    def _next_to_send(self) -> tuple[RunWriter, Segment] | None:
        now = time.monotonic()
        # Whoever waits to read goes first; of one writer the oldest always does.
        for writer in sorted(self._writers.all(), key=lambda each: not self._is_waited_for(each.key.run)):
            if self._delivery.pace(writer).next_s <= now:
                for segment in writer.sealed()[:1]:
                    if segment.instead is None:
                        return writer, segment
        for writer in self._writers.drop_done():
            self._delivery.forget(writer)
        if self._writers.are_done and not self._stop.is_set():
            self._end()
        return None

    def _next_try_s(self) -> float:
        now = time.monotonic()
        due = [self._delivery.pace(each).next_s - now for each in self._writers.all() if each.sealed()]
        return max(0.0, min([_IDLE_S, self._salvage_s - now, *due]))

    # ------------------------------------------------------------------------------------------------ salvage

    def salvage(self, *, of_any_host: bool = False) -> Salvaged:
        """Send what dead processes left."""
        done, failed = Salvaged(), 0
        if self._spool is None:
            return done
        salvager: Salvager | None = None
        for folder in self._spool.orphans(of_any_host=of_any_host):
            self._salvaging.add(folder)
            try:
                if salvager is None:
                    salvager = self._salvager()
                if salvager.by.writer == folder.writer:
                    continue
                done += salvager.take(folder)
            except WriterEndedError:
                return done
            except Exception as error:  # noqa: BLE001 - a sink is anybody's code
                done += Salvaged(error=f"{type(error).__name__}: {error}", left=1)
            finally:
                folder.release()
                self._salvaging.discard(folder)
            failed += done.error is not None
            if failed > _FAILED_FOLDERS or self._stop.is_set():
                break
        return done

    def _salvager(self) -> Salvager:
        writer = self._writers.of(None)
        if writer.certifying.is_lacking:
            with self._lock:
                self._changed.wait_for(lambda: not writer.certifying.is_lacking, _IDENTITY_S)
        if writer.certifying.is_lacking:
            raise AuditError(f"nobody vouches for who salvages: {writer.certifying.error}")
        return Salvager(
            by=writer.key,
            certificate=writer.certifying.certificate,
            send=self._delivery.put,
            record=self.record,
            again=self._again,
            now_ms=self._settings.now_ms,
            may_go_on=lambda: not self._stop.is_set() and not self._waiting,
        )

    def _again(self, run: str | None, writer: str, events: list[Event]) -> None:
        self._renewing.record_again(run, writer, events, why="its segment cannot stand under its id")
        self._tell()

    # --------------------------------------------------------------------------------------------------- ends

    def disown(self) -> None:
        """After a fork, in the child: nothing here is the child's."""
        for writer in self._writers.all():
            writer.disown()
        for folder in list(self._salvaging):
            folder.disown()


def about(act: Act) -> str:
    """An act, for errors."""
    about = "" if act.checkpoint is None else f" of {act.checkpoint.folder}"
    run = "" if act.run is None else f" (run {act.run})"
    return f"{act.action.value}{about}{run}"
