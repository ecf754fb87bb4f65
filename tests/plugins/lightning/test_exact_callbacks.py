"""Callbacks and modules that train in ways of their own, broken off and gone on with."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, Callback, StochasticWeightAveraging, Timer
from torch import nn

from strongroom import Checkpointer

DONE = (4, 10, 16, 24)
"""Batches done when the run breaks off, of 3 epochs of 10."""


def gone_on_with(fit: Any, done: int, **options: Any) -> Any:
    """What a run that was broken off there ends as."""
    fit(until=done, checkpoint={"every_n_train_steps": done}, **options)
    return fit(seed=1, checkpoint={"every_n_epochs": 100}, **options)


class Unfreezing(BaseFinetuning):
    """Trains the head alone at first; from epoch 1 on the first layer too, in a group of its own."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=3e-3)


@pytest.mark.parametrize("done", DONE)
def test_layers_that_are_unfrozen_by_epoch(fit: Any, uninterrupted: Any, net: Any, done: int) -> None:
    class Head(net):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)

    options = {"module": Head, "callbacks": (Unfreezing,)}
    reference = uninterrupted(**options)
    assert len(reference.trainer.optimizers[0].param_groups) == 2
    resumed = gone_on_with(fit, done, **options)
    resumed.ends_like(reference)
    assert len(resumed.trainer.optimizers[0].param_groups) == 2


def averaging() -> Callback:
    return StochasticWeightAveraging(swa_lrs=5e-3, swa_epoch_start=1, annealing_epochs=2)


@pytest.mark.filterwarnings("ignore:.*swa_epoch_start")
@pytest.mark.parametrize("done", (4, 10, 16, 20))
def test_averaged_weights(fit: Any, uninterrupted: Any, done: int) -> None:
    reference = uninterrupted(callbacks=(averaging,))
    gone_on_with(fit, done, callbacks=(averaging,)).ends_like(reference)


def test_the_last_checkpoint_of_a_run_that_averages_holds_the_averaged_weights(fit: Any, root: Any) -> None:
    outcome = fit(checkpoint={"every_n_train_steps": 7}, callbacks=(averaging,))
    newest = Checkpointer(root).restore()
    assert newest is not None
    assert newest.step == 30
    for name, value in outcome.weights.items():
        assert torch.equal(newest.state["model"][name], value), name


class Ema(Callback):
    """An average of all weights, kept beside them, and looked at by nobody while training."""

    def __init__(self) -> None:
        self.average: dict[str, torch.Tensor] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        for name, value in pl_module.named_parameters():
            old = self.average.get(name, value.detach().clone())
            self.average[name] = old.lerp(value.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.average = state_dict["average"]


@pytest.mark.parametrize("done", (4, 10, 16))
def test_an_average_kept_by_a_callback(fit: Any, done: int) -> None:
    def trained(**options: Any) -> dict[str, torch.Tensor]:
        ema = Ema()
        fit(*options.pop("where", ()), callbacks=(lambda: ema,), **options)
        return ema.average

    expected = trained(where=(None,))
    trained(until=done, checkpoint={"every_n_train_steps": done})
    average = trained(seed=1, checkpoint={"every_n_epochs": 100})
    assert all(torch.equal(average[name], value) for name, value in expected.items())


class Adversarial(lightning.LightningModule):
    """Two networks against each other, each with an optimizer that is stepped by hand, and two schedulers."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 6))
        self.judge = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 1))
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
        makes, judges = self.optimizers()
        x = batch[0]
        made = self.generator(torch.randn(len(x), 3))
        if batch_idx % 2 == 0:
            self.toggle_optimizer(makes)
            loss = nn.functional.softplus(-self.judge(made)).mean()
            makes.zero_grad()
            self.manual_backward(loss)
            makes.step()
            self.untoggle_optimizer(makes)
        self.toggle_optimizer(judges)
        real, fake = self.judge(x), self.judge(made.detach())
        loss = (nn.functional.softplus(-real) + nn.functional.softplus(fake)).mean()
        judges.zero_grad()
        self.manual_backward(loss)
        judges.step()
        self.untoggle_optimizer(judges)
        for scheduler in self.lr_schedulers():
            scheduler.step()
        self.losses.append(loss.item())
        return {"loss": loss.detach()}

    def configure_optimizers(self) -> Any:
        makes = torch.optim.Adam(self.generator.parameters(), lr=1e-2, betas=(0.5, 0.9))
        judges = torch.optim.Adam(self.judge.parameters(), lr=2e-2)
        steps = [torch.optim.lr_scheduler.StepLR(one, 4, 0.8) for one in (makes, judges)]
        return [makes, judges], steps


@pytest.mark.parametrize("done", (4, 10, 15))
def test_two_networks_against_each_other(fit: Any, uninterrupted: Any, done: int) -> None:
    reference = uninterrupted(module=Adversarial)
    # Of every two batches one steps both optimizers.
    steps = done + (done + 1) // 2 if done <= 10 else 15 + 5 + 3
    fit(until=done, checkpoint={"every_n_train_steps": steps}, module=Adversarial)
    resumed = fit(seed=1, checkpoint={"every_n_epochs": 100}, module=Adversarial)
    assert len(resumed.losses) == 30 - done
    resumed.ends_like(reference)


class Counted(Timer):
    """Its time is up after some batches: clocks are not for tests."""

    def __init__(self, batches: int) -> None:
        super().__init__(timedelta(seconds=5), verbose=False)
        self.left = batches

    def time_elapsed(self, stage: Any = "train") -> float:
        return 10.0 if self.left <= 0 else 0.0

    def on_train_batch_end(self, *args: Any, **options: Any) -> None:
        self.left -= 1
        super().on_train_batch_end(*args, **options)


def test_a_run_stopped_by_its_time_limit_goes_on_from_there(fit: Any, uninterrupted: Any) -> None:
    stopped = fit(callbacks=(lambda: Counted(13),))
    assert len(stopped.losses) == 13
    resumed = fit(seed=1, checkpoint={"every_n_epochs": 100}, callbacks=(lambda: Counted(99),))
    assert len(resumed.losses) == 17
    assert resumed.losses == uninterrupted().losses[13:]
    assert all(torch.equal(value, uninterrupted().weights[name]) for name, value in resumed.weights.items())


def test_a_second_fit_of_the_same_trainer_goes_on_in_memory_and_can_be_resumed(fit: Any, root: Any) -> None:
    outcome = fit(max_epochs=1)
    trainer, module = outcome.trainer, outcome.module
    data = trainer.train_dataloader
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, data)
    resumed = fit(seed=1, max_epochs=3)
    assert resumed.losses == []
    for name, value in module.state_dict().items():
        assert torch.equal(resumed.weights[name], value), name
