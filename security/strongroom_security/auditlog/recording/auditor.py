"""Fills the core's seam: acts go into the log beside the program; what reads waits for the sink, what writes
never does.

It owns which process records: a forked child begins anew, and only once it records something; auditors
that were told the same share one record, which ends when they are all gone; the end of a program is the
end of its record. What a process does with an act is `recording`'s.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing.process
import multiprocessing.util
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Final, TypeVar

from strongroom.auditing import Act
from strongroom.errors import AuditError
from strongroom.layout import CheckpointName
from strongroom_security.auditlog.recording.recording import Recording, about
from strongroom_security.auditlog.recording.salvage import Salvaged
from strongroom_security.auditlog.recording.settings import AuditState, Settings
from strongroom_security.auditlog.recording.writing import WriterEndedError

__all__ = ["LogAuditor"]

_LOG: Final = logging.getLogger("strongroom")
_T = TypeVar("_T")

_AT_EXIT_S: Final = 5.0
_MAX_UNRECORDED: Final = 10_000


class LogAuditor:
    """Keeps the record; see `strongroom.auditing.Auditor`. Building one touches and starts nothing."""

    is_on = True

    def __init__(self, settings: Settings) -> None:
        self.settings: Final = settings
        self._process: Recording | None = None
        self._unrecorded: deque[tuple[int, Act]] = deque(maxlen=_MAX_UNRECORDED)

    @property
    def sink(self) -> str:
        """See `strongroom.auditing.Sinking.sink`."""
        return self.settings.sink

    def record(self, act: Act) -> None:
        """See `strongroom.auditing.Auditor.record`."""
        try:
            self._with(lambda process: process.record(act))
        except Exception as error:  # noqa: BLE001 - what is recorded must not fail for it
            _LOG.error("an event of the audit log was lost: %s: %s", type(error).__name__, error)
            self._lose(act)

    def intend(self, act: Act) -> None:
        """See `strongroom.auditing.Auditor.intend`."""
        until = time.monotonic() + self.settings.intent_s
        try:
            self._with(lambda process: process.intend(act, until))
        except AuditError:
            raise
        except Exception as error:  # what cannot be put on record is not read, whatever the reason
            raise AuditError(
                f"{about(act)} could not be put on record first ({type(error).__name__}: {error}); nothing "
                f"was read"
            ) from error

    def secure(self, *, within_s: float) -> None:
        """See `strongroom.auditing.Auditor.secure`. What is in no safe hands by then is told."""
        process = self._process
        if process is None or not process.is_here:
            return
        left = process.secure(time.monotonic() + within_s)
        if left:
            _LOG.warning(
                "%d events of the audit log are neither in %s nor on stable storage here (%s), and what they "
                "are about goes on: they are lost if this machine fails before that is over",
                left,
                self.settings.sink,
                process.state().error or "they took too long",
            )

    def close(self, *, within_s: float) -> None:
        """See `strongroom.auditing.Auditor.close`. It is done at the end of the program, too."""
        process, self._process = self._process, None
        if process is None or not process.is_here:
            return
        until = time.monotonic() + within_s
        if process.let_go(self):
            process.close(until)
        else:
            process.secure(until)  # others go on with it

    def knows(self, run: str, checkpoint: CheckpointName) -> bool | None:
        """See `strongroom.auditing.Knowing.knows`."""
        return self._with(lambda process: process.knows(run, checkpoint))

    def state(self) -> AuditState:
        """How it stands, for whoever watches."""
        process = self._process
        found = process.state() if process is not None and process.is_here else AuditState()
        return replace(found, lost=found.lost + sum(pid == os.getpid() for pid, _ in self._unrecorded))

    def salvage(self, *, of_any_host: bool = False) -> Salvaged:
        """Send what dead processes left here for this sink; on this thread, however long it takes.

        Args:
            of_any_host: in a spool that machines share, take what others have left in the last 24 hours, too:
                their processes have to be dead.
        """
        return self._with(lambda process: process.salvage(of_any_host=of_any_host))

    def _with(self, work: Callable[[Recording], _T]) -> _T:
        while True:
            process = self._here()
            try:
                return work(process)
            except WriterEndedError:
                with _STATE.lock:
                    if self._process is process:
                        self._process = None

    def _lose(self, act: Act) -> None:
        """Have it counted: by this process's record, or by the next one where there is none."""
        process = self._process
        if process is not None and process.is_here:
            process.lose(act)
        else:
            self._unrecorded.append((os.getpid(), act))

    def _here(self) -> Recording:
        process = self._process
        if process is not None and process.is_here:
            return process
        with _STATE.lock:
            process = self._process
            if process is None or not process.is_here:
                process = _STATE.recording(self.settings)
                process.hold(self)
                self._process = process
                while self._unrecorded:
                    pid, lost = self._unrecorded.popleft()
                    if pid == os.getpid():  # a fork has the list of what its parent lost
                        process.lose(lost)
                _at_the_end_of_this_process()
            return process


class _State:
    """Of this process: which auditors live, and who may make another."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.live: set[Recording] = set()
        self.shared: dict[Hashable, Recording] = {}
        self.is_registered = False

    def recording(self, settings: Settings) -> Recording:
        """The record of whoever was told the same, if there is one; else a new one."""
        same = settings.same
        found = None if same is None else self.shared.get(same)
        if found is None or not found.is_here or not found.is_open:
            found = Recording(settings, then=self._forget)
            self.live.add(found)
            if same is not None:
                self.shared[same] = found
        return found

    def _forget(self, recording: Recording) -> None:
        self.live.discard(recording)
        for same in [same for same, each in list(self.shared.items()) if each is recording]:
            self.shared.pop(same, None)


_STATE = _State()


def _forget_after_fork() -> None:
    live = list(_STATE.live)
    # Whoever held the lock is not in the child.
    _STATE.lock = threading.RLock()
    _STATE.live = set()
    _STATE.shared = {}
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
    # Whoever records after this registers anew; what comes too late for that, the next start sends.
    _STATE.is_registered = False
    until = time.monotonic() + _AT_EXIT_S
    for process in list(_STATE.live):
        if process.is_here:
            process.close(until)
