"""Ranks that are called differently, hold different values or see different roots: told, never guessed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import agreement_jobs as jobs
import pytest
from crews import Crews
from fault_jobs import Told, go_on, save_steps
from launching import Launcher

from strongroom import Checkpointer

RANKS = 4


@pytest.fixture
def run(crews: Crews) -> Any:
    """Runs a function on four ranks, and gives what each call told by call, then by rank."""

    def run(function: Any, *arguments: Any) -> list[tuple[Told, ...]]:
        return list(zip(*crews.run(function, *arguments, ranks=RANKS), strict=True))

    return run


def errors(outcomes: tuple[Told, ...]) -> list[str | None]:
    return [told.error for told in outcomes]


def test_different_steps_are_an_error_that_names_them(run: Any, tmp_path: Path) -> None:
    first, then = run(jobs.different_steps, tmp_path)
    for told in first:
        assert told.error == "RanksDisagreeError"
        assert "rank 0 called save(step=4) and rank 2 called save(step=5)" in told.text
        assert told.ranks == (2,)
        assert told.seconds < jobs.TIMEOUT_S / 2
    assert [told.step for told in then] == [6] * RANKS


def test_different_calls_are_an_error_that_names_them(run: Any, tmp_path: Path) -> None:
    first, then = run(jobs.different_calls, tmp_path)
    for told in first:
        assert told.error == "RanksDisagreeError"
        assert "rank 0: deciding on a save; ranks 1, 3: looking for a checkpoint" in told.text
        assert told.ranks == (1, 3)
        assert told.seconds < jobs.TIMEOUT_S / 2
    assert [told.step for told in then] == [6] * RANKS


def test_every_rank_hears_the_same_words_in_rank_order(crews: Crews, tmp_path: Path) -> None:
    for rank, (words, failed, other, again) in enumerate(crews.run(jobs.confer, tmp_path, ranks=RANKS)):
        assert words == tuple({"rank": number} for number in range(RANKS))
        assert failed.error == ("ValueError" if rank == 2 else "RankFailedError")
        assert "no word from here" in failed.text
        assert other.error == "RanksDisagreeError"
        assert "rank 0 called confer('that') and ranks 1, 2, 3 called confer('this')" in other.text
        assert again == tuple(range(RANKS))


def test_different_steps_to_restore_are_an_error_that_names_them(run: Any, tmp_path: Path) -> None:
    first, then = run(jobs.different_steps_to_restore, tmp_path)
    for told in first:
        assert told.error == "RanksDisagreeError"
        assert "rank 0 called restore(step=None) and rank 3 called restore(step=1)" in told.text
    assert [told.step for told in then] == [1] * RANKS


def test_what_one_rank_cannot_do_is_everyones_error_at_once(run: Any, tmp_path: Path) -> None:
    *failed, last = run(jobs.a_call_that_one_rank_cannot_make, tmp_path)
    expected = ["ConfigError", "StateEncodingError", "ConfigError", "ConfigError"]
    for outcomes, error in zip(failed, expected, strict=True):
        assert errors(outcomes) == [error] * RANKS
        assert all("rank 1 (" in told.text for rank, told in enumerate(outcomes) if rank != 1)
        assert all(told.seconds < jobs.TIMEOUT_S / 2 for told in outcomes)
    assert [told.step for told in last] == [4] * RANKS


@pytest.mark.parametrize(
    ("kind", "named"),
    (
        ("number", "state['odd']['deep'][1]['lr']"),
        ("bool", "state['odd']['deep'][1]['lr']"),
        ("generator", "odd"),
        ("array", "odd"),
        ("tensor", "odd"),
        ("key", "state['odd']['more'] (on some ranks only)"),
        ("order", "state['odd'] (the order of its entries)"),
    ),
)
def test_a_common_value_that_differs_is_an_error_that_names_it(
    run: Any, tmp_path: Path, kind: str, named: str
) -> None:
    first, then = run(jobs.values_that_differ, tmp_path, kind)
    for told in first:
        assert told.error == "RanksDisagreeError", told
        assert told.ranks == (2,), told
        assert named in told.text, told
        assert "rank 2 and rank 0 hold different values" in told.text
        assert "PerRank" in told.text
    assert [told.step for told in then] == [2] * RANKS


def test_a_root_of_its_own_for_each_rank_is_refused(run: Any, tmp_path: Path) -> None:
    first, then = run(jobs.own_roots, tmp_path, False)
    for told in (*first, *then):
        assert told.error == "ConfigError", told
        assert "ranks 1, 2, 3 cannot see" in told.text
    assert not list(tmp_path.glob("run*/step-*"))


def test_a_root_of_its_own_for_each_rank_is_refused_to_restore_from(
    crews: Crews, run: Any, tmp_path: Path
) -> None:
    crews.run(save_steps, tmp_path / "run0", [1], ranks=RANKS)
    before = sorted(path.name for path in (tmp_path / "run0").iterdir())
    _, restored, saved = run(jobs.own_roots, tmp_path, True)
    for told in restored:
        assert told.error == "ConfigError", told
        assert "ranks 1, 2, 3 and rank 0 see different things" in told.text
    assert errors(saved) == ["ConfigError"] * RANKS
    assert sorted(path.name for path in (tmp_path / "run0").iterdir()) == before
    assert crews.run(go_on, tmp_path / "run0", ranks=RANKS) == [([1], 1, True, 9)] * RANKS


def test_a_root_is_looked_at_again_where_a_first_try_failed(run: Any, tmp_path: Path) -> None:
    first, second = run(jobs.own_roots_that_a_first_try_did_not_find, tmp_path)
    assert all(told.step is None for told in (*first, *second))
    assert not list(tmp_path.glob("*/step-*"))


def test_a_store_in_memory_is_refused(run: Any) -> None:
    (outcomes,) = run(jobs.memory_stores)
    assert errors(outcomes) == ["ConfigError"] * RANKS


def test_different_digests_are_refused(run: Any, tmp_path: Path) -> None:
    (outcomes,) = run(jobs.different_digests, tmp_path)
    for told in outcomes:
        assert told.error == "ConfigError"
        assert "rank 0 computes blake3 digests and rank 1 computes sha256" in told.text


def test_all_skip_where_one_is_busy(crews: Crews, tmp_path: Path) -> None:
    outcomes = crews.run(jobs.busy, tmp_path, ranks=RANKS)
    assert all(outcome == outcomes[0] for outcome in outcomes)
    (first, _), (second, stands_for), (third, _), (last, _) = outcomes[0]
    assert (first, last) == (None, None)
    assert second is not None
    assert second == third
    assert stands_for == 1


@pytest.mark.parametrize("rank", (0, 2))
@pytest.mark.parametrize("operation", ("open_writer", "write", "finish"))
@pytest.mark.parametrize(
    ("fault", "error"),
    (
        ("DENIED", "AccessDeniedError"),
        ("FULL", "StoreFullError"),
        ("REFUSED", "StoreUnavailableError"),
    ),
)
def test_a_store_that_fails_one_rank_fails_all_in_the_same_way(
    crews: Crews, tmp_path: Path, rank: int, operation: str, fault: str, error: str
) -> None:
    crews.run(save_steps, tmp_path, [1], ranks=RANKS)
    for number, (told,) in enumerate(
        crews.run(jobs.store_faults, tmp_path, rank, operation, fault, ranks=RANKS)
    ):
        assert told.step is None
        assert told.error == error, told
        assert "SaveError" in told.bases
        assert (f"rank {rank} (" in told.text) == (number != rank)
    assert crews.run(go_on, tmp_path, ranks=RANKS) == [([1], 1, True, 9)] * RANKS


def test_two_checkpointers_do_not_meet_each_other(crews: Crews, tmp_path: Path) -> None:
    assert crews.run(jobs.two_checkpointers, tmp_path, ranks=RANKS) == [[1, 1, 2, 2, 3]] * RANKS


def test_a_part_of_the_job_saves_by_itself(launcher: Launcher, tmp_path: Path) -> None:
    assert launcher.run(jobs.a_part_of_the_job, tmp_path, ranks=RANKS) == [[0], [1], ["ConfigError"], [3]]


def test_the_jobs_group_may_go_once_the_ranks_have_met(launcher: Launcher, tmp_path: Path) -> None:
    assert launcher.run(jobs.without_the_group, tmp_path, ranks=2) == [[2, "ConfigError"]] * 2


def test_one_rank_that_saves_alone_is_told_who_is_missing(launcher: Launcher, tmp_path: Path) -> None:
    (told,), *_ = launcher.run(jobs.one_that_calls_alone, tmp_path, ranks=RANKS)
    assert (told.error, told.ranks) == ("RanksMissingError", (1, 2, 3))
    assert "not called" in told.text
    assert not list(tmp_path.iterdir())


def test_a_rank_that_is_late_by_a_call_meets_the_others_in_the_next(run: Any, tmp_path: Path) -> None:
    *late, last = run(jobs.one_that_is_late_by_a_call, tmp_path)
    for outcomes in late:
        assert all(told.step is None for told in outcomes)
    assert [told.step for told in last] == [9] * RANKS


def test_a_forked_child_does_not_disturb_its_parents_job(crews: Crews, tmp_path: Path) -> None:
    assert crews.run(jobs.a_fork, tmp_path, ranks=2) == [[0, 2]] * 2


SCRIPT = """
import sys
import torch
import torch.distributed as dist
from strongroom import Checkpointer

rank, folder, how = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
checkpointer = Checkpointer(f"{folder}/run", timeout_s=1 if how == "alone" else 60)
if how == "alone" and rank == 1:
    # Never takes what rank 0 has sent it, and is there until that one has ended.
    sys.stdin.read()
    sys.exit(0)
handle = checkpointer.save(1, {"t": torch.ones(2)})
if how != "kept":
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("how", ("never closed", "kept", "alone"))
def test_scripts_end_in_order_and_the_last_save_with_them(tmp_path: Path, how: str) -> None:
    """Also one that ends without ``close``, or with its group still there."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", SCRIPT, str(rank), str(tmp_path), how],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=100)[1] for process in processes]
    if how == "alone":
        assert [process.returncode for process in processes] == [1, 0], said
        assert "RanksMissingError: rank 1 did not answer within 1 s (deciding on a save)" in said[0]
    else:
        assert [process.returncode for process in processes] == [0, 0], said
        assert [checkpoint.step for checkpoint in Checkpointer(tmp_path / "run").checkpoints()] == [1]
