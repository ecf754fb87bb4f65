"""A run whose checkpoints lie sealed and signed in a bucket, and which resumes from there by itself.

python train.py NAME [MAX_STEPS]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from strongroom_lightning import StrongroomCheckpoint


class Classifier(lightning.LightningModule):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(16, width), nn.Dropout(0.1), nn.ReLU(), nn.Linear(width, 4))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 16, generator=generator)
    return TensorDataset(x, x[:, :4].argmax(dim=1))


def main(name: str, max_steps: int) -> None:
    lightning.seed_everything(7, verbose=False)
    checkpoint = StrongroomCheckpoint(
        name,
        config=Path(__file__).with_name("strongroom.toml"),
        every_n_train_steps=10,
        monitor="loss",
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=-1,
        max_steps=max_steps,
        callbacks=[checkpoint],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), DataLoader(samples(), batch_size=16, shuffle=True))
    print(f"step {trainer.global_step} of {checkpoint.dirpath}; the best: {checkpoint.best_model_path}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 40)
