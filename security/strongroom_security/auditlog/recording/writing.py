"""One writer of this process: its lines on their way to the spool, and its segments on their way to the sink.

A line is in the kernel's hands once `RunWriter.append` returns: a killed process loses none. Where the spool
takes nothing (a full disk) or takes it slowly, lines wait in memory, in order; the sink gets segments from
both. Whatever stops a change halfway (an exception out of a signal's handler, memory that ran out) undoes it;
a handler that records while a line of the same thread is being written has its act put aside. When a
segment is sealed by its age, and when it is sent, is `recording`'s to say.
"""

from __future__ import annotations

import contextlib
import copy
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from strongroom.auditing import Act
from strongroom.errors import StrongroomError
from strongroom_security.auditlog.format.events import Actor
from strongroom_security.auditlog.format.segments import SegmentChain, WriterKey
from strongroom_security.auditlog.recording.certifying import Certifying
from strongroom_security.auditlog.recording.filing import Segment, WriterFiles
from strongroom_security.auditlog.recording.spool import Spool

__all__ = ["MEMORY_LINES", "BusyError", "RunWriter", "Segment", "WriterEndedError"]

_T = TypeVar("_T")

MEMORY_LINES: Final = 10_000
"""That a writer keeps in memory while the spool takes none."""

_SEGMENT_BYTES: Final = 8 << 20
"""After which a segment is sealed, however few events it has: it goes to the sink as one object."""
_LINES_AT_ONCE: Final = 1_000
_KEPT_OPEN: Final = 8
"""Closed segments whose files stay open, newest first: what is open can be read when it was removed."""
_LAST_MS: Final = 253_402_300_799_999
"""The end of the year 9999: after it no hour has a name."""


class WriterEndedError(Exception):
    """The writer has ended, and takes nothing more; another one does."""


