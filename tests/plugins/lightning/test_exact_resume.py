"""A run that was broken off and started again ends as the uninterrupted one: every loss, every weight."""

from __future__ import annotations

import warnings
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, GradientAccumulationScheduler
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

MID_EPOCH, EPOCHS_LAST_STEP, SECOND_EPOCH = 4, 10, 16
"""Batches done when the run breaks off, of 3 epochs of 10."""

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"accumulate_grad_batches": 2},
    "scheduler by step": {"scheduler": "step"},
    "scheduler by epoch": {"scheduler": "epoch"},
    "scheduler by metric": {"scheduler": "plateau", "validate": True},
    "validation inside the epoch": {"validate": True, "val_check_interval": 2},
    "steps as the limit": {"max_epochs": -1, "max_steps": 27},
    "clipping": {"gradient_clip_val": 0.1},
    "a loader with its own generator": {"generator": True},
    "batches as the limit": {"limit_train_batches": 9},
    "validation across epochs": {
        "validate": True,
        "val_check_interval": 7,
        "check_val_every_n_epoch": None,
    },
    "everything": {
        "validate": True,
        "val_check_interval": 3,
        "accumulate_grad_batches": 2,
        "scheduler": "step",
        "generator": True,
    },
}


@pytest.mark.parametrize("done", (MID_EPOCH, EPOCHS_LAST_STEP, SECOND_EPOCH))
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_a_run_broken_off_anywhere_ends_as_the_uninterrupted_one(
    fit: Any, uninterrupted: Any, settings: dict[str, Any], done: int
) -> None:
    reference = uninterrupted(**settings)
    last_step = done // settings.get("accumulate_grad_batches", 1)
    broken = fit(until=done, checkpoint={"every_n_train_steps": last_step}, **settings)
    assert broken.losses == reference.losses[:done]
    # A fresh process has another seed behind it.
    resumed = fit(seed=1000, checkpoint={"every_n_epochs": 100}, **settings)
    assert len(resumed.losses) == len(reference.losses) - done
    resumed.ends_like(reference)


