"""Where a fit stood between two steps, and whether it still stands there when an error ends it.

An error in the middle of a step leaves weights, counters, metrics and random states that belong to no step.
But while the next batch is being read nothing of the run has changed yet: only random states may have moved,
and those are known where they were looked at before. What failed there can be saved, and resumes exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from strongroom.resume import Moment, RngState
from strongroom_lightning import seam

__all__ = ["Standing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A place between two steps.

    Attributes:
        moment: which.
        progress: how far Lightning's counters had come.
        rng: the random states there; None: they were not looked at.
    """

    moment: Moment
    progress: tuple[int, int]
    rng: RngState | None = None

    @classmethod
    def of(cls, trainer: Any, moment: Moment, rng: RngState | None = None) -> Standing:
        return cls(moment=moment, progress=seam.progress(trainer.fit_loop), rng=rng)

    def is_held(self, trainer: Any) -> bool:
        """Whether all that a checkpoint would hold is still as it was there."""
        if self.progress != seam.progress(trainer.fit_loop) or seam.loaders_keep_state(trainer.fit_loop):
            return False
        # What workers read, they read with random states of their own.
        return self.rng is not None or seam.loaders_have_workers(trainer.fit_loop)
