"""A small Composer run with everything in it that an exact resume has to bring back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from composer import Algorithm, Callback, ComposerModel, Evaluator, Event, Trainer
from composer.utils import dist
from samples import Numbers
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from strongroom_composer import StrongroomCheckpoint

BATCHES, EPOCHS = 6, 2


class BrokenOffError(Exception):
    """What ends a run in the middle, in place of a kill."""


class Net(ComposerModel):
    """Dropout, so that every draw counts."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, width), nn.Dropout(0.3), nn.ReLU(), nn.Linear(width, 3))
        # Where the model is sharded, these are.
        self.net[0]._fsdp_wrap = self.net[3]._fsdp_wrap = True

    def forward(self, batch: Any) -> torch.Tensor:
        return self.net(batch[0])

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, batch[1])

    def get_metrics(self, is_train: bool) -> dict[str, Any]:
        return {"accuracy": MulticlassAccuracy(num_classes=3, average="micro")}

    def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
        metric.update(outputs, batch[1])


class Average(Callback):
    """A callback with state of its own: a running mean of the losses, a tensor and a count."""

    def __init__(self) -> None:
        self.mean, self.count = torch.zeros(()), 0
        self.losses: list[float] = []
        self.measured: list[float] = []

    def batch_end(self, state: Any, logger: Any) -> None:
        self.count += 1
        loss = state.loss.detach().clone()
        self.losses.append(float(loss))
        self.mean = self.mean + (loss - self.mean) / self.count

    def eval_end(self, state: Any, logger: Any) -> None:
        self.measured.append(float(state.eval_metrics["eval"]["accuracy"].compute()))

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean, self.count = state["mean"], state["count"]


class Drawing(Callback):
    """Draws, and changes the model, at events around those at which a run is saved."""

    def _draw(self, state: Any, logger: Any) -> None:
        with torch.no_grad():
            model = state.model.module if state.is_model_ddp else state.model
            model.net[0].bias.mul_(1 + 1e-3 * float(torch.randn(())))

    batch_checkpoint = epoch_start = epoch_end = epoch_checkpoint = before_dataloader = _draw


class Noise(Algorithm):
    """A small algorithm with a state: it counts, and adds what it has counted to the inputs."""

    def __init__(self) -> None:
        self.count = 0

    def match(self, event: Event, state: Any) -> bool:
        return event == Event.AFTER_DATALOADER

    def apply(self, event: Event, state: Any, logger: Any) -> None:
        self.count += 1
        x, y = state.batch
        state.batch = (x + 1e-3 * self.count, y)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Interrupt(Callback):
    """Raises before a given batch, counted from 0 over the whole run, is trained on."""

    def __init__(self, before_batch: int) -> None:
        self.before_batch = before_batch

    def batch_start(self, state: Any, logger: Any) -> None:
        if int(state.timestamp.batch) == self.before_batch:
            raise BrokenOffError


@dataclass(kw_only=True)
class Outcome:
    """What a fit left behind."""

    losses: list[float]
    measured: list[float]
    weights: dict[str, torch.Tensor]
    average: Average
    trainer: Any
    checkpoint: StrongroomCheckpoint | None

    @property
    def learning_rate(self) -> float:
        return float(self.trainer.state.optimizers[0].param_groups[0]["lr"])

    def ends_like(self, reference: Outcome) -> None:
        """Losses to the last batch, weights, states, counters: equal as floats."""
        assert len(self.losses) <= len(reference.losses)
        assert self.losses == reference.losses[len(reference.losses) - len(self.losses) :]
        assert self.measured == reference.measured[len(reference.measured) - len(self.measured) :]
        assert self.weights.keys() == reference.weights.keys()
        for name, value in self.weights.items():
            assert torch.equal(value, reference.weights[name]), name
        assert self.average.count == reference.average.count
        assert torch.equal(self.average.mean, reference.average.mean)
        assert self.learning_rate == reference.learning_rate
        for unit in ("iteration", "epoch", "batch", "sample", "batch_in_epoch", "epoch_in_iteration"):
            assert getattr(self.trainer.state.timestamp, unit) == getattr(
                reference.trainer.state.timestamp, unit
            ), unit


