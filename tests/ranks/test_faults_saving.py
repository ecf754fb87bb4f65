"""A save of four ranks of which one fails: each kind of fault, at each place.

Whatever happens, on whichever rank: nothing is committed that is not whole, every rank that lives
raises in time and says who and what it was, a later save works, and a job that comes after
restores what was committed last and goes on.
"""

from __future__ import annotations

import shutil
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest
from crews import Crews
from fault_jobs import RAISED, Fault, Told, go_on, save_steps, saving
from launching import Job, Launcher

RANKS = 4
TIMEOUT_S = 2.0
GRACE_S = 10.0
"""What a rank may take besides: here 1 s to hear whom the coordinator missed, 2 s for last words,
and the rest for a machine that is busy with other tests."""

SLOW_S = 4.0
"""Longer than the timeout and the longest that anyone waits for word of it."""

SHARD = r"open_writer step-\d+-\d+-\w+/data/\d+-\d+\.safetensors"
DOCUMENT = r"open_writer step-\d+-\d+-\w+/data/state-\d+\.json"
PART = r"make_durable step-\d+-\d+-\w+/?"
MANIFEST = r"put step-\d+-\d+-\w+/data/MANIFEST\.json"
COMMIT = r"put_if_absent step-\d+-\d+-\w+/COMMIT"

DECIDING = "deciding on a save"
LOOKING = "looking at the root"
WRITING = "writing step 2"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a rank fails.

    Attributes:
        at: as `Fault.place`.
        phases: parts of what errors may call it.
        ranks: who comes there: the coordinator, another one, or one of each.
        is_committed: whether what was saved stands all the same.
    """

    at: str
    phases: tuple[str, ...]
    ranks: tuple[int, ...] = (0, 2)
    is_committed: bool = False


PLACES = {
    "before the call": Place(at="call", phases=(DECIDING,)),
    "capturing": Place(at="capture", phases=(DECIDING,)),
    "claiming a launch": Place(at="put_if_absent launches/.*", phases=(DECIDING,), ranks=(0,)),
    "looking at the root": Place(at="read launches/.*", phases=(LOOKING,), ranks=(2,)),
    # The coordinator is there while the others may still be hearing its last word.
    "staging": Place(at="staging", phases=(WRITING, LOOKING)),
    "writing a shard": Place(at=SHARD, phases=(WRITING, LOOKING)),
    "writing its document": Place(at=DOCUMENT, phases=(WRITING, LOOKING)),
    "with its part written": Place(at=f"{PART}, after", phases=(WRITING,), ranks=(2,)),
    "before the manifest": Place(at=MANIFEST, phases=(WRITING,), ranks=(0,)),
    "before the commit": Place(at=f"{MANIFEST}, after", phases=(WRITING,), ranks=(0,)),
    "after the commit": Place(at=f"{COMMIT}, after", phases=(WRITING,), ranks=(0,), is_committed=True),
}

CASES = [
    pytest.param(kind, place, id=f"{kind}-{name.replace(' ', '-')}")
    for kind in ("raises", "slow", "killed", "stopped")
    for name, place in PLACES.items()
    # Who raises before its call does not call: the same as one that is slow.
    if (kind, name) != ("raises", "before the call")
]


@pytest.fixture(scope="module")
def first(crews: Crews, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with one checkpoint, to be copied."""
    root = tmp_path_factory.mktemp("first") / "run"
    crews.run(save_steps, root, [1], ranks=RANKS)
    return root


