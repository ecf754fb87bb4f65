"""One writer's files in the spool: made, written, read again, cleared away; and what a disk says to that.

Which line goes when is `writing`'s to say. A spool that hangs does so for one caller: after that lines are
written beside the program, until it is quick again.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from strongroom_security.auditlog.recording.spool import Spool, WriterFolder

__all__ = ["Segment", "WriterFiles"]

_TRY_AGAIN_S: Final = 1.0
"""After which a spool that took nothing is tried again, beside the program."""
_SLOW_S: Final = 1.0
"""A write that took so long was the last one that a caller waited for, until:"""
_QUICK_S: Final = 0.1
"""one beside the program takes no longer than this."""


@dataclass(eq=False, kw_only=True)
class Segment:
    """A segment that the sink has not got yet. Changed under its writer's lock alone, but for `is_accepted`.

    Attributes:
        key: in the sink.
        opened_s: when, on the monotonic clock; `recorded_s`: when its first event was recorded.
        on_disk: bytes that the spool has, and that count.
        backlog: what the spool has not taken yet, in order.
        may_stand: whether it was sent without an answer, so that it may stand in the sink.
        is_flushing: a thread is writing to its file without the lock, and closes it afterwards.
        is_frozen: the file ends in what does not count, and takes no more.
        is_forgotten: it need not wait here any more.
        instead: the segment that its events were recorded in again; None: they stand in this one.
        is_lost: somebody has removed it from the spool.
    """

    key: str
    number: int
    is_certified: bool
    opened_s: float
    recorded_s: float = 0.0
    events: int = 0
    size_bytes: int = 0
    on_disk: int = 0
    backlog: deque[bytes] = field(default_factory=deque)
    descriptor: int | None = None
    is_closed: bool = False
    is_synced: bool = False
    is_renamed: bool = False
    is_accepted: bool = False
    is_forgotten: bool = False
    is_flushing: bool = False
    is_frozen: bool = False
    may_stand: bool = False
    instead: Segment | None = None
    is_lost: bool = False

    @property
    def is_settled(self) -> bool:
        """Whether its events are in the sink."""
        return self.is_accepted if self.instead is None else self.instead.is_settled


class WriterFiles:
    """The files of one writer.

    Args:
        spool: where they are; None: nowhere, and lines wait in memory alone.
        writer: its id.

    Attributes:
        error: why the spool takes nothing; None: it does.
        lock: held by whoever renames, reads or removes; never by who records.
    """

    def __init__(self, spool: Spool | None, writer: str) -> None:
        self.error: str | None = None
        self.lock: Final = threading.RLock()
        self._spool = spool
        self._writer = writer
        self._folder: WriterFolder | None = None
        self._tried_s = -math.inf

    @property
    def is_slow(self) -> bool:
        """Whether a caller waited too long for the last write."""
        return self._spool is not None and self._spool.is_slow

    def open(self, segment: Segment) -> bool:
        """Whether there is a file for a segment; it is made where it is not."""
        if segment.is_frozen:
            return False
        if segment.descriptor is not None:
            return True
        if self._spool is None or time.monotonic() - self._tried_s < _TRY_AGAIN_S:
            return False
        began = time.monotonic()
        try:
            segment.descriptor = self._create(self._spool, segment.number)
        except OSError as error:
            self._told(error)
            return False
        finally:
            self._spool.is_slow = self._spool.is_slow or time.monotonic() - began > _SLOW_S
        return True

    def _create(self, spool: Spool, number: int) -> int:
        if self._folder is None:
            self._folder = spool.begin(self._writer)
        try:
            return self._folder.create(number)
        except FileNotFoundError:
            # Somebody has removed the folder: what comes from now on has another.
            self._folder.disown()
            self._folder = None
            self._folder = spool.begin(self._writer)
            return self._folder.create(number)

    def write(self, segment: Segment, data: bytes, *, is_beside: bool = False) -> int:
        """Append to a segment's file; how much of it was.

        Args:
            is_beside: nobody waits for it: a quick write says that the spool is quick again.
        """
        began = time.monotonic()
        try:
            written = os.write(segment.descriptor or 0, data)
        except OSError as error:
            self._told(error)
            return 0
        finally:
            if self._spool is not None:
                took_s = time.monotonic() - began
                self._spool.is_slow = took_s > (_QUICK_S if is_beside else _SLOW_S)
        if written == len(data):
            self.error = None
        return written

    def _told(self, error: OSError) -> None:
        self.error = f"{error.strerror or type(error).__name__}: {error.filename or 'the spool'}"
        self._tried_s = time.monotonic()

    def cut(self, segment: Segment) -> None:
        """Take off a file's end what does not count."""
        if segment.descriptor is None or segment.is_flushing:
            return  # who flushes writes only what counts
        try:
            if os.fstat(segment.descriptor).st_size > segment.on_disk:
                os.ftruncate(segment.descriptor, segment.on_disk)
        except OSError:
            segment.is_frozen = True

    def undo(self, segment: Segment) -> None:
        """Remove the file of a segment that never began."""
        self.close(segment)
        if self._folder is not None:
            with contextlib.suppress(OSError):
                self._folder.remove_open(segment.number)

    @staticmethod
    def close(segment: Segment) -> None:
        """Let go of a segment's file; who is writing to it does that afterwards."""
        descriptor = segment.descriptor
        if descriptor is not None and not segment.is_flushing:
            segment.descriptor = None
            os.close(descriptor)

    def sync(self, segment: Segment) -> None:
        """See a closed segment to stable storage here, as far as that can be done."""
        with self.lock:
            folder = self._folder
            is_whole = segment.is_closed and not segment.backlog and segment.on_disk > 0
            if folder is None or not is_whole or segment.is_synced or segment.is_forgotten:
                return
            try:
                if not segment.is_renamed:
                    folder.close_segment(segment.number)
                    segment.is_renamed = True
                folder.sync(segment.number)
            except OSError as error:
                if not segment.is_forgotten:
                    self._told(error)
                return
            segment.is_synced = True

    def read(self, segment: Segment, length: int, descriptor: int | None) -> bytes:
        """What counts of a segment's file: of one that was removed, too, while it is open.

        Args:
            length: how many bytes do.
            descriptor: another one of the file's; it is closed. None: by its name.

        Raises:
            OSError: it cannot be read.
        """
        if descriptor is not None:
            with open(descriptor, "rb") as file:
                file.seek(0)
                return file.read(length)
        if not length or self._folder is None:
            return b""
        return self._folder.read(segment.number, is_closed=segment.is_renamed)[:length]

    def clear(self, segment: Segment, *, is_last: bool) -> None:
        """Remove a segment's file, and the folder after the last one."""
        with self.lock:
            if self._folder is not None:
                # What cannot be removed is found there again later, and in the sink.
                with contextlib.suppress(OSError):
                    self._folder.remove(segment.number)
            if is_last:
                self.release()

    def release(self) -> None:
        """Let the folder go; what waits in it is the next process's."""
        with self.lock:
            folder, self._folder = self._folder, None
            if folder is not None:
                folder.release()

    def disown(self) -> None:
        """After a fork, in the child: the folder stays the parent's."""
        if self._folder is not None:
            self._folder.disown()
