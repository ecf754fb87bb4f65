"""The writers of one process: one for each run, made with its first event and ended when it is idle."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar

from strongroom.auditing import Act
from strongroom.errors import FormatError
from strongroom.manifest import check_run_id
from strongroom_security.auditlog.format.events import Actor
from strongroom_security.auditlog.format.segments import WriterKey
from strongroom_security.auditlog.recording.actors import Actors
from strongroom_security.auditlog.recording.certifying import Certifying
from strongroom_security.auditlog.recording.settings import Settings
from strongroom_security.auditlog.recording.spool import Spool
from strongroom_security.auditlog.recording.writing import RunWriter, WriterEndedError

__all__ = ["IDLE_S", "Writers", "usable_run"]

_T = TypeVar("_T")

_MANY: Final = 16
"""More than so many runs at once have those ended that were idle longest."""
IDLE_S: Final = 1.0
"""For which one of too many was idle."""


class Writers:
    """Who writes which run's events; used by all threads, and by handlers of signals.

    Args:
        settings: what a writer is told.
        actors: on which host they are.
        spool: where their segments wait.
        lock: may be entered again.
        aside: takes an act that could not be recorded now.
        tell: called when an answer about a certificate has come.
        wait: waits for so many seconds, and says whether to give up.
    """

    def __init__(
        self,
        settings: Settings,
        actors: Actors,
        spool: Spool | None,
        *,
        lock: threading.RLock,
        aside: Callable[[Act, Actor, int], None],
        tell: Callable[[], None],
        wait: Callable[[float], bool],
    ) -> None:
        self.is_closing = False
        self._settings = settings
        self._actors = actors
        self._spool = spool
        self._lock = lock
        self._aside = aside
        self._tell = tell
        self._wait = wait
        self._of_runs: dict[str | None, RunWriter] = {}
        self._ended: list[RunWriter] = []

    def all(self) -> list[RunWriter]:
        """Those in use, and those that have ended with something left to send."""
        return list(dict.fromkeys([*self._ended, *self._of_runs.copy().values()]))

    def in_use(self) -> list[RunWriter]:
        return list(self._of_runs.copy().values())

    @property
    def are_many(self) -> bool:
        return len(self._of_runs) > _MANY

    @property
    def room(self) -> int:
        """How many bytes more may wait."""
        return self._settings.spool_bytes - sum(each.pending_bytes for each in self.all())

    @property
    def error(self) -> str | None:
        """Why the spool takes nothing; None: it does."""
        return next((each.spool_error for each in self.all() if each.spool_error is not None), None)

    def with_one(self, run: str | None, work: Callable[[RunWriter], _T]) -> tuple[RunWriter, _T]:
        """What comes of something with the writer of a run, whoever that is by then."""
        while True:
            writer = self.of(run)
            try:
                return writer, work(writer)
            except WriterEndedError:
                continue  # it gave its id up just now

    def of(self, run: str | None) -> RunWriter:
        """The writer of a run.

        Raises:
            WriterEndedError: this process is being closed.
        """
        run = usable_run(run)
        writer = self._of_runs.get(run)
        if writer is not None and not writer.has_ended:
            return writer
        with self._lock:
            while True:
                if self.is_closing:
                    raise WriterEndedError
                writer = self._of_runs.get(run)
                if writer is None:
                    # A handler that comes in between makes one as well: the first is everybody's.
                    fresh = self._new(run)
                    writer = self._of_runs.setdefault(run, fresh)
                    if writer is not fresh:
                        fresh.certifying.is_pointless = True
                if not writer.has_ended:
                    return writer
                self.retire(writer)

    def of_any_time(self, run: str | None) -> RunWriter:
        """The writer of a run; in a process that is being closed and has something to say, too."""
        try:
            return self.of(run)
        except WriterEndedError:
            with self._lock:
                fresh = self._new(usable_run(run))
                self._ended.append(fresh)
            return fresh

    def _new(self, run: str | None) -> RunWriter:
        drawn, private = self._settings.draw()
        key = WriterKey(writer=drawn, run=run, private=private, host=self._actors.host, pid=self._actors.pid)
        return RunWriter(
            key,
            certifying=Certifying(self._settings.signer, key, then=self._tell, wait=self._wait),
            spool=self._spool,
            seal_events=self._settings.seal_events,
            now_ms=self._settings.now_ms,
            aside=self._aside,
        )

    def retire(self, writer: RunWriter) -> None:
        """Take a writer that has ended, or is to end, from those in use; what it has is sent all the same."""
        with self._lock:
            if writer not in self._ended:
                self._ended.append(writer)
            if self._of_runs.get(writer.key.run) is writer:
                del self._of_runs[writer.key.run]

    def close(self) -> None:
        """End all: each says that it was its last segment."""
        with self._lock:
            self.is_closing = True
            writers = self.in_use()
            for writer in writers:
                self.retire(writer)
        for writer in writers:
            writer.seal(is_last=True)

    def end_idle(self) -> None:
        """Have files, and what goes over all writers, for the runs of now, and not for all that ever were."""
        by_use = sorted(self.in_use(), key=lambda each: each.used_s)
        for writer in by_use[: max(0, len(by_use) - _MANY)]:
            if writer.used_s + IDLE_S < time.monotonic() and not writer.certifying.is_on_its_way:
                self.retire(writer)
                writer.seal(is_last=True)

    def drop_done(self) -> list[RunWriter]:
        """Those that have ended, and sent all: they are forgotten."""
        with self._lock:
            done = [each for each in self._ended if each.is_done]
            for writer in done:
                self._ended.remove(writer)
                writer.certifying.is_pointless = True
                writer.release()
            return done

    @property
    def are_done(self) -> bool:
        """Whether nothing is left of any of them, once they are closed."""
        return self.is_closing and all(each.is_done for each in self._ended)


def usable_run(run: str | None) -> str | None:
    """A run as a segment's key can name it; what is none is about no run."""
    try:
        return None if run is None else check_run_id(run)
    except FormatError:
        return None