@pytest.mark.parametrize(("kind", "place"), CASES)
def test_a_save_of_which_one_rank_fails(
    launcher: Launcher, crews: Crews, first: Path, tmp_path: Path, kind: str, place: Place
) -> None:
    roots = {rank: Path(shutil.copytree(first, tmp_path / f"run{rank}")) for rank in place.ranks}
    faults = {rank: Fault(kind=kind, place=place.at, rank=rank, slow_s=SLOW_S) for rank in place.ranks}
    # They wait for most of the time: side by side.
    jobs = {
        rank: launcher.start(saving, roots[rank], [faults[rank]], TIMEOUT_S, ranks=RANKS)
        for rank in place.ranks
        if kind != "raises"
    }
    for rank in place.ranks:
        if kind == "raises":
            outcomes = dict(enumerate(crews.run(saving, roots[rank], [faults[rank]], TIMEOUT_S, ranks=RANKS)))
        else:
            outcomes = finish(jobs[rank], kind, rank)
        check_outcomes(outcomes, kind, place, rank)
        newest = 3 if kind in ("raises", "slow") else 2 if place.is_committed else 1
        steps = sorted({1, newest, *((2,) if place.is_committed else ())}, reverse=True)
        for after in crews.run(go_on, roots[rank], ranks=RANKS):
            assert after == (steps, newest, True, 9)


def finish(job: Job, kind: str, rank: int) -> dict[int, list[Told]]:
    """What the ranks of a job told, those that lived."""
    first_to_end = [other for other in range(RANKS) if other != rank or kind == "slow"]
    ended = job.wait(first_to_end)
    if kind == "stopped":
        # What it was about to do, it must not do any more when it wakes.
        job.signal(rank, signal.SIGCONT)
        ended |= job.wait([rank])
    if kind == "killed":
        assert job.wait([rank])[rank].exit_code == -signal.SIGKILL
    job.kill()
    assert not [outcome.error for outcome in ended.values() if outcome.error], ended
    return {other: outcome.value for other, outcome in ended.items()}


def check_outcomes(outcomes: dict[int, list[Told]], kind: str, place: Place, rank: int) -> None:
    for other, (told, *later) in outcomes.items():
        if other == rank:
            check_own(told, kind, place)
        else:
            check_named(told, kind, place, rank)
        if later:
            saved, closed = later
            assert saved.step == 3, saved
            assert closed.error is None, closed


def check_named(told: Told, kind: str, place: Place, rank: int) -> None:
    """What a rank says of another one that failed."""
    assert told.step is None, told
    assert "StrongroomError" in told.bases, told
    assert any(phase in told.text for phase in place.phases), told
    if kind == "raises":
        # In its own words; at once.
        assert f"rank {rank} (" in told.text, told
        assert RAISED in told.text, told
        assert ("OutcomeUnknownError" in told.bases) == place.is_committed, told
        return
    assert told.seconds < TIMEOUT_S + GRACE_S, told
    assert told.error == "RanksMissingError", told
    assert told.ranks == (rank,), told
    # Its part was written and the coordinator is gone: what became of it, only the root can tell.
    is_unknown = rank == 0 and WRITING in told.text
    assert ("OutcomeUnknownError" in told.bases) == is_unknown, told


def check_own(told: Told, kind: str, place: Place) -> None:
    """What the failing rank itself says, if it lives."""
    if kind == "raises":
        assert told.step is None
        assert RAISED in told.text, told
    elif place.is_committed:
        assert told.step == 2, told
    else:
        assert told.step is None, told
        assert "StrongroomError" in told.bases, told


def test_the_time_of_a_save_is_one_for_all_ranks(launcher: Launcher, first: Path, tmp_path: Path) -> None:
    """A coordinator that has used up most of it does not wait for another one as long again."""
    root = Path(shutil.copytree(first, tmp_path / "run"))
    faults = [
        Fault(kind="slow", place=SHARD, rank=0, slow_s=3.5),
        Fault(kind="killed", place=SHARD, rank=2),
    ]
    job = launcher.start(saving, root, faults, 4.0, ranks=RANKS)
    for outcome in job.wait([0, 1, 3]).values():
        (told,) = outcome.value
        assert (told.error, told.ranks) == ("RanksMissingError", (2,)), told
        assert told.seconds < 7, told
    job.kill()
