"""Which steps a save takes: kinds of numbers, their order, twice the same, and while one is in flight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from strongroom import ConfigError, SaveError, StoreUnavailableError, events
from strongroom.layout import MAX_STEP
from strongroom.stores.memory import MemoryStore

STATE = {"t": torch.ones(2)}


@pytest.mark.parametrize(
    "step", (3, np.int64(3), np.uint8(3), torch.tensor(3)), ids=lambda step: type(step).__name__
)
def test_any_integer_is_a_step(step: Any, begin: Any) -> None:
    checkpoint = begin(MemoryStore()).save(step, STATE).result()
    assert checkpoint.step == 3
    assert type(checkpoint.step) is int


@pytest.mark.parametrize(
    "step",
    (
        True,
        np.bool_(True),
        3.0,
        np.float64(3),
        torch.tensor(3.0),
        "3",
        None,
        -1,
        MAX_STEP + 1,
        torch.tensor([3, 4]),
    ),
    ids=repr,
)
def test_anything_else_is_none(step: Any, begin: Any) -> None:
    checkpointer = begin(MemoryStore())
    with pytest.raises(ConfigError, match="step must be an integer from 0"):
        checkpointer.save(step, STATE)
    if step is not None:
        with pytest.raises(ConfigError, match="step must be an integer from 0"):
            checkpointer.restore(step=step)
    assert checkpointer.checkpoints() == []


def test_the_first_and_the_last_step_there_can_be(begin: Any) -> None:
    checkpointer = begin(MemoryStore())
    checkpointer.save(0, STATE)
    checkpointer.save(MAX_STEP, STATE).result()
    assert [c.step for c in checkpointer.checkpoints()] == [MAX_STEP, 0]


def test_a_step_that_this_launch_saved_is_skipped_and_its_handle_gives_what_stands(
    begin: Any, listener: Any
) -> None:
    checkpointer = begin(MemoryStore(), events=[listener])
    first = checkpointer.save(5, STATE)
    checkpointer.wait()
    again = checkpointer.save(5, {"t": torch.zeros(2)})
    assert first.skipped is None
    assert "saved already" in str(again.skipped)
    assert again.result() == first.result()
    assert len(checkpointer.checkpoints()) == 1
    assert checkpointer.restore().state["t"].tolist() == [1, 1]
    assert [event.step for event in listener.of(events.SaveSkipped)] == [5]


def test_a_step_that_is_in_flight_is_not_saved_twice(store: Any, begin: Any) -> None:
    gate = store.hold(on="open_writer")
    checkpointer = begin(store)
    first = checkpointer.save(5, STATE)
    gate.wait_reached()
    again = checkpointer.save(5, STATE)
    assert again.skipped is not None
    assert not again.done()
    gate.open()
    assert again.result(60) == first.result(60)
    assert len(checkpointer.checkpoints()) == 1


def test_a_step_whose_save_failed_can_be_saved_again(store: Any, begin: Any) -> None:
    store.fail(StoreUnavailableError("gone"), on="finish", times=1)
    checkpointer = begin(store)
    with pytest.raises(SaveError):
        checkpointer.save(5, STATE).result(60)
    again = checkpointer.save(5, STATE)
    assert again.skipped is None
    assert again.result(60).step == 5


def test_a_lower_step_is_refused_and_the_error_says_how_to_go_back(begin: Any) -> None:
    checkpointer = begin(MemoryStore())
    checkpointer.save(5, STATE).result()
    with pytest.raises(ConfigError, match=r"step 4 is lower than step 5.*restore\(step=\.\.\.\) first"):
        checkpointer.save(4, STATE)
    checkpointer.save(6, STATE).result()
    assert [c.step for c in checkpointer.checkpoints()] == [6, 5]


def test_a_step_below_the_restored_one_is_refused_and_the_same_one_is_not(root: Path, begin: Any) -> None:
    begin(root).save(5, STATE).result()
    checkpointer = begin(root)
    checkpointer.restore()
    with pytest.raises(ConfigError, match="step 4 is lower than step 5"):
        checkpointer.save(4, STATE)
    again = checkpointer.save(5, STATE).result()
    assert (again.step, again.launch) == (5, 2)


def test_a_save_while_one_is_in_flight_waits_for_it_and_both_stand(store: Any, begin: Any) -> None:
    gate = store.hold(on="open_writer", where="step-000000000001")
    checkpointer = begin(store)
    first = checkpointer.save(1, STATE)
    gate.wait_reached()
    gate.open()
    second = checkpointer.save(2, STATE)
    assert first.done()
    assert (first.result(60).step, second.result(60).step) == (1, 2)


def test_figures_provenance_and_tags_are_kept_with_the_checkpoint(root: Path, begin: Any) -> None:
    checkpoint = (
        begin(root)
        .save(
            1,
            STATE,
            metrics={"loss": torch.tensor(0.5), "acc": np.float32(0.25)},
            provenance={"commit": "abc"},
            tags=("best", "night"),
        )
        .result()
    )
    text = (root / checkpoint.folder / "data" / "provenance.json").read_text()
    for word in ("best", "night", "abc", "loss", "acc"):
        assert word in text


@pytest.mark.parametrize("tags", ("best", [1]), ids=["text", "number"])
def test_tags_are_a_sequence_of_texts(tags: Any, begin: Any) -> None:
    with pytest.raises(ConfigError, match="tag"):
        begin(MemoryStore()).save(1, STATE, tags=tags)


# ----------------------------------------------------------------------------------------- options


@pytest.mark.parametrize("seconds", (0, -1, float("inf"), float("nan"), "10", None, True, 2.0**40))
def test_a_timeout_is_a_positive_number_of_seconds(seconds: Any, root: Path, begin: Any) -> None:
    with pytest.raises(ConfigError, match="timeout_s"):
        begin(root, timeout_s=seconds)


def test_the_longest_timeout_can_be_read_back(root: Path, begin: Any) -> None:
    begin(root, timeout_s=2**31).save(1, STATE).result()
    checkpointer = begin(root)
    checkpointer.restore()
    checkpointer.save(2, STATE).result()
    assert [c.step for c in checkpointer.checkpoints()] == [2, 1]


@pytest.mark.parametrize("run_id", ("", "a b", "../a", "x" * 129, 7), ids=repr)
def test_a_run_id_that_is_none_is_a_wrong_option(run_id: Any, root: Path, begin: Any) -> None:
    with pytest.raises(ConfigError, match="run id"):
        begin(root, run_id=run_id)


def test_the_platforms_run_id_is_written_and_another_is_refused(root: Path, begin: Any) -> None:
    begin(root, run_id="job-7").save(1, STATE).result()
    begin(root, run_id="job-7").save(2, STATE).result()
    with pytest.raises(ConfigError, match=r"belongs to run job-7.*'job-8'"):
        begin(root, run_id="job-8").save(3, STATE)


@pytest.mark.parametrize("value", (-1, 1.5, "3", None, True))
def test_max_fallback_is_a_whole_number(value: Any, root: Path, begin: Any) -> None:
    with pytest.raises(ConfigError, match="max_fallback"):
        begin(root, max_fallback=value)


@pytest.mark.parametrize("digest", ("md5", "SHA256", 7))
def test_an_unknown_digest_is_refused(digest: Any, root: Path, begin: Any) -> None:
    with pytest.raises(ConfigError, match="blake3, sha256"):
        begin(root, digest=digest)


def test_what_keeps_nothing_is_no_retention_policy(root: Path, begin: Any) -> None:
    with pytest.raises(ConfigError, match="retention policy"):
        begin(root, keep=3)


def test_a_job_of_several_processes_is_told_what_this_release_does(
    root: Path, begin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="2 processes"):
        begin(root)
