"""A run that was broken off and started again ends as the uninterrupted one: every loss, weight and log."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trained
from torch.utils.data import IterableDataset
from trained import BATCH_SIZE, BATCHES, EPOCHS, Outcome
from transformers import EarlyStoppingCallback, TrainerCallback

from strongroom import Checkpointer

Train = Callable[..., Any]

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "accumulation that does not divide the epoch": {"gradient_accumulation_steps": 4},
    "evaluation inside the epoch": {"eval_strategy": "steps", "eval_steps": 2},
    "evaluation at the epoch's end": {"eval_strategy": "epoch"},
    "a scheduler by metric": {
        "eval_strategy": "epoch",
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "metric_for_best_model": "loss",
        "lr_scheduler_kwargs": {"factor": 0.5, "patience": 0, "threshold": 100.0, "threshold_mode": "abs"},
    },
    "a scheduler with warm-up": {"lr_scheduler_type": "cosine", "warmup_steps": 3},
    "steps as the limit": {"max_steps": 11},
    "the epoch's saves": {"save_strategy": "epoch", "logging_strategy": "epoch"},
    "a sampler of the global stream": {"train_sampling_strategy": "sequential"},
    "half precision": {"bf16": True},
}
DONE = (4, BATCHES, 8)
"""Batches trained on when the run breaks off: in the first epoch, at its end, in the second."""


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, Any]], Outcome]:
    """The uninterrupted run of some settings, once."""
    known: dict[str, Outcome] = {}

    def of(settings: dict[str, Any]) -> Outcome:
        name = repr(settings)
        if name not in known:
            folder = tmp_path_factory.mktemp("alone")
            known[name] = trained.train(folder, root=None, **{**settings, "save_strategy": "no"})
        return known[name]

    return of


@pytest.mark.parametrize("done", DONE)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_a_run_broken_off_anywhere_ends_as_the_uninterrupted_one(
    train: Train, reference: Any, settings: dict[str, Any], done: int
) -> None:
    steps = done // settings.get("gradient_accumulation_steps", 1)
    if settings.get("save_strategy") == "epoch" and done < BATCHES:
        pytest.skip("nothing is saved before the epoch's end")
    broken = train(until=steps, **settings)
    assert broken.result is None
    # A fresh process has another seed behind it.
    resumed = train(seed=1000, **settings)
    assert resumed.losses
    resumed.ends_like(reference(settings))


def test_saving_does_not_change_the_run(train: Train, uninterrupted: Train) -> None:
    settings = {"eval_strategy": "steps", "eval_steps": 2}
    train(**settings).ends_like(uninterrupted(**settings))


def test_many_resumes_in_a_row(train: Train, uninterrupted: Train) -> None:
    settings = {"eval_strategy": "epoch", "logging_steps": 5}
    for number, done in enumerate((1, 5, 6, 11), start=77):
        train(until=done, seed=number, **settings)
    train(seed=99, **settings).ends_like(uninterrupted(**settings))


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_with_loader_workers(train: Train, uninterrupted: Train) -> None:
    settings = {"dataloader_num_workers": 1, "dataloader_multiprocessing_context": "fork"}
    train(until=4, **settings)
    train(seed=1000, **settings).ends_like(uninterrupted(**settings))


def test_the_samplers_own_seed_comes_back(train: Train, uninterrupted: Train) -> None:
    """Accelerate's sampler begins from the seed of the process, and a program may have drawn it elsewhere."""
    reference = uninterrupted(seed=123)
    train(until=3, seed=123)
    train(seed=4).ends_like(reference)


