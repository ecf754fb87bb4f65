"""A run of several processes with a sharded model (FSDP2), which goes on by itself wherever it was killed.

torchrun --standalone --nproc-per-node 2 train.py ROOT [MAX_STEPS]
"""

from __future__ import annotations

import hashlib
import os
import sys
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from strongroom_lightning import StrongroomCheckpoint


class Classifier(lightning.LightningModule):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net: Any = None

    def configure_model(self) -> None:
        if self.net is not None:
            return
        width = self.hparams["width"]
        with torch.device("meta"):  # no process ever holds the whole model
            self.net = nn.Sequential(nn.Linear(16, width), nn.Dropout(0.1), nn.ReLU(), nn.Linear(width, 4))
        for part in (self.net[0], self.net[3], self.net):
            fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 16, generator=generator)
    return TensorDataset(x, x[:, :4].argmax(dim=1))


def main(root: str, max_steps: int = 200) -> str:
    """Train, and return a digest of the weights."""
    lightning.seed_everything(7, verbose=False)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy=ModelParallelStrategy(data_parallel_size=world_size, tensor_parallel_size=1),
        devices=world_size,
        max_epochs=-1,
        max_steps=max_steps,
        callbacks=[StrongroomCheckpoint(root, every_n_train_steps=10, keep=3)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Classifier()
    trainer.fit(model, DataLoader(samples(), batch_size=8, shuffle=True))
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.full_tensor().numpy().tobytes())
    if trainer.is_global_zero:
        print(f"step {trainer.global_step} of {root}, weights {digest.hexdigest()[:16]}")
    return digest.hexdigest()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:3]))
