"""The weights alone as a safetensors file for others: who writes it, and what that is on record as."""

from __future__ import annotations

from typing import Any

from strongroom.auditing import Action, Activity, Auditor
from strongroom.errors import RankFailedError, StrongroomError
from strongroom.exporting.onefile import write_weights
from strongroom.layout import RUN
from strongroom.manifest import RUN_BOUNDS, Run
from strongroom.stores.open import open_store
from strongroom_lightning.strategies import whole_weights

__all__ = ["hand_over"]


def hand_over(trainer: Any, path: str, *, root: str, auditor: Auditor) -> None:
    """Write the weights to ``path``; for all ranks. Rank 0 writes, and what fails there fails on all.

    That somebody takes a model out is put on record first, as `strongroom export` does, and not done where it
    cannot be.

    Args:
        root: the run's.

    Raises:
        AuditError: it could not be put on record; nothing was written.
        ConfigError, StoreError: as `write_weights`.
        RankFailedError: rank 0 raised one of these.
    """
    weights = whole_weights(trainer)  # of all ranks together
    error = _write(path, weights, trainer.global_step, root, auditor) if trainer.is_global_zero else None
    told = trainer.strategy.broadcast(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    if told is not None:
        raise RankFailedError(
            f"rank 0 did not write {path} ({told})", ranks=(0,), phase="handing weights over"
        )


def _write(
    path: str, weights: dict[str, Any], step: int, root: str, auditor: Auditor
) -> StrongroomError | None:
    """What became of it: the others must hear of it before it is raised."""
    try:
        if not auditor.is_on:
            write_weights(path, weights)
            return None
        store = open_store(root)
        with Activity(auditor, Action.EXPORT, root=store.uri, details={"step": step}) as activity:
            activity.intend(_run_of(store), None)
            write_weights(path, weights)
            activity.note(size_bytes=sum(weight.nbytes for weight in weights.values()), tensors=len(weights))
    except StrongroomError as error:
        return error
    return None


def _run_of(store: Any) -> str | None:
    """The run's id, where the root says it to whoever asks."""
    try:
        return Run.decode(store.read(RUN, limit_bytes=RUN_BOUNDS.length_bytes), RUN).run
    except StrongroomError:
        return None
