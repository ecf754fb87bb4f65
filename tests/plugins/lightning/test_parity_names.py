""" "best" and "last": what they name, in which stage, in which process, and what a resume knows of them."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from scripted import Outcome, Scripted, all_steps, loader, run, steps
from torch.utils.data import DataLoader, IterableDataset

from strongroom import Checkpointer, tree
from strongroom.errors import CheckpointNotFoundError, IntegrityError
from strongroom_lightning import StrongroomCheckpoint
from strongroom_lightning.uri import CheckpointUri

SCORES = {2: 0.5, 4: 0.2, 6: 0.3, 8: 0.4}

RANKED = {"monitor": "score", "save_top_k": 2}


def weights_of(root: Path, step: int | None) -> dict[str, torch.Tensor]:
    restored = Checkpointer(root).restore({"model": {}}, only="model", step=step)
    assert restored is not None
    found: dict[str, torch.Tensor] = restored.state["model"]
    return found


def fresh_trainer(*callbacks: Callback, **settings: Any) -> lightning.Trainer:
    return lightning.Trainer(
        accelerator="cpu",
        devices=1,
        callbacks=list(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )


def has(module: Scripted, expected: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, expected[name]) for name, value in module.state_dict().items())


class Stop(Callback):
    def __init__(self, at_step: int) -> None:
        self.at_step = at_step

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.at_step:
            raise KeyError


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A finished run, of which the tests that follow only read."""
    return run(tmp_path_factory.mktemp("trained") / "run", SCORES, **RANKED)


# ------------------------------------------------------------------------------------------ to evaluate


@pytest.mark.parametrize("stage", ("validate", "test", "predict"))
@pytest.mark.parametrize(("name", "step"), (("best", 4), ("last", 8)))
@pytest.mark.parametrize("in_new_process", (False, True))
def test_every_stage_takes_them(
    trained: Outcome, stage: str, name: str, step: int, in_new_process: bool
) -> None:
    root = Path(trained.checkpoint.dirpath)
    trainer, module = trained.trainer, Scripted()
    if in_new_process:
        trainer = fresh_trainer(StrongroomCheckpoint(root, **RANKED))
    getattr(trainer, stage)(module, loader(1), ckpt_path=name)
    assert has(module, weights_of(root, step))
    assert trainer.ckpt_path == f"strongroom://{root}#step={step}"
    assert list(trained.ranked) == [4, 6]  # what was evaluated has no say in it


def test_without_a_module_the_best_is_tested_as_lightning_has_it(trained: Outcome) -> None:
    with pytest.warns(UserWarning, match="best model of the previous"):
        trained.trainer.test(dataloaders=loader(1), verbose=False)
    assert has(trained.trainer.lightning_module, weights_of(Path(trained.checkpoint.dirpath), 4))


def test_paths_are_taken_as_they_are_told(trained: Outcome) -> None:
    root = Path(trained.checkpoint.dirpath)
    for path in trained.checkpoint.best_k_models:
        module = Scripted()
        fresh_trainer(StrongroomCheckpoint(root)).validate(module, loader(1), ckpt_path=path, verbose=False)
        assert has(module, weights_of(root, CheckpointUri.parse(path).step))


def test_the_best_of_another_root_can_be_named(trained: Outcome, root: Path) -> None:
    module = Scripted()
    ckpt_path = f"strongroom://{trained.checkpoint.dirpath}#best"
    fresh_trainer(StrongroomCheckpoint(root)).validate(module, loader(1), ckpt_path=ckpt_path, verbose=False)
    assert has(module, weights_of(Path(trained.checkpoint.dirpath), 4))
    assert not root.exists()


def test_the_best_of_a_root_that_was_never_ranked_is_an_error(root: Path) -> None:
    run(root, trainer={"max_epochs": 1})
    trainer = fresh_trainer(StrongroomCheckpoint(root, monitor="score"))
    for ckpt_path in ("best", f"strongroom://{root}#best"):
        with pytest.raises(CheckpointNotFoundError, match="holds no checkpoint that was ranked"):
            trainer.validate(Scripted(), loader(1), ckpt_path=ckpt_path)


