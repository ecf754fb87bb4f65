"""What saving costs, for a Trainer's loggers: handed to them after a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from strongroom.frontend import Figures, Replace
from strongroom.frontend.figures import Log
from strongroom_lightning.voice import VOICE

__all__ = ["log_figures", "watch_figures"]


def watch_figures(figures: Figures, trainer: Any, replace: Replace) -> None:
    """Log after each batch what is new; where there is nothing, that costs a look at an empty queue."""

    def make(original: Callable[..., None]) -> Callable[..., None]:
        def on_advance_end(*args: Any) -> None:
            original(*args)
            if figures.are_new:
                log_figures(figures, trainer)

        return on_advance_end

    replace(trainer.fit_loop.epoch_loop, "on_advance_end", make)


def log_figures(figures: Figures, trainer: Any) -> None:
    """Give the loggers what was noted since, under the step that they stand at: they only go forward."""

    def of(logger: Any) -> Log:
        def log(found: Mapping[str, float]) -> None:
            logger.log_metrics(dict(found), step=trainer.fit_loop.epoch_loop._batches_that_stepped)

        return log

    loggers = trainer.loggers if trainer.is_global_zero else ()
    figures.hand_to([(type(logger).__name__, of(logger)) for logger in loggers], VOICE.warn)
