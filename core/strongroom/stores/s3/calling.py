"""When a request is sent again: pauses with full jitter, bounded in number and in time. It knows no protocol.

That answers get lost is its business too: whoever creates something has to know whether an earlier try of the
same request may have done it already.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from strongroom import chance
from strongroom.stores.s3.failures import GaveUpError, TryFailedError

__all__ = ["Patience"]

_T = TypeVar("_T")

_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 10.0


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long one goes on.

    Attributes:
        tries: how often a request is sent, at most.
        patience_s: after so long since the first none is sent again.
        sleep: waits for so many seconds.
        monotonic: seconds, of a clock that cannot jump.
        draw: a random number between two others.
    """

    tries: int
    patience_s: float
    sleep: Callable[[float], None] = time.sleep
    monotonic: Callable[[], float] = time.monotonic
    draw: Callable[[float, float], float] = chance.uniform

    def call(
        self,
        request: Callable[[], _T],
        *,
        is_given_up: Callable[[], bool] = _never,
        until: float | None = None,
    ) -> tuple[_T, bool]:
        """What a request answers, and whether an earlier try of it may have been done, its answer lost.

        The pauses between tries are random between nothing and a bound that doubles, so that a thousand ranks
        which one outage stopped do not come back as one.

        Args:
            request: one try; it raises `TryFailedError`.
            is_given_up: asked before another try.
            until: as `monotonic` has it, when at the latest a try may begin; None: as patience has it.

        Raises:
            GaveUpError: it failed for good.
        """
        last = self.monotonic() + self.patience_s
        if until is not None:
            last = min(last, until)
        bound = _FIRST_PAUSE_S
        was_lost = False
        for number in itertools.count(1):
            try:
                return request(), was_lost
            except TryFailedError as failure:
                is_last = number >= self.tries or not failure.is_passing or is_given_up()
                pause = 0.0 if is_last else self.draw(0.0, bound)
                if is_last or self.monotonic() + pause > last:
                    raise GaveUpError(failure, tries=number, was_lost=was_lost) from failure
                was_lost = was_lost or failure.may_have_landed
            bound = min(_LONGEST_PAUSE_S, 2 * bound)
            self.sleep(pause)
        raise GaveUpError(TryFailedError("never tried"), tries=0, was_lost=False)