@pytest.mark.parametrize("done", (MID_EPOCH, EPOCHS_LAST_STEP, SECOND_EPOCH))
def test_with_loader_workers(fit: Any, uninterrupted: Any, done: int) -> None:
    settings = {"workers": 2, "accumulate_grad_batches": 2}
    reference = uninterrupted(**settings)
    fit(until=done, checkpoint={"every_n_train_steps": done // 2}, **settings)
    fit(seed=1000, checkpoint={"every_n_epochs": 100}, **settings).ends_like(reference)


def test_saving_does_not_change_the_run(fit: Any, uninterrupted: Any) -> None:
    for settings in ({}, {"workers": 2}, {"validate": True}):
        outcome = fit(checkpoint={"every_n_train_steps": 1, "resume": "never"}, **settings)
        outcome.ends_like(uninterrupted(**settings))


def test_many_resumes_in_a_row(fit: Any, uninterrupted: Any) -> None:
    settings = {"accumulate_grad_batches": 2, "scheduler": "step", "validate": True}
    reference = uninterrupted(**settings)
    for number, done in enumerate((3, 4, 9, 10, 11, 20, 25), start=7):
        fit(until=done, seed=number, **settings)
    fit(seed=99, **settings).ends_like(reference)


def test_steps_that_were_not_saved_are_trained_again(fit: Any, uninterrupted: Any) -> None:
    reference = uninterrupted()
    options = {"checkpoint": {"every_n_train_steps": 4}}
    fit(until=15, **options)
    resumed = fit(seed=1, **options)
    assert len(resumed.losses) == len(reference.losses) - 12
    resumed.ends_like(reference)


def test_with_checkpoints_at_epoch_ends_alone(fit: Any, uninterrupted: Any) -> None:
    reference = uninterrupted(validate=True)
    options = {"checkpoint": {"every_n_epochs": 1}, "validate": True}
    fit(until=27, **options)
    resumed = fit(seed=1, **options)
    assert len(resumed.losses) == 10
    resumed.ends_like(reference)


@pytest.mark.parametrize("done", (5, 10, 17))
def test_accumulation_that_leaves_a_rest_at_the_epochs_end(fit: Any, uninterrupted: Any, done: int) -> None:
    settings = {"accumulate_grad_batches": 3}
    reference = uninterrupted(**settings)
    assert reference.trainer.global_step == 12
    fit(until=done, **settings)
    resumed = fit(seed=1, checkpoint={"every_n_epochs": 100}, **settings)
    assert len(resumed.losses) == {5: 27, 10: 20, 17: 14}[done]
    resumed.ends_like(reference)


@pytest.mark.parametrize("done", (7, 17, 24))
def test_accumulation_that_changes_from_epoch_to_epoch(fit: Any, uninterrupted: Any, done: int) -> None:
    """Lightning's scheduler acts where an epoch begins, a hook that a resume inside one leaves out."""
    settings: dict[str, Any] = {"callbacks": [lambda: GradientAccumulationScheduler({0: 1, 1: 2, 2: 3})]}
    reference = uninterrupted(**settings)
    fit(until=done, **settings)
    fit(**settings).ends_like(reference)


def test_a_finished_run_can_be_trained_on(fit: Any, uninterrupted: Any) -> None:
    reference = uninterrupted()
    assert len(fit(max_epochs=2).losses) == 20
    fit(seed=1).ends_like(reference)


def test_a_run_stopped_by_its_step_limit_goes_on_inside_the_epoch(fit: Any, uninterrupted: Any) -> None:
    reference = uninterrupted(max_epochs=-1, max_steps=27)
    fit(max_epochs=-1, max_steps=13)
    resumed = fit(seed=1, max_epochs=-1, max_steps=27)
    assert len(resumed.losses) == 14
    # Lightning counts the epoch that the limit cut short as an epoch, in either run.
    resumed.ends_like(reference)


class Stream(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """Data without a length: Lightning fetches one batch ahead. What is drawn late has its own generator."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(5)

    def __iter__(self) -> Any:
        for index in torch.randperm(40).tolist():
            yield torch.randn(6, generator=self.generator) + index / 40, torch.tensor(index % 3)


def test_data_without_a_length(fit: Any, uninterrupted: Any) -> None:
    options = {"loader": lambda: DataLoader(Stream(), batch_size=4)}
    reference = uninterrupted(**options)
    assert len(reference.losses) == 30
    for done in (MID_EPOCH, SECOND_EPOCH):
        fit(until=done, checkpoint={"every_n_train_steps": done, "resume": "never"}, **options)
        fit(seed=1, checkpoint={"every_n_epochs": 100}, **options).ends_like(reference)


def quiet_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(40, 6, generator=generator), torch.arange(40) % 3)


@pytest.mark.parametrize("done", (MID_EPOCH, EPOCHS_LAST_STEP, SECOND_EPOCH))
def test_persistent_workers_keep_the_order(fit: Any, uninterrupted: Any, done: int) -> None:
    def loader() -> Any:
        return DataLoader(quiet_data(), batch_size=4, shuffle=True, num_workers=1, persistent_workers=True)

    reference = uninterrupted(loader=loader)
    fit(until=done, checkpoint={"every_n_train_steps": done}, loader=loader)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fit(seed=1, checkpoint={"every_n_epochs": 100}, loader=loader).ends_like(reference)
    # In the first epoch all workers are new in either run, and nothing differs.
    about_workers = [one for one in told if "persistent workers" in str(one.message)]
    assert len(about_workers) == (0 if done == MID_EPOCH else 1)


class Stateful:
    """A loader that keeps its own position, and counts what it reads."""

    def __init__(self) -> None:
        self.read = 0
        self._order: list[int] = []
        self._at = 0

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Any:
        if not self._order or self._at == len(self):
            self._order, self._at = torch.randperm(10).tolist(), 0
        data = quiet_data().tensors
        while self._at < len(self):
            first = 4 * self._order[self._at]
            self._at += 1
            self.read += 1
            yield data[0][first : first + 4], data[1][first : first + 4]

    def state_dict(self) -> dict[str, Any]:
        return {"order": list(self._order), "at": self._at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._order, self._at = state_dict["order"], state_dict["at"]


@pytest.mark.parametrize("done", (MID_EPOCH, EPOCHS_LAST_STEP, SECOND_EPOCH))
def test_loaders_that_keep_their_own_position_are_not_read_again(
    fit: Any, uninterrupted: Any, done: int
) -> None:
    reference = uninterrupted(loader=Stateful)
    fit(until=done, checkpoint={"every_n_train_steps": done}, loader=Stateful)
    last = Stateful()
    resumed = fit(seed=1, checkpoint={"every_n_epochs": 100}, loader=lambda: last)
    resumed.ends_like(reference)
    assert last.read == len(resumed.losses)


@pytest.mark.parametrize("done", (MID_EPOCH, EPOCHS_LAST_STEP, SECOND_EPOCH))
def test_several_loaders_at_once(fit: Any, uninterrupted: Any, net: Any, done: int) -> None:
    class Two(net):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return super().training_step([batch["a"][0] + batch["b"][0].mean(), batch["a"][1]], batch_idx)

    def loader() -> Any:
        return {
            "a": DataLoader(quiet_data(), batch_size=4, shuffle=True),
            # Shorter, and so begun again in the middle of the other one.
            "b": DataLoader(
                quiet_data(), batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(1)
            ),
        }

    reference = uninterrupted(loader=loader, module=Two)
    fit(until=done, checkpoint={"every_n_train_steps": done}, loader=loader, module=Two)
    fit(seed=1, checkpoint={"every_n_epochs": 100}, loader=loader, module=Two).ends_like(reference)


def test_manual_optimization_with_two_optimizers(fit: Any, uninterrupted: Any, net: Any) -> None:
    class Manual(net):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                loss = super().training_step(batch, batch_idx)
                self.manual_backward(loss)
                optimizer.step()
            return {"loss": loss.detach()}

        def configure_optimizers(self) -> Any:
            first, second = list(self.net[0].parameters()), list(self.net[3].parameters())
            return [torch.optim.AdamW(first, lr=1e-2), torch.optim.SGD(second, lr=1e-2, momentum=0.9)]

    reference = uninterrupted(module=Manual)
    assert reference.trainer.global_step == 60
    fit(until=14, checkpoint={"every_n_train_steps": 28}, module=Manual)
    resumed = fit(seed=1, checkpoint={"every_n_epochs": 100}, module=Manual)
    assert len(resumed.losses) == 32
    resumed.ends_like(reference)


@pytest.mark.parametrize("done", (MID_EPOCH, EPOCHS_LAST_STEP, SECOND_EPOCH))
def test_a_callback_that_swaps_the_weights_in_its_hooks(fit: Any, uninterrupted: Any, done: int) -> None:
    if not hasattr(lightning.pytorch.callbacks, "WeightAveraging"):
        pytest.skip("this Lightning has no WeightAveraging callback; 2.6 has")

    def averaging() -> Callback:
        # It puts the averaged weights into the checkpoint as the model's, and takes them out again.
        return lightning.pytorch.callbacks.WeightAveraging(
            avg_fn=lambda average, new, count: 0.8 * average + 0.2 * new
        )

    reference = uninterrupted(callbacks=(averaging,))
    fit(until=done, checkpoint={"every_n_train_steps": done}, callbacks=(averaging,))
    fit(seed=1, checkpoint={"every_n_epochs": 100}, callbacks=(averaging,)).ends_like(reference)


def test_early_stopping_stops_at_the_same_batch(fit: Any, uninterrupted: Any) -> None:
    def stopping() -> Callback:
        return EarlyStopping(monitor="val_loss", patience=2, min_delta=10.0, verbose=False)

    options = {"validate": True, "val_check_interval": 4, "callbacks": (stopping,)}
    reference = uninterrupted(**options)
    assert len(reference.losses) < 30
    fit(until=6, checkpoint={"every_n_train_steps": 6}, **options)
    fit(seed=1, checkpoint={"every_n_epochs": 100}, **options).ends_like(reference)


def test_loaders_made_anew_every_epoch(fit: Any, uninterrupted: Any) -> None:
    settings = {"reload_dataloaders_every_n_epochs": 1}
    reference = uninterrupted(**settings)
    for done in (MID_EPOCH, SECOND_EPOCH):
        fit(until=done, checkpoint={"every_n_train_steps": done, "resume": "never"}, **settings)
        fit(seed=1, checkpoint={"every_n_epochs": 100}, **settings).ends_like(reference)


def test_loaders_asked_for_before_the_restore(fit: Any, uninterrupted: Any, net: Any) -> None:
    class OneCycle(net):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            steps = int(self.trainer.estimated_stepping_batches)  # makes the training loaders, right here
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    reference = uninterrupted(module=OneCycle)
    fit(until=MID_EPOCH, checkpoint={"every_n_train_steps": MID_EPOCH}, module=OneCycle)
    fit(seed=1, checkpoint={"every_n_epochs": 100}, module=OneCycle).ends_like(reference)
