"""What `ModelCheckpoint` does with a monitored metric: when it saves, what stays, and what is the best."""

from __future__ import annotations

import gc
import logging
import math
import warnings
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import scripted
import torch
from lightning.pytorch.callbacks import Callback
from scripted import all_steps, run, steps

from strongroom import sweep
from strongroom.errors import ConfigError, SaveError
from strongroom.handle import SaveHandle
from strongroom_lightning.ranking import Ranking, RankingRule

NAN = math.nan

SCORES = {2: 0.5, 4: 0.2, 6: 0.3, 8: 0.4}
"""By step: an epoch has 2 batches, and is validated at its end."""


# ----------------------------------------------------------------------------------------- what stays


@pytest.mark.parametrize(
    ("arguments", "expected"),
    (
        ({}, [4, 8]),
        ({"mode": "max"}, [2, 8]),
        ({"save_top_k": 2}, [4, 6, 8]),
        ({"save_top_k": 3}, [4, 6, 8]),  # the newest is the third
        ({"save_top_k": 2, "keep": 2}, [4, 6, 8]),
        ({"save_top_k": 1, "keep": 3}, [4, 6, 8]),
        ({"save_top_k": -1}, [2, 4, 6, 8]),
        ({"save_top_k": 0}, [8]),
        ({"save_top_k": 0, "keep": 2}, [6, 8]),
        ({"monitor": None}, [2, 4, 6, 8]),
        ({"monitor": None, "save_top_k": 1}, [8]),
        ({"monitor": None, "save_top_k": 0, "save_last": True}, [8]),
        ({"monitor": None, "save_top_k": -1, "save_last": "link"}, [2, 4, 6, 8]),
    ),
    ids=str,
)
def test_the_best_stay_beside_the_newest(root: Path, arguments: dict[str, Any], expected: list[int]) -> None:
    outcome = run(root, SCORES, **{"monitor": "score", **arguments})
    assert all_steps(root) == expected
    assert set(outcome.ranked) <= set(expected)
    assert outcome.checkpoint.last_model_path == f"strongroom://{root}#step=8"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    (
        ({"save_top_k": 2, "keep": 3}, [4, 6, 8]),
        ({"save_top_k": -1}, [4, 8]),  # all stay, as far as this callback is concerned; the best is the best
        ({"save_top_k": 0, "keep": 3}, [8]),
    ),
    ids=str,
)
def test_whoever_collects_from_outside_leaves_the_best_that_the_run_ranked(
    root: Path, arguments: dict[str, Any], expected: list[int]
) -> None:
    from strongroom_cli.main import main

    outcome = run(root, SCORES, **{"monitor": "score", **arguments})
    assert main(["gc", str(root), "--keep-last", "1"]) == 0
    assert all_steps(root) == expected
    if arguments["save_top_k"]:
        assert outcome.checkpoint.best_model_path == f"strongroom://{root}#step=4"


def test_attributes_say_what_is_best(root: Path) -> None:
    checkpoint = run(root, SCORES, monitor="score", save_top_k=2).checkpoint
    best, second = (f"strongroom://{root}#step={step}" for step in (4, 6))
    assert checkpoint.best_model_path == best
    assert checkpoint.best_model_score == torch.tensor(0.2)
    assert checkpoint.best_k_models == {best: torch.tensor(0.2), second: torch.tensor(0.3)}
    assert checkpoint.kth_best_model_path == second
    assert checkpoint.kth_value == torch.tensor(0.3)
    assert checkpoint.current_score == torch.tensor(0.4)
    assert (checkpoint.monitor, checkpoint.mode, checkpoint.save_top_k) == ("score", "min", 2)
    checkpoint.to_yaml(root.with_name("best.yaml"))
    assert root.with_name("best.yaml").read_text().startswith(f"{best}: 0.2")


def test_without_a_metric_the_newest_is_the_best(root: Path) -> None:
    checkpoint = run(root, SCORES).checkpoint
    assert checkpoint.best_model_path == checkpoint.last_model_path == f"strongroom://{root}#step=8"
    assert checkpoint.best_model_score is None
    assert checkpoint.best_k_models == {}
    assert checkpoint.kth_best_model_path == ""


