"""Two ranks of a Trainer's job over gloo: killed, told to stop, failed; and each gets back what it had."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

import pytest
import trainer_ranks
from processes import FrontEndLauncher
from test_timing import steps

ALL = 12


@pytest.fixture(scope="module")
def launcher() -> Iterator[FrontEndLauncher]:
    preloaded = ("transformers.trainer", "accelerate", "strongroom_transformers.callback", "trainer_ranks")
    with FrontEndLauncher(preloaded, trainer_ranks.as_trainer_rank) as started:
        yield started


@pytest.fixture(scope="module")
def reference(launcher: FrontEndLauncher, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The uninterrupted run without our callback, once for all tests that ask for it."""
    known: dict[str, list[dict[str, Any]]] = {}

    def run(**settings: Any) -> list[dict[str, Any]]:
        key = repr(sorted(settings.items()))
        if key not in known:
            folder = tmp_path_factory.mktemp("alone")
            alone = {**settings, "save_strategy": "no"}
            known[key] = launcher.run(trainer_ranks.train, folder, None, ranks=2, **alone)
        return known[key]

    return run


def ends_like(resumed: list[dict[str, Any]], whole: list[dict[str, Any]]) -> None:
    for number, (one, other) in enumerate(zip(resumed, whole, strict=True)):
        left = len(one["losses"])
        assert 0 < left < len(other["losses"])
        assert one["losses"] == other["losses"][-left:], number
        for name in ("weights", "step", "seen", "history", "next"):
            assert one[name] == other[name], (number, name)


SETTINGS = {"eval_strategy": "steps", "eval_steps": 2}
ACCUMULATED = {"gradient_accumulation_steps": 2, "eval_strategy": "epoch", "logging_steps": 2}


@pytest.mark.parametrize(
    ("settings", "step"), ((SETTINGS, 4), (ACCUMULATED, 3)), ids=("steps", "accumulated")
)
def test_killed(
    launcher: FrontEndLauncher,
    reference: Any,
    tmp_path: Path,
    root: Path,
    settings: dict[str, Any],
    step: int,
) -> None:
    job = launcher.start(trainer_ranks.train, tmp_path, root, ("kill", step, 1), ranks=2, **settings)
    assert job.wait([1])[1].exit_code == -signal.SIGKILL
    job.kill()
    resumed = launcher.run(trainer_ranks.train, tmp_path, root, seed=3, ranks=2, **settings)
    ends_like(resumed, reference(**settings))


def test_pr_41723_told_to_stop_on_one_rank_all_ranks_save_the_same_step(
    launcher: FrontEndLauncher, reference: Any, tmp_path: Path, root: Path
) -> None:
    settings = {**SETTINGS, "save_steps": 100}
    told = launcher.run(trainer_ranks.train, tmp_path, root, ("stop", 2, 1), ranks=2, **settings)
    assert [one["status"] for one in told] == [128 + signal.SIGTERM] * 2
    assert len({one["step"] for one in told}) == 1
    assert steps(root) == [told[0]["step"]]
    resumed = launcher.run(trainer_ranks.train, tmp_path, root, seed=3, ranks=2, **SETTINGS)
    ends_like(resumed, reference(**SETTINGS))


def test_an_error_of_one_rank_ends_all_in_words(
    launcher: FrontEndLauncher, tmp_path: Path, root: Path
) -> None:
    failed = launcher.run(trainer_ranks.train, tmp_path, root, ("fail", 3, 1), ranks=2)
    assert "this rank alone" in failed[1]["error"]
    assert failed[0]["error"] is not None
    assert "rank 1" in failed[0]["error"] or "peer" in failed[0]["error"]
    assert steps(root)[-1] <= 3


def test_fewer_ranks_go_on_from_where_more_had_come(
    launcher: FrontEndLauncher, tmp_path: Path, root: Path
) -> None:
    launcher.run(trainer_ranks.train, tmp_path, root, ("stop", 3, 0), save_steps=100, ranks=2)
    (step,) = steps(root)
    (one,) = launcher.run(trainer_ranks.train, tmp_path, root, seed=3, ranks=1)
    # One rank has twice as many batches of an epoch, and has left out those that two had taken.
    assert one["error"] is None
    assert len(one["losses"]) == 4 * 6 - 2 * step
