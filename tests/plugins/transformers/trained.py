"""A small run of a Trainer with everything in it that an exact resume has to bring back."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState

from strongroom_transformers import StrongroomCallback

# Ranks are other processes: what they run must be importable there by name.
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

BATCHES, EPOCHS, BATCH_SIZE = 6, 2, 4


class BrokenOffError(Exception):
    """What ends a run in the middle, in place of a kill."""


class Numbers(Dataset[dict[str, torch.Tensor]]):
    """Noise is drawn while reading."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(size, 6, generator=generator)
        self.y = torch.randint(0, 3, (size,), generator=generator)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[index] + 0.1 * torch.randn(6), "labels": self.y[index]}


class Net(nn.Module):
    """Dropout, and a buffer that training moves."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, width), nn.Dropout(0.3), nn.ReLU(), nn.Linear(width, 3))
        self.register_buffer("average", torch.zeros(width))
        self.losses: list[float] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.net(x)
        loss = nn.functional.cross_entropy(found, labels)
        if self.training:
            self.losses.append(loss.item())
            self.average.mul_(0.9).add_(self.net[0].bias.detach(), alpha=0.1)
        return {"loss": loss, "logits": found}


class Drawing(TrainerCallback, ExportableState):
    """A user's own: it draws where it is called, and counts what it has seen."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"seen": list(self.seen)}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        torch.rand(())

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        torch.rand(())  # the Trainer calls it once more in the epoch in which a run is taken up

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(f"step {state.global_step}")


class BreakOff(TrainerCallback):
    """Raises when so many steps were made, before the next one."""

    def __init__(self, until: int) -> None:
        self.until = until

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.until:
            raise BrokenOffError


@dataclass
class Outcome:
    """What came of a run.

    Attributes:
        trainer: as it was left.
        model: likewise.
        drawing: the user's callback.
        result: what ``train()`` returned; None: it was broken off.
    """

    trainer: Any
    model: Any
    drawing: Drawing
    result: Any = None
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def losses(self) -> list[float]:
        return self.model.losses

    @property
    def step(self) -> int:
        return self.trainer.state.global_step

    @property
    def history(self) -> list[dict[str, float]]:
        """What was logged, without what measures time."""
        return [
            {name: value for name, value in entry.items() if "runtime" not in name and "second" not in name}
            for entry in self.trainer.state.log_history
        ]

    def ends_like(self, other: Outcome) -> None:
        """Equal as floats: the losses since, every weight, the optimizer, and what was logged."""
        assert self.losses == other.losses[len(other.losses) - len(self.losses) :]
        assert self.step == other.step
        mine, theirs = self.model.state_dict(), other.model.state_dict()
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
        assert self.history == other.history
        assert self.drawing.seen == other.drawing.seen
        if self.result is not None and other.result is not None:
            assert self.result.training_loss == other.result.training_loss
        mine, theirs = (one.trainer.lr_scheduler.state_dict() for one in (self, other))
        assert mine == theirs


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    """The run's, of which each test says what it is about."""
    settings: dict[str, Any] = {
        "output_dir": str(folder / "trainer"),
        "per_device_train_batch_size": BATCH_SIZE,
        "num_train_epochs": EPOCHS,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "steps",
        "save_steps": 1,
        "logging_steps": 4,
        "learning_rate": 1e-2,
        "seed": 7,
        **more,
    }
    return TrainingArguments(**settings)


def build(
    folder: Path,
    *,
    root: Path | None,
    until: int | None = None,
    seed: int = 77,
    callbacks: Sequence[TrainerCallback] = (),
    options: dict[str, Any] | None = None,
    kind: type[Trainer] = Trainer,
    model: nn.Module | None = None,
    data: Any = None,
    more: dict[str, Any] | None = None,
    **args: Any,
) -> Outcome:
    """A Trainer that is about to train, with its random streams at some place."""
    torch.manual_seed(0)
    drawing = Drawing()
    made = [drawing, *callbacks, *([] if until is None else [BreakOff(until)])]
    model = Net() if model is None else model
    evaluates = args.get("eval_strategy", "no") != "no"
    trainer = kind(
        model=model,
        args=arguments(folder, **args),
        train_dataset=Numbers(BATCHES * BATCH_SIZE) if data is None else data,
        eval_dataset=Numbers(8) if evaluates else None,
        callbacks=made,
        **(more or {}),
    )
    trainer.remove_callback(PrinterCallback)
    if root is not None:
        StrongroomCallback(root, **(options or {})).attach(trainer)
    torch.manual_seed(seed)
    return Outcome(trainer=trainer, model=model, drawing=drawing)


def train(folder: Path, *, root: Path | None, resume: Any = None, **settings: Any) -> Outcome:
    """Train to the end, or until it is broken off."""
    outcome = build(folder, root=root, **settings)
    try:
        outcome.result = outcome.trainer.train(resume_from_checkpoint=resume)
    except BrokenOffError:
        outcome.result = None
    return outcome
