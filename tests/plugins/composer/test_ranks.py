"""Runs of two ranks: broken off, killed and told to stop anywhere, they end as the uninterrupted ones."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import composer_jobs as jobs
import pytest

from strongroom import Checkpointer

WAYS = ("DDP", "FSDP2 sharded", "FSDP2 full")

POINTS = [4, 6, 9]
"""In an epoch, after its last step, in the next one."""


def steps_of(root: Path) -> list[int]:
    return sorted(one.step for one in Checkpointer(root).checkpoints())


@pytest.mark.parametrize("way", WAYS)
def test_a_run_of_ranks_broken_off_anywhere_ends_as_the_uninterrupted_one(
    launcher: Any, tmp_path: Path, way: str
) -> None:
    for found in launcher.run(jobs.broken_and_resumed, tmp_path, way, POINTS, ranks=2):
        whole = found["whole"]
        for done in POINTS:
            resumed = found[done]
            assert len(resumed["losses"]) == 12 - done
            assert resumed["losses"] == whole["losses"][done:]
            assert resumed["measured"] == whole["measured"][-len(resumed["measured"]) :]
            for part in ("weights", "lr", "mean", "batch"):
                assert resumed[part] == whole[part], (done, part)


def test_a_sharded_model_is_saved_by_the_ranks_that_have_it(launcher: Any, tmp_path: Path) -> None:
    launcher.run(jobs.broken_and_resumed, tmp_path, "FSDP2 sharded", [4], ranks=2)
    (newest,) = (tmp_path / "4").glob("step-000000000004-*")
    sizes = {path.name[:5]: path.stat().st_size for path in newest.glob("data/0*.safetensors")}
    assert set(sizes) == {"00000", "00001"}
    assert min(sizes.values()) > 1000  # halves of the weights and of the optimizer's moments


@pytest.mark.parametrize("way", WAYS[:1])
def test_a_run_of_which_a_rank_is_killed_goes_on_exactly(launcher: Any, tmp_path: Path, way: str) -> None:
    root = tmp_path / "run"
    job = launcher.start(jobs.killed, root, way, 8, ranks=2)
    assert job.wait([1])[1].exit_code == -signal.SIGKILL
    job.kill()
    left = steps_of(root)[-1]
    assert left in (7, 8)
    resumed = launcher.run(jobs.trained, root, way, seed=1000, ranks=2)
    whole = launcher.run(jobs.trained, None, way, ranks=2)
    for one, reference in zip(resumed, whole, strict=True):
        assert one["losses"] == reference["losses"][left:]
        assert one["weights"] == reference["weights"]


def test_a_signal_on_one_rank_stops_both_after_the_same_step(launcher: Any, tmp_path: Path) -> None:
    root = tmp_path / "run"
    ended = launcher.run(jobs.preempted, root, "DDP", 3, {"save_interval": "1000ep"}, ranks=2)
    (step,) = steps_of(root)
    assert step >= 4
    for code, words in ended:
        assert code == 143
        assert words == f"told to stop by SIGTERM: step {step} is saved"


def test_a_function_that_says_when_to_save_is_asked_on_rank_0(launcher: Any, tmp_path: Path) -> None:
    for found in launcher.run(jobs.as_told, tmp_path / "run", (2, 5), ranks=2):
        assert found == [2, 5]


def test_another_number_of_ranks_goes_on_with_the_model_and_the_optimizer(
    launcher: Any, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    options = {"until": 4, "checkpoint": {"save_interval": "4ba"}, "callbacks": ()}
    (broken, _) = launcher.run(jobs.trained, root, "FSDP2 sharded", **options, ranks=2)
    (alone,) = launcher.run(jobs.resumed_elsewhere, root, ranks=1)
    assert alone["batch"] == 4
    assert alone["weights"] == broken["weights"]
    assert alone["moments"] != 0
    assert alone["outcome"]["batch"] > 4
