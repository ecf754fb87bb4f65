"""What ranks train under the package ``pytorch_lightning``, whole or sharded. Importable by name."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning
import torch
from processes import rank, warnings_are_errors, world_size
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from strongroom_lightning.pytorch_lightning import StrongroomCheckpoint

__all__ = ["WAYS", "StoppedError", "as_rank", "train"]

EXPECTED_WARNINGS = (
    "ignore:.*does not have many workers:",
    "ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning",
    "ignore:The number of training batches:",
)


def as_rank() -> None:
    """Tell the package, in this process, which rank it is: it was imported before that was known."""
    from pytorch_lightning.utilities.rank_zero import rank_zero_only

    rank_zero_only.rank = rank()
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings_are_errors(EXPECTED_WARNINGS)


class StoppedError(Exception):
    """What ends a run in the middle, on every rank."""


class Net(pytorch_lightning.LightningModule):
    """Dropout that differs by rank, losses of each rank's own."""

    def __init__(self, *, is_sharded: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 3))
        self.is_sharded = is_sharded
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.is_sharded:
            for part in (self.net[0], self.net[3], self.net):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Stop(Callback):
    def __init__(self, before_batch: int) -> None:
        self.before_batch = before_batch

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.fit_loop.total_batch_idx == self.before_batch:
            raise StoppedError


WAYS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": partial(str, "ddp"), "is_sharded": False},
    "fsdp2": {"strategy": partial(ModelParallelStrategy, 2, 1), "is_sharded": True},
}


def train(
    root: Path | None, way: str, *, until: int | None = None, draw_from: int = 7
) -> tuple[list[float], dict[str, list[float]]]:
    """2 epochs of 6 batches on every rank: the losses of this one, and the weights, whole.

    Args:
        root: where to save at every step; None trains without our callback.
        until: break off before this batch, counted over the whole run.
        draw_from: what each rank's generator is seeded with after the model was made.
    """
    pytorch_lightning.seed_everything(7, verbose=False)
    net = Net(is_sharded=WAYS[way]["is_sharded"])
    torch.manual_seed(1000 * draw_from + rank())
    callbacks: list[Callback] = [] if until is None else [Stop(until)]
    if root is not None:
        callbacks.append(StrongroomCheckpoint(root, every_n_train_steps=1))
    trainer = pytorch_lightning.Trainer(
        accelerator="cpu",
        devices=world_size(),
        strategy=WAYS[way]["strategy"](),
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=root is not None,
        max_epochs=2,
    )
    generator = torch.Generator().manual_seed(0)
    samples = 4 * 6 * world_size()
    data = TensorDataset(
        torch.randn(samples, 6, generator=generator), torch.randint(0, 3, (samples,), generator=generator)
    )
    try:
        trainer.fit(net, DataLoader(data, 4, shuffle=True))
    except StoppedError:
        assert until is not None
    weights = {}
    for name, value in net.state_dict().items():
        full = value.full_tensor() if hasattr(value, "full_tensor") else value
        weights[name] = full.double().flatten().tolist()
    return net.losses, weights
