"""One clock for all ranks of a job, rank 0's: an interval of time has passed on all of them or on none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

__all__ = ["SharedClock"]

_SHARE: Final = 0.05
"""Of the interval: how late it may be found to have passed, at a steady pace."""

_MOST_STEPS: Final = 1000


class SharedClock:
    """Reads rank 0's clock on every rank, and asks for it only so often as an interval needs.

    Args:
        clock: this rank's, in seconds.
        confer: `strongroom.Checkpointer.confer`.
        interval_s: what is measured by it.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        confer: Callable[[str, Callable[[], Any]], Sequence[Any]],
        interval_s: float,
    ) -> None:
        self._clock = clock
        self._confer = confer
        self._interval_s = interval_s
        self._at: tuple[int, float] | None = None
        self._next_step = 0

    def read(self, step: int) -> float:
        """The time at a step, the same on every rank; between two looks the last one's.

        For all ranks, with the same steps.
        """
        if self._at is not None and self._at[0] <= step < self._next_step:
            return self._at[1]
        now = float(self._confer("the time", self._clock)[0])
        ahead = 1
        if self._at is not None and now > self._at[1]:
            pace = (step - self._at[0]) / (now - self._at[1])
            ahead = min(max(1, int(pace * self._interval_s * _SHARE)), _MOST_STEPS)
        self._at, self._next_step = (step, now), step + ahead
        return now
