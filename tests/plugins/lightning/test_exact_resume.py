"""A run that was broken off and started again ends as the uninterrupted one: every loss, every weight."""

from __future__ import annotations

from typing import Any

import pytest

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
