"""Processes that Lightning starts for the fit alone, and what who started them knows afterwards."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from strongroom import Checkpointer

SCRIPT = """
import sys

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

from strongroom_lightning import StrongroomCheckpoint


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy="ddp_fork",
    max_epochs=2,
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    callbacks=[StrongroomCheckpoint(sys.argv[1], every_n_train_steps=3)],
)
module = Module()
trainer.fit(module, DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=4))
best = trainer.checkpoint_callback.best_model_path
assert torch.equal(Module.load_from_checkpoint(best).net.weight, module.net.weight)
print("best:", best)
"""


def test_who_forked_the_ranks_knows_what_they_saved(tmp_path: Path) -> None:
    """As in notebooks: copies of the callback save, in the ranks, and the original is asked."""
    root = tmp_path / "run"
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(root)], capture_output=True, text=True, timeout=200, cwd=tmp_path
    )
    assert ran.returncode == 0, ran.stderr
    assert f"best: strongroom://{root}#step=8" in ran.stdout
    assert [one.step for one in Checkpointer(root).checkpoints()] == [8, 6, 3]
