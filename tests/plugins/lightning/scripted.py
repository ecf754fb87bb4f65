"""Runs whose metrics are written down beforehand, so that a test knows which checkpoint is the best."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader, TensorDataset

from strongroom import Checkpointer
from strongroom_lightning import StrongroomCheckpoint

__all__ = ["Outcome", "Scripted", "all_steps", "run", "steps"]


class Scripted(lightning.LightningModule):
    """Logs, at each validation, what is written for the step; and at each batch, as ``train_score``.

    Args:
        scores: by step; of a step that has none nothing is logged.
    """

    def __init__(
        self, scores: Mapping[int, float] | Callable[[int], float | None] = lambda step: None
    ) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.score_of = scores if callable(scores) else dict(scores).get
        self.seen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen.append(self.trainer.global_step)
        score = self.score_of(self.trainer.global_step + 1)
        if score is not None:
            self.log("train_score", score)
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def on_validation_epoch_end(self) -> None:
        score = -9.0 if self.trainer.sanity_checking else self.score_of(self.trainer.global_step)
        if score is not None:
            self.log("score", score)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader(batches: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(batches, 2)))


@dataclass(kw_only=True)
class Outcome:
    """What a fit left behind."""

    trainer: lightning.Trainer
    module: Scripted
    checkpoint: StrongroomCheckpoint

    @property
    def ranked(self) -> dict[int, float]:
        """The callback's best models, by step, the best first."""
        return {step_of(path): score.item() for path, score in self.checkpoint.best_k_models.items()}


def run(
    root: Path,
    scores: Mapping[int, float] | Callable[[int], float | None] = lambda step: None,
    *,
    batches: int = 2,
    ckpt_path: str | None = None,
    callbacks: Sequence[Callback] = (),
    validate: bool = True,
    trainer: Mapping[str, Any] | None = None,
    raises: type[BaseException] | None = None,
    **checkpoint: Any,
) -> Outcome:
    """Train a fresh module in a fresh Trainer: 4 epochs of ``batches`` batches, validated after each.

    Args:
        scores: of `Scripted`.
        trainer: arguments of the Trainer.
        raises: what the fit is expected to raise.
        checkpoint: arguments of `StrongroomCheckpoint`.
    """
    torch.manual_seed(3)
    made = StrongroomCheckpoint(root, **checkpoint)
    module = Scripted(scores)
    fitting = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        callbacks=[*callbacks, made],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 4, "num_sanity_val_steps": 0, **(trainer or {})},
    )
    try:
        fitting.fit(module, loader(batches), loader(1) if validate else None, ckpt_path=ckpt_path)
    except BaseException as error:
        if raises is None or not isinstance(error, raises):
            raise
    else:
        assert raises is None, f"{raises} was not raised"
    return Outcome(trainer=fitting, module=module, checkpoint=made)


def steps(root: Path) -> list[int]:
    """The steps of the root's current line, the oldest first."""
    return [one.step for one in reversed(Checkpointer(root).checkpoints()) if not one.is_superseded]


def all_steps(root: Path) -> list[int]:
    """All steps of the root, superseded ones included, sorted."""
    return sorted(one.step for one in Checkpointer(root).checkpoints())


def step_of(path: str) -> int:
    return int(path.rpartition("#step=")[2])
