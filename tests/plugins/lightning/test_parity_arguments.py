"""`ModelCheckpoint`'s arguments, as they are given to ours: checked when it is built, and told likewise."""

from __future__ import annotations

import typing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from scripted import run

from strongroom.catalog import Catalog
from strongroom.errors import ConfigError
from strongroom.opened import open_checkpoint
from strongroom.signing import NO_GUARD
from strongroom.stores.local import LocalStore
from strongroom_lightning import StrongroomCheckpoint

RUN = "runs/a"


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        ({"save_top_k": -3, "monitor": "score"}, r"save_top_k must be -1 \(all\), 0 \(none\)"),
        ({"save_top_k": True, "monitor": "score"}, "save_top_k must be"),
        ({"save_top_k": 3}, r"save_top_k=3 without monitor: there is nothing to rank by.*keep=3"),
        ({"save_top_k": -1, "keep": 2}, "save_top_k=-1 keeps all, and keep=2 does not"),
        ({"mode": "unknown_option"}, "mode must be one of 'min', 'max'; got 'unknown_option'"),
        ({"monitor": 3}, "monitor must be the name of a logged metric"),
        ({"monitor": ""}, "monitor must be the name of a logged metric"),
        ({"keep": 0, "monitor": "score"}, "keep must be how many of the newest stay, at least 1.*got 0"),
        ({"every_n_epochs": -3}, "every_n_epochs must be a whole number, 0 to switch it off"),
        ({"every_n_train_steps": -3}, "every_n_train_steps must be a whole number, 0 to switch it off"),
        ({"every_n_train_steps": True}, "every_n_train_steps must be a whole number.*got True"),
        ({"every_n_epochs": "2"}, "every_n_epochs must be a whole number.*got '2'"),
        ({"save_last": []}, "save_last must be"),
        ({"accept_older": "no"}, "accept_older must be True or False; got 'no'"),
        ({"save_weights_only": "no"}, "save_weights_only must be True or False; got 'no'"),
        ({"save_on_train_epoch_end": "no"}, "save_on_train_epoch_end must be True or False; got 'no'"),
        ({"provenance": 5}, "provenance must be a mapping.*got 5"),
        ({"filename": "{epoch:1000000000}"}, "more than three digits"),
        ({"filename": "x" * 2000}, "labels of 2000 characters; 1000 are allowed"),
        ({"save_last": "copy"}, "save_last must be True, False, 'link' or None"),
        ({"filename": "{}"}, "no metric's name"),
        ({"filename": "{epoch"}, "is no pattern: expected '}'"),
        ({"filename": "{epoch:.2f}-{score:d}"}, "is no pattern: Unknown format code 'd'"),
        ({"filename": "{epoch:{width}}"}, "braces within braces"),
        ({"filename": "{score!r}"}, "a conversion"),
    ),
    ids=str,
)
def test_what_cannot_work_is_refused_at_once(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StrongroomCheckpoint(RUN, **arguments)


@pytest.mark.parametrize(
    "arguments",
    (
        {"save_top_k": -1},
        {"save_top_k": 0},
        {"save_top_k": 1},
        {"save_top_k": 3, "monitor": "score"},
        {"every_n_epochs": 0},
        {"every_n_train_steps": 0, "every_n_epochs": 3},
        {"every_n_train_steps": 4, "every_n_epochs": 0},
        {"every_n_train_steps": 0, "every_n_epochs": 0, "train_time_interval": timedelta(minutes=1)},
        # Lightning's excludes what follows; these are several callbacks in one.
        {"every_n_train_steps": 4, "every_n_epochs": 2},
        {"train_time_interval": timedelta(minutes=1), "every_n_epochs": 2, "every_n_train_steps": 9},
        {"enable_version_counter": False, "save_last": "link", "auto_insert_metric_name": False},
    ),
    ids=str,
)
def test_what_can_is_taken(arguments: dict[str, Any]) -> None:
    StrongroomCheckpoint(RUN, **arguments)


def test_an_epoch_is_the_interval_where_none_is_given() -> None:
    assert (StrongroomCheckpoint(RUN).every_n_epochs, StrongroomCheckpoint(RUN).every_n_train_steps) == (
        1,
        None,
    )
    assert StrongroomCheckpoint(RUN, every_n_train_steps=0).every_n_epochs is None
    assert StrongroomCheckpoint(RUN, every_n_train_steps=4).every_n_epochs is None
    assert StrongroomCheckpoint(RUN).train_time_interval is None


@pytest.mark.parametrize(
    ("arguments", "expected"),
    (
        ({}, -1),
        ({"monitor": "score"}, 1),
        ({"save_top_k": 0}, 0),
        ({"monitor": "score", "save_top_k": -1}, -1),
    ),
    ids=str,
)
def test_save_top_k_can_be_read(arguments: dict[str, Any], expected: int) -> None:
    assert StrongroomCheckpoint(RUN, **arguments).save_top_k == expected


@pytest.mark.parametrize(
    ("text", "value"),
    (("true", True), ("yes", True), ("False", False), ("no", False), ("link", "link")),
    ids=str,
)
def test_a_command_line_can_give_save_last(text: str, value: bool | str) -> None:
    parser = ArgumentParser()
    parser.add_argument("--it", type=typing.get_type_hints(StrongroomCheckpoint.__init__)["save_last"])
    assert parser.parse_args(["--it", text]).it == value


def test_what_was_given_can_be_read() -> None:
    given = StrongroomCheckpoint(RUN, save_last="link", verbose=True)
    assert (given.save_last, given.verbose) == ("link", True)
    assert (StrongroomCheckpoint(RUN).save_last, StrongroomCheckpoint(RUN).verbose) == (None, False)


def test_a_home_folder_is_expanded() -> None:
    assert StrongroomCheckpoint("~/runs").dirpath == str(Path.home() / "runs")
    assert StrongroomCheckpoint(Path("~/runs")).dirpath == str(Path.home() / "runs")
    assert StrongroomCheckpoint("./~/runs").dirpath == str(Path.cwd() / "~" / "runs")
    assert StrongroomCheckpoint("s3://bucket/~/runs").dirpath == "s3://bucket/~/runs"


@pytest.mark.parametrize("dirpath", (None, 5, b"runs/a"), ids=str)
def test_a_root_has_no_default(dirpath: Any) -> None:
    with pytest.raises(ConfigError, match=r"dirpath must be the run's root.*It has no default"):
        StrongroomCheckpoint(dirpath)


def test_a_relative_root_is_meant_where_the_callback_is_made(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = StrongroomCheckpoint("run")
    monkeypatch.chdir("/")
    assert made.dirpath == str(root)


def test_provenance_that_is_no_mapping_is_told(root: Path) -> None:
    with pytest.raises(ConfigError, match=r"provenance\(\) must return a mapping; it returned 5"):
        run(root, provenance=lambda: 5)


# ----------------------------------------------------------------------------------------------- labels


METRICS = {"epoch": 3, "step": 2, "epoch_test": 3, "acc": 0.03, "val/loss": 0.03, "val/mAP@0.50": 0.2}


@pytest.mark.parametrize(
    ("filename", "inserts", "expected"),
    (
        (None, True, "epoch=3-step=2"),
        ("", True, "epoch=3-step=2"),
        ("ckpt", True, "ckpt"),
        ("{epoch:03d}-{acc}", True, "epoch=003-acc=0.03"),
        ("{epoch:03d}-{epoch_test:03.0f}", True, "epoch=003-epoch_test=003"),
        ("{epoch},{acc:.5f}", True, "epoch=3,acc=0.03000"),
        ("{epoch}_{val/loss:.5f}", True, "epoch=3_val/loss=0.03000"),
        ("epoch={epoch:03d}-val_acc={acc}", False, "epoch=003-val_acc=0.03"),
        ("mAP@0.50={val/mAP@0.50:.4f}", False, "mAP@0.50=0.2000"),
        ("{missing:.1f}", True, "missing=?"),
    ),
    ids=str,
)
def test_labels_read_as_modelcheckpoints_files(filename: str | None, inserts: bool, expected: str) -> None:
    ours = StrongroomCheckpoint(RUN, filename=filename, auto_insert_metric_name=inserts)
    assert ours.format_checkpoint_name(METRICS) == expected
    assert ours.format_checkpoint_name(METRICS, filename="{step}") == ("step=2" if inserts else "2")
    if expected != "missing=?" and "epoch_test" not in expected:  # theirs writes 0, and takes whole numbers
        theirs = ModelCheckpoint(RUN, filename=filename, auto_insert_metric_name=inserts)
        assert Path(theirs.format_checkpoint_name(METRICS)) == Path(theirs.dirpath or "", f"{expected}.ckpt")


def labels_in(root: Path) -> dict[int, list[str]]:
    store = LocalStore(root)
    history = Catalog(store).history()
    return {
        name.step: open_checkpoint(store, commit, NO_GUARD).provenance["tags"]
        for name, commit in history.commits.items()
    }


def test_a_label_is_kept_with_each_checkpoint(root: Path) -> None:
    run(
        root,
        {2: 0.5, 4: 0.25},
        filename="best-{epoch:02d}-{score:.2f}",
        trainer={"max_epochs": 2, "val_check_interval": 0.5},
    )
    assert labels_in(root) == {
        1: ["best-epoch=00-score=?"],
        2: ["best-epoch=00-score=0.50"],
        3: ["best-epoch=01-score=0.50"],
        4: ["best-epoch=01-score=0.25"],
    }


def test_what_a_hook_logs_that_is_no_number_does_not_stop_a_run(root: Path) -> None:
    class Odd(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.callback_metrics.update(text="best", many=torch.ones(3), nothing=None)

    run(root, callbacks=[Odd()], filename="{text}-{many}", trainer={"max_epochs": 1})
    assert labels_in(root) == {2: ["text=?-many=?"]}


def test_of_two_callbacks_the_error_says_how_one_does_what_both_should(root: Path) -> None:
    again = StrongroomCheckpoint(root, every_n_epochs=5)
    with pytest.raises(ConfigError, match="one for the best and one for the last, one of ours does"):
        run(root, callbacks=[again], monitor="score")
    assert not root.exists()
