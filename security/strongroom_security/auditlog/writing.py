"""One writer of this process: its lines on their way to the spool, and its segments on their way to the sink.

A line is in the kernel's hands once `RunWriter.append` returns: a killed process loses none. Where the spool
takes nothing (a full disk) or takes it slowly, lines wait in memory, in order; the sink gets segments from
both. Whatever stops a change halfway (an exception out of a signal's handler, memory that ran out) undoes it;
a handler that records while a line of the same thread is being written has its act put aside. When a segment is
sealed by its age, and when it is sent, is `recording`'s to say.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

from strongroom.auditing import Act
from strongroom.errors import StrongroomError
from strongroom_security.auditlog.certifying import Certifying
from strongroom_security.auditlog.events import Actor
from strongroom_security.auditlog.segments import SegmentChain, WriterKey
from strongroom_security.auditlog.spool import Spool, WriterFolder

__all__ = ["MEMORY_LINES", "BusyError", "RunWriter", "Segment", "WriterEndedError"]

_T = TypeVar("_T")

MEMORY_LINES: Final = 10_000
"""That a writer keeps in memory while the spool takes none."""

_SEGMENT_BYTES: Final = 8 << 20
"""After which a segment is sealed, however few events it has: it goes to the sink as one object."""
_WRITE_BYTES: Final = 1 << 20
_LINES_AT_ONCE: Final = 1_000
_TRY_AGAIN_S: Final = 1.0
"""After which a spool that took nothing is tried again, beside the program."""
_SLOW_S: Final = 1.0
"""A write that took so long was the last one that a caller waited for, until:"""
_QUICK_S: Final = 0.1
"""one beside the program takes no longer than this."""
_KEPT_OPEN: Final = 8
"""Closed segments whose files stay open, newest first: what is open can be read when it was removed."""
_LAST_MS: Final = 253_402_300_799_999
"""The end of the year 9999: after it no hour has a name."""


class WriterEndedError(Exception):
    """The writer has ended, and takes nothing more; another one does."""


class BusyError(Exception):
    """This very thread is in the middle of a line: a signal's handler runs in it."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Before:
    """How a writer stood before a change, which is done whole or not at all."""

    thread: int
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
        self.spool_error: str | None = None
        self.used_s = time.monotonic()
        self.pending_events = 0
        self.pending_bytes = 0
        self._in_memory = 0
        self._seal_events = seal_events
        # Entered by `with` alone, which no exception out of a handler can come between.
        self._lock = threading.RLock()
        self._file_lock = threading.RLock()
        self._before: _Before | None = None
        self._chain = SegmentChain(key)
        self._spool = spool
        self._folder: WriterFolder | None = None
        self._tried_s = -math.inf
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
                if not self._has_room(room):
                    return None
                segment = self._current or self._change(self._open)
                chain = self._chain
                line = self._change(lambda: self._add(act, actor, when))
                self._seal_if_full(segment)
                return segment, line
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
                raise BusyError
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
            has_begun = not self._is_busy() and self._chain.segment > 0 and not self.has_ended
            if has_begun and self._current is None and not self.certifying.is_lacking:
                self._change(self._open)

    def seal(self, *, is_last: bool = False, at_least: int = 1) -> bool:
        """Close the open segment, if it holds so many events; whether it did.

        Args:
            is_last: the writer ends, whatever the segment holds.
        """
        with self._lock:
            if self._is_busy() or self.has_ended:
                return False
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

    def _could_be_certified(self, segment: Segment) -> bool:
        """Whether the certificate has come since a segment was opened without."""
        return not segment.is_certified and not self.certifying.is_lacking

    def _time(self) -> int:
        return _in_calendar(self._now_ms())

    # -------------------------------------------------------------------------------- changes, whole or not

    def _is_busy(self) -> bool:
        """Whether this thread is in the middle of a change. What another one left halfway is undone."""
        before = self._before
        if before is None:
            return False
        if before.thread == threading.get_ident():
            return True
        self._undo()
        return False

    def _change(self, work: Callable[[], _T]) -> _T:
        """Do something to the chain and the current segment: whole, or not at all."""
        now = self._current
        self._before = _Before(
            thread=threading.get_ident(),
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
            descriptor, made.descriptor = made.descriptor, None
            if descriptor is not None:
                os.close(descriptor)
            if self._folder is not None:
                with contextlib.suppress(OSError):
                    self._folder.remove_open(made.number)
        if segment is not None:
            segment.events, segment.recorded_s = before.events, before.recorded_s
            segment.size_bytes, segment.on_disk = before.size_bytes, before.on_disk
            while len(segment.backlog) > before.backlog:
                segment.backlog.pop()
            segment.is_closed = False
            self._cut(segment)
        while len(self._sealed) > before.sealed:
            self._sealed.pop()
        self._current = segment
        self.pending_events, self.pending_bytes = before.pending_events, before.pending_bytes
        self._in_memory = before.in_memory
        self.has_ended = False
        self._chain = before.chain
        self._before = None

    @staticmethod
    def _cut(segment: Segment) -> None:
        """Take off a file's end what does not count."""
        if segment.descriptor is None or segment.is_flushing:
            return  # who flushes writes only what counts
        try:
            if os.fstat(segment.descriptor).st_size > segment.on_disk:
                os.ftruncate(segment.descriptor, segment.on_disk)
        except OSError:
            segment.is_frozen = True

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
        # In order over all segments: what stands behind a hole could not be salvaged.
        is_slow = self._spool is not None and self._spool.is_slow
        began = time.monotonic()
        if self._in_memory or is_slow or not self._can_write(segment):
            segment.backlog.append(line)
            self._in_memory += 1
            self._look_at_the_clock(began)
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
        self._look_at_the_clock(began)

    def _look_at_the_clock(self, began: float) -> None:
        """A disk that hangs may do so once: what follows is written beside the program."""
        if self._spool is not None and time.monotonic() - began > _SLOW_S:
            self._spool.is_slow = True

    def _can_write(self, segment: Segment) -> bool:
        """Whether there is a file for a segment; it is made where it is not."""
        if segment.is_frozen:
            return False
        if segment.descriptor is not None:
            return True
        if self._spool is None or time.monotonic() - self._tried_s < _TRY_AGAIN_S:
            return False
        try:
            if self._folder is None:
                self._folder = self._spool.begin(self.key.writer)
            try:
                segment.descriptor = self._folder.create(segment.number)
            except FileNotFoundError:
                # Somebody has removed the folder: what comes from now on has another.
                self._folder.disown()
                self._folder = None
                self._folder = self._spool.begin(self.key.writer)
                segment.descriptor = self._folder.create(segment.number)
        except OSError as error:
            self._told(error)
            return False
        return True

    def _told(self, error: OSError) -> None:
        self.spool_error = f"{error.strerror or type(error).__name__}: {error.filename or 'the spool'}"
        self._tried_s = time.monotonic()

    # --------------------------------------------------------------------------------- beside the program

    def flush(self) -> None:
        """Write what waits in memory to the spool, as far as it takes it now; nobody waits for it meanwhile."""
        if not self._in_memory:
            return
        with self._file_lock:
            while self._flush_one():
                pass

    def _flush_one(self) -> bool:
        """Write a part of what waits; whether to go on."""
        with self._lock:
            if self._is_busy():
                return False
            segment = next((each for each in self._all() if each.backlog), None)
            if segment is None or not self._can_write(segment):
                return False
            lines: list[bytes] = []
            for line in segment.backlog:
                lines.append(line)
                if sum(map(len, lines)) >= _WRITE_BYTES or len(lines) >= _LINES_AT_ONCE:
                    break
            data, descriptor = b"".join(lines), segment.descriptor or 0
            segment.is_flushing = True
        began, written, failed = time.monotonic(), 0, False
        try:
            written = os.write(descriptor, data)
        except OSError as error:
            failed = True
            self._told(error)
        finally:
            with self._lock:
                segment.is_flushing = False
                if segment.is_forgotten:
                    self._close_file(segment)
                else:
                    self._flushed(segment, lines, written)
        if self._spool is not None and not failed:
            self._spool.is_slow = time.monotonic() - began > _QUICK_S
        return not failed and written == len(data)

    def _flushed(self, segment: Segment, lines: list[bytes], written: int) -> None:
        segment.on_disk += written
        if written:
            self.spool_error = None
        for line in lines:
            if written < len(line):
                if written:
                    segment.backlog[0] = line[written:]
                return
            written -= len(line)
            segment.backlog.popleft()
            self._in_memory -= 1

    def sync(self, segment: Segment) -> None:
        """See a closed segment to stable storage here, as far as that can be done."""
        with self._file_lock:
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
        with self._lock:
            kept = [each for each in self._sealed if each.is_synced and each.descriptor is not None]
            for each in kept[:-_KEPT_OPEN]:
                self._close_file(each)

    @staticmethod
    def _close_file(segment: Segment) -> None:
        descriptor = segment.descriptor
        if descriptor is not None and not segment.is_flushing:
            segment.descriptor = None
            os.close(descriptor)

    def content(self, segment: Segment) -> bytes:
        """All of a segment, from wherever it waits: a file that was removed, too, while it is open.

        Raises:
            OSError: the spool cannot be read.
        """
        with self._file_lock:  # no other name, and no more bytes, while it is read
            with self._lock:
                self._is_busy()
                folder, on_disk, rest = self._folder, segment.on_disk, b"".join(segment.backlog)
                descriptor = None if segment.descriptor is None else os.dup(segment.descriptor)
            if descriptor is not None:
                with open(descriptor, "rb") as file:
                    file.seek(0)
                    return file.read(on_disk) + rest
            if not on_disk or folder is None:
                return rest
            return folder.read(segment.number, is_closed=segment.is_renamed)[:on_disk] + rest

    def accepted(self, segment: Segment) -> None:
        """The sink has it: it need not wait here any more."""
        with self._lock:
            self._is_busy()
            segment.is_accepted = True
            self._forget(segment)
        self._clear(segment)

    def _forget(self, segment: Segment) -> None:
        segment.is_forgotten = True
        with contextlib.suppress(ValueError):
            self._sealed.remove(segment)
            self.pending_events -= segment.events
            self.pending_bytes -= segment.size_bytes
        self._in_memory -= len(segment.backlog)
        segment.backlog.clear()
        self._close_file(segment)

    def _clear(self, segment: Segment) -> None:
        """Remove a file, and the folder after the last one: without the lock, since a disk may hang."""
        with self._file_lock:
            folder = self._folder
            if folder is None:
                return
            # What cannot be removed is found there again later, and in the sink.
            with contextlib.suppress(OSError):
                folder.remove(segment.number)
            if self.is_done:
                folder.release()
                self._folder = None

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
        self._clear(segment)

    # ------------------------------------------------------------------------------------------------ looking

    def _all(self) -> list[Segment]:
        current = self._current
        return [*self._sealed, *([] if current is None else [current])]

    @property
    def current(self) -> Segment | None:
        return self._current

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
        if self._folder is not None:
            self._folder.disown()

    def release(self) -> None:
        """Let the folder go: the process ends, and what waits there is the next one's."""
        with self._file_lock:
            if self._folder is not None:
                self._folder.release()
                self._folder = None


def _bare(act: Act) -> Act:
    return replace(act, path=None, reason=None, details={"shortened": True})


def _in_calendar(time_ms: int) -> int:
    """A clock may say anything; a line's time has an hour."""
    return min(max(0, time_ms), _LAST_MS)
