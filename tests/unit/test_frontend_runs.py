"""A run in no framework's terms: saved between steps, taken up exactly, told to stop, ended by an error."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from frontend_loop import BATCHES, JOB, STEPS, Loop
from torch import nn

from strongroom import Checkpointer
from strongroom.errors import CheckpointNotFoundError, ConfigError, SaveError, StateMismatchError
from strongroom.frontend import Place, Preempted
from strongroom.resume import DataPosition, JobShape, RngState, SaveIntervals

_PROGRAM = Path(__file__).parent / "frontend_loop.py"


@pytest.fixture(autouse=True)
def _handlers_as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    assert {number: signal.getsignal(number) for number in before} == before


@pytest.fixture(scope="module")
def uninterrupted() -> Loop:
    return Loop(None).train()


def steps_of(root: Path) -> list[int]:
    return sorted(one.step for one in Checkpointer(root).checkpoints())


def goes_on(root: Path, uninterrupted: Loop, **options: Any) -> Loop:
    resumed = Loop(root, draw_from=99, **options).train()
    assert resumed.losses == uninterrupted.losses[STEPS - len(resumed.losses) :]
    assert resumed.weights == uninterrupted.weights
    return resumed


# ------------------------------------------------------------------------------------- saving and resuming


def test_saving_changes_nothing_and_every_step_can_be_taken_up(tmp_path: Path, uninterrupted: Loop) -> None:
    saved = Loop(tmp_path).train()
    assert saved.losses == uninterrupted.losses
    assert saved.weights == uninterrupted.weights
    assert steps_of(tmp_path) == list(range(1, STEPS + 1))
    for step in range(STEPS, 0, -1):
        loop = Loop(None, draw_from=99)
        restored = Checkpointer(tmp_path).restore(
            {"model": loop.model, "optimizer": loop.optimizer, "loop": None} | dict.fromkeys(Place.PARTS),
            step=step,
        )
        assert restored is not None
        loop.step, loop.epoch = step, restored.state["loop"]["epoch"]
        Place.from_state(restored.state).restore([loop.followed], [loop.model], JOB)
        loop.train()
        assert loop.losses == uninterrupted.losses[step:]
        assert loop.weights == uninterrupted.weights


def test_a_run_that_came_to_its_end_is_taken_up_and_trains_no_more(
    tmp_path: Path, uninterrupted: Loop
) -> None:
    Loop(tmp_path).train()
    resumed = goes_on(tmp_path, uninterrupted)
    assert resumed.losses == []
    assert f"resuming from step {STEPS} of {tmp_path}" in resumed.voice.said
    assert len(steps_of(tmp_path)) == STEPS


def test_what_is_kept_and_what_is_noted_of_each_save(tmp_path: Path) -> None:
    loop = Loop(tmp_path, keep=2, provenance={"data": "v3"}).train()
    newest, older = Checkpointer(tmp_path).checkpoints()
    assert (newest.step, older.step) == (STEPS, STEPS - 1)
    noted = json.loads((tmp_path / newest.folder / "data/provenance.json").read_bytes())
    assert noted["tags"] == ["loop"]
    assert str(loop.losses[-1]) in str(noted["metrics"])
    assert noted["provenance"]["v"] == [["data", "v3"]]


def test_intervals_by_epoch_and_by_time(tmp_path: Path) -> None:
    Loop(tmp_path / "steps", intervals=SaveIntervals(every_n_steps=3)).train()
    assert steps_of(tmp_path / "steps") == [3, 6, STEPS]
    Loop(tmp_path / "end", intervals=SaveIntervals()).train()
    assert steps_of(tmp_path / "end") == [STEPS]
    Loop(tmp_path / "time", intervals=SaveIntervals(every=timedelta(microseconds=1))).train()
    assert STEPS in steps_of(tmp_path / "time")
    assert len(steps_of(tmp_path / "time")) > 1


def test_a_front_end_that_decides_by_itself_saves_a_step_once(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    saves = loop.saves
    assert saves is not None
    saves.begin(saves.moment(0, 0))
    assert saves.between_steps(saves.moment(0, 0), due=True) is None  # nothing was trained
    assert saves.between_steps(saves.moment(1, 0), due=False) is None
    assert saves.between_steps(saves.moment(1, 0), due=True) is not None
    assert saves.between_steps(saves.moment(1, 0), due=True) is None
    assert saves.between_steps(saves.moment(1, 0)) is None
    assert saves.left_at == 1
    saves.wait()
    saves.end()
    saves.end()
    assert steps_of(tmp_path) == [1]


def test_a_damaged_checkpoint_is_passed_over_and_told(tmp_path: Path, uninterrupted: Loop) -> None:
    loop = Loop(tmp_path)
    loop.in_step = _raise_at(6)
    with pytest.raises(ZeroDivisionError):
        loop.train()
    newest = max(tmp_path.glob("step-*"))
    shard = next(newest.glob("data/*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"!")
    resumed = goes_on(tmp_path, uninterrupted)
    assert len(resumed.losses) == STEPS - 4
    assert len(resumed.voice.warned) == 1
    assert f"step 5 of {tmp_path} is damaged and was skipped" in resumed.voice.warned[0]


# ---------------------------------------------------------------------------------------- what is refused


def test_another_front_ends_root_is_refused_in_words(tmp_path: Path) -> None:
    Loop(tmp_path).train()
    with pytest.raises(StateMismatchError, match="was not written by this loop; give this run a root of its"):
        Loop(tmp_path, part="other")


def test_another_model_is_not_taken_for_another_front_end(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"loop": {"epoch": 0}}).result()
    with pytest.raises(StateMismatchError) as raised:
        Loop(tmp_path)
    assert "was not written by" not in str(raised.value)


def test_resume_says_whether_there_must_be_something(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="resume='must'"):
        Loop(tmp_path / "none", resume="must")
    fresh = Loop(tmp_path / "none")
    assert "holds no checkpoint: the run begins at its first step" in fresh.voice.said[0]
    Loop(tmp_path / "some").train()
    anew = Loop(tmp_path / "some", resume="never")
    assert anew.step == 0
    assert "nothing is restored" in anew.voice.said[0]


# ------------------------------------------------------------------------------------------------ failures


def _raise_at(step: int) -> Any:
    def in_step(now: int) -> None:
        if now == step:
            raise ZeroDivisionError("the loop's own")

    return in_step


def test_an_error_of_the_loops_own_is_never_hidden_and_what_was_saved_stays(
    tmp_path: Path, uninterrupted: Loop
) -> None:
    loop = Loop(tmp_path)
    loop.in_step = _raise_at(4)
    with pytest.raises(ZeroDivisionError, match="the loop's own"):
        loop.train()
    assert steps_of(tmp_path) == [1, 2, 3]
    assert len(goes_on(tmp_path, uninterrupted).losses) == STEPS - 3


def test_what_gathering_raises_ends_the_run_and_the_random_states_are_put_back(tmp_path: Path) -> None:
    loop = Loop(tmp_path, fails_with=KeyError("a callback's"))
    saves = loop.saves
    assert saves is not None
    saves.begin(saves.moment(0, 0))
    before = torch.get_rng_state()
    with pytest.raises(KeyError, match="a callback's"):
        saves.save(saves.moment(1, 0))
    assert torch.equal(torch.get_rng_state(), before)
    saves.end()


def test_a_failed_save_is_raised_at_the_next_and_not_before(tmp_path: Path) -> None:
    root = tmp_path / "root"
    loop = Loop(root)
    saves = loop.saves
    assert saves is not None
    saves.begin(saves.moment(0, 0))
    saves.between_steps(saves.moment(1, 0))
    saves.wait()
    for folder in (root, root / "launches"):
        folder.chmod(0o500)
    if os.access(root, os.W_OK):  # root may write everywhere
        root.rename(tmp_path / "away")
        root.write_text("no folder")
    with pytest.raises(SaveError):
        for step in range(2, 5):
            saves.between_steps(saves.moment(step, 0))
            saves.wait()
    saves.end(SaveError("told"))
    for folder in (tmp_path / "away", root):
        if folder.is_dir():
            folder.chmod(0o700)


# -------------------------------------------------------------------------------------------- told to stop


def test_a_real_signal_in_a_step_saves_that_step_and_the_status_tells_it(
    tmp_path: Path, uninterrupted: Loop
) -> None:
    command = [sys.executable, str(_PROGRAM), str(tmp_path), "SIGUSR1", str(BATCHES + 1)]
    done = subprocess.run(command, timeout=120, check=False)
    assert done.returncode == 128 + signal.SIGUSR1
    assert steps_of(tmp_path) == list(range(1, BATCHES + 2))
    assert len(goes_on(tmp_path, uninterrupted).losses) == STEPS - BATCHES - 1


def test_a_notice_saves_although_nothing_is_due_and_says_what_stands(
    tmp_path: Path, uninterrupted: Loop
) -> None:
    told: list[int] = []
    loop = Loop(
        tmp_path,
        intervals=SaveIntervals(every_n_steps=100),
        spot_notice=lambda: "spot: two minutes" if told else None,
        spot_notice_every_s=0.005,
    )

    def in_step(now: int) -> None:
        if now == 3:
            told.append(now)
            while not loop._preemption.is_told:
                pass

    loop.in_step = in_step
    with pytest.raises(Preempted) as raised:
        loop.train()
    assert raised.value.code == 143
    assert raised.value.reason == "spot: two minutes"
    assert str(raised.value) == f"told to stop by spot: two minutes: step {raised.value.step} is saved"
    assert steps_of(tmp_path) == [raised.value.step]
    assert (
        f"step {raised.value.step} of {tmp_path} is committed; ending with status 143" in loop.voice.said[-1]
    )
    goes_on(tmp_path, uninterrupted)


def test_told_to_stop_before_the_first_step_nothing_is_saved(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    saves = loop.saves
    assert saves is not None
    loop._preemption.begin()
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(Preempted, match="nothing was trained") as raised:
        saves.begin(saves.moment(0, 0))
    saves.end(raised.value)
    assert steps_of(tmp_path) == []


def test_told_to_stop_in_its_last_step_a_run_ends_as_it_would_have(
    tmp_path: Path, uninterrupted: Loop
) -> None:
    loop = Loop(tmp_path)
    loop.in_step = lambda now: os.kill(os.getpid(), signal.SIGTERM) if now == STEPS else None
    loop.train()
    assert loop.weights == uninterrupted.weights
    assert steps_of(tmp_path)[-1] == STEPS


@pytest.mark.parametrize("accepts", (True, False))
def test_slurm_is_asked_once_the_step_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accepts: bool
) -> None:
    program = tmp_path / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\necho "$@" > {tmp_path}/asked\nls {tmp_path}/root/step-*/COMMIT >> {tmp_path}/asked\n'
        f"exit {0 if accepts else 1}\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    for name in ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"):
        monkeypatch.delenv(name, raising=False)
    loop = Loop(tmp_path / "root", requeue=True, intervals=SaveIntervals())
    loop.in_step = lambda now: os.kill(os.getpid(), signal.SIGUSR1) if now == 2 else None
    with pytest.raises(Preempted) as raised:
        loop.train()
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked[0] == "requeue 77"
    assert len(asked) == 2
    assert raised.value.code == (0 if accepts else 128 + signal.SIGUSR1)
    assert bool(loop.voice.warned) == (not accepts)


# ---------------------------------------------------------------------------------------------------- place


def test_a_place_comes_back_through_a_checkpoint_as_it_was(tmp_path: Path) -> None:
    loop = Loop(None)
    batches = iter(loop.loader)
    next(batches)
    loop.model[0].weight.requires_grad_(False)
    loop.model[1].eval()
    place = Place.of([loop.followed], [loop.model], JOB)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, place.to_state()).result()
        restored = checkpointer.restore(dict.fromkeys(Place.PARTS))
    assert restored is not None
    again = Place.from_state(restored.state)
    assert again.job == JOB
    assert [one.batches for one in again.positions] == [1]
    fresh = Loop(None, draw_from=3)
    assert again.restore([fresh.followed], [fresh.model], JOB) == ()
    assert not fresh.model[0].weight.requires_grad
    assert not fresh.model[1].training
    assert fresh.model[0].training
    assert [one[0].tolist() for one in fresh.loader] == [one[0].tolist() for one in batches]
    assert torch.equal(torch.rand(3), _after(place.rng))


def _after(rng: RngState) -> torch.Tensor:
    rng.restore()
    return torch.rand(3)


def test_looking_moves_nothing() -> None:
    loop = Loop(None)
    before = torch.get_rng_state()
    Place.of([loop.followed], [loop.model], JOB)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("part", Place.PARTS)
def test_a_part_that_is_missing_or_something_else_is_named(part: str) -> None:
    loop = Loop(None)
    state = {key: one.value for key, one in Place.of([loop.followed], [loop.model], JOB).to_state().items()}
    Place.from_state(state)
    with pytest.raises(StateMismatchError, match=f"the checkpoint lacks {part}") as raised:
        Place.from_state({**state, part: None})
    assert list(raised.value.missing) == [part]
    if part != "modes":
        with pytest.raises(StateMismatchError, match="not one that this release writes"):
            Place.from_state({**state, part: [{}] if part == "position" else {}})


def test_another_number_of_loaders_is_an_error() -> None:
    loop = Loop(None)
    place = Place.of([loop.followed], [loop.model], JOB)
    with pytest.raises(StateMismatchError, match="had 1 data loaders, and this program has 0"):
        place.restore([], [loop.model], JOB)


def test_a_rank_that_did_not_exist_draws_its_own_noise() -> None:
    loop = Loop(None)
    place = Place.of([loop.followed], [loop.model], JOB)
    fresh = Loop(None, draw_from=3)
    expected = torch.get_rng_state()
    place.restore([fresh.followed], [fresh.model], JOB, is_new_rank=True)
    assert torch.equal(torch.get_rng_state(), expected)


def test_another_number_of_processes_goes_on_behind_what_all_have_taken() -> None:
    loop = Loop(None)
    batches = iter(loop.loader)
    next(batches)
    next(batches)
    two = JobShape(world_size=2, replicas=2, batch_size=1)
    place = Place.of([loop.followed], [loop.model], JobShape(world_size=1, replicas=1, batch_size=2))
    fresh = Loop(None, draw_from=3)
    place.restore([fresh.followed], [fresh.model], two)
    assert fresh.followed.position().batches == 2
    four = JobShape(world_size=4, replicas=4, batch_size=1)
    place.restore([fresh.followed], [fresh.model], four)
    assert fresh.followed.position().batches == 1


def test_a_job_without_processes_is_refused() -> None:
    with pytest.raises(ConfigError, match="a job has processes"):
        JobShape(world_size=0, replicas=1, batch_size=None)
    with pytest.raises(StateMismatchError, match="not one that this release writes"):
        JobShape.from_state({"world_size": 1})


def test_generators_of_two_loaders_are_told_apart() -> None:
    model = nn.Linear(1, 1)
    loops = [Loop(None), Loop(None)]
    for number, loop in enumerate(loops):
        loop.loader.generator = torch.Generator().manual_seed(number)
    place = Place.of([loop.followed for loop in loops], [model], JOB)
    assert sorted(place.rng.generators) == ["loader0.generator", "loader1.generator"]
    for loop in loops:
        torch.rand(2, generator=loop.loader.generator)
    place.restore([loop.followed for loop in loops], [model], JOB)
    assert [torch.rand((), generator=loop.loader.generator).item() for loop in loops] == [
        torch.rand((), generator=torch.Generator().manual_seed(number)).item() for number in range(2)
    ]
    assert isinstance(place.positions[0], DataPosition)
