"""What was measured before a resume still counts after it: means, metrics, and what monitors go by."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torchmetrics import MaxMetric, MeanMetric, MetricCollection, RunningMean
from torchmetrics.classification import MulticlassAccuracy, MulticlassPrecision

DONE = (4, 10, 16)
"""Batches done when the run breaks off, of 3 epochs of 10."""


@pytest.fixture
def measuring(net: Any) -> Any:
    class Measuring(net):  # type: ignore[misc]
        """Logs in every way that there is, and keeps what each epoch came to."""

        def __init__(self) -> None:
            super().__init__()
            self.accuracy = MulticlassAccuracy(3)
            self.group = MetricCollection(
                {"micro": MulticlassAccuracy(3, average="micro"), "precision": MulticlassPrecision(3)}
            )
            self.highest = MaxMetric()
            self.mean = MeanMetric()
            self.lately = RunningMean(window=4)

        def on_train_epoch_start(self) -> None:
            super().on_train_epoch_start()
            self.log("at_start", torch.rand(()))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            guesses = self.net(batch[0]).argmax(-1)
            self.accuracy(guesses, batch[1])
            self.group.update(guesses, batch[1])
            self.highest.update(loss.detach())
            self.mean.update(loss.detach())
            self.lately(loss.detach())
            self.log("both", loss, on_step=True, on_epoch=True)
            self.log("accuracy", self.accuracy, on_epoch=True)
            for reduce in ("min", "max", "sum"):
                self.log(reduce, loss, on_step=False, on_epoch=True, reduce_fx=reduce)
            if batch_idx == 1:
                self.log("once", loss, on_step=False, on_epoch=True)
            return loss

        def on_train_epoch_end(self) -> None:
            group = {f"group_{name}": value for name, value in self.group.compute().items()}
            self.log_dict({**group, "highest": self.highest.compute(), "mean": self.mean.compute()})
            self.log("lately", self.lately.compute())
            for metric in (self.group, self.highest, self.mean):
                metric.reset()

    return Measuring


class Recorder(Callback):
    """What monitors saw of each epoch, read where the next one begins, or training ends."""

    def __init__(self) -> None:
        self.epochs: list[dict[str, float]] = []

    def _note(self, trainer: Any, *args: Any) -> None:
        self.epochs.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    on_train_end = _note

    def on_train_epoch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.current_epoch:
            self._note(trainer)


def measured(fit: Any, *args: Any, **options: Any) -> tuple[Any, list[dict[str, float]]]:
    recorder = Recorder()
    outcome = fit(*args, callbacks=(lambda: recorder,), **options)
    return outcome, recorder.epochs


@pytest.mark.parametrize("done", DONE)
def test_each_epoch_comes_to_what_it_would_have(fit: Any, measuring: Any, done: int) -> None:
    _, expected = measured(fit, None, module=measuring)
    assert len(expected) == 3
    assert {"both_epoch", "accuracy", "min", "sum", "once", "at_start", "group_micro"} <= expected[0].keys()
    fit(until=done, checkpoint={"every_n_train_steps": done}, module=measuring)
    _, resumed = measured(fit, module=measuring, checkpoint={"every_n_epochs": 100}, seed=1)
    # At an epoch's first hook the resumed run sees what the last one had come to, too.
    assert resumed == expected[len(expected) - len(resumed) :]
    assert len(resumed) == {4: 3, 10: 3, 16: 2}[done]


def test_without_them_an_epoch_resumed_in_the_middle_counts_from_there(fit: Any, measuring: Any) -> None:
    _, expected = measured(fit, None, module=measuring)
    options = {"every_n_train_steps": 4, "running_metrics": False}
    outcome = fit(until=4, checkpoint=options, module=measuring)
    _, resumed = measured(fit, module=measuring, checkpoint={"every_n_epochs": 100}, seed=1)
    assert resumed[0]["sum"] < expected[0]["sum"]
    assert resumed[1:] == expected[1:]
    assert outcome.checkpoint is not None


def test_metrics_that_the_module_has_no_more_are_told(fit: Any, measuring: Any) -> None:
    fit(until=4, checkpoint={"every_n_train_steps": 4}, module=measuring)

    class Fewer(measuring):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.mean = torch.nn.Identity()  # by the same name, and no metric
            self.mean.update = self.mean.compute = lambda *args: torch.zeros(())
            self.mean.reset = lambda: None

    with pytest.warns(UserWarning, match="the state of a metric mean, which this module lacks"):
        fit(module=Fewer, checkpoint={"every_n_epochs": 100})


@pytest.mark.parametrize("done", (5, 7, 15))
def test_a_scheduler_goes_by_the_last_validation_right_after_the_resume(
    fit: Any, uninterrupted: Any, net: Any, done: int
) -> None:
    """One that steps with every batch needs the metric at once, long before the next validation."""

    class ByStep(net):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
                optimizer, factor=0.9, patience=1, threshold=100.0, threshold_mode="abs"
            )
            config = {"scheduler": plateau, "interval": "step", "monitor": "val_loss", "strict": False}
            return {"optimizer": optimizer, "lr_scheduler": config}

    options = {"module": ByStep, "validate": True, "val_check_interval": 4}
    with warnings.catch_warnings():
        # Of the steps before the first validation.
        warnings.filterwarnings("ignore", message="ReduceLROnPlateau conditioned on metric val_loss")
        reference = uninterrupted(**options)
        fit(until=done, checkpoint={"every_n_train_steps": done}, **options)
    # Here it is known, so that nobody warns.
    fit(seed=1, checkpoint={"every_n_epochs": 100}, **options).ends_like(reference)


@pytest.mark.parametrize("done", DONE)
def test_a_scheduler_by_an_epochs_mean(fit: Any, uninterrupted: Any, net: Any, done: int) -> None:
    class ByMean(net):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("mean", loss.square(), on_step=False, on_epoch=True)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            plateau = ByValue(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "mean"}}

    reference = uninterrupted(module=ByMean)
    fit(until=done, checkpoint={"every_n_train_steps": done}, module=ByMean)
    fit(seed=1, checkpoint={"every_n_epochs": 100}, module=ByMean).ends_like(reference)


class ByValue(torch.optim.lr_scheduler.ReduceLROnPlateau):
    """The rate follows the metric itself, so that any other mean shows."""

    def step(self, metrics: Any, epoch: Any = None) -> None:
        super().step(metrics, epoch)
        for group in self.optimizer.param_groups:
            group["lr"] = 1e-2 * float(metrics)
