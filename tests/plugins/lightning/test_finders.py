"""Lightning's searches for a learning rate or batch size train on trial: nothing of that is the run's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateFinder
from lightning.pytorch.tuner import Tuner
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from strongroom import Checkpointer, ConfigError
from strongroom_lightning import StrongroomCheckpoint

pytestmark = [
    pytest.mark.filterwarnings("ignore:Starting from v1.9.0:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*overridden after:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*weights_only"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
]


class Line(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.lr, self.batch_size = nn.Linear(4, 1), 0.01, 4
        self.trained: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.trained.append(self.trainer.global_step)
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def train_dataloader(self) -> DataLoader[Any]:
        samples = TensorDataset(torch.randn(48, 4, generator=torch.Generator().manual_seed(0)))
        return DataLoader(samples, batch_size=self.batch_size, shuffle=True)


def trainer_at(root: Path, *callbacks: Any, **options: Any) -> lightning.Trainer:
    return lightning.Trainer(
        default_root_dir=root.parent,
        callbacks=[StrongroomCheckpoint(root, every_n_train_steps=4), *callbacks],
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def steps_of(root: Path) -> list[int]:
    return [checkpoint.step for checkpoint in Checkpointer(root).checkpoints()]


def test_a_tuner_leaves_no_checkpoint_and_the_fit_that_follows_is_the_first(tmp_path: Path) -> None:
    root, module = tmp_path / "run", Line()
    trainer = trainer_at(root, max_epochs=1)
    Tuner(trainer).lr_find(module, num_training=9, early_stop_threshold=None, update_attr=False)
    assert steps_of(root) == []
    trainer.fit(module)
    assert steps_of(root) == [12, 8, 4]

    again = Line()
    trainer = trainer_at(root, max_epochs=2)
    Tuner(trainer).lr_find(again, num_training=9, early_stop_threshold=None, update_attr=False)
    again.trained.clear()
    trainer.fit(again)
    assert again.trained == list(range(12, 24)), "it resumes, tuned before or not"


def test_a_finder_in_a_fit_is_not_saved_and_the_fit_is(tmp_path: Path) -> None:
    root, module = tmp_path / "run", Line()
    finder = LearningRateFinder(num_training_steps=9, early_stop_threshold=None, update_attr=False)
    trainer_at(root, finder, max_epochs=1).fit(module)
    assert module.trained == [*range(9), *range(12)]
    assert steps_of(root) == [12, 8, 4]


def test_a_finder_in_a_run_that_would_resume_is_refused_before_it_undoes_the_resume(tmp_path: Path) -> None:
    root = tmp_path / "run"
    trainer_at(root, max_steps=8).fit(Line())
    with pytest.raises(ConfigError, match="LearningRateFinder would search anew"):
        trainer_at(root, LearningRateFinder(num_training_steps=20), max_steps=12).fit(Line())
    assert max(steps_of(root)) == 8


class Flat(Line):
    """A model whose watched figure never gets better."""

    def on_train_epoch_end(self) -> None:
        self.log("figure", torch.ones(()))


def stopping(patience: int) -> EarlyStopping:
    return EarlyStopping("figure", patience=patience, check_on_train_epoch_end=True)


def test_a_run_that_early_stopping_ended_is_finished_and_not_trained_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "run"
    first = Flat()
    trainer_at(root, stopping(2), max_epochs=20).fit(first)
    assert len(first.trained) == 3 * 12

    with caplog.at_level("INFO"):
        again = Flat()
        trainer_at(root, stopping(2), max_epochs=20).fit(again)
    assert again.trained == []
    assert "already finished (early stopping ran out of patience at step 36" in caplog.text
    assert torch.equal(again.net.weight, first.net.weight)

    asked = Flat()
    trainer_at(root, max_epochs=5).fit(asked)
    assert len(asked.trained) == 2 * 12, "without the early stopping it goes on where it was stopped"
