"""How fast a process may write: a token bucket that all its writing threads share.

So that a save in the background leaves some of a shared network or disk to training's own reading.
It knows bytes and time, and neither files nor stores.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Final

from strongroom.errors import ConfigError

__all__ = ["Pace", "check_rate"]

_BURST_S: Final = 0.1
"""What may be written at once after a pause: this much of a second's worth."""


class Pace:
    """Lets bytes through at a rate on average; safe to use from several threads.

    Whoever spends waits until its own bytes are paid for, in the order of asking: ten threads
    together are as fast as one.

    Args:
        max_bytes_per_second: the rate; None: nobody ever waits.
        monotonic: seconds, of a clock that cannot jump.
        sleep: waits for so many seconds.

    Raises:
        ConfigError: the rate is no positive number.
    """

    def __init__(
        self,
        max_bytes_per_second: float | None,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes_per_second = check_rate(max_bytes_per_second)
        self._monotonic = monotonic
        self._sleep = sleep
        self._lock = threading.Lock()
        self._paid_until = -math.inf

    @property
    def is_unbounded(self) -> bool:
        """Whether nobody ever waits."""
        return self._bytes_per_second is None

    def spend(self, length_bytes: int) -> None:
        """Return once so many more bytes may be written."""
        if self._bytes_per_second is None or length_bytes <= 0:
            return
        with self._lock:
            now = self._monotonic()
            # A pause saves up no more than a short burst.
            begins = max(self._paid_until, now - _BURST_S)
            self._paid_until = begins + length_bytes / self._bytes_per_second
            wait_s = self._paid_until - now
        if wait_s > 0:
            self._sleep(wait_s)


def check_rate(max_bytes_per_second: float | None) -> float | None:
    """Return a rate if it is a positive number, or None, which is none.

    Raises:
        ConfigError: it is neither.
    """
    is_number = isinstance(max_bytes_per_second, int | float) and not isinstance(max_bytes_per_second, bool)
    if max_bytes_per_second is None:
        return None
    if is_number and math.isfinite(max_bytes_per_second) and max_bytes_per_second > 0:
        return max_bytes_per_second
    raise ConfigError(
        f"max_bytes_per_second must be a positive number or None, got {max_bytes_per_second!r:.60}"
    )
