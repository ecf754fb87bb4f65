"""How far a run has come, as it is counted here: steps of the optimizer, and epochs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from strongroom.resume.following import FollowedLoader
from strongroom_accelerate import seam
from strongroom_accelerate.voice import VOICE

__all__ = ["OptimizerSteps", "Standing"]

_SUSPICIOUS: Final = 1000
"""Batches in a row, of which none led to a step."""


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
        self._others = 0  # epochs of that loader that are none of the run's
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
        return _trained(self.training) - self._others

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
        self._others = 0 if training is None else _trained(training) - self._epochs


def _trained(loader: FollowedLoader) -> int:
    return loader.epochs_done - loader.untrained


class OptimizerSteps:
    """Whether a batch was the last one of a step: also where a program accumulates gradients by itself.

    Args:
        accelerator: the program's; what it knows of accumulation counts too.
        note: is called when an optimizer has taken a step.
    """

    def __init__(self, accelerator: Any, note: Callable[[], None]) -> None:
        self._accelerator = accelerator
        self._note = note
        self._has_warned = False
        self.forget()

    def forget(self) -> None:
        """Nothing is prepared any more."""
        self._watched: list[Any] = []
        self._has_stepped = False
        self._in_vain = 0

    def watch(self) -> None:
        """Listen to the optimizers that were prepared; those of engines do not say when they step."""
        for one in seam.bare_optimizers(self._accelerator):
            is_known = any(one is known for known in self._watched)
            if is_known or seam.has_engine(self._accelerator) or not hasattr(one, "register_step_post_hook"):
                continue
            self._watched.append(one)
            one.register_step_post_hook(self._is_told)

    def has_stepped(self) -> bool:
        """Whether a step was taken, or left out by the scaler, since this was asked last."""
        if not self._accelerator.sync_gradients:
            return False
        has_stepped, self._has_stepped = self._has_stepped, False
        if has_stepped or not self._watched or self._accelerator.optimizer_step_was_skipped:
            self._in_vain = 0
            return True
        self._in_vain += 1
        if self._in_vain == _SUSPICIOUS:
            VOICE.warn(
                f"step() was called {_SUSPICIOUS} times, and no optimizer that was prepared has taken a step "
                f"meanwhile: nothing is counted and saved; is it another optimizer that trains?"
            )
        return False

    def check_none_is_pending(self) -> None:
        """Tell where an epoch is saved whose last batches are in no step yet."""
        if self._in_vain and not self._has_warned:
            self._has_warned = True
            VOICE.warn(
                f"an epoch ended {self._in_vain} batches behind the optimizer's last step: their gradients "
                f"are in no checkpoint, and a run that is resumed here lacks them; step at an epoch's end"
            )

    def _is_told(self, *_: Any) -> None:
        self._has_stepped = True
        self._note()
