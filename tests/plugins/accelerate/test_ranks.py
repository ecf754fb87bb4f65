"""Two processes: replicas and shards, killed and told to stop for real, and brought back to the last bit."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from accelerate_issues import in_folder
from accelerate_runs import LOADERS, FrontEndLauncher, Outcome, terminate, train, train_often
from processes import die

from strongroom import Checkpointer

WAYS = ("ddp", "fsdp2")


@pytest.fixture(scope="module")
def references(launcher: FrontEndLauncher) -> dict[str, list[Outcome]]:
    """Each way's uninterrupted run, without us: each rank's outcome."""
    plans = [{"root": None, "way": way} for way in WAYS]
    ranks = launcher.run(train_often, plans, ranks=2)
    return {way: [outcomes[number] for outcomes in ranks] for number, way in enumerate(WAYS)}


def _like(found: list[Outcome], references: list[Outcome]) -> None:
    for outcome, reference in zip(found, references, strict=True):
        assert outcome.has_resumed
        outcome.ends_like(reference)


@pytest.mark.parametrize("way", WAYS)
def test_two_processes_broken_off_anywhere_end_as_the_uninterrupted_ones(
    way: str, launcher: FrontEndLauncher, references: Any, tmp_path: Path
) -> None:
    plans: list[dict[str, Any]] = []
    for until in (2, 6, 9):
        root = tmp_path / f"run{until}"
        plans += [{"root": root, "way": way, "until": until}, {"root": root, "way": way, "seed": 99}]
    ranks = launcher.run(train_often, plans, ranks=2)
    for resumed in range(1, len(plans), 2):
        _like([outcomes[resumed] for outcomes in ranks], references[way])


@pytest.mark.parametrize("loader", sorted(set(LOADERS) - {"stock", "workers", "stateful, workers"}))
def test_two_processes_go_on_with_every_kind_of_loader(
    loader: str, launcher: FrontEndLauncher, tmp_path: Path
) -> None:
    plans: list[dict[str, Any]] = [{"root": None, "loader": loader}]
    plans += [{"root": tmp_path / "run", "loader": loader, "until": 8}]
    plans += [{"root": tmp_path / "run", "loader": loader, "seed": 99}]
    ranks = launcher.run(train_often, plans, ranks=2)
    _like([outcomes[2] for outcomes in ranks], [outcomes[0] for outcomes in ranks])


@pytest.mark.parametrize("way", WAYS)
def test_one_of_two_processes_is_killed(
    way: str, launcher: FrontEndLauncher, references: Any, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    outcomes = launcher.start(
        train, root, way=way, until=10, act=die, on=(1,), strongroom={"every_n_steps": 4}, ranks=2
    ).outcomes()
    assert outcomes[1].exit_code == -signal.SIGKILL
    assert outcomes[0].error is not None
    _like(launcher.run(train, root, way=way, seed=99, ranks=2), references[way])


@pytest.mark.parametrize("way", WAYS)
def test_a_signal_to_one_process_stops_both_after_the_same_step(
    way: str, launcher: FrontEndLauncher, references: Any, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    arguments: dict[str, Any] = {"way": way, "until": 2, "act": terminate, "on": (1,), "pace_s": 0.2}
    outcomes = launcher.start(train, root, strongroom={}, ranks=2, **arguments).outcomes()
    for outcome in outcomes:
        assert outcome.error is not None
        name, said = outcome.error
        assert name == "Preempted"
        assert "told to stop by SIGTERM" in said
    with Checkpointer(root) as checkpointer:
        (saved,) = checkpointer.checkpoints()
    assert 2 < saved.step < 12
    _like(launcher.run(train, root, way=way, seed=99, ranks=2), references[way])


def test_an_exception_on_one_process_ends_the_other_one_in_words(
    launcher: FrontEndLauncher, references: Any, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    outcomes = launcher.start(train, root, until=5, on=(1,), ranks=2).outcomes()
    assert outcomes[1].error is not None
    assert outcomes[1].error[0] == "BrokenOffError"
    assert outcomes[0].error is not None
    with Checkpointer(root) as checkpointer:
        assert checkpointer.checkpoints()[0].step == 5
    _like(launcher.run(train, root, seed=99, ranks=2), references["ddp"])


def test_processes_with_different_numbers_of_batches_save_once_all_are_done(
    launcher: FrontEndLauncher, tmp_path: Path
) -> None:
    assert launcher.run(in_folder, tmp_path, "join_uneven", ranks=2) == [(3, 0), (3, 1)]
    with Checkpointer(tmp_path / "run") as checkpointer:
        assert [one.step for one in checkpointer.checkpoints()] == [3]