def test_where_nothing_is_to_stay_for_being_good_nothing_is_the_best(root: Path) -> None:
    for monitor in ("score", None):
        checkpoint = run(
            root / str(monitor), SCORES, monitor=monitor, save_top_k=0, save_last=True
        ).checkpoint
        assert checkpoint.best_model_path == checkpoint.kth_best_model_path == ""
        assert checkpoint.best_k_models == {}
        assert checkpoint.best_model_score is None
        assert checkpoint.last_model_path.endswith("#step=8")


@pytest.mark.parametrize(("mode", "best"), (("min", 8), ("max", 6)))
def test_what_is_not_a_number_is_worse_than_every_number(root: Path, mode: str, best: int) -> None:
    outcome = run(root, {2: NAN, 4: 7.0, 6: 8.0, 8: 5.0}, monitor="score", mode=mode)
    assert list(outcome.ranked) == [best]


@pytest.mark.parametrize(("mode", "worst"), (("min", math.inf), ("max", -math.inf)))
def test_a_score_that_is_not_a_number_reads_as_the_worst(root: Path, mode: str, worst: float) -> None:
    checkpoint = run(root, {2: NAN}, monitor="score", mode=mode, trainer={"max_epochs": 1}).checkpoint
    assert checkpoint.best_model_score == checkpoint.current_score == worst
    assert checkpoint.kth_value == worst


def test_an_equal_score_replaces_nothing(root: Path) -> None:
    assert list(run(root, lambda step: 1.0, monitor="score").ranked) == [2]
    assert all_steps(root) == [2, 8]


def test_issue_1150_nothing_is_removed_before_what_replaces_it_is_committed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed = []
    remove = sweep.remove

    def watched(store: Any, removal: Any, **options: Any) -> Any:
        removed.append((removal.name.step, all_steps(root)))
        return remove(store, removal, **options)

    monkeypatch.setattr(sweep, "remove", watched)
    run(root, {2: 0.5, 4: 0.2, 6: 0.1, 8: 0.05}, monitor="score")
    assert removed == [(2, [2, 4]), (4, [4, 6]), (6, [6, 8])]


# ------------------------------------------------------------------------------------------ when it saves


@pytest.mark.parametrize(
    ("trainer", "arguments", "expected"),
    (
        ({"val_check_interval": 0.25}, {}, [3, 6, 9, 12, 15, 18, 21, 24]),
        ({"val_check_interval": 0.42}, {}, [5, 10, 17, 22, 24]),
        ({"val_check_interval": 0.5}, {"every_n_epochs": 2}, [18, 24]),
        ({"val_check_interval": 0.5}, {"save_on_train_epoch_end": True}, [12, 24]),
        ({"val_check_interval": 0.5}, {"save_on_train_epoch_end": True, "every_n_epochs": 2}, [24]),
        ({}, {}, [12, 24]),
        ({}, {"save_on_train_epoch_end": False}, [12, 24]),
        ({"check_val_every_n_epoch": 2}, {}, [24]),
        ({"check_val_every_n_epoch": 2}, {"save_on_train_epoch_end": True}, [12, 24]),
        ({"check_val_every_n_epoch": None, "val_check_interval": 7}, {}, [7, 14, 21, 24]),
        ({"limit_val_batches": 0, "val_check_interval": 0.5}, {}, [12, 24]),
        ({"limit_val_batches": 0}, {"save_on_train_epoch_end": False}, [24]),
        ({}, {"every_n_epochs": 0}, [24]),
        ({}, {"every_n_train_steps": 10, "every_n_epochs": 0}, [10, 20, 24]),
        ({}, {"every_n_train_steps": 0, "every_n_epochs": 2}, [24]),
    ),
    ids=str,
)
def test_epochs_are_saved_when_modelcheckpoint_would(
    root: Path, trainer: dict[str, Any], arguments: dict[str, Any], expected: list[int]
) -> None:
    run(root, batches=12, trainer={"max_epochs": 2, **trainer}, **arguments)
    assert steps(root) == expected


