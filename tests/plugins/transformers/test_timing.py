"""When a run is saved, the Trainer's own arguments say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trained import BATCHES, EPOCHS
from transformers import TrainerCallback

from strongroom import Checkpointer

Train = Callable[..., Any]
LAST = BATCHES * EPOCHS


def steps(root: Path) -> list[int]:
    with Checkpointer(root) as checkpointer:
        return sorted(one.step for one in checkpointer.checkpoints())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    (
        ({"save_strategy": "no"}, []),
        ({"save_steps": 5}, [5, 10, LAST]),
        ({"save_steps": 0.25}, [3, 6, 9, LAST]),
        ({"save_strategy": "epoch"}, [BATCHES, LAST]),
        ({"save_steps": 4, "max_steps": 7}, [4, 7]),
    ),
    ids=("no", "steps", "a ratio", "epoch", "a run that ends between"),
)
def test_saves_are_where_the_trainer_has_them(
    train: Train, root: Path, arguments: dict[str, Any], expected: list[int]
) -> None:
    train(**arguments)
    assert steps(root) == expected


class Improves(TrainerCallback):
    """Makes of the evaluation at each step what the test says."""

    def __init__(self, figures: dict[int, float]) -> None:
        self.figures = figures

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        metrics["eval_score"] = self.figures[state.global_step]


def test_only_the_best_and_the_last_are_saved(train: Train, root: Path) -> None:
    figures = {2: 1.0, 4: 3.0, 6: 2.0, 8: 4.0, 10: 0.0, 12: 1.0}
    train(
        callbacks=[Improves(figures)],
        save_strategy="best",
        eval_strategy="steps",
        eval_steps=2,
        metric_for_best_model="score",
        greater_is_better=True,
    )
    # The last one besides, so that a run which has ended is known to have.
    assert steps(root) == [2, 4, 8, LAST]


class Listens(TrainerCallback):
    """Is told of every save, and looks what stands in the root by then."""

    def __init__(self) -> None:
        self.told: list[int] = []

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert not control.should_save
        self.told.append(state.global_step)


def test_on_save_follows_each_save_once(train: Train, root: Path) -> None:
    listens = Listens()
    train(callbacks=[listens], save_steps=3, eval_strategy="epoch")
    assert listens.told == steps(root) == [3, 6, 9, 12]


class Wishes(TrainerCallback):
    """Asks for a save by the Trainer's own means."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save = state.global_step in (2, BATCHES)


def test_a_callback_may_ask_for_a_save(train: Train, root: Path) -> None:
    train(callbacks=[Wishes()], save_strategy="epoch")
    assert steps(root) == [2, BATCHES, LAST]


def test_a_save_at_an_epochs_last_step_waits_for_the_epochs_end(train: Train, root: Path) -> None:
    """What the epoch's end adds to the run, its evaluation among it, is in the checkpoint."""
    train(save_steps=BATCHES, eval_strategy="epoch")
    with Checkpointer(root) as checkpointer:
        found = checkpointer.restore({"trainer": None}, only="trainer", step=BATCHES)
    assert found is not None
    assert any("eval_loss" in entry for entry in json.loads(found.state["trainer"]["state"]["log_history"]))


def test_by_hand(build: Train, root: Path) -> None:
    """Whoever calls the Trainer's own method saves, in ours."""

    class ByHand(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                outcome.trainer._save_checkpoint(outcome.model, trial=None)

    outcome = build(callbacks=[ByHand()], save_strategy="epoch")
    outcome.trainer.train()
    assert steps(root) == [3, BATCHES, LAST]


def test_nothing_is_written_where_the_trainer_would_write(train: Train, tmp_path: Path) -> None:
    train(save_steps=3)
    assert list((tmp_path / "trainer").iterdir()) == []


def test_committed_checkpoints_are_told_to_who_listens(build: Train, root: Path) -> None:
    outcome = build(save_steps=5)
    callback = next(one for one in outcome.trainer.callback_handler.callbacks if hasattr(one, "on_commit"))
    told: list[int] = []
    callback.on_commit.append(lambda trainer, checkpoint: told.append(checkpoint.step))
    outcome.trainer.train()
    assert told == steps(root) == [5, 10, LAST]
