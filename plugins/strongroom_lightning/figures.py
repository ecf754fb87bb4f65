"""What saving costs, for the run's loggers: noted wherever it becomes known, and logged between two steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Final

from lightning_utilities.core.rank_zero import rank_zero_warn

from strongroom.events import CheckpointCommitted, CheckpointReplicated, Event, SaveFailed, SaveStarted
from strongroom_lightning.replacing import Replace

__all__ = ["Figures"]

_PREFIX: Final = "strongroom/"

_REMEMBERED: Final = 1000
"""Events; the oldest go where a run has no step for so long."""


class Figures:
    """An event sink whose figures are given to a Trainer's loggers, on the training thread."""

    def __init__(self) -> None:
        self._found: deque[dict[str, float]] = deque(maxlen=_REMEMBERED)
        self._is_off = False

    def emit(self, event: Event) -> None:
        """Note what an event says; called on any thread."""
        found: dict[str, float]
        if isinstance(event, SaveStarted):
            found = {"step": event.step, "stall_s": event.wait_s + event.stage_s}
        elif isinstance(event, CheckpointCommitted):
            found = {"step": event.step, "background_s": event.background_s, "bytes": event.size_bytes}
        elif isinstance(event, CheckpointReplicated):
            found = {"step": event.step, "lag_s": event.lag_s}
        elif isinstance(event, SaveFailed):
            found = {"step": event.step, "failures": event.failures}
        else:
            return
        self._found.append({f"{_PREFIX}{name}": float(value) for name, value in found.items()})

    def watch(self, trainer: Any, replace: Replace) -> None:
        """Log after each batch what is new; where there is nothing, that costs a look at an empty queue."""

        def make(original: Callable[..., None]) -> Callable[..., None]:
            def on_advance_end(*args: Any) -> None:
                original(*args)
                if self._found:
                    self.log(trainer)

            return on_advance_end

        replace(trainer.fit_loop.epoch_loop, "on_advance_end", make)

    def log(self, trainer: Any) -> None:
        """Give the loggers what was noted since, under the step that they stand at: they only go forward."""
        while self._found:
            found = self._found.popleft()
            if self._is_off or not trainer.is_global_zero:
                continue
            for logger in trainer.loggers:
                try:
                    logger.log_metrics(found, step=trainer.fit_loop.epoch_loop._batches_that_stepped)
                except Exception as error:  # noqa: BLE001 - whatever a logger does, the run goes on
                    self._is_off = True
                    rank_zero_warn(
                        f"Strongroom: {type(logger).__name__} took no figures of saves, and is given no more "
                        f"in this run: {error!r:.200}"
                    )
