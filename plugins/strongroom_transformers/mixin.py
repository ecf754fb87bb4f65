"""A Trainer with a Strongroom of its own, for who writes a Trainer class anyway."""

from __future__ import annotations

import os
from typing import Any

from strongroom_transformers.callback import StrongroomCallback

__all__ = ["StrongroomTrainerMixin"]


class StrongroomTrainerMixin:
    """Attaches a `StrongroomCallback` when the Trainer is made.

    ::

        class MyTrainer(StrongroomTrainerMixin, Trainer): ...

        MyTrainer(model=model, args=args, train_dataset=dataset, strongroom="runs/a").train()

    Args:
        args: the Trainer's.
        strongroom: the run's root, or a callback with its options; None: trained without.
        kwargs: the Trainer's.
    """

    def __init__(
        self, *args: Any, strongroom: str | os.PathLike[str] | StrongroomCallback | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        if strongroom is None:
            return
        callback = (
            strongroom if isinstance(strongroom, StrongroomCallback) else StrongroomCallback(strongroom)
        )
        callback.attach(self)
