"""A restore of four ranks of which one fails: all raise, or all fall back, and never some of each."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest
from crews import Crews
from fault_jobs import RAISED, Fault, go_on, restoring, restoring_with_faulty_store, save_steps
from launching import Launcher

RANKS = 4
TIMEOUT_S = 2.0
GRACE_S = 10.0
SLOW_S = 4.0

LOOKING = "looking for a checkpoint"
OPENING = "opening step 2"
READING = "reading step 2"
LOADING = "loading step 2"

PLACES = {
    "before the call": ("call", (LOOKING,)),
    "looking": ("read run.json", (LOOKING,)),
    # The coordinator has gone on to the next while the others may still be hearing its last word.
    "opening": (
        r"read step-\d*2-\d+-\w+/data/index.*|read step-\d*2-\d+-\w+/data/MANIFEST.json",
        (OPENING, LOOKING),
    ),
    "reading": (r"open_reader step-\d*2-\d+-\w+/data/.*\.safetensors", (READING, OPENING)),
    "loading": ("load", (LOADING, READING)),
}

CASES = [
    pytest.param(kind, *place, id=f"{kind}-{name.replace(' ', '-')}")
    for kind in ("raises", "slow", "killed", "stopped")
    for name, place in PLACES.items()
    if (kind, name) != ("raises", "before the call")
]


@pytest.fixture(scope="module")
def first(crews: Crews, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with two checkpoints, to be copied."""
    root = tmp_path_factory.mktemp("first") / "run"
    crews.run(save_steps, root, [1, 2], ranks=RANKS)
    return root


@pytest.mark.parametrize(("kind", "place", "phases"), CASES)
def test_a_restore_of_which_one_rank_fails(
    launcher: Launcher, crews: Crews, first: Path, kind: str, place: str, phases: tuple[str, ...]
) -> None:
    # Nothing writes: both at once, on one root.
    jobs = {
        rank: launcher.start(
            restoring,
            first,
            [Fault(kind=kind, place=place, rank=rank, slow_s=SLOW_S)],
            TIMEOUT_S,
            ranks=RANKS,
        )
        for rank in (0, 2)
    }
    for rank, job in jobs.items():
        others = [other for other in range(RANKS) if other != rank]
        ended = job.wait(others)
        if kind == "killed":
            assert job.wait([rank])[rank].exit_code == -signal.SIGKILL
        else:
            if kind == "stopped":
                job.signal(rank, signal.SIGCONT)
            ended |= job.wait([rank])
        job.kill()
        assert not [outcome.error for outcome in ended.values() if outcome.error], ended
        for other, outcome in ended.items():
            told, *later = outcome.value
            if kind == "stopped" and rank == other == 0 and place == "load":
                # Nobody is left to say that it is late.
                continue
            assert told.step is None, told
            if other != rank:
                assert any(phase in told.text for phase in phases), told
                if kind != "raises":
                    assert (told.error, told.ranks) == ("RanksMissingError", (rank,)), told
                assert (RAISED in told.text) == (kind == "raises")
                assert told.seconds < TIMEOUT_S + GRACE_S, told
            if later:
                assert later[0].step == 2, later
                assert later[1].error is None, later


@pytest.mark.parametrize("kind", ("slow", "killed", "stopped"))
@pytest.mark.parametrize("rank", (0, 2))
@pytest.mark.parametrize("place", ("before the call", "looking"))
def test_a_first_talk_to_which_one_rank_does_not_come(
    launcher: Launcher, first: Path, kind: str, rank: int, place: str
) -> None:
    fault = Fault(kind=kind, place=PLACES[place][0], rank=rank, slow_s=SLOW_S)
    job = launcher.start(restoring, first, [fault], TIMEOUT_S, is_first=True, ranks=RANKS)
    ended = job.wait([other for other in range(RANKS) if other != rank])
    job.kill()
    for outcome in ended.values():
        (told,) = outcome.value
        assert (told.error, told.ranks) == ("RanksMissingError", (rank,)), told
        assert told.seconds < TIMEOUT_S + GRACE_S, told


@pytest.mark.parametrize("rank", (0, 1, 3))
def test_damage_that_one_rank_finds_makes_all_fall_back_together(
    crews: Crews, first: Path, tmp_path: Path, rank: int
) -> None:
    root = Path(shutil.copytree(first, tmp_path / "run"))
    # Its own document: no other rank reads it.
    (document,) = root.glob(f"step-*2-*/data/state-{rank:05d}.json")
    document.write_bytes(document.read_bytes()[:-1] + b"!")
    outcomes = crews.run(restoring, root, [], TIMEOUT_S, True, ranks=RANKS)
    for told, *_ in outcomes:
        assert told.step == 1, told
        assert told.text.startswith("step 2: "), told
        assert f"state-{rank:05d}.json" in told.text


@pytest.mark.parametrize("rank", (0, 2))
@pytest.mark.parametrize("operation", ("read", "open_reader", "read_into"))
@pytest.mark.parametrize(
    ("fault", "error"),
    (
        ("DENIED", "AccessDeniedError"),
        ("REFUSED", "StoreUnavailableError"),
        ("TIMED_OUT", "StoreUnavailableError"),
    ),
)
def test_a_rank_that_the_store_refuses_makes_all_raise_why(
    crews: Crews, first: Path, rank: int, operation: str, fault: str, error: str
) -> None:
    outcomes = crews.run(restoring_with_faulty_store, first, rank, operation, fault, TIMEOUT_S, ranks=RANKS)
    for number, told in enumerate(outcomes):
        assert told.step is None, told
        assert told.error == error, told
        assert (f"rank {rank} (" in told.text) == (number != rank), told


def test_a_checkpoint_that_only_some_ranks_see_is_no_damage(
    crews: Crews, first: Path, tmp_path: Path
) -> None:
    """As where one host has an old copy where the others have the shared file system."""
    roots = [Path(shutil.copytree(first, tmp_path / f"run{rank}")) for rank in range(RANKS)]
    (old,) = roots[3].glob("step-*2-*")
    shutil.rmtree(old)
    for (told,) in crews.run(restoring, roots, [], TIMEOUT_S, is_first=True, ranks=RANKS):
        assert told.error == "ConfigError", told
        assert "rank 3 cannot see" in told.text


def test_a_job_that_comes_after_all_that_goes_on(crews: Crews, first: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(first, tmp_path / "run"))
    assert crews.run(go_on, root, ranks=RANKS) == [([2, 1], 2, True, 9)] * RANKS
