"""One writer of this process: its lines on their way to the spool, and its segments on their way to the sink.

A line is in the kernel's hands once `RunWriter.append` returns: a killed process loses none. Where the spool
takes nothing (a full disk), lines wait in memory, in order; the sink gets segments from both. When a segment
is sealed by its age, and when it is sent, is `auditor`'s to say.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from strongroom.auditing import Act
from strongroom.errors import StrongroomError
from strongroom_security.auditlog.certifying import Certifying
from strongroom_security.auditlog.events import Actor
from strongroom_security.auditlog.segments import SegmentChain, WriterKey
from strongroom_security.auditlog.spool import Spool, WriterFolder

__all__ = ["MEMORY_LINES", "RunWriter", "Segment", "WriterEndedError"]

MEMORY_LINES: Final = 10_000
"""That a writer keeps in memory while the spool takes none."""

_SEGMENT_BYTES: Final = 8 << 20
"""After which a segment is sealed, however few events it has: it goes to the sink as one object."""
_WRITE_BYTES: Final = 1 << 20
_TRY_AGAIN_S: Final = 1.0
"""After which a spool that took nothing is tried again, beside the program."""


class WriterEndedError(Exception):
    """The writer has ended, and takes nothing more; another one does."""


@dataclass(eq=False, kw_only=True)
class Segment:
    """A segment that the sink has not got yet. Changed under its writer's lock alone, but for `is_accepted`.

    Attributes:
        key: in the sink.
        opened_s: when, on the monotonic clock; `recorded_s`: when its first event was recorded.
        on_disk: bytes that the spool has.
        backlog: what the spool has not taken yet, in order.
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
    instead: Segment | None = None
    is_lost: bool = False

    @property
    def is_settled(self) -> bool:
        """Whether its events are in the sink."""
        return self.is_accepted if self.instead is None else self.instead.is_settled


