"""Segments on their way into the sink, one at a time: what is tried when, and what comes of a try."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Final

from strongroom.errors import OutcomeUnknownError, StoreUnavailableError, StrongroomError
from strongroom.stores.base import Store
from strongroom_security.auditlog.recording.sending import Pace, Teller
from strongroom_security.auditlog.recording.settings import Settings
from strongroom_security.auditlog.recording.uploading import upload
from strongroom_security.auditlog.recording.writing import RunWriter, Segment

__all__ = ["Delivery"]

_UPLOAD_S: Final = 60.0
_HANGS_S: Final = 1.0
"""After which a sink that does not answer is one that is away, to who waits for what is safe here as well."""
_IDS_AT_ONCE: Final = 3
"""Given up one after the other because something else stood there, with nothing accepted in between; after
them it is the sink that is taken to be wrong, and an id is given up only after so many tries:"""
_TRIES_OF_AN_ID: Final = 8


class Delivery:
    """Sends segments; used by one thread, and looked at by all.

    Args:
        settings: where the sink is.
        changed: told whenever a try has ended; of a lock that may be entered again.
        lock: of ``changed``.
        is_urgent: whether somebody waits for a run's segments.

    Attributes:
        failures: tries in a row that failed; `failed_tries`: all of them.
        error: why the last one did; None: it did not.
    """

    def __init__(
        self,
        settings: Settings,
        changed: threading.Condition,
        lock: threading.RLock,
        *,
        is_urgent: Callable[[str | None], bool],
    ) -> None:
        self.failures = 0
        self.failed_tries = 0
        self.error: str | None = None
        self._settings = settings
        self._changed = changed
        self._lock = lock
        self._is_urgent = is_urgent
        self._store: Store | None = None
        self._paces: dict[str, Pace] = {}
        self._began_s: float | None = None
        self._refused = 0
        self._teller = Teller(
            f"the audit log's sink {settings.sink} takes nothing; events wait here",
            f"the audit log's sink {settings.sink} takes events again",
        )

    @property
    def is_hanging(self) -> bool:
        """Whether a try has had no answer for a while."""
        began = self._began_s
        return began is not None and time.monotonic() - began > _HANGS_S

    def pace(self, writer: RunWriter) -> Pace:
        return self._paces.setdefault(writer.key.writer, Pace())

    def hurry(self, writers: Iterable[RunWriter]) -> None:
        for writer in writers:
            self.pace(writer).hurry()

    def forget(self, writer: RunWriter) -> None:
        """It has ended, and sent all."""
        self._paces.pop(writer.key.writer, None)

    def send(self, writer: RunWriter, segment: Segment) -> tuple[bytes, str] | None:
        """Try to send a segment. What comes back says that its writer's id cannot be used any more.

        Returns:
            what stands in the sink in its place, and why the id is to be given up; None: it is there, or
            is to be tried again.
        """
        pace = self.pace(writer)
        try:
            writer.sync(segment)
            try:
                data = writer.content(segment)
            except FileNotFoundError as error:
                return b"", f"its spool was removed ({error.filename})"
            found = self._send(writer, segment, data)
            if found is not None:
                if self._refused >= _IDS_AT_ONCE and pace.failures < _TRIES_OF_AN_ID:
                    raise StoreUnavailableError(
                        f"something else stands at {segment.key} in {self._settings.sink}, as at "
                        "whatever was sent before it: see what answers there"
                    )
                self._refused += 1
                return found, "another process writes under its id"
            writer.accepted(segment)
        except Exception as error:  # noqa: BLE001 - a sink is anybody's code, and this thread must not die of it
            self._failed(writer, error)
            return None
        with self._lock:
            pace.succeeded()
            self._refused = self.failures = 0
            self.error = None
            self._changed.notify_all()
        self._teller.working()
        return None

    def _send(self, writer: RunWriter, segment: Segment, data: bytes) -> bytes | None:
        try:
            return self.put(
                segment.key, data, is_urgent=self._is_urgent(writer.key.run), may_stand=segment.may_stand
            )
        except Exception as error:
            if isinstance(error, OutcomeUnknownError) or not isinstance(error, StrongroomError):
                segment.may_stand = True
            raise

    def put(self, key: str, data: bytes, *, is_urgent: bool = False, may_stand: bool = False) -> bytes | None:
        """See `upload`."""
        self._began_s = time.monotonic()
        try:
            store = self._store
            if store is None:
                store = self._store = self._settings.open_sink()
            within_s = self._settings.intent_s if is_urgent else _UPLOAD_S
            return upload(store, key, data, within_s=within_s, may_stand=may_stand)
        finally:
            self._began_s = None

    def _failed(self, writer: RunWriter, error: Exception) -> None:
        self._store = None  # a folder's store refuses for good after a failed fsync; a new one looks again
        with self._lock:
            self.pace(writer).failed(in_a_hurry=self._is_urgent(writer.key.run))
            self.failures += 1
            self.failed_tries += 1
            self.error = f"{type(error).__name__}: {error}"[:500]
            self._changed.notify_all()
        self._teller.failing(self.error)
