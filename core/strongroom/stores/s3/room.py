"""Memory for parts on their way: bounded for a whole store, used again, and given back when nobody writes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

__all__ = ["Room"]

_WAKE_S: Final = 0.1
"""How late an interrupt, or a writer that was given up, is noticed at most."""


class Room:
    """Counts bytes on their way, and keeps buffers between two parts.

    The buffer that a writer is filling counts for nothing, so that writers never wait for each other's
    filling: what is counted moves by itself.

    Args:
        limit_bytes: how much may be on its way. A part that is larger goes alone.
        limit_parts: and how many parts.
        part_bytes: the length of a usual part; buffers of another length are not kept.
    """

    def __init__(self, *, limit_bytes: int, limit_parts: int, part_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._limit_parts = limit_parts
        self._part_bytes = part_bytes
        self._condition = threading.Condition()
        self._used_bytes = 0
        self._used_parts = 0
        self._free: list[bytearray] = []
        self._writers = 0

    def enter(self) -> None:
        """A writer begins."""
        with self._condition:
            self._writers += 1

    def leave(self) -> None:
        """A writer has ended; with the last one all buffers go."""
        with self._condition:
            self._writers -= 1
            if self._writers <= 0:
                self._free.clear()

    def buffer(self, length_bytes: int) -> bytearray:
        """A buffer of just this length, with anything in it."""
        with self._condition:
            if length_bytes == self._part_bytes and self._free:
                return self._free.pop()
        return bytearray(length_bytes)

    def give_back(self, buffer: bytearray) -> None:
        """Keep a buffer for the next part."""
        with self._condition:
            if len(buffer) == self._part_bytes and self._writers > 0:
                self._free.append(buffer)

    def take(self, length_bytes: int, *, is_given_up: Callable[[], bool]) -> bool:
        """Wait until a part of so many bytes may be on its way too; False: it was given up first."""
        with self._condition:
            while self._used_parts and not self._has_room(length_bytes):
                if is_given_up():
                    return False
                self._condition.wait(_WAKE_S)
            self._used_bytes += length_bytes
            self._used_parts += 1
        return True

    def release(self, length_bytes: int) -> None:
        """They have arrived, or never will."""
        with self._condition:
            self._used_bytes -= length_bytes
            self._used_parts -= 1
            self._condition.notify_all()

    def _has_room(self, length_bytes: int) -> bool:
        is_short = self._used_bytes + length_bytes > self._limit_bytes
        return not is_short and self._used_parts < self._limit_parts
