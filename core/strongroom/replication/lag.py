"""How far a target is behind, when that is worth a word, and how long a failure is waited out."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final

from strongroom import chance
from strongroom.manifest import Commit

__all__ = ["ALARM_S", "WARN_S", "LagWatch", "lag_s", "pause_s", "random_pause_s"]

WARN_S: Final = 3600.0
"""A target that is an hour behind is worth a warning: so much work would be lost with the first tier."""
ALARM_S: Final = 4 * 3600.0
"""One that is four hours behind is an error."""

_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 60.0


def lag_s(waiting: Iterable[Commit], now_ms: int) -> float:
    """How long the oldest of some checkpoints has been committed, and waits; 0: none does."""
    oldest = min((commit.committed_at_ms for commit in waiting), default=now_ms)
    # The writer's clock may be ahead of this one.
    return max(0.0, (now_ms - oldest) / 1000)


def pause_s(failures: int, jitter: float) -> float:
    """How long to wait after so many failures in a row: twice as long each time, up to a minute.

    Args:
        jitter: from 0 to 1, drawn anew each time, so that the jobs of a cluster do not all come back at once.
    """
    longest = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(failures - 1, 16))
    return longest * (0.5 + 0.5 * jitter)


def random_pause_s(failures: int) -> float:
    """As `pause_s`, with jitter drawn."""
    return pause_s(failures, chance.uniform(0.0, 1.0))


class LagWatch:
    """Says once when a lag passes a mark, and is ready to say it again once it has fallen below."""

    def __init__(self) -> None:
        self._passed = 0.0

    def passed(self, lag_s: float) -> int | None:
        """The level of logging at which to tell of a lag now; None: there is nothing new."""
        mark = ALARM_S if lag_s > ALARM_S else WARN_S if lag_s > WARN_S else 0.0
        is_new = mark > self._passed
        self._passed = mark
        if not is_new:
            return None
        return logging.ERROR if mark == ALARM_S else logging.WARNING
