"""Runs that fail: what is saved then, what stands, who is told, and how soon all is over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import preempted_runs
import pytest
import rank_runs
from lightning_ranks import LightningLauncher

from strongroom import Checkpointer


def steps_of(root: Path) -> list[int]:
    return sorted(one.step for one in Checkpointer(root).checkpoints())


@pytest.fixture(scope="module")
def reference(launcher: LightningLauncher) -> list[dict[str, Any]]:
    """The uninterrupted run of two ranks."""
    return launcher.run(rank_runs.train, None, ranks=2)


@pytest.fixture(scope="module")
def reference_alone(launcher: LightningLauncher) -> list[dict[str, Any]]:
    return launcher.run(rank_runs.train, None, ranks=1, strategy="auto")


def goes_on_exactly(
    launcher: LightningLauncher, root: Path, reference: list[dict[str, Any]], done: int, **settings: Any
) -> None:
    resumed = launcher.run(rank_runs.train, root, draw_from=99, ranks=len(reference), **settings)
    for one, expected in zip(resumed, reference, strict=True):
        assert one["losses"] == expected["losses"][done:]
        assert one["weights"] == expected["weights"]


def test_a_batch_that_cannot_be_read_loses_nothing_where_that_is_asked_for(
    launcher: LightningLauncher, tmp_path: Path, reference_alone: list[dict[str, Any]]
) -> None:
    root = tmp_path / "run"
    (failed,) = launcher.run(
        preempted_runs.fails_reading, root, 5, ranks=1, strategy="auto", save_on_exception=True
    )
    assert failed["error"] == "OSError: the disk is gone"
    assert steps_of(root) == [4]
    goes_on_exactly(launcher, root, reference_alone, 4, strategy="auto")


def test_a_job_whose_end_takes_the_loaders_worker_away_first_loses_nothing(
    launcher: LightningLauncher, tmp_path: Path
) -> None:
    root, settings = tmp_path / "run", {"strategy": "auto", "loader": preempted_runs.by_a_worker}
    reference = launcher.run(rank_runs.train, None, ranks=1, **settings)
    (failed,) = launcher.run(preempted_runs.loses_its_worker, root, 5, ranks=1, strategy="auto")
    assert failed["error"] is not None
    assert "DataLoader worker" in failed["error"]
    assert steps_of(root) == [4]
    goes_on_exactly(launcher, root, reference, 4, **settings)


def test_an_error_in_the_middle_of_a_step_saves_nothing_and_says_what_stands(
    launcher: LightningLauncher, tmp_path: Path
) -> None:
    (failed,) = launcher.run(
        preempted_runs.fails, tmp_path / "run", "on_after_backward:7", ranks=1, strategy="auto",
        save_on_exception=True, every=5,
    )  # fmt: skip
    assert failed["error"] == "ValueError: as the test wants it"
    assert any("middle of a step" in word and "step 5 stands" in word for word in failed["warned"])
    assert steps_of(tmp_path / "run") == [5]


def test_all_ranks_that_cannot_read_the_same_batch_save_together(
    launcher: LightningLauncher, tmp_path: Path, reference: list[dict[str, Any]]
) -> None:
    root = tmp_path / "run"
    failed = launcher.run(preempted_runs.fails_reading, root, 5, ranks=2, save_on_exception=True)
    assert [one["error"] for one in failed] == ["OSError: the disk is gone"] * 2
    assert steps_of(root) == [4]
    goes_on_exactly(launcher, root, reference, 4)


@pytest.mark.parametrize(
    ("rank", "place", "stands"),
    (
        (1, "on_train_batch_start:5", 4),
        (0, "on_after_backward:3", 2),
        (1, "on_validation_batch_start:1", 2),
    ),
)
def test_a_rank_that_fails_alone_is_named_on_the_other_and_the_last_commit_stands(
    launcher: LightningLauncher, tmp_path: Path, rank: int, place: str, stands: int
) -> None:
    root = tmp_path / "run"
    settings = {"validate": True, "val_check_interval": 3} if "validation" in place else {}
    failed = launcher.run(preempted_runs.fails, root, place, ranks=2, whom=[rank], every=2, **settings)
    assert failed[rank]["error"] == "ValueError: as the test wants it"
    other = failed[1 - rank]
    assert other["error"] is not None  # gloo's, or ours at its next step
    assert any(f"rank {rank} has failed (ValueError: as the test wants it)" in one for one in other["logged"])
    assert max(one["took_s"] for one in failed) < 30
    assert max(steps_of(root)) == stands  # it was being written, and is waited for


def test_an_interrupt_from_the_keyboard_ends_the_run_and_the_save_in_flight_is_waited_for(
    launcher: LightningLauncher, tmp_path: Path, reference_alone: list[dict[str, Any]]
) -> None:
    root = tmp_path / "run"
    (ended,) = launcher.run(
        preempted_runs.told, root, "on_train_batch_start:4", numbers=[2], every=4, ranks=1, strategy="auto"
    )
    assert ended["status"] == 1  # Lightning's own
    assert steps_of(root) == [4]
    goes_on_exactly(launcher, root, reference_alone, 4, strategy="auto")


def test_a_run_that_stops_itself_saves_where_it_stands(launcher: LightningLauncher, tmp_path: Path) -> None:
    root = tmp_path / "run"
    (ended,) = launcher.run(preempted_runs.stops_itself, root, 5, ranks=1, strategy="auto")
    assert (ended["status"], ended["error"]) == (None, None)
    assert steps_of(root) == [5]


def test_a_failed_background_save_ends_the_fit_unless_it_is_tolerated(
    launcher: LightningLauncher, tmp_path: Path
) -> None:
    (raised,) = launcher.run(
        preempted_runs.cannot_write, tmp_path / "a", tolerate=0, ranks=1, strategy="auto"
    )
    assert raised["error"] is not None
    assert raised["error"].startswith("SaveError: the save of step 3 failed in the background")
    (went_on,) = launcher.run(
        preempted_runs.cannot_write, tmp_path / "b", tolerate=1, ranks=1, strategy="auto"
    )
    assert went_on["error"] is None
    assert steps_of(tmp_path / "b") == [1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    assert any("step 3" in word for word in went_on["logged"])
