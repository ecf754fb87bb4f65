"""A run that was broken off and started again ends as the uninterrupted one: every loss, every weight."""

from __future__ import annotations

from typing import Any

import composer_runs
import pytest
import torch
from composer import Time
from composer.algorithms import EMA, GradientClipping, LabelSmoothing
from composer.optim import CosineAnnealingWithWarmupScheduler
from composer_runs import BATCHES, Drawing, Noise, stock_loader
from torch.utils.data import DataLoader, IterableDataset

EVERYTHING: dict[str, Any] = {
    "validate": True,
    "scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7),
    "callbacks": (Drawing,),
    "algorithms": (Noise,),
}

MID_EPOCH, EPOCHS_LAST_STEP, SECOND_EPOCH = 4, 6, 9
"""Batches done when the run breaks off, of 2 epochs of 6."""


class Stream(IterableDataset[Any]):
    """Without a length, shuffled from a generator that it carries; reading draws."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def __iter__(self) -> Any:
        for index in torch.randperm(4 * BATCHES, generator=self.generator).tolist():
            yield torch.full((6,), index / 10) + 0.1 * torch.randn(6), torch.tensor(index % 3)


class Iterations(Drawing):
    """Iterations of two epochs, and draws at their ends."""

    def init(self, state: Any, logger: Any) -> None:
        state._iteration_length = "2ep"

    def iteration_start(self, state: Any, logger: Any) -> None:
        torch.randn(())


def own_generator() -> Any:
    return stock_loader(generator=torch.Generator().manual_seed(3))


def evaluation_that_draws() -> Any:
    """From a generator of its own, which Composer's first look at it moves too."""
    return stock_loader(batches=2, generator=torch.Generator().manual_seed(4))


class Shared:
    """One loader, trained from and evaluated on."""

    def __init__(self) -> None:
        self.loader: Any = None

    def train(self) -> Any:
        self.loader = own_generator()
        return self.loader

    def evaluate(self) -> Any:
        return self.loader


SHARED = Shared()


def cosine(optimizer: Any) -> Any:
    return CosineAnnealingWithWarmupScheduler(t_warmup="2ba")


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "evaluation at the epoch's end": {"validate": True, "eval_interval": "1ep", "callbacks": (Drawing,)},
    "evaluation with a generator": {"validate": evaluation_that_draws},
    "evaluation on the training data": {"loader": SHARED.train, "validate": SHARED.evaluate},
    "Composer's scheduler": {"scheduler": cosine},
    "a loader with its own generator": {"loader": own_generator},
    "part of an epoch": {"train_subset_num_batches": 6, "loader": lambda: stock_loader(batches=8)},
    "batches as the limit": {"max_duration": "11ba"},
    "given to fit": {"at_fit": True, **EVERYTHING},
    "no looking ahead": {"spin_dataloaders": False, "validate": True},
    "a stream without a length": {
        "loader": lambda: DataLoader(Stream(), batch_size=4),
        "max_duration": "12ba",
        "callbacks": (Drawing,),
    },
    "microbatches": {"device_train_microbatch_size": 2},
    "iterations": {"callbacks": (Iterations,)},
    "an average of the weights": {
        "algorithms": (lambda: EMA(half_life="2ba"), LabelSmoothing),
        "validate": True,
    },
    "clipping": {"algorithms": (lambda: GradientClipping("norm", 0.1),)},
    "saved measurements": {"save_metrics": True, "validate": True},
}


@pytest.mark.parametrize("done", range(1, 12))
def test_a_run_broken_off_anywhere_ends_as_the_uninterrupted_one(
    fit: Any, uninterrupted: Any, done: int
) -> None:
    reference = uninterrupted(**EVERYTHING)
    broken = fit(until=done, checkpoint={"save_interval": f"{done}ba"}, **EVERYTHING)
    assert broken.losses == reference.losses[:done]
    resumed = fit(seed=1000, checkpoint={"save_interval": "100ep"}, **EVERYTHING)
    assert len(resumed.losses) == len(reference.losses) - done
    resumed.ends_like(reference)


@pytest.mark.parametrize("done", (MID_EPOCH, EPOCHS_LAST_STEP, SECOND_EPOCH))
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_whatever_a_run_is_made_of_comes_back(
    fit: Any, uninterrupted: Any, settings: dict[str, Any], done: int
) -> None:
    reference = uninterrupted(**settings)
    fit(until=done, checkpoint={"save_interval": f"{done}ba"}, **settings)
    resumed = fit(seed=1000, checkpoint={"save_interval": "100ep"}, **settings)
    assert len(resumed.losses) == len(reference.losses) - done
    resumed.ends_like(reference)


@pytest.mark.parametrize("workers", ({"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}))
def test_with_loader_workers(fit: Any, uninterrupted: Any, workers: dict[str, Any]) -> None:
    settings = {"loader": lambda: stock_loader(multiprocessing_context="fork", **workers)}
    reference = uninterrupted(**settings)
    for done in (MID_EPOCH, SECOND_EPOCH):
        fit(until=done, checkpoint={"save_interval": f"{done}ba"}, **settings)
    resumed = fit(seed=1000, **settings)
    if "persistent_workers" not in workers:
        resumed.ends_like(reference)


def test_from_an_epochs_end(fit: Any, uninterrupted: Any) -> None:
    fit(until=8, checkpoint={"save_interval": 1}, **EVERYTHING)
    resumed = fit(seed=1000, checkpoint={"save_interval": Time.from_epoch(1)}, **EVERYTHING)
    assert len(resumed.losses) == 6
    resumed.ends_like(uninterrupted(**EVERYTHING))


def test_saving_does_not_change_the_run(fit: Any, uninterrupted: Any) -> None:
    for settings in (EVERYTHING, SETTINGS["an average of the weights"]):
        checkpoint = {"save_interval": "1ba", "resume": "never"}
        fit(checkpoint=checkpoint, **settings).ends_like(uninterrupted(**settings))


def test_many_resumes_in_a_row(fit: Any, uninterrupted: Any) -> None:
    for number, done in enumerate((2, 3, 6, 7, 11), start=7):
        fit(until=done, seed=number, **EVERYTHING)
    fit(seed=99, **EVERYTHING).ends_like(uninterrupted(**EVERYTHING))


def test_steps_that_were_not_saved_are_trained_again(fit: Any, uninterrupted: Any) -> None:
    fit(until=9, checkpoint={"save_interval": "4ba"}, **EVERYTHING)
    resumed = fit(seed=1000, checkpoint={"save_interval": "4ba"}, **EVERYTHING)
    assert len(resumed.losses) == 4
    resumed.ends_like(uninterrupted(**EVERYTHING))


def test_a_resume_may_leave_reading_to_the_sampler(fit: Any, said: Any) -> None:
    def quiet() -> Any:
        loader = stock_loader()
        loader.dataset.__class__ = Quiet
        return loader

    class Quiet(composer_runs.Numbers):
        def __getitem__(self, index: int) -> Any:
            read.append(index)
            return self.x[index], self.y[index]

    read: list[int] = []
    reference = fit(None, loader=quiet)
    fit(until=MID_EPOCH, loader=quiet)
    read.clear()
    fit(seed=1000, checkpoint={"save_interval": "1ep", "skip": "sampler"}, loader=quiet).ends_like(reference)
    assert len(read) == 4 * (12 - MID_EPOCH)
    assert "by its sampler" in said.text