def test_before_anything_was_saved_there_is_no_best(root: Path) -> None:
    ours = StrongroomCheckpoint(root)
    assert (ours.best_model_path, ours.last_model_path, ours.best_k_models) == ("", "", {})
    for checkpoint in (ours, StrongroomCheckpoint(root, monitor="score")):
        with pytest.raises(CheckpointNotFoundError, match="holds no checkpoint that was ranked"):
            fresh_trainer(checkpoint).validate(Scripted(), loader(1), ckpt_path="best")


def test_a_callback_without_a_metric_finds_what_the_root_was_ranked_by(trained: Outcome) -> None:
    module = Scripted()
    other = fresh_trainer(StrongroomCheckpoint(trained.checkpoint.dirpath))
    other.validate(module, loader(1), ckpt_path="best", verbose=False)
    assert has(module, weights_of(Path(trained.checkpoint.dirpath), 4))


def test_a_development_run_has_no_best(root: Path) -> None:
    trainer = fresh_trainer(StrongroomCheckpoint(root, monitor="score"), fast_dev_run=True)
    with pytest.raises(ValueError, match="fast_dev_run=True"):
        trainer.validate(Scripted(), loader(1), ckpt_path="best")


@pytest.mark.filterwarnings("ignore:.*multiple `ModelCheckpoint` callbacks")
def test_beside_modelcheckpoint_the_best_is_whose_metric_it_is(root: Path) -> None:
    theirs = ModelCheckpoint(root.with_name("theirs"), monitor="score")
    outcome = run(root, SCORES, callbacks=[theirs])
    outcome.trainer.validate(Scripted(), loader(1), ckpt_path="best", verbose=False)
    assert outcome.trainer.ckpt_path == theirs.best_model_path
    shutil.rmtree(root)
    theirs = ModelCheckpoint(root.with_name("others"), monitor="score", mode="max")
    outcome = run(root, SCORES, callbacks=[theirs], **RANKED)
    outcome.trainer.validate(Scripted(), loader(1), ckpt_path="best", verbose=False)
    assert outcome.trainer.ckpt_path == outcome.checkpoint.best_model_path