def test_each_validation_of_an_epoch_ranks_its_own_weights(root: Path) -> None:
    scores = {2: 0.9, 4: 0.8, 6: 0.7, 8: 0.1, 10: 0.3}
    outcome = run(
        root,
        scores,
        batches=10,
        monitor="score",
        save_top_k=3,
        trainer={"max_epochs": 1, "val_check_interval": 0.2},
    )
    assert outcome.ranked == pytest.approx({8: 0.1, 10: 0.3, 6: 0.7})


def test_a_step_that_is_due_is_not_ranked_by_what_was_measured_on_another(root: Path) -> None:
    outcome = run(
        root,
        {2: 0.1, 4: 0.9},
        batches=4,
        monitor="score",
        mode="max",
        save_top_k=-1,
        every_n_train_steps=1,
        trainer={"max_epochs": 1, "val_check_interval": 0.5},
    )
    assert all_steps(root) == [1, 2, 3, 4]
    assert outcome.ranked == pytest.approx({4: 0.9, 2: 0.1})


LATE = {"monitor": "score", "save_top_k": -1, "every_n_train_steps": 3}


def test_what_was_due_before_it_was_measured_is_saved_again_once_it_is(root: Path) -> None:
    outcome = run(root, lambda step: 1.0 / step, batches=4, **LATE)
    # Validated at 4, 8, 12, 16; of these 12 is due by itself, and 16 at the end.
    assert steps(root) == [3, 4, 6, 8, 9, 12, 15, 16]
    assert list(outcome.ranked) == [16, 12, 8, 4]


@pytest.mark.parametrize("until", (3, 4, 6, 7))
def test_a_resumed_run_saves_and_ranks_where_the_uninterrupted_one_does(root: Path, until: int) -> None:
    class Stop(Callback):
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == until:
                raise KeyError

    run(root, lambda step: 1.0 / step, batches=4, callbacks=[Stop()], raises=KeyError, **LATE)
    outcome = run(root, lambda step: 1.0 / step, batches=4, **LATE)
    assert steps(root) == [3, 4, 6, 8, 9, 12, 15, 16]
    assert list(outcome.ranked) == [16, 12, 8, 4]


def test_time_defers_to_the_first_validation_too(root: Path) -> None:
    outcome = run(
        root,
        {2: 0.2, 4: 0.6},
        monitor="score",
        mode="max",
        save_top_k=-1,
        train_time_interval=timedelta(microseconds=1),
        trainer={"max_epochs": 2, "check_val_every_n_epoch": 2},
    )
    assert steps(root) == [1, 2, 3, 4]
    assert outcome.ranked == pytest.approx({4: 0.6})


def test_a_metric_of_training_ranks_the_step_that_it_was_measured_at(root: Path) -> None:
    outcome = run(
        root,
        {1: 0.1, 2: 0.5, 4: 0.2, 6: 0.3, 8: 0.4},
        monitor="train_score",
        every_n_train_steps=2,
        save_top_k=2,
        validate=False,
    )
    assert outcome.ranked == pytest.approx({4: 0.2, 6: 0.3})


@pytest.mark.parametrize(("monitor", "expected"), (("epoch", {8: 3.0, 6: 2.0}), ("step", {8: 8.0, 6: 6.0})))
def test_epochs_and_steps_can_be_monitored(root: Path, monitor: str, expected: dict[int, float]) -> None:
    assert run(root, monitor=monitor, mode="max", save_top_k=2).ranked == expected


def test_the_sanity_check_ranks_nothing(root: Path) -> None:
    outcome = run(root, SCORES, monitor="score", save_top_k=-1, trainer={"num_sanity_val_steps": 1})
    assert outcome.ranked == pytest.approx({4: 0.2, 6: 0.3, 8: 0.4, 2: 0.5})


