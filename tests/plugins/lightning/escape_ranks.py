"""What ranks do in the tests of what else writes a sealed run's state. Importable by name."""

from __future__ import annotations

import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import rank_runs
import torch
from lightning.pytorch.callbacks import Callback, LearningRateFinder, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from strongroom_lightning import StrongroomCheckpoint

__all__ = ["MARKER", "WAYS", "bring_back", "find_rate", "take_up", "train_beside", "validate"]

MARKER = np.float32(1.2345e-21)
"""A weight that no training moves; its bytes are looked for in every file."""


class Marker(nn.Module):
    """Where a model is born without memory, what gives it some knows what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("marker", torch.empty(256))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.marker.fill_(float(MARKER))


class MarkedNet(rank_runs.RankNet):
    def __init__(self) -> None:
        super().__init__()
        self.lr, self.kept = 0.01, Marker()


class MarkedShardedNet(rank_runs.ShardedNet):
    def __init__(self) -> None:
        super().__init__()
        self.lr, self.kept = 0.01, Marker()


class Trained(Callback):
    """How the run went on: the steps that it was trained on."""

    steps: list[int]

    def on_fit_start(self, trainer: Any, *args: Any) -> None:
        Trained.steps = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        Trained.steps.append(trainer.global_step)


WAYS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp", "module": MarkedNet},
    "fsdp2": {"strategy": partial(rank_runs.sharded, 2, 1), "module": MarkedShardedNet},
    "fsdp2, one file": {
        "strategy": partial(rank_runs.sharded, 2, 1, distributed=False),
        "module": MarkedShardedNet,
    },
}


def _other() -> ModelCheckpoint:
    return ModelCheckpoint("other", every_n_train_steps=4, save_top_k=-1, save_last=True)


def _begin_in(folder: Path) -> None:
    os.chdir(folder)
    for message in (
        ".*by another callback.*",  # this resume is not exact, and should be said not to be
        "Be aware that when using",
        "Using `DistributedSampler` with the dataloaders",
        ".*is not empty",
        ".*overridden after",
    ):
        warnings.filterwarnings("ignore", message=message)


def _train(folder: Path, way: str, policy: Path, **options: Any) -> dict[str, Any]:
    _begin_in(folder)
    checkpoint = {"every_n_epochs": 1, "security": policy, **options.pop("checkpoint", {})}
    return rank_runs.train(folder / "run", checkpoint=checkpoint, **{**WAYS[way], **options})


def train_beside(folder: Path, way: str, policy: Path) -> dict[str, Any]:
    """Train with a ModelCheckpoint beside ours: 2 epochs of 6 batches, saved by it at every 4th."""
    return _train(folder, way, policy, callbacks=[_other])


def take_up(folder: Path, way: str, policy: Path) -> tuple[dict[str, Any], list[int]]:
    """What the other callback's last one brings back, and the steps that are trained from there."""
    again = {"ckpt_path": "other/last.ckpt", "draw_from": 99, "checkpoint": {"resume": "never"}}
    at_start = bring_back(folder, way, policy)
    _train(folder, way, policy, callbacks=[Trained], max_epochs=3, **again)
    return at_start, Trained.steps


def bring_back(folder: Path, way: str, policy: Path) -> dict[str, Any]:
    """What the other callback's last one brings back, before anything is trained."""
    return _train(
        folder,
        way,
        policy,
        callbacks=[rank_runs.StopAtStart],
        ckpt_path="other/last.ckpt",
        checkpoint={"resume": "never"},
    )


def validate(folder: Path, way: str, policy: Path) -> dict[str, list[float]]:
    """The weights that a validation is given by ``ckpt_path``."""
    _begin_in(folder)
    net = WAYS[way]["module"]()
    strategy = WAYS[way]["strategy"]
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy() if callable(strategy) else strategy,
        callbacks=[StrongroomCheckpoint("run", security=policy)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.validate(net, DataLoader(rank_runs.Numbers(16), 4), ckpt_path="other/last.ckpt", verbose=False)
    return rank_runs.whole(net)


def find_rate(folder: Path, way: str, policy: Path) -> dict[str, Any]:
    """Train with a finder, which saves before its trial and takes that up after it."""

    def finder() -> LearningRateFinder:
        return LearningRateFinder(num_training_steps=3, early_stop_threshold=None, update_attr=False)

    return _train(folder, way, policy, callbacks=[finder], max_epochs=1)