class BusyError(Exception):
    """This very thread is in the middle of a line: a signal's handler runs in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Before:
    """How a writer stood before a change, which is done whole or not at all."""

    chain: SegmentChain
    current: Segment | None
    sealed: int
    pending_events: int
    pending_bytes: int
    in_memory: int
    events: int
    recorded_s: float
    size_bytes: int
    on_disk: int
    backlog: int


class RunWriter:
    """The writer of one run's events in this process; used by any thread, and by handlers of signals.

    Args:
        key: whose chain it is.
        certifying: its certificate, there or on its way.
        spool: where segments wait; None: in memory alone.
        seal_events: how many events a segment has at most.
        now_ms: the clock that events are told by.
        aside: takes an act that could not be recorded now: its actor, and when it was.
    """

    def __init__(
        self,
        key: WriterKey,
        *,
        certifying: Certifying,
        spool: Spool | None,
        seal_events: int,
        now_ms: Callable[[], int],
        aside: Callable[[Act, Actor, int], None],
    ) -> None:
        self.key: Final = key
        self.certifying: Final = certifying
        self.has_ended = False
        self.used_s = time.monotonic()
        self.pending_events = 0
        self.pending_bytes = 0
        self._in_memory = 0
        self._seal_events = seal_events
        # Entered by `with` alone, which no exception out of a handler can come between.
        self._lock = threading.RLock()
        self._files = WriterFiles(spool, key.writer)
        self._before: _Before | None = None
        self._holder: int | None = None
        self._chain = SegmentChain(key)
        self._now_ms = now_ms
        self._aside = aside
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
            BusyError: a handler of a signal does this in the middle of a line; the act is put aside.
        """
        when = self._time() if time_ms is None else _in_calendar(time_ms)
        chain: SegmentChain | None = None
        try:
            with self._lock:
                if self._is_busy():
                    self._aside(act, actor, when)
                    raise BusyError
                try:
                    self._holder = threading.get_ident()
                    if not self._has_room(room):
                        return None
                    segment = self._current or self._change(self._open)
                    chain = self._chain
                    line = self._change(lambda: self._add(act, actor, when))
                    self._seal_if_full(segment)
                    return segment, line
                finally:
                    self._holder = None
        except Exception:
            raise
        except BaseException:
            if chain is None or self._chain is chain:
                self._aside(act, actor, when)  # the caller is told of something else, and not of this
            raise

    def append_alone(self, act: Act, actor: Actor, *, room: int) -> tuple[Segment, bytes] | None:
        """As `append`, and seal its segment, which has the certificate if there is one by now."""
        with self._lock:
            if self._is_busy():
                raise BusyError  # the lock stays entered, and nobody could send what is waited for
            try:
                self._holder = threading.get_ident()
                current = self._current
                if not self.has_ended and current is not None and self._could_be_certified(current):
                    self._change(self._close)
                if not self._has_room(room):
                    return None
                segment = self._current or self._change(self._open)
                when = self._time()
                line = self._change(lambda: self._add(act, actor, when))
                self._change(self._close)
                return segment, line
            finally:
                self._holder = None

    def _has_room(self, room: int) -> bool:
        if self.has_ended:
            raise WriterEndedError
        self.used_s = time.monotonic()
        return room > 0 and self._in_memory < MEMORY_LINES

    def _seal_if_full(self, segment: Segment) -> None:
        if segment.events >= self._seal_events or segment.size_bytes >= _SEGMENT_BYTES:
            self._change(self._close)

    def open_next(self) -> None:
        """Begin the next segment before its first event, so that a dead process leaves one to be closed."""
        with self._lock:
            if self._is_busy() or self._chain.segment == 0 or self.has_ended:
                return
            if self._current is None and not self.certifying.is_lacking:
                self._change(self._open)

    def seal(self, *, is_last: bool = False, at_least: int = 1) -> bool:
        """Close the open segment, if it holds so many events; whether it did.

        Args:
            is_last: the writer ends, whatever the segment holds.
        """
        with self._lock:
            if self._is_busy() or self.has_ended:
                return False
            try:
                self._holder = threading.get_ident()
                if is_last and not self._chain.segment:
                    self.has_ended = True  # it never began
                    return False
                if is_last:
                    if self._current is not None and self._could_be_certified(self._current):
                        self._change(self._close)
                    if self._current is None:
                        self._change(self._open)
                    self._change(lambda: self._close(is_last=True))
                    return True
                if self._current is None or self._current.events < at_least:
                    return False
                self._change(self._close)
                return True
            finally:
                self._holder = None

    def _could_be_certified(self, segment: Segment) -> bool:
        """Whether the certificate has come since a segment was opened without."""
        return not segment.is_certified and not self.certifying.is_lacking

    def _time(self) -> int:
        return _in_calendar(self._now_ms())

    # -------------------------------------------------------------------------------- changes, whole or not

    def _is_busy(self) -> bool:
        """Whether this thread is in the middle of something. What another one left halfway is undone."""
        if self._holder == threading.get_ident():
            return True
        self._holder = None
        self._undo()
        return False

    def _change(self, work: Callable[[], _T]) -> _T:
        """Do something to the chain and the current segment: whole, or not at all."""
        now = self._current
        self._before = _Before(
            chain=self._chain,
            current=now,
            sealed=len(self._sealed),
            pending_events=self.pending_events,
            pending_bytes=self.pending_bytes,
            in_memory=self._in_memory,
            events=0 if now is None else now.events,
            recorded_s=0.0 if now is None else now.recorded_s,
            size_bytes=0 if now is None else now.size_bytes,
            on_disk=0 if now is None else now.on_disk,
            backlog=0 if now is None else len(now.backlog),
        )
        try:
            done = work()
            self._before = None  # from here on it counts
            return done
        except BaseException:
            self._undo()
            raise

    def _undo(self) -> None:
        """Go back to before a change that was not done whole. Fine when repeated, from anywhere in it."""
        before = self._before
        if before is None:
            return
        made, segment = self._current, before.current
        if segment is None and made is not None:
            self._files.undo(made)
        if segment is not None:
            segment.events, segment.recorded_s = before.events, before.recorded_s
            segment.size_bytes, segment.on_disk = before.size_bytes, before.on_disk
            while len(segment.backlog) > before.backlog:
                segment.backlog.pop()
            segment.is_closed = False
            self._files.cut(segment)
        while len(self._sealed) > before.sealed:
            self._sealed.pop()
        self._current = segment
        self.pending_events, self.pending_bytes = before.pending_events, before.pending_bytes
        self._in_memory = before.in_memory
        self.has_ended = False
        self._chain = before.chain
        self._before = None

    def _open(self) -> Segment:
        chain, certificate = copy.copy(self._chain), self.certifying.certificate
        line = chain.open(time_ms=self._time(), certificate=certificate)
        segment = self._current = Segment(
            key=chain.key,
            number=chain.segment,
            is_certified=certificate is not None or not self.certifying.is_needed,
            opened_s=time.monotonic(),
        )
        self._write(segment, line)
        self._chain = chain
        return segment

    def _add(self, act: Act, actor: Actor, time_ms: int) -> bytes:
        segment, chain = self._current, copy.copy(self._chain)
        if segment is None:
            raise WriterEndedError  # it was opened right before this
        try:
            line = chain.add(act, actor, time_ms=time_ms)
        except StrongroomError:
            # Too long for a line, or of values that JSON has no spelling for; that it was is what counts.
            line = chain.add(_bare(act), actor, time_ms=time_ms)
        self._write(segment, line)
        segment.events += 1
        self.pending_events += 1
        if segment.events == 1:
            segment.recorded_s = time.monotonic()
        self._chain = chain
        return line

    def _close(self, *, is_last: bool = False) -> None:
        segment, chain = self._current, copy.copy(self._chain)
        if segment is None:
            return
        self._write(segment, chain.close(time_ms=self._time(), is_last=is_last))
        segment.is_closed = True
        self._chain = chain
        self._sealed.append(segment)
        self._current = None
        self.has_ended = is_last

    def _write(self, segment: Segment, line: bytes) -> None:
        segment.size_bytes += len(line)
        self.pending_bytes += len(line)
        written = 0
        # In order over all segments: what stands behind a hole could not be salvaged.
        if not self._in_memory and not self._files.is_slow and self._files.open(segment):
            written = self._files.write(segment, line)
            segment.on_disk += written
        if written < len(line):
            segment.backlog.append(line[written:])
            self._in_memory += 1

    # --------------------------------------------------------------------------------- beside the program

    def flush(self) -> None:
        """Write what waits in memory to the spool, as far as it takes it now; nobody waits meanwhile."""
        if not self._in_memory:
            return
        with self._files.lock:
            while self._flush_one():
                pass

    def _flush_one(self) -> bool:
        """Write a part of what waits; whether to go on."""
        with self._lock:
            if self._is_busy():
                return False
            segment = next((each for each in self._all() if each.backlog), None)
            if segment is None or not self._files.open(segment):
                return False
            lines: list[bytes] = []
            for line in segment.backlog:
                lines.append(line)
                if len(lines) >= _LINES_AT_ONCE:
                    break
            segment.is_flushing = True
        data, written = b"".join(lines), 0
        try:
            written = self._files.write(segment, data, is_beside=True)
        finally:
            with self._lock:
                segment.is_flushing = False
                if segment.is_forgotten:
                    self._files.close(segment)
                else:
                    self._flushed(segment, lines, written)
        return written == len(data)

    def _flushed(self, segment: Segment, lines: list[bytes], written: int) -> None:
        segment.on_disk += written
        for line in lines:
            if written < len(line):
                segment.backlog[0] = line[written:]
                return
            written -= len(line)
            segment.backlog.popleft()
            self._in_memory -= 1

    def sync(self, segment: Segment) -> None:
        """See a closed segment to stable storage here, as far as that can be done."""
        self._files.sync(segment)
        with self._lock:
            kept = [each for each in self._sealed if each.is_synced and each.descriptor is not None]
            for each in kept[:-_KEPT_OPEN]:
                self._files.close(each)

    def content(self, segment: Segment) -> bytes:
        """All of a segment, from wherever it waits: a file that was removed, too, while it is open.

        Raises:
            OSError: the spool cannot be read.
        """
        with self._files.lock:  # no other name, and no more bytes, while it is read
            with self._lock:
                self._is_busy()
                on_disk, rest = segment.on_disk, b"".join(segment.backlog)
                descriptor = None if segment.descriptor is None else os.dup(segment.descriptor)
            return self._files.read(segment, on_disk, descriptor) + rest

    def accepted(self, segment: Segment) -> None:
        """The sink has it: it need not wait here any more."""
        with self._lock:
            self._is_busy()
            segment.is_accepted = True
            self._forget(segment)
        # Without the lock, since a disk may hang.
        self._files.clear(segment, is_last=self.is_done)

    def _forget(self, segment: Segment) -> None:
        segment.is_forgotten = True
        with contextlib.suppress(ValueError):
            self._sealed.remove(segment)
            self.pending_events -= segment.events
            self.pending_bytes -= segment.size_bytes
        self._in_memory -= len(segment.backlog)
        segment.backlog.clear()
        self._files.close(segment)

    def give_up(self) -> list[Segment]:
        """End it, since another has its id; what the sink has not got, first first, the open one included."""
        with self._lock:
            self._is_busy()
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
        self._files.clear(segment, is_last=self.is_done)

    # ------------------------------------------------------------------------------------------------ looking

    def _all(self) -> list[Segment]:
        current = self._current
        return [*self._sealed, *([] if current is None else [current])]

    @property
    def current(self) -> Segment | None:
        return self._current

    @property
    def spool_error(self) -> str | None:
        """Why the spool takes nothing; None: it does."""
        return self._files.error

    @property
    def has_backlog(self) -> bool:
        return self._in_memory > 0

    def sealed(self) -> list[Segment]:
        """The closed segments that the sink has not got, first first."""
        with self._lock:
            self._is_busy()
            return list(self._sealed)

    @property
    def is_done(self) -> bool:
        """Whether it has ended, and nothing of it waits."""
        return self.has_ended and not self._sealed

    @property
    def oldest_s(self) -> float | None:
        """When, on the monotonic clock, the oldest event was recorded that waits; None: none does."""
        return next((segment.recorded_s for segment in self._all() if segment.events), None)

    def disown(self) -> None:
        """After a fork, in the child: nothing is the child's, and nobody is there to release the lock."""
        for segment in self._all():
            descriptor, segment.descriptor = segment.descriptor, None
            if descriptor is not None:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        self._files.disown()

    def release(self) -> None:
        """Let the folder go: the process ends, and what waits there is the next one's."""
        self._files.release()


def _bare(act: Act) -> Act:
    return replace(act, path=None, reason=None, details={"shortened": True})


def _in_calendar(time_ms: int) -> int:
    """A clock may say anything; a line's time has an hour."""
    return min(max(0, time_ms), _LAST_MS)