def _whole(value: Any) -> torch.Tensor:
    """For all ranks, where it is sharded."""
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()


def stock_loader(*, batches: int = BATCHES, shuffle: bool = True, **options: Any) -> Any:
    """Of four samples a batch on each rank; dealt out where there are several."""
    data = Numbers(4 * batches * dist.get_world_size())
    if dist.get_world_size() > 1:
        options["sampler"] = dist.get_sampler(data, shuffle=shuffle)
        shuffle = False
    return DataLoader(data, batch_size=4, shuffle=shuffle, **options)


def train(
    root: Path | str | None = None,
    *,
    until: int | None = None,
    seed: int = 7,
    checkpoint: dict[str, Any] | None = None,
    model: Callable[[], Any] = Net,
    scheduler: Callable[[Any], Any] | None = None,
    validate: bool | Callable[[], Any] = False,
    eval_interval: Any = "2ba",
    callbacks: Sequence[Callable[[], Any]] = (),
    algorithms: Sequence[Callable[[], Any]] = (),
    loader: Callable[[], Any] = stock_loader,
    at_fit: bool = False,
    **settings: Any,
) -> Outcome:
    """Train a fresh model in a fresh Trainer, as a new process would.

    Args:
        root: where to save; None trains without our callback.
        until: break off before this batch, counted over the whole run.
        checkpoint: arguments of `StrongroomCheckpoint`; it saves at every step unless told otherwise.
        at_fit: whether data, schedulers and evaluators are given to ``fit``, not to the Trainer.
        settings: arguments of the Trainer.
    """
    torch.manual_seed(7)
    average = Average()
    everyone: list[Any] = [average]
    ours = None
    if root is not None:
        ours = StrongroomCheckpoint(root, **(checkpoint or {"save_interval": "1ba"}))
        everyone.append(ours)
    everyone += [make() for make in callbacks]
    if until is not None:
        everyone.append(Interrupt(until))
    module = model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    given: dict[str, Any] = {"train_dataloader": loader()}
    if scheduler is not None and not at_fit:
        given |= {"schedulers": scheduler(optimizer), "step_schedulers_every_batch": True}
    if validate:
        # Reading draws noise, from the stream that training draws from.
        make_eval = validate if callable(validate) else (lambda: stock_loader(batches=2, shuffle=False))
        given |= {
            "eval_dataloader": Evaluator(label="eval", dataloader=make_eval(), metric_names=["accuracy"]),
            "eval_interval": eval_interval,
        }
    trainer = Trainer(
        model=module,
        optimizers=optimizer,
        callbacks=everyone,
        algorithms=[make() for make in algorithms],
        progress_bar=False,
        log_to_console=False,
        device="cpu",
        **{"seed": seed, "max_duration": f"{EPOCHS}ep", "auto_log_hparams": False, **settings},
        **({} if at_fit else given),
    )
    if scheduler is not None and at_fit:
        # Made now: it sets the learning rate that a run begins with.
        given |= {"schedulers": scheduler(optimizer), "step_schedulers_every_batch": True}
    # A process that starts again is elsewhere in its random streams.
    torch.manual_seed(seed)
    if until is None:
        trainer.fit(**(given if at_fit else {}))
    else:
        try:
            trainer.fit(**(given if at_fit else {}))
        except BrokenOffError:
            pass
        else:
            raise AssertionError("the run was not broken off")
    trainer.close()
    bare = trainer.state.model.module if trainer.state.is_model_ddp else trainer.state.model
    return Outcome(
        losses=average.losses,
        measured=average.measured,
        weights={name: _whole(value) for name, value in bare.state_dict().items()},
        average=average,
        trainer=trainer,
        checkpoint=ours,
    )