def test_a_best_that_is_damaged_is_an_error_and_nothing_else_is_loaded(root: Path) -> None:
    outcome = run(root, SCORES, **RANKED)
    shard = next(root.glob("step-000000000004-*/data/*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x01")
    with pytest.raises(IntegrityError, match="step"):
        outcome.trainer.validate(Scripted(), loader(1), ckpt_path="best", verbose=False)


# ------------------------------------------------------------------------------------------- to train on


def test_issue_14466_last_begins_anew_where_there_is_nothing_and_resumes_where_there_is(root: Path) -> None:
    with pytest.warns(UserWarning, match="ckpt_path='last', but .* holds no checkpoint"):
        run(root, SCORES, ckpt_path="last", callbacks=[Stop(5)], raises=KeyError)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        outcome = run(root, SCORES, ckpt_path="last")
    assert outcome.module.seen == [4, 5, 6, 7]
    assert steps(root) == [2, 4, 6, 8]


def test_issue_18524_last_resumes_in_a_process_that_knows_nothing_of_the_first(root: Path) -> None:
    run(root, SCORES, callbacks=[Stop(7)], raises=KeyError, every_n_train_steps=1)
    outcome = run(root, SCORES, ckpt_path="last", resume="never", every_n_train_steps=1)
    assert outcome.module.seen == [7]
    assert steps(root) == list(range(1, 9))


def test_training_goes_on_from_the_best(root: Path) -> None:
    outcome = run(root, SCORES, **RANKED)
    again = run(root, SCORES, ckpt_path="best", **RANKED)
    assert again.module.seen == [4, 5, 6, 7]
    assert list(again.ranked) == [4, 6]
    trainer = outcome.trainer
    trainer.fit(outcome.module, loader(2), loader(1), ckpt_path="best")  # a second fit of the same Trainer
    assert outcome.module.seen[-4:] == [4, 5, 6, 7]


# -------------------------------------------------------------------------------------------- a resume knows


def test_what_was_best_is_known_after_a_resume(root: Path) -> None:
    run(root, SCORES, callbacks=[Stop(6)], raises=KeyError, **RANKED)
    checkpoint = StrongroomCheckpoint(root, **RANKED)
    seen = []

    class Look(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            seen.append((checkpoint.best_model_path, checkpoint.last_model_path, checkpoint.current_score))

    trainer = fresh_trainer(Look(), checkpoint, max_epochs=4, num_sanity_val_steps=0)
    trainer.fit(Scripted({8: 0.1}), loader(2), loader(1))
    assert seen == [(f"strongroom://{root}#step=4", f"strongroom://{root}#step=6", torch.tensor(0.3))]
    assert list(checkpoint.best_k_models) == [f"strongroom://{root}#step={step}" for step in (8, 4)]
    # 6 was restored, and so read and found whole; it goes when a later one has been.
    assert all_steps(root) == [4, 6, 8]


def test_a_checkpoint_that_somebody_removed_is_not_remembered(root: Path) -> None:
    run(root, SCORES, callbacks=[Stop(6)], raises=KeyError, **RANKED)
    shutil.rmtree(next(root.glob("step-000000000004-*")))
    assert list(run(root, {8: 0.9}, **RANKED).ranked) == [6, 8]


def test_one_that_is_removed_while_the_run_goes_on_is_not_either(root: Path) -> None:
    class Remove(Callback):
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 6:
                trainer.checkpoint_callback._fit.checkpointer.wait()
                shutil.rmtree(next(root.glob("step-000000000004-*")))

    assert list(run(root, SCORES, callbacks=[Remove()], **RANKED).ranked) == [6, 8]


def test_a_rewind_forgets_what_came_after(root: Path) -> None:
    run(root, SCORES, monitor="score", save_top_k=-1)
    outcome = run(
        root, {6: 0.9, 8: 0.8}, ckpt_path="strongroom://#step=2", monitor="score", save_top_k=-1, keep=None
    )
    assert outcome.ranked == pytest.approx({2: 0.5, 8: 0.8, 6: 0.9})


def test_a_new_line_forgets_everything(root: Path) -> None:
    run(root, SCORES, **RANKED)
    assert list(run(root, {2: 0.9, 4: 0.8, 6: 0.7, 8: 0.75}, resume="never", **RANKED).ranked) == [6, 8]


def test_a_metric_that_was_known_before_the_resume_may_be_late_after_it(root: Path) -> None:
    run(root, SCORES, callbacks=[Stop(5)], raises=KeyError, **RANKED)
    assert list(run(root, {8: 0.1}, **RANKED).ranked) == [8, 4]


def test_another_interval_forgets_nothing(root: Path) -> None:
    run(root, SCORES, callbacks=[Stop(6)], raises=KeyError, **RANKED)
    assert list(run(root, SCORES, every_n_train_steps=3, **RANKED).ranked) == [4, 6]


def test_another_metric_ranks_anew_and_what_was_best_stays(root: Path) -> None:
    run(root, SCORES, callbacks=[Stop(6)], raises=KeyError, monitor="score")
    highest: dict[str, Any] = {"monitor": "score", "mode": "max", "trainer": {"max_epochs": 6}}
    with pytest.warns(UserWarning, match=r"was ranked by score \(min\) until now.*step 4.* stays until you"):
        run(root, SCORES, callbacks=[Stop(9)], raises=KeyError, **highest)
    assert all_steps(root) == [4, 6, 8]
    outcome = run(root, {10: 0.1, 12: 0.1}, **highest)
    assert list(outcome.ranked) == [8]
    assert all_steps(root) == [4, 8, 12]


def test_a_root_that_was_moved_is_still_ones_own(root: Path) -> None:
    run(root, SCORES, callbacks=[Stop(6)], raises=KeyError, **RANKED)
    moved = root.with_name("moved")
    root.rename(moved)
    outcome = run(moved, SCORES, **RANKED)
    assert list(outcome.ranked) == [4, 6]
    assert outcome.checkpoint.best_model_path == f"strongroom://{moved}#step=4"


def test_of_another_root_only_the_best_path_is_taken_over(root: Path) -> None:
    run(root, SCORES, **RANKED)
    checkpoint = run(root.with_name("other"), ckpt_path=f"strongroom://{root}#step=8", **RANKED).checkpoint
    assert checkpoint.best_model_path == f"strongroom://{root}#step=4"
    assert checkpoint.best_k_models == {}
    assert all_steps(root) == [4, 6, 8]


def test_what_a_checkpoint_carries_of_it_is_small_and_plain(root: Path) -> None:
    outcome = run(root, lambda step: 1.0 / step, monitor="score", save_top_k=20, trainer={"max_epochs": 30})
    restored = Checkpointer(root).restore({"lightning": {}}, only="lightning")
    assert restored is not None
    state = restored.state["lightning"]["strongroom_ranking"]
    assert state["scores"] == pytest.approx(outcome.ranked)
    assert len(json.dumps(state)) < 1000
    tree.capture({"state": state}, rank=0)


def test_the_callback_can_be_sent_to_another_process(root: Path) -> None:
    sent = pickle.loads(pickle.dumps(StrongroomCheckpoint(root, **RANKED)))
    assert (sent.dirpath, sent.monitor, sent.save_top_k) == (str(root), "score", 2)
    assert sent.best_k_models == {}


@pytest.mark.parametrize("copied", (copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))))
def test_after_a_fit_it_still_can_with_what_it_knows(root: Path, copied: Callable[[Any], Any]) -> None:
    ours = StrongroomCheckpoint(root, **RANKED)
    fresh_trainer(ours, max_epochs=4).fit(
        Scripted(SCORES), loader(2), loader(1)
    )  # nothing is asked of it before
    sent = copied(ours)
    assert sent.best_model_path == ours.best_model_path == f"strongroom://{root}#step=4"
    assert sent.last_model_path == ours.last_model_path
    assert pickle.loads(pickle.dumps(sent.namespace)) == sent.namespace


