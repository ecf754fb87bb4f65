"""What ``train()`` goes on from: what it was given, or the newest whole checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from trained import BATCHES, EPOCHS, BrokenOffError, Net

from strongroom import Checkpointer
from strongroom.errors import CheckpointNotFoundError, ConfigError, IntegrityError, StateMismatchError

Train = Callable[..., Any]
LAST = BATCHES * EPOCHS


def launches(root: Path) -> int:
    return len(list((root / "launches").glob("*.json")))


def test_true_wants_a_checkpoint(train: Train) -> None:
    with pytest.raises(CheckpointNotFoundError, match="must"):
        train(resume=True)
    train(until=4)
    assert len(train(resume=True).losses) == LAST - 4


def test_false_begins_anew(train: Train, root: Path, uninterrupted: Train) -> None:
    train(until=4)
    train(resume=False).ends_like(uninterrupted())
    assert launches(root) == 2


def test_never_and_must_are_the_callbacks(train: Train) -> None:
    with pytest.raises(CheckpointNotFoundError):
        train(options={"resume": "must"})
    train(until=4)
    assert len(train(options={"resume": "never"}).losses) == LAST


@pytest.mark.parametrize("step", (3, BATCHES))
def test_a_named_step_is_a_rewind(train: Train, root: Path, uninterrupted: Train, step: int) -> None:
    train(until=9)
    resumed = train(resume=f"strongroom://{root}#step={step}", seed=5)
    assert len(resumed.losses) == LAST - step
    resumed.ends_like(uninterrupted())


def test_a_name_without_a_step_is_the_newest(train: Train, root: Path) -> None:
    train(until=9)
    assert len(train(resume=f"strongroom://{root}").losses) == LAST - 9


@pytest.mark.parametrize("name", ("strongroom://elsewhere", "strongroom://", "strongroom://{root}#best"))
def test_another_runs_name_is_refused(train: Train, root: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="not a checkpoint of this run"):
        train(resume=name.format(root=root))


@pytest.mark.parametrize("given", (5, "", b"checkpoint-5"))
def test_what_names_nothing_is_refused(train: Train, given: Any) -> None:
    with pytest.raises(ConfigError, match="resume_from_checkpoint must be"):
        train(resume=given)


def test_a_folder_of_the_trainers_own_is_the_trainers_to_load(
    train: Train, root: Path, tmp_path: Path, uninterrupted: Train
) -> None:
    """It reads ahead in its own way; what we save from there on is exact in itself."""
    train(root=None, until=4)
    folder = tmp_path / "trainer" / "checkpoint-4"
    moved = train(resume=str(folder), until=8, seed=5)
    assert len(moved.losses) == 4
    again = train(seed=6)
    whole = train(root=None, resume=str(folder), seed=5)
    assert again.step == whole.step == LAST
    assert [len(one.losses) for one in (moved, again)] == [4, 4]
    with Checkpointer(root) as checkpointer:
        assert checkpointer.checkpoints()[-1].step == 5


def test_what_goes_on_from_the_trainers_folder_resumes_exactly(train: Train, tmp_path: Path) -> None:
    train(root=None, until=4)
    folder = str(tmp_path / "trainer" / "checkpoint-4")
    whole = train(root=tmp_path / "whole", resume=folder, seed=5)
    train(resume=folder, until=8, seed=5)
    train(seed=6).ends_like(whole)
    train(root=tmp_path / "other", resume=folder, until=5, seed=5)
    train(root=tmp_path / "other", seed=6).ends_like(whole)


def test_a_finished_run_trains_nothing_and_says_so(train: Train, said: Callable[[], str]) -> None:
    whole = train()
    again = train(seed=5)
    assert again.losses == []
    assert "already finished" in said()
    assert again.step == LAST
    assert again.result.training_loss == whole.result.training_loss
    assert torch.equal(again.model.net[0].weight, whole.model.net[0].weight)


def test_a_run_that_stopped_inside_an_epoch_is_finished_too(train: Train) -> None:
    train(max_steps=4)
    assert train(max_steps=4, seed=5).losses == []


def test_a_finished_run_goes_on_where_it_is_given_more_steps(train: Train, uninterrupted: Train) -> None:
    constant = {"lr_scheduler_type": "constant"}
    train(max_steps=4, **constant)
    more = train(max_steps=9, seed=5, **constant)
    assert more.losses == uninterrupted(max_steps=9, **constant).losses[4:]


def test_the_same_trainer_goes_on_after_an_error(build: Train, uninterrupted: Train) -> None:
    """As in a notebook: a cell was stopped, and is run once more."""
    outcome = build(until=4)
    with pytest.raises(BrokenOffError):
        outcome.trainer.train()
    breaks = next(one for one in outcome.trainer.callback_handler.callbacks if hasattr(one, "until"))
    breaks.until = None
    outcome.trainer.train()
    reference = uninterrupted()
    assert outcome.losses == reference.losses
    assert outcome.trainer.state.global_step == LAST


def test_the_same_trainer_twice(build: Train) -> None:
    outcome = build()
    outcome.trainer.train()
    outcome.trainer.train()
    assert len(outcome.losses) == LAST


def test_a_damaged_checkpoint_is_passed_over(
    train: Train, root: Path, uninterrupted: Train, said: Callable[[], str]
) -> None:
    train(until=5)
    (newest,) = root.glob("step-000000000005-*")
    shard = next(newest.glob("data/*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x55")
    resumed = train(seed=3)
    assert "damaged" in said()
    assert len(resumed.losses) == LAST - 4
    resumed.ends_like(uninterrupted())


def test_where_none_is_whole_it_is_an_error(train: Train, root: Path) -> None:
    train(until=2)
    for shard in root.glob("step-*/data/*.safetensors"):
        shard.write_bytes(b"\x55" + shard.read_bytes()[1:])
    with pytest.raises(IntegrityError):
        train()


def test_what_another_program_wrote_is_refused(train: Train, root: Path) -> None:
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, {"model": Net(), "epoch": 3}).result()
    with pytest.raises(StateMismatchError, match="not written by StrongroomCallback"):
        train()


def test_another_model_is_an_error_that_lists_what_differs(train: Train) -> None:
    train(until=3)
    with pytest.raises(StateMismatchError, match=r"net\.0\.weight"):
        train(model=Net(width=5))


def test_other_data_are_an_error(train: Train) -> None:
    from trained import Numbers

    train(until=3)
    with pytest.raises(StateMismatchError, match="batches"):
        train(data=Numbers(40))


def test_arguments_that_changed_count_and_are_told(train: Train, root: Path, said: Callable[[], str]) -> None:
    """The Trainer itself goes on with what was saved."""
    train(until=3, save_steps=3)
    train(save_steps=4)
    with Checkpointer(root) as checkpointer:
        assert sorted(one.step for one in checkpointer.checkpoints()) == [3, 4, 8, 12]
    assert "save_steps: 4 (from args) != 3" in said()