def test_skipping_by_the_sampler(train: Train, uninterrupted: Train) -> None:
    class Quiet(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
        def __len__(self) -> int:
            return BATCHES * BATCH_SIZE

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            return {"x": torch.full((6,), float(index)) / 24, "labels": torch.tensor(index % 3)}

    options = {"skip": "sampler"}
    train(until=4, data=Quiet(), options=options)
    train(seed=9, data=Quiet(), options=options).ends_like(uninterrupted(data=Quiet()))


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    """No length, and fewer batches than the run has steps; it draws from a generator that it carries."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def __iter__(self) -> Any:
        for index in torch.randperm(BATCH_SIZE * BATCHES, generator=self.generator).tolist():
            yield {"x": torch.randn(6, generator=self.generator), "labels": torch.tensor(index % 3)}


@pytest.mark.parametrize("done", (4, BATCHES, 8))
def test_a_stream_without_a_length(train: Train, uninterrupted: Train, done: int) -> None:
    settings = {"max_steps": BATCHES * EPOCHS}
    train(until=done, data=Stream(), **settings)
    resumed = train(seed=9, data=Stream(), **settings)
    resumed.ends_like(uninterrupted(data=Stream(), **settings))


def test_ignore_data_skip_begins_the_epoch_again(train: Train) -> None:
    train(until=4)
    resumed = train(seed=9, ignore_data_skip=True)
    # The whole first epoch once more, and of the second what is left until all steps are made.
    assert len(resumed.losses) == 2 * BATCHES - 4
    assert resumed.step == 2 * BATCHES


class EndsEpochs(TrainerCallback):
    """A user's own: an epoch is over before its data are."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_epoch_stop = state.global_step in (3, 7)


@pytest.mark.parametrize("done", (2, 3, 5))
def test_epochs_that_a_callback_ends(train: Train, uninterrupted: Train, done: int) -> None:
    settings = {"eval_strategy": "epoch"}
    train(until=done, callbacks=[EndsEpochs()], **settings)
    resumed = train(seed=9, callbacks=[EndsEpochs()], **settings)
    resumed.ends_like(uninterrupted(callbacks=[EndsEpochs()], **settings))


@pytest.mark.filterwarnings("ignore:Using EarlyStoppingCallback without")
def test_early_stopping_remembers_its_patience(train: Train, uninterrupted: Train) -> None:
    def patient() -> list[TrainerCallback]:
        return [EarlyStoppingCallback(early_stopping_patience=2, early_stopping_threshold=100.0)]

    settings = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "metric_for_best_model": "loss",
        "greater_is_better": False,
    }
    reference = uninterrupted(callbacks=patient(), **settings)
    assert reference.step < BATCHES * EPOCHS
    train(until=5, callbacks=patient(), **settings)
    train(seed=9, callbacks=patient(), **settings).ends_like(reference)


@pytest.mark.filterwarnings("ignore:Using EarlyStoppingCallback without")
def test_the_evaluation_at_the_start_is_not_made_again(train: Train, uninterrupted: Train) -> None:
    settings = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "eval_on_start": True,
        "metric_for_best_model": "loss",
        "greater_is_better": False,
    }

    def patient() -> list[TrainerCallback]:  # which would count it
        return [EarlyStoppingCallback(early_stopping_patience=3, early_stopping_threshold=100.0)]

    reference = uninterrupted(callbacks=patient(), **settings)
    assert reference.history[0]["step"] == 0
    train(until=3, callbacks=patient(), **settings)
    train(seed=9, callbacks=patient(), **settings).ends_like(reference)


def test_callbacks_are_made_anew_where_the_arguments_say_so(train: Train, uninterrupted: Train) -> None:
    settings = {"eval_strategy": "steps", "eval_steps": 2, "restore_callback_states_from_checkpoint": True}
    train(until=5, **settings)
    resumed = train(seed=9, **settings)
    reference = uninterrupted(**settings)
    again = next(one for one in resumed.trainer.callback_handler.callbacks if type(one).__name__ == "Drawing")
    assert again is not resumed.drawing
    assert again.seen == reference.drawing.seen
    assert resumed.losses == reference.losses[-len(resumed.losses) :]


class Logs(TrainerCallback):
    """A user's own figures, of every kind that a log may hold."""

    def __init__(self, entry: dict[str, Any]) -> None:
        self.entry = entry

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        state.log_history.append({**self.entry, "step": state.global_step})


@pytest.mark.parametrize(
    "more", ({}, {"scores": [1, 2.5], "exact": np.float32(0.1)}), ids=("plain", "others")
)
def test_whatever_was_logged_comes_back(train: Train, more: dict[str, Any]) -> None:
    entry = {"loss": 0.1, "norm": math.inf, "count": 3, "is": True, "words": 'a "ä"', "none": None, **more}
    train(until=2, callbacks=[Logs(entry)])
    resumed = train(callbacks=[Logs(entry)], seed=3, max_steps=3)
    found = resumed.trainer.state.log_history[:3]
    assert found == [{**entry, "step": step} for step in (1, 2, 3)]
    assert [type(value) for value in found[0].values()] == [type(value) for value in found[2].values()]


def test_a_log_is_not_taken_apart_value_by_value(train: Train, root: Path) -> None:
    train(until=1, callbacks=[Logs({"figure": 0.1})])
    with Checkpointer(root) as checkpointer:
        found = checkpointer.restore()
    assert found is not None
    assert json.loads(found.state["trainer"]["state"]["log_history"]) == [{"figure": 0.1, "step": 1}]
