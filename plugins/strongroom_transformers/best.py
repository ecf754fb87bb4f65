"""The best model of a run, put back when training ends."""

from __future__ import annotations

from typing import Any

from strongroom import Checkpoint, Checkpointer
from strongroom_transformers.contents import Weights
from strongroom_transformers.voice import VOICE

__all__ = ["load_best"]


def load_best(
    checkpointer: Checkpointer, trainer: Any, weights: Weights, step: int | None, named: str
) -> Checkpoint | None:
    """Fill the model from one checkpoint and no other; for all ranks.

    Raises:
        IntegrityError: it is damaged. No other one is taken: it would not be the best.
        CheckpointNotFoundError: it is gone.
    """
    VOICE.info(f"loading the best model from {named} (score: {trainer.state.best_metric})")
    parts = weights.parts(trainer.model)
    restored = checkpointer.restore(parts, step=step, only=tuple(parts), accept_older=True)
    if restored is None:
        return None
    weights.restored(trainer.model, restored.state)
    return restored.checkpoint
