"""When what is sent to a sink that fails: the pauses, and what is said about them."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass
from typing import Final

from strongroom.chance import uniform

__all__ = ["Pace", "Teller"]

_LOG: Final = logging.getLogger("strongroom")

_FIRST_S: Final = 0.5
_LONGEST_S: Final = 60.0
_HURRIED_S: Final = 0.5
"""The longest pause while somebody waits to read."""
_AT_ONCE_S: Final = 0.05
_TELL_AGAIN_S: Final = 300.0


@dataclass
class Pace:
    """Tries to send one writer's segments.

    Attributes:
        failures: in a row.
        next_s: before which it is not tried again, on the monotonic clock.
    """

    failures: int = 0
    next_s: float = 0.0
    _failed_s: float = -math.inf

    def failed(self, *, in_a_hurry: bool) -> None:
        self.failures += 1
        self._failed_s = time.monotonic()
        pause_s = min(_LONGEST_S, _FIRST_S * 2 ** min(self.failures - 1, 10))
        # Drawn anew each time: the ranks of a job must not come back all at once.
        pause_s *= uniform(0.5, 1.0)
        self.next_s = self._failed_s + (min(pause_s, _HURRIED_S) if in_a_hurry else pause_s)

    def succeeded(self) -> None:
        self.failures, self.next_s = 0, 0.0

    def hurry(self) -> None:
        """Somebody waits: try at once, unless that was just done."""
        self.next_s = min(self.next_s, self._failed_s + _AT_ONCE_S)


class Teller:
    """Says once that something fails, again every five minutes, and once that it works again."""

    def __init__(self, fails: str, works: str) -> None:
        self._fails = fails
        self._works = works
        self._told_s: float | None = None

    def failing(self, why: object) -> None:
        now = time.monotonic()
        if self._told_s is None or now - self._told_s >= _TELL_AGAIN_S:
            self._told_s = now
            _LOG.warning("%s: %s", self._fails, why)

    def working(self) -> None:
        if self._told_s is not None:
            self._told_s = None
            _LOG.info("%s", self._works)
