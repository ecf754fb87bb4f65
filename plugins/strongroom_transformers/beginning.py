"""What a call of ``train()`` began with, for a second try with a smaller batch.

With ``auto_find_batch_size`` the Trainer begins its loop again when the accelerator has no room, on the
weights that the failed try had come to, and counts its steps from 0. Here it begins again from what the first
try began with: weights, optimizer, scaler and random states.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from strongroom.resume import RngState
from strongroom_transformers import seam

__all__ = ["Beginning"]


class Beginning:
    """A copy, on the CPU, of what a Trainer holds before its loop begins."""

    def __init__(self, trainer: Any) -> None:
        self._rng = RngState.capture()
        self._weights = {
            name: value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
            for name, value in trainer.model.state_dict().items()
        }
        self._has_optimizer = trainer.optimizer is not None
        self._optimizer: Any = None
        self._scheduler: Any = None
        if self._has_optimizer:
            self._optimizer = copy.deepcopy(seam.bare_optimizer(trainer).state_dict())
        self._has_scheduler = trainer.lr_scheduler is not None
        if self._has_scheduler:
            self._scheduler = copy.deepcopy(trainer.lr_scheduler.state_dict())
        scaler = trainer.accelerator.scaler
        self._scaler = None if scaler is None else scaler.state_dict()

    def put_back(self, trainer: Any) -> None:
        """Let the Trainer be as it was."""
        trainer.model.load_state_dict(self._weights)
        trainer.model.zero_grad()
        if self._has_optimizer:
            seam.bare_optimizer(trainer).load_state_dict(self._optimizer)
        else:
            trainer.optimizer = None
        if self._has_scheduler and trainer.lr_scheduler is not None:
            trainer.lr_scheduler.load_state_dict(self._scheduler)
        else:
            trainer.lr_scheduler = None
        if self._scaler is not None:
            trainer.accelerator.scaler.load_state_dict(self._scaler)
        self._rng.restore()
