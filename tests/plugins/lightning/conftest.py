"""A small run with everything in it that an exact resume has to bring back, and a way to break it off."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader

from strongroom_lightning import StrongroomCheckpoint

# Ranks are other processes: what they run must be importable there by name.
sys.path.insert(0, str(Path(__file__).parent))

from lightning_ranks import LightningLauncher
from samples import Numbers

BATCHES = 10
EPOCHS = 3


LIGHTNINGS_OWN_WARNINGS = (
    "ignore:.*does not have many workers:",
    "ignore:You defined a `validation_step` but have no `val_dataloader`:",
    "ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning",
    "ignore:The number of training batches:",
    "ignore:.*multi-threaded, use of fork:DeprecationWarning",
)


torch.set_num_threads(1)  # the models are tiny: threads would only wait for each other


def pytest_itemcollected(item: pytest.Item) -> None:
    """What Lightning says about small runs is no finding; that a resumed loader is not resumable would be."""
    if item.path.is_relative_to(Path(__file__).parent):
        for warning in LIGHTNINGS_OWN_WARNINGS:
            item.add_marker(pytest.mark.filterwarnings(warning))


class BrokenOffError(Exception):
    """What ends a run in the middle, in place of a kill."""


class Net(lightning.LightningModule):
    """Dropout, an average kept in a hook of its own, a scheduler, hyper-parameters."""

    def __init__(
        self, scheduler: str | None = None, width: int = 8, options: dict[str, Any] | None = None
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.scheduler = scheduler
        self.net = nn.Sequential(nn.Linear(6, width), nn.Dropout(0.3), nn.ReLU(), nn.Linear(width, 3))
        self.register_buffer("average", torch.zeros(width))
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        self.losses.append(loss.item())
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        # Runs after every callback's hook of that name.
        self.average.mul_(0.9).add_(self.net[0].bias.detach(), alpha=0.1)

    def on_train_epoch_start(self) -> None:
        self.net[0].bias.data.add_(1e-3 * torch.randn(()))  # draws before the epoch's iterator is made

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self.net(x), y))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        if self.scheduler is None:
            return optimizer
        if self.scheduler == "plateau":
            # No epoch is ever good enough, so that leaving one out shows.
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
                optimizer, factor=0.5, patience=0, threshold=100.0, threshold_mode="abs"
            )
            config = {
                "scheduler": plateau,
                "monitor": "val_loss",
            }
        else:
            config = {
                "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7),
                "interval": self.scheduler,
            }
        return {"optimizer": optimizer, "lr_scheduler": config}


class Average(Callback):
    """A callback with state of its own: a running mean of the losses, a tensor and a count."""

    def __init__(self) -> None:
        self.mean, self.count = torch.zeros(()), 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
        self.count += 1
        self.mean = self.mean + (outputs["loss"].detach() - self.mean) / self.count

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.mean, self.count = state_dict["mean"], state_dict["count"]


class Interrupt(Callback):
    """Raises before a given batch, counted from 0 over the whole run, is trained on."""

    def __init__(self, before_batch: int) -> None:
        self.before_batch = before_batch

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.fit_loop.total_batch_idx == self.before_batch:
            raise BrokenOffError


@dataclass(kw_only=True)
class Outcome:
    """What a fit left behind."""

    losses: list[float]
    weights: dict[str, torch.Tensor]
    average: Average
    trainer: lightning.Trainer
    module: Net
    checkpoint: StrongroomCheckpoint | None

    @property
    def learning_rate(self) -> float:
        return float(self.trainer.optimizers[0].param_groups[0]["lr"])

    def ends_like(self, reference: Outcome) -> None:
        """Losses to the last batch, weights, callback state, counters: equal as floats."""
        assert len(self.losses) <= len(reference.losses)
        assert self.losses == reference.losses[len(reference.losses) - len(self.losses) :]
        assert self.weights.keys() == reference.weights.keys()
        for name, value in self.weights.items():
            assert torch.equal(value, reference.weights[name]), name
        assert self.average.count == reference.average.count
        assert torch.equal(self.average.mean, reference.average.mean)
        assert self.learning_rate == reference.learning_rate
        assert self.trainer.global_step == reference.trainer.global_step
        assert self.trainer.current_epoch == reference.trainer.current_epoch
        logged = "fit_loop.epoch_loop._batches_that_stepped"  # the step under which loggers file metrics
        assert attrgetter(logged)(self.trainer) == attrgetter(logged)(reference.trainer)


def train(
    root: Path | None = None,
    *,
    until: int | None = None,
    seed: int = 7,
    ckpt_path: str | None = None,
    checkpoint: dict[str, Any] | None = None,
    module: Callable[[], Net] | None = None,
    scheduler: str | None = None,
    validate: bool = False,
    callbacks: Sequence[Callable[[], Callback]] = (),
    loader: Callable[[], Any] | None = None,
    workers: int = 0,
    persistent_workers: bool = False,
    generator: bool = False,
    **settings: Any,
) -> Outcome:
    """Train a fresh module in a fresh Trainer, as a new process would.

    Args:
        root: where to save; None trains without our callback.
        until: break off before this batch, counted over the whole run.
        checkpoint: arguments of `StrongroomCheckpoint`; it saves at every step unless told otherwise.
        module: makes the module, after everything was seeded.
        callbacks: makers of further callbacks.
        loader: makes the training data; otherwise a stock loader with the options that follow.
        settings: arguments of the Trainer.
    """
    lightning.seed_everything(seed, verbose=False)
    average = Average()
    everyone: list[Callback] = [average, *(make() for make in callbacks)]
    strongroom = None
    if root is not None:
        strongroom = StrongroomCheckpoint(root, **(checkpoint or {"every_n_train_steps": 1}))
        everyone.insert(0, strongroom)  # Lightning moves it to the end
    if until is not None:
        everyone.append(Interrupt(until))
    net = Net(scheduler) if module is None else module()
    trainer = lightning.Trainer(
        devices=1,
        callbacks=everyone,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=root is not None,
        **{"accelerator": "cpu", "max_epochs": EPOCHS, **settings},
    )
    data = (
        loader()
        if loader is not None
        else DataLoader(
            Numbers(4 * BATCHES),
            batch_size=4,
            shuffle=True,
            num_workers=workers,
            persistent_workers=persistent_workers,
            generator=torch.Generator().manual_seed(3) if generator else None,
        )
    )
    # Reading draws noise, from the stream that training draws from.
    validation = DataLoader(Numbers(8), batch_size=4) if validate else None
    if until is None:
        trainer.fit(net, data, validation, ckpt_path=ckpt_path)
    else:
        with pytest.raises(BrokenOffError):
            trainer.fit(net, data, validation, ckpt_path=ckpt_path)
    return Outcome(
        losses=net.losses,
        weights={name: value.clone() for name, value in net.state_dict().items()},
        average=average,
        trainer=trainer,
        module=net,
        checkpoint=strongroom,
    )


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root that does not exist yet; the working directory is where Lightning would write by itself."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run"


@pytest.fixture
def fit(root: Path) -> Callable[..., Outcome]:
    """`train`, with the test's root; ``fit(None)`` trains without our callback."""
    return lambda *args, **options: train(*(args or (root,)), **options)


@pytest.fixture(scope="session")
def uninterrupted() -> Callable[..., Outcome]:
    """The same training without our callback, once for all tests that ask for it."""
    # With the options themselves: functions among them are known by an address, which must stay theirs.
    known: dict[str, tuple[dict[str, Any], Outcome]] = {}

    def reference(**options: Any) -> Outcome:
        key = repr(sorted(options.items()))
        if key not in known:
            known[key] = (options, train(None, **options))
        return known[key][1]

    return reference


@pytest.fixture
def net() -> type[Net]:
    return Net


@pytest.fixture(scope="session")
def launcher() -> Iterator[LightningLauncher]:
    """Starts jobs of several ranks under Lightning, each rank a real process."""
    with LightningLauncher() as launcher:
        yield launcher
