"""What a file holds, whether it is sealed or not. Reads through `strongroom.sealing`'s `Opener`.

A sealed file is fetched in whole segments, a few at a time, into scratch memory, and opened from
there: into the reader's buffer where that takes a segment whole, else by way of more scratch memory.
No more memory is used than that, however large the file is.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import TYPE_CHECKING, Final, Literal

from strongroom.errors import IntegrityError
from strongroom.manifest import SEGMENT_BYTES

if TYPE_CHECKING:
    from typing_extensions import Self

    from strongroom.sealing import Opener
    from strongroom.stores.base import ObjectReader

__all__ = ["SealedReader", "open_whole", "segment_count"]

_SEGMENTS_AT_ONCE: Final = 2
"""Fetched by one call: enough to keep a disk busy, and little enough to stay in the processor's cache."""


def open_whole(opener: Opener, stored: bytes) -> bytes:
    """What a sealed file holds, from all of its bytes.

    Raises:
        IntegrityError: it is not what was sealed.
    """
    plain = bytearray(opener.size_bytes)
    count = segment_count(opener)
    start, end = opener.stored_range(0, count)
    opener.open_into(0, memoryview(stored)[start:end], memoryview(plain))
    return bytes(plain)


def segment_count(opener: Opener) -> int:
    """How many segments a file has; an empty one has one, which holds nothing."""
    return max(1, -(-opener.size_bytes // opener.segment_bytes))


class SealedReader:
    """An `ObjectReader` of what a sealed object holds; closes the one that it reads."""

    def __init__(self, stored: ObjectReader, opener: Opener) -> None:
        self._stored = stored
        self._opener = opener
        self._count = segment_count(opener)
        self._spare = threading.local()

    @property
    def size_bytes(self) -> int:
        return self._opener.size_bytes

    def read_into(self, offset_bytes: int, buffer: memoryview) -> int:
        """Fill ``buffer``; every byte of it was verified.

        Raises:
            IntegrityError: what is stored there is not what was sealed.
        """
        opener, target = self._opener, buffer.cast("B")
        end = min(offset_bytes + len(target), opener.size_bytes)
        position = offset_bytes
        while position < end:
            first, skipped = divmod(position, opener.segment_bytes)
            # Segments that the buffer takes whole; the file's last one is whole when it ends.
            until = self._count if end == opener.size_bytes else end // opener.segment_bytes
            if skipped == 0 and until > first:
                count = min(_SEGMENTS_AT_ONCE, until - first)
                position += self._open(first, count, target[position - offset_bytes :])
                continue
            last = min(self._count, -(-end // opener.segment_bytes))
            # What fits into one fetch is one; else the segment that is cut comes alone.
            count = last - first if last - first <= _SEGMENTS_AT_ONCE else 1
            plain = memoryview(self._scratch("plain"))
            opened = self._open(first, count, plain)
            upto = min(end, position - skipped + opened)
            taken = plain[skipped : skipped + upto - position]
            target[position - offset_bytes : upto - offset_bytes] = taken
            position = upto
        return max(0, end - offset_bytes)

    def check(self) -> None:
        """Open every segment, and keep nothing of them.

        Raises:
            IntegrityError: one of them is not what was sealed.
        """
        plain = memoryview(self._scratch("plain"))
        for first in range(0, self._count, _SEGMENTS_AT_ONCE):
            self._open(first, min(_SEGMENTS_AT_ONCE, self._count - first), plain)

    def _open(self, first: int, count: int, target: memoryview) -> int:
        """Fetch segments and open them into memory; return how many bytes they hold."""
        start, stop = self._opener.stored_range(first, count)
        fetched = memoryview(self._scratch("stored"))[: stop - start]
        filled = self._stored.read_into(start, fetched)
        if filled != len(fetched):
            raise IntegrityError(f"ends at byte {start + filled}, within a segment that ends at {stop}")
        return self._opener.open_into(first, fetched, target)

    def close(self) -> None:
        self._stored.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _scratch(self, what: Literal["stored", "plain"]) -> bytearray:
        """Memory of this thread's own for stored or for opened segments."""
        found: bytearray | None = getattr(self._spare, what, None)
        if found is None:
            found = bytearray(min(_SEGMENTS_AT_ONCE, self._count) * SEGMENT_BYTES)
            setattr(self._spare, what, found)
        return found