def test_a_validation_while_gradients_are_accumulated_waits_for_the_step(root: Path) -> None:
    outcome = run(
        root,
        lambda step: 0.5,
        batches=8,
        monitor="score",
        save_top_k=-1,
        trainer={"max_epochs": 1, "accumulate_grad_batches": 4, "val_check_interval": 3},
    )
    # Validated after batches 3 and 6, before step 1 and before step 2.
    assert list(outcome.ranked) == [1, 2]


# ----------------------------------------------------------------------------------- what cannot be ranked


def test_a_metric_that_is_never_logged_is_an_error_once_validation_has_run(root: Path) -> None:
    run(root, SCORES, monitor="scores", raises=ConfigError)
    assert steps(root) == [2]  # what was due is not lost for it
    with pytest.raises(
        ConfigError, match=r"monitor='scores' is not among what was logged: epoch, step.*score"
    ):
        run(root, SCORES, monitor="scores")


def test_without_validation_it_is_warned_of_once(root: Path) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        outcome = run(root, monitor="score", validate=False)
    about = [str(one.message) for one in told if "is not among what was logged" in str(one.message)]
    assert len(about) == 1
    assert outcome.ranked == {}
    assert all_steps(root) == [8]


def test_what_is_no_single_number_cannot_be_monitored(root: Path) -> None:
    class Log(Callback):
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.callback_metrics["pair"] = torch.ones(2)

    with pytest.raises(ConfigError, match="monitor='pair' is no single number"):
        run(root, monitor="pair", callbacks=[Log()])


def test_it_says_what_each_ranked_save_came_to(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        run(root, SCORES, monitor="score", verbose=True, trainer={"max_epochs": 3})
    told = [record.message for record in caplog.records if "score is" in record.message]
    assert told == [
        "Strongroom: score is 0.5 at step 2, number 1 of the best",
        "Strongroom: score is 0.2 at step 4, number 1 of the best",
        "Strongroom: score is 0.3 at step 6, not among the best that stay",
    ]


# ------------------------------------------------------------------------------------ what is committed


def ranking(root: Path) -> Ranking:
    return Ranking(RankingRule.of(monitor="score", mode="min", save_top_k=1, keep=None), str(root))


def committed(step: int, root: Path) -> SaveHandle:
    handle = SaveHandle(step)
    handle.settle(scripted.Checkpointer(root).checkpoints()[0])
    return handle


def test_a_save_that_is_under_way_or_has_failed_is_not_the_best(root: Path) -> None:
    run(root, trainer={"max_epochs": 1})
    tried = ranking(root)
    tried.begin(2, 0.5, is_owed=True)
    tried.follow(2, committed(2, root))
    assert tried.best_steps() == [2]
    tried.begin(4, 0.1, is_owed=True)
    under_way = SaveHandle(4)
    tried.follow(4, under_way)
    assert tried.best_steps() == [2]
    assert tried.last_model_path.endswith("#step=2")
    assert list(tried.state_dict()["scores"]) == [4]  # for in the checkpoint of step 4 it is
    under_way.fail(SaveError("the disk is full"))
    assert tried.best_steps() == [2]
    assert list(tried.state_dict()["scores"]) == [2]
    assert tried.is_behind  # one that is ranked is still to be made


def test_what_has_committed_is_let_go_of_also_where_nobody_asks(root: Path) -> None:
    run(root, trainer={"max_epochs": 1})
    tried = ranking(root)
    earlier = committed(2, root)
    tried.begin(2, 0.5, is_owed=True)
    tried.follow(2, earlier)
    kept = weakref.ref(earlier)
    del earlier
    assert kept() is not None
    tried.begin(4, 0.1, is_owed=True)
    gc.collect()
    assert kept() is None
    assert tried.best_steps() == [2]


def test_a_save_by_hand_leaves_no_ranked_one_to_be_made(root: Path) -> None:
    class ByHand(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 1:
                trainer.save_checkpoint("strongroom://latest")

    run(root, SCORES, callbacks=[ByHand()], monitor="score", save_top_k=-1, every_n_epochs=2)
    assert steps(root) == [1, 4, 8]
