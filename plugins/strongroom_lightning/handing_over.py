"""The weights alone as a safetensors file for others: who writes it, and what that is on record as."""

from __future__ import annotations

from typing import Any

from strongroom.errors import RankFailedError, StrongroomError
from strongroom.exporting.onefile import write_weights
from strongroom.frontend import RunSettings, on_record_as_export
from strongroom_lightning.strategies import whole_weights

__all__ = ["hand_over"]


def hand_over(trainer: Any, path: str, settings: RunSettings) -> None:
    """Write the weights to ``path``; for all ranks. Rank 0 writes, and what fails there fails on all.

    That somebody takes a model out is put on record first, as `strongroom export` does, and not done where it
    cannot be.

    Args:
        settings: the run's.

    Raises:
        AuditError: it could not be put on record; nothing was written.
        ConfigError, StoreError: as `write_weights`.
        RankFailedError: rank 0 raised one of these.
    """
    weights = whole_weights(trainer)  # of all ranks together
    error = _write(path, weights, trainer.global_step, settings) if trainer.is_global_zero else None
    told = trainer.strategy.broadcast(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    if told is not None:
        raise RankFailedError(
            f"rank 0 did not write {path} ({told})", ranks=(0,), phase="handing weights over"
        )


def _write(path: str, weights: dict[str, Any], step: int, settings: RunSettings) -> StrongroomError | None:
    """What became of it: the others must hear of it before it is raised."""
    try:
        with on_record_as_export(settings, {"step": step}) as note:
            write_weights(path, weights)
            note(size_bytes=sum(weight.nbytes for weight in weights.values()), tensors=len(weights))
    except StrongroomError as error:
        return error
    return None