class RunWriter:
    """The writer of one run's events in this process; used by any thread.

    Args:
        key: whose chain it is.
        certifying: its certificate, there or on its way.
        spool: where segments wait; None: in memory alone.
        seal_events: how many events a segment has at most.
        now_ms: the clock that events are told by.
    """

    def __init__(
        self,
        key: WriterKey,
        *,
        certifying: Certifying,
        spool: Spool | None,
        seal_events: int,
        now_ms: Callable[[], int],
    ) -> None:
        self.key: Final = key
        self.certifying: Final = certifying
        self.has_ended = False
        self.spool_error: str | None = None
        self.pending_events = 0
        self.pending_bytes = 0
        self._in_memory = 0
        self._seal_events = seal_events
        self._lock = threading.Lock()
        self._chain = SegmentChain(key)
        self._spool = spool
        self._folder: WriterFolder | None = None
        self._tried_s = -math.inf
        self._now_ms = now_ms
        self._current: Segment | None = None
        self._sealed: deque[Segment] = deque()

    # ------------------------------------------------------------------------------------------------ writing

    def append(
        self, act: Act, actor: Actor, *, time_ms: int | None = None, room: int
    ) -> tuple[Segment, bytes] | None:
        """Add an event; where it stands, and its line. None: there is no room for it.

        Args:
            time_ms: when it was; None: now.
            room: how many bytes the spool may hold more.

        Raises:
            WriterEndedError: take another writer.
        """
        with self._lock:
            return self._append(act, actor, time_ms, room)

    def append_alone(self, act: Act, actor: Actor, *, room: int) -> tuple[Segment, bytes] | None:
        """As `append`, and seal its segment, which has the certificate if there is one by now."""
        with self._lock:
            if not self.has_ended and self._current is not None and self._could_be_certified(self._current):
                self._seal(is_last=False)
            added = self._append(act, actor, None, room)
            if added is not None and not added[0].is_closed:
                self._seal(is_last=False)
            return added

    def _append(self, act: Act, actor: Actor, time_ms: int | None, room: int) -> tuple[Segment, bytes] | None:
        if self.has_ended:
            raise WriterEndedError
        if room <= 0 or self._in_memory >= MEMORY_LINES:
            return None
        segment = self._current or self._open()
        now_ms = self._now_ms() if time_ms is None else time_ms
        try:
            line = self._chain.add(act, actor, time_ms=now_ms)
        except StrongroomError:
            # Too long for a line, or of values that JSON has no spelling for; that it was is what counts.
            line = self._chain.add(_bare(act), actor, time_ms=now_ms)
        segment.events += 1
        self.pending_events += 1
        if segment.events == 1:
            segment.recorded_s = time.monotonic()
        self._write(segment, line)
        if segment.events >= self._seal_events or segment.size_bytes >= _SEGMENT_BYTES:
            self._seal(is_last=False)
        return segment, line

    def open_next(self) -> None:
        """Begin the next segment before its first event, so that a dead process leaves one to be closed."""
        with self._lock:
            has_begun = self._chain.segment > 0 and not self.has_ended
            if has_begun and self._current is None and not self.certifying.is_lacking:
                self._open()

    def seal(self, *, is_last: bool = False, at_least: int = 1) -> bool:
        """Close the open segment, if it holds so many events; whether it did.

        Args:
            is_last: the writer ends, whatever the segment holds.
        """
        with self._lock:
            if self.has_ended:
                return False
            if is_last and not self._chain.segment:
                self.has_ended = True  # it never began
                return False
            if is_last:
                if self._current is not None and self._could_be_certified(self._current):
                    self._seal(is_last=False)
                if self._current is None:
                    self._open()
                self._seal(is_last=True)
                self.has_ended = True
                return True
            if self._current is None or self._current.events < at_least:
                return False
            self._seal(is_last=False)
            return True

    def _could_be_certified(self, segment: Segment) -> bool:
        """Whether the certificate has come since a segment was opened without."""
        return not segment.is_certified and not self.certifying.is_lacking

    def _open(self) -> Segment:
        certificate = self.certifying.certificate
        line = self._chain.open(time_ms=self._now_ms(), certificate=certificate)
        segment = self._current = Segment(
            key=self._chain.key,
            number=self._chain.segment,
            is_certified=certificate is not None or not self.certifying.is_needed,
            opened_s=time.monotonic(),
        )
        self._write(segment, line)
        return segment

    def _seal(self, *, is_last: bool) -> None:
        segment = self._current
        if segment is None:
            return
        self._write(segment, self._chain.close(time_ms=self._now_ms(), is_last=is_last))
        segment.is_closed = True
        self._current = None
        self._sealed.append(segment)
        self._settle(segment)

    def _write(self, segment: Segment, line: bytes) -> None:
        segment.size_bytes += len(line)
        self.pending_bytes += len(line)
        # In order over all segments: what stands behind a hole could not be salvaged.
        if self._in_memory or not self._can_write(segment):
            segment.backlog.append(line)
            self._in_memory += 1
            return
        try:
            written = os.write(segment.descriptor or 0, line)
        except OSError as error:
            self._told(error)
            written = 0
        segment.on_disk += written
        if written == len(line):
            self.spool_error = None
        else:
            segment.backlog.append(line[written:])
            self._in_memory += 1

    def _can_write(self, segment: Segment) -> bool:
        """Whether there is a file for a segment; it is made where it is not."""
        if segment.descriptor is not None:
            return True
        if self._spool is None or time.monotonic() - self._tried_s < _TRY_AGAIN_S:
            return False
        try:
            if self._folder is None:
                self._folder = self._spool.begin(self.key.writer)
            segment.descriptor = self._folder.create(segment.number)
        except OSError as error:
            self._told(error)
            return False
        return True

    def _told(self, error: OSError) -> None:
        self.spool_error = f"{error.strerror or type(error).__name__}: {error.filename or 'the spool'}"
        self._tried_s = time.monotonic()

    def _settle(self, segment: Segment) -> None:
        """Close the file of a closed segment, once it is whole."""
        if segment.is_closed and not segment.backlog and segment.descriptor is not None:
            os.close(segment.descriptor)
            segment.descriptor = None
            if self._folder is not None:
                try:
                    self._folder.close_segment(segment.number)
                except OSError as error:
                    self._told(error)
                    return
            segment.is_renamed = True

    # --------------------------------------------------------------------------------- beside the program

    def flush(self) -> None:
        """Write what waits in memory to the spool, as far as it takes it now."""
        if not self._in_memory:
            return
        with self._lock:
            for segment in self._all():
                while segment.backlog:
                    if not self._can_write(segment) or not self._flush_one(segment):
                        return
                self._settle(segment)

    def _flush_one(self, segment: Segment) -> bool:
        data = bytearray()
        count = 0
        for line in segment.backlog:
            data += line
            count += 1
            if len(data) >= _WRITE_BYTES:
                break
        try:
            written = os.write(segment.descriptor or 0, data)
        except OSError as error:
            self._told(error)
            return False
        segment.on_disk += written
        self.spool_error = None
        for _ in range(count):
            segment.backlog.popleft()
        self._in_memory -= count
        if written < len(data):
            segment.backlog.appendleft(bytes(data[written:]))
            self._in_memory += 1
            return False
        return True

    def sync(self, segment: Segment) -> None:
        """See a closed segment to stable storage here, as far as that can be done."""
        folder = self._folder
        if folder is None or segment.is_synced or segment.is_accepted or not segment.is_renamed:
            return
        try:
            folder.sync(segment.number)
        except OSError as error:
            if not segment.is_accepted:
                self._told(error)
            return
        segment.is_synced = True

    def content(self, segment: Segment) -> bytes:
        """All of a closed segment, from wherever it waits.

        Raises:
            OSError: the spool cannot be read.
        """
        with self._lock:
            folder, on_disk, rest = self._folder, segment.on_disk, b"".join(segment.backlog)
            is_renamed = segment.is_renamed
        if not on_disk or folder is None:
            return rest
        return folder.read(segment.number, is_closed=is_renamed)[:on_disk] + rest

    def accepted(self, segment: Segment) -> None:
        """The sink has it: it need not wait here any more."""
        with self._lock:
            segment.is_accepted = True
            self._forget(segment)

    def _forget(self, segment: Segment) -> None:
        with contextlib.suppress(ValueError):
            self._sealed.remove(segment)
            self.pending_events -= segment.events
            self.pending_bytes -= segment.size_bytes
        self._in_memory -= len(segment.backlog)
        segment.backlog.clear()
        if segment.descriptor is not None:
            os.close(segment.descriptor)
            segment.descriptor = None
        if self._folder is not None:
            # What cannot be removed is found there again later, and in the sink.
            with contextlib.suppress(OSError):
                self._folder.remove(segment.number)
        if self.has_ended and not self._sealed and self._folder is not None:
            self._folder.release()
            self._folder = None

    def give_up(self) -> list[Segment]:
        """End it, since another has its id; what the sink has not got, first first, the open one included."""
        with self._lock:
            self.has_ended = True
            left = list(self._all())
            self._current = None
            self._sealed.clear()
            self._sealed.extend(left)
            return left

    def replaced(self, segment: Segment, by: Segment | None, *, is_lost: bool = False) -> None:
        """A segment's events stand in another one, of another writer; None: in the sink, or nowhere."""
        with self._lock:
            segment.instead = by
            segment.is_lost = is_lost
            segment.is_accepted = by is None and not is_lost
            self._forget(segment)

    # ------------------------------------------------------------------------------------------------ looking

    def _all(self) -> list[Segment]:
        return [*self._sealed, *([] if self._current is None else [self._current])]

    @property
    def current(self) -> Segment | None:
        return self._current

    def sealed(self) -> list[Segment]:
        """The closed segments that the sink has not got, first first."""
        with self._lock:
            return list(self._sealed)

    @property
    def is_done(self) -> bool:
        """Whether it has ended, and nothing of it waits."""
        return self.has_ended and not self._sealed

    @property
    def oldest_s(self) -> float | None:
        """When, on the monotonic clock, the oldest event was recorded that waits; None: none does."""
        with self._lock:
            return next((segment.recorded_s for segment in self._all() if segment.events), None)

    def disown(self) -> None:
        """After a fork, in the child: nothing is the child's, and nobody is there to release the lock."""
        for segment in self._all():
            descriptor, segment.descriptor = segment.descriptor, None
            if descriptor is not None:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        if self._folder is not None:
            self._folder.disown()

    def release(self) -> None:
        """Let the folder go: the process ends, and what waits there is the next one's."""
        with self._lock:
            if self._folder is not None:
                self._folder.release()
                self._folder = None


def _bare(act: Act) -> Act:
    return replace(act, path=None, reason=None, details={"shortened": True})
