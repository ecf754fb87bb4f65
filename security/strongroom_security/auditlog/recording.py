"""What one process puts on record, from its first event until it is closed: which writer takes what, and when
its segments are sealed, sent, or given up.

Two threads serve all writers of the process: one seals segments and sees them to stable storage here, one
sends them. How a line is written is `writing`'s to say, what a dead process left is `salvage`'s.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NoReturn, TypeVar

from strongroom.auditing import Act, Action, Outcome, Phase
from strongroom.errors import AuditError, FormatError, StrongroomError
from strongroom.layout import CheckpointName
from strongroom.manifest import check_run_id
from strongroom.stores.base import Store
from strongroom_security.auditlog.actors import Actors
from strongroom_security.auditlog.certifying import Certifying
from strongroom_security.auditlog.forwarding import Forwarding, receiver_of
from strongroom_security.auditlog.knowing import Known
from strongroom_security.auditlog.salvage import Event, Salvaged, Salvager, missing_events, recorded_again
from strongroom_security.auditlog.segments import WriterKey, read_segment
from strongroom_security.auditlog.sending import Pace, Teller
from strongroom_security.auditlog.settings import AuditState, Settings
from strongroom_security.auditlog.spool import find_spool
from strongroom_security.auditlog.uploading import upload
from strongroom_security.auditlog.writing import RunWriter, Segment, WriterEndedError

__all__ = ["Recording", "about"]

_LOG: Final = logging.getLogger("strongroom")
_T = TypeVar("_T")

_UPLOAD_S: Final = 60.0
_IDLE_S: Final = 60.0
_SPOOL_AGAIN_S: Final = 1.0
_IDENTITY_S: Final = 10.0
_SALVAGE_EVERY_S: Final = 900.0
_SALVAGE_AGAIN_S: Final = 60.0
_FAILED_FOLDERS: Final = 3
"""After which the sink is taken to be away, and not just closed to some run's segments."""
_NO_OPERATION: Final = "0" * 16
_ANY_ROOM: Final = sys.maxsize


class Recording:
    """An auditor in one process; used by all of its threads, and by no fork of it.

    Args:
        settings: what the auditor was told.
        then: called once it was closed and everything is in the sink.
    """

    def __init__(self, settings: Settings, *, then: Callable[[Recording], None]) -> None:
        self._settings = settings
        self._then = then
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
        self._known = Known(settings.open_sink)
        self._actors = Actors(
            role=settings.role,
            session_of=settings.session_of,
            asks_aws=settings.asks_aws,
            environment=dict(os.environ),
        )
        self._forwarding = Forwarding([receiver_of(text) for text in settings.also])
        self._spool = find_spool(settings.spool, settings.sink)
        self._sink_teller = Teller(
            f"the audit log's sink {settings.sink} takes nothing; events wait here",
            f"the audit log's sink {settings.sink} takes events again",
        )
        self._spool_teller = Teller(
            "the audit log's spool takes nothing; events wait in memory, and are lost with this process",
            "the audit log's spool takes events again",
        )
        self._lost_teller = Teller("the audit log has no room left for", "the audit log has room again")

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
        self._known.note(act)
        segment, line = added
        self._forwarding.put(line[:-1])
        if segment.events == 1 or segment.is_closed:
            self._wake()

    def lose(self, act: Act) -> None:
        """Count what could not be recorded for a reason that nobody foresaw; it is told in the log later."""
        self._lose(act)
        self._wake()

    def knows(self, run: str, checkpoint: CheckpointName) -> bool | None:
        return None if _usable(run) is None else self._known.knows(run, checkpoint)

    def intend(self, act: Act, until: float) -> None:
        writer = self._writer(act.run)
        if writer.certifying.is_lacking:
            with self._changed:
                self._changed.wait_for(lambda: not writer.certifying.is_lacking, until - time.monotonic())
            if writer.certifying.is_lacking:
                self.record(act)  # that it was tried
                why = writer.certifying.error or "it did not answer"
                self._refuse(act, f"the signer of the audit log vouches for no writer here: {why}")
        within_s = min(_IDENTITY_S, max(0.0, (until - time.monotonic()) / 2))
        self._actors.wait_for_identity(act, within_s)
        actor = self._actors.of(act)
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
            f"{about(act)} could not be put on record first: {why}. Nothing was read; see that the sink can "
            f"be reached and that this identity may create objects under segments/ there, then do it again"
        )

    def _append(self, act: Act) -> tuple[Segment, bytes] | None:
        actor = self._actors.of(act)
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
        if not self._lost or self._is_closing or self._room() <= 0:
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
                reason=f"{sum(kinds.values())} events were lost: no room, a spool removed, or a failure",
                details={"lost_events": sum(kinds.values()), **kinds},
            )
            try:
                added = self._append(act)
            except Exception as error:  # noqa: BLE001 - of whatever kind: what was lost stays counted
                _LOG.debug("what was lost of the audit log cannot be told yet: %s", error)
                added = None
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
        self._then(self)

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
        _LOG.warning(
            "the audit log's writer %s ends: %s; of %d events that were not sent, %d are recorded again",
            writer.key.writer,
            why,
            sum(segment.events for segment in left),
            len(all_missing),
        )
        last: Segment | None = None
        # At the end of a program a new writer would say that, and nothing else.
        if all_missing or not self._is_closing:
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
        fresh.append(act, self._actors.of(act), room=_ANY_ROOM)
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
        done, failed = Salvaged(), 0
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
            failed += done.error is not None
            if failed > _FAILED_FOLDERS or self._stop.is_set():
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


def _usable(run: str | None) -> str | None:
    """A run as a segment's key can name it; what is none is about no run."""
    try:
        return None if run is None else check_run_id(run)
    except FormatError:
        return None


def about(act: Act) -> str:
    """An act, for errors."""
    about = "" if act.checkpoint is None else f" of {act.checkpoint.folder}"
    run = "" if act.run is None else f" (run {act.run})"
    return f"{act.action.value}{about}{run}"
