"""What saving costs, for a Trainer's trackers, which are callbacks: handed to them between two steps.

They are told by ``on_log``, as of everything else, and ``state.log_history`` stays what training alone makes
of it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Final

from strongroom.frontend import Figures
from strongroom.frontend.figures import Log
from strongroom.resume import RngState
from strongroom_transformers.voice import VOICE

__all__ = ["hand_over"]

_NO_TRACKERS: Final = frozenset(
    {
        "DefaultFlowCallback",
        "EarlyStoppingCallback",
        "NotebookProgressCallback",
        "PrinterCallback",
        "ProgressCallback",
        "SealedFolders",
        "StrongroomCallback",
    }
)
"""Callbacks that show every log to whoever watches, or that look at none."""


def hand_over(figures: Figures, trainer: Any) -> None:
    """Give the trackers what was noted since, on rank 0; whatever they draw, training does not see."""
    rng = RngState.capture()
    loggers = _trackers(trainer) if trainer.is_world_process_zero() else []
    figures.hand_to(loggers, VOICE.warn)
    rng.restore()


def _trackers(trainer: Any) -> list[tuple[str, Log]]:
    handler = trainer.callback_handler

    def of(callback: Any) -> Log:
        def log(found: Mapping[str, float]) -> None:
            callback.on_log(
                trainer.args,
                trainer.state,
                copy.copy(trainer.control),  # one rank alone is told, and none of them may stop by itself
                logs=dict(found),
                model=handler.model,
                processing_class=handler.processing_class,
                optimizer=handler.optimizer,
                lr_scheduler=handler.lr_scheduler,
                train_dataloader=handler.train_dataloader,
                eval_dataloader=handler.eval_dataloader,
            )

        return log

    return [
        (type(callback).__name__, of(callback))
        for callback in handler.callbacks
        if type(callback).__name__ not in _NO_TRACKERS
    ]