def test_a_copy_of_a_trainer_saves_its_own_weights_by_hand(root: Path) -> None:
    outcome = run(root, SCORES, **RANKED)
    other = copy.deepcopy(outcome.trainer)
    with torch.no_grad():
        for parameter in other.lightning_module.parameters():
            parameter.fill_(7.0)
    other.save_checkpoint(root.with_name("by-hand"))
    assert all(bool((value == 7.0).all()) for value in weights_of(root.with_name("by-hand"), None).values())


@pytest.mark.parametrize(
    ("text", "means"),
    (
        ("strongroom://best", CheckpointUri(root=None, step=None, is_best=True)),
        ("strongroom://last", CheckpointUri(root=None, step=None, may_be_absent=True)),
        ("strongroom://runs/b#best", CheckpointUri(root="runs/b", step=None, is_best=True)),
        ("strongroom://s3://bucket/b#step=7", CheckpointUri(root="s3://bucket/b", step=7)),
        ("strongroom://./best", CheckpointUri(root="./best", step=None)),
        ("strongroom://runs/a#b#step=7", CheckpointUri(root="runs/a#b", step=7)),
        (
            "strongroom://runs/#1/\u00fc ß#best",
            CheckpointUri(root="runs/#1/\u00fc ß", step=None, is_best=True),
        ),
    ),
)
def test_names_are_read_as_they_are_written(text: str, means: CheckpointUri) -> None:
    assert CheckpointUri.parse(text) == means
    assert str(means) == text


class Stream(IterableDataset[tuple[torch.Tensor]]):
    """Data that do not say how many they are."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor]]:
        return iter([(torch.ones(2),) for _ in range(10)])


def test_data_without_a_length_can_be_resumed(root: Path) -> None:
    with pytest.raises(TypeError):
        len(DataLoader(Stream()))
    for epochs, seen in ((2, [0, 1, 2, 3]), (4, [4, 5, 6, 7])):
        module = Scripted()
        trainer = fresh_trainer(
            StrongroomCheckpoint(root, every_n_train_steps=1), max_epochs=epochs, limit_train_batches=2
        )
        trainer.fit(module, DataLoader(Stream()), ckpt_path="last" if epochs > 2 else None)
        assert module.seen == seen
