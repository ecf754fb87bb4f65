"""Told to stop: all ranks save after one step, end with the right status, and the run goes on exactly."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import preempted_runs
import pytest
import rank_runs
from multiprocess import LightningLauncher

from strongroom import Checkpointer

TERM, USR1, INT = signal.SIGTERM, signal.SIGUSR1, signal.SIGINT
STEPS = 12


def steps_of(root: Path) -> list[int]:
    return sorted(one.step for one in Checkpointer(root).checkpoints())


@pytest.fixture(scope="module")
def references(launcher: LightningLauncher) -> dict[tuple[int, bool], list[dict[str, Any]]]:
    """Uninterrupted runs by their number of ranks and whether they validate, each trained once."""
    return {
        (ranks, validate): launcher.run(rank_runs.train, None, ranks=ranks, **_settings(ranks, validate))
        for ranks in (1, 2)
        for validate in (False, True)
    }


def _settings(ranks: int, validate: bool) -> dict[str, Any]:
    settings: dict[str, Any] = {"validate": validate}
    if ranks == 1 and not validate:  # Lightning warns of metrics where a group exists and is not trained in
        settings["strategy"] = "auto"
    if validate:
        settings |= {"val_check_interval": 3, "num_sanity_val_steps": 1}
    return settings


def goes_on_exactly(
    launcher: LightningLauncher,
    root: Path,
    references: dict[tuple[int, bool], list[dict[str, Any]]],
    *,
    ranks: int,
    validate: bool = False,
) -> None:
    """The run taken up ends with the uninterrupted run's losses and weights, as floats."""
    done = max(steps_of(root), default=0)
    resumed = launcher.run(rank_runs.train, root, draw_from=99, ranks=ranks, **_settings(ranks, validate))
    for one, expected in zip(resumed, references[ranks, validate], strict=True):
        assert one["losses"] == expected["losses"][done:]
        assert one["weights"] == expected["weights"]


@pytest.mark.parametrize(
    ("ranks", "whom", "place", "step"),
    (
        (1, None, "on_train_batch_start:4", 5),
        (1, None, "on_train_batch_end:5", 6),  # the last of an epoch
        (1, None, "on_validation_batch_start:1", 3),
        (1, None, "on_train_epoch_start:1", 7),
        (2, None, "on_train_batch_start:4", 5),
        (2, [0], "on_train_batch_start:4", None),
        (2, [1], "on_train_batch_start:7", None),
        (2, [1], "on_validation_batch_start:2", None),
    ),
)
def test_a_signal_stops_all_ranks_after_the_same_step_and_the_run_goes_on_exactly(
    launcher: LightningLauncher,
    tmp_path: Path,
    references: dict[tuple[int, bool], list[dict[str, Any]]],
    ranks: int,
    whom: list[int] | None,
    place: str,
    step: int | None,
) -> None:
    root, validate = tmp_path / "run", "validation" in place
    settings = _settings(ranks, validate)
    if step is None:
        settings["callbacks"] = [preempted_runs.slowly]  # half a second may pass until all know
    ended = launcher.run(preempted_runs.told, root, place, ranks=ranks, whom=whom, **settings)
    assert [one["status"] for one in ended] == [143] * ranks, ended
    assert {one["kind"] for one in ended} == {"SIGTERMException"}
    assert all(one["received"] and one["handlers"] for one in ended)
    (saved,) = steps_of(root)
    assert {one["step"] for one in ended} == {saved}
    assert step is None or saved == step
    goes_on_exactly(launcher, root, references, ranks=ranks, validate=validate)
