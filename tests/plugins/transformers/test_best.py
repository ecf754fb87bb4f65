"""The best model, and how many checkpoints stay: by the Trainer's arguments, after each commit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from test_timing import Improves, steps

from strongroom import Checkpointer
from strongroom.errors import ConfigError, IntegrityError
from strongroom.layout import CheckpointName
from strongroom.ranking import Scores
from strongroom_transformers.retaining import KeepAsTrainer

Train = Callable[..., Any]

RANKED = {
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_steps": 2,
    "metric_for_best_model": "score",
    "greater_is_better": True,
}
PEAK_AT_4 = {2: 1.0, 4: 3.0, 6: 2.0, 8: 2.5, 10: 0.0, 12: 1.0}


def ranked(figures: dict[int, float] = PEAK_AT_4, **more: Any) -> dict[str, Any]:
    return {"callbacks": [Improves(figures)], **RANKED, **more}


@pytest.mark.parametrize(("limit", "expected"), ((1, [4, 12]), (2, [4, 12]), (3, [4, 10, 12]), (None, None)))
def test_the_best_stays_beside_the_newest(
    train: Train, root: Path, limit: int | None, expected: list[int] | None
) -> None:
    train(**ranked(save_total_limit=limit))
    assert steps(root) == (expected or [2, 4, 6, 8, 10, 12])


def test_without_a_metric_the_newest_stay(train: Train, root: Path) -> None:
    train(save_total_limit=2, save_steps=2)
    assert steps(root) == [10, 12]


def test_keep_says_the_same(train: Train, root: Path) -> None:
    train(options={"keep": 2}, save_steps=2)
    assert steps(root) == [10, 12]
    with pytest.raises(ConfigError, match="give one"):
        train(options={"keep": 2}, save_total_limit=3)


def test_the_best_stays_where_a_run_is_taken_up(train: Train, root: Path) -> None:
    train(until=9, **ranked(save_total_limit=2))
    resumed = train(seed=4, **ranked(save_total_limit=2))
    # Besides, the newest one that was once read and found whole always stays.
    assert steps(root) == [4, 8, 12]
    assert resumed.trainer.state.best_metric == 3.0
    assert resumed.trainer.state.best_global_step == 4
    assert resumed.trainer.state.best_model_checkpoint == f"strongroom://{root}#step=4"


def test_the_best_model_is_there_in_the_end(train: Train, root: Path) -> None:
    outcome = train(**ranked(load_best_model_at_end=True, save_total_limit=1))
    with Checkpointer(root) as checkpointer:
        best = checkpointer.restore(step=4)
        newest = checkpointer.restore()
    assert best is not None
    assert newest is not None
    weight = outcome.model.net[0].weight
    assert torch.equal(weight, best.state["model"]["net.0.weight"])
    assert not torch.equal(weight, newest.state["model"]["net.0.weight"])
    # It is taken up where it was left, and not where the best one stood.
    assert train(seed=3, **ranked(load_best_model_at_end=True)).step == 12


def test_a_better_one_that_was_not_saved_takes_nothing_from_the_best_that_was(
    train: Train, root: Path, said: Callable[[], str]
) -> None:
    figures = {2: 1.0, 4: 3.0, 6: 5.0, 8: 2.0, 10: 0.0, 12: 1.0}  # 6 is not saved
    settings = ranked(figures, save_steps=4, load_best_model_at_end=True, save_total_limit=2)
    train(until=9, **settings)
    outcome = train(seed=4, **settings)
    assert outcome.trainer.state.best_global_step == 6
    assert outcome.trainer.state.best_model_checkpoint == f"strongroom://{root}#step=4"
    assert "not there any more" not in said()
    with Checkpointer(root) as checkpointer:
        best = checkpointer.restore(step=4)
    assert best is not None
    assert torch.equal(outcome.model.net[0].weight, best.state["model"]["net.0.weight"])


def test_the_best_model_is_there_also_where_the_run_was_broken_off_after_it(train: Train, root: Path) -> None:
    whole = train(root=root.with_name("whole"), **ranked(load_best_model_at_end=True))
    train(until=9, **ranked(load_best_model_at_end=True))
    resumed = train(seed=4, **ranked(load_best_model_at_end=True))
    assert torch.equal(resumed.model.net[0].weight, whole.model.net[0].weight)


def test_a_root_that_was_moved_has_its_best_model_with_it(train: Train, root: Path) -> None:
    train(until=9, **ranked(load_best_model_at_end=True))
    moved = root.rename(root.with_name("moved"))
    resumed = train(root=moved, seed=4, **ranked(load_best_model_at_end=True))
    assert resumed.trainer.state.best_model_checkpoint == f"strongroom://{moved}#step=4"


def test_a_damaged_best_model_is_an_error_and_not_another_one(build: Train, root: Path) -> None:
    outcome = build(**ranked(load_best_model_at_end=True))
    trainer = outcome.trainer
    finds = trainer._load_best_model

    def damage_first() -> None:
        (best,) = root.glob("step-000000000004-*")
        shard = next(best.glob("data/*.safetensors"))
        shard.write_bytes(shard.read_bytes()[:-1] + b"\x55")
        finds()

    trainer._load_best_model = damage_first
    with pytest.raises(IntegrityError):
        trainer.train()


def test_folders_of_the_trainers_own_are_left_alone(train: Train, tmp_path: Path, root: Path) -> None:
    train(root=None, until=5)
    folder = tmp_path / "trainer" / "checkpoint-4"
    assert folder.is_dir()
    train(seed=2, **ranked(load_best_model_at_end=True, save_total_limit=1))
    assert folder.is_dir()
    assert steps(root) == [4, 12]


def name(step: int) -> CheckpointName:
    return CheckpointName(step=step, launch=1, attempt="a" * 16)


@pytest.mark.parametrize(
    ("limit", "best", "expected"),
    (
        (1, None, [9]),
        (1, 9, [9]),
        (1, 3, [9, 3]),
        (2, 3, [9, 3]),
        (3, 3, [9, 6, 3]),
        (3, 6, [9, 6, 3]),
        (3, 1, [9, 6, 1]),
    ),
)
def test_how_many_stay(limit: int, best: int | None, expected: Sequence[int]) -> None:
    scores = Scores("score", "max")
    for step, score in zip((1, 3, 6, 9), itertools.count(), strict=False):
        if best is not None:
            scores.put(step, 100.0 if step == best else -float(score))
    kept = KeepAsTrainer(limit=limit, scores=scores).keep([name(step) for step in (9, 6, 3, 1)])
    assert sorted((one.step for one in kept), reverse=True) == sorted(expected, reverse=True)
