"""How far a run has come, as it is counted here: steps of the optimizer, and epochs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strongroom.resume.following import FollowedLoader

__all__ = ["Standing"]


class Standing:
    """Counters of one run.

    A script that calls ``step()`` counts by itself. Where one only calls ``save_state()``, the steps of the
    first optimizer that was prepared are counted in their place.

    Attributes:
        steps_of_optimizer: of that optimizer, since the run's very beginning.
        training: the loader that training was last seen to read from.
        is_inside_epochs: the loop goes by ``epochs()``, which says when one is over.
    """

    def __init__(self) -> None:
        self.begin_anew()

    def begin_anew(self) -> None:
        """Nothing was trained yet."""
        self.steps_of_optimizer = 0
        self.training: FollowedLoader | None = None
        self.is_inside_epochs = False
        self._steps = 0
        self._epochs = 0
        self._counts_steps = False
        self._counts_epochs = False

    @property
    def steps(self) -> int:
        """Optimizer steps done since the run's very beginning."""
        return self._steps if self._counts_steps else self.steps_of_optimizer

    @property
    def epochs(self) -> int:
        """Whole epochs done: by ``epochs()``, or of the loader that training reads from."""
        if self._counts_epochs or self.training is None:
            return self._epochs
        return self.training.epochs_done

    def begin_to_count(self) -> None:
        """The program says from now on when a step is over."""
        self._counts_steps = True

    def step(self) -> None:
        """A step is over."""
        self._steps += 1

    def epoch_begins(self) -> None:
        """The program's loop goes by ``epochs()``."""
        if not self._counts_epochs:
            self._epochs = self.epochs
        self._counts_epochs = self.is_inside_epochs = True

    def epoch_is_over(self) -> None:
        self._epochs += 1

    def catch_up(self, steps: int) -> None:
        """Ranks that had more batches have taken more steps."""
        self._steps = max(self._steps, steps)

    def to_state(self) -> dict[str, Any]:
        """What a checkpoint carries."""
        return {"steps": self.steps, "epochs": self.epochs}

    def load(self, state: Mapping[str, Any], training: FollowedLoader | None) -> None:
        """Go on from what `to_state` gave."""
        self._steps = self.steps_of_optimizer = state["steps"]
        self._epochs = state["epochs"]
        self._counts_epochs = self.is_inside_epochs
        self.training = training
