"""A training run in a process of its own, for `test_sigkill.py`, which kills it.

Prints ``batch N`` before each batch and, when it has finished, ``weights <digest>`` as the last line.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import warnings
from typing import Any

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from strongroom_lightning import StrongroomCheckpoint


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 256), nn.Dropout(0.2), nn.ReLU(), nn.Linear(256, 4))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        sys.stdout.write(f"batch {self.trainer.fit_loop.total_batch_idx}\n")
        sys.stdout.flush()
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(root: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    lightning.seed_everything(5, verbose=False)
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randn(80, 8, generator=generator), torch.randint(0, 4, (80,), generator=generator)
    )
    module = Net()
    lightning.Trainer(
        max_epochs=3,
        accelerator="cpu",
        devices=1,
        callbacks=[StrongroomCheckpoint(root, every_n_train_steps=3, keep=3)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module, DataLoader(data, batch_size=4, shuffle=True))
    digest = hashlib.sha256()
    for value in module.state_dict().values():
        digest.update(value.numpy().tobytes())
    sys.stdout.write(f"weights {digest.hexdigest()}\n")


if __name__ == "__main__":
    main(sys.argv[1])
