"""Told to stop: all ranks save after one step, end with the right status, and the run goes on exactly."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import preempted_runs
import pytest
import rank_runs
from lightning_ranks import LightningLauncher

from strongroom import Checkpointer
from strongroom.errors import ConfigError
from strongroom_lightning import StrongroomCheckpoint

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
        (2, None, "on_train_batch_start:4", None),
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


@pytest.fixture
def scontrol(tmp_path: Path) -> Path:
    """What ``scontrol`` was called with, and how many commits there were then; it fails beside ``fails``."""
    program = tmp_path / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\necho "$@" $(ls -d {tmp_path}/run/step-*/COMMIT | wc -l) >> {tmp_path}/calls\n'
        f"[ ! -e {tmp_path}/fails ]\n"
    )
    program.chmod(0o755)
    return tmp_path / "calls"


def slurm_job(tmp_path: Path, **more: str) -> dict[str, str]:
    return {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "SLURM_JOB_ID": "1234", **more}


@pytest.mark.parametrize(
    ("ranks", "more", "job"),
    (
        (1, {}, "1234"),
        (2, {"SLURM_ARRAY_JOB_ID": "1200", "SLURM_ARRAY_TASK_ID": "7"}, "1200_7"),
    ),
)
def test_slurms_signal_puts_the_job_back_once_its_checkpoint_is_committed(
    launcher: LightningLauncher,
    tmp_path: Path,
    references: dict[tuple[int, bool], list[dict[str, Any]]],
    scontrol: Path,
    ranks: int,
    more: dict[str, str],
    job: str,
) -> None:
    root = tmp_path / "run"
    ended = launcher.run(
        preempted_runs.told, root, numbers=[USR1], slurm=slurm_job(tmp_path, **more), ranks=ranks,
        callbacks=[preempted_runs.slowly], default_root_dir=str(tmp_path), **_settings(ranks, False),
    )  # fmt: skip
    assert [one["status"] for one in ended] == [0] * ranks, ended
    assert scontrol.read_text() == f"requeue {job} 1\n"
    assert list(tmp_path.rglob("hpc_ckpt*")) == []
    goes_on_exactly(launcher, root, references, ranks=ranks)


def test_a_job_that_slurm_does_not_take_back_ends_with_the_signals_status(
    launcher: LightningLauncher, tmp_path: Path, scontrol: Path
) -> None:
    (tmp_path / "fails").touch()
    (ended,) = launcher.run(
        preempted_runs.told, tmp_path / "run", numbers=[USR1], slurm=slurm_job(tmp_path), ranks=1,
        strategy="auto",
    )  # fmt: skip
    assert ended["status"] == 138
    assert any("scontrol requeue 1234 ended with 1" in word for word in ended["warned"])
    assert steps_of(tmp_path / "run") == [5]


def test_a_job_of_slurms_that_is_cancelled_is_not_put_back(
    launcher: LightningLauncher, tmp_path: Path, scontrol: Path
) -> None:
    (ended,) = launcher.run(
        preempted_runs.told, tmp_path / "run", slurm=slurm_job(tmp_path), ranks=1, strategy="auto"
    )
    assert ended["status"] == 143
    assert not scontrol.exists()


def test_a_notice_on_one_rank_stops_all(
    launcher: LightningLauncher, tmp_path: Path, references: dict[tuple[int, bool], list[dict[str, Any]]]
) -> None:
    root = tmp_path / "run"
    ended = launcher.run(
        preempted_runs.told, root, ranks=2, whom=[1], notice=True, callbacks=[preempted_runs.slowly]
    )
    assert [one["status"] for one in ended] == [143, 143], ended
    assert len(steps_of(root)) == 1
    goes_on_exactly(launcher, root, references, ranks=2)


def test_a_save_in_flight_is_waited_for_and_the_last_step_is_saved_too(
    launcher: LightningLauncher, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    (ended,) = launcher.run(preempted_runs.told, root, every=4, ranks=1, strategy="auto")
    assert ended["status"] == 143
    assert steps_of(root) == [4, 5]


@pytest.mark.parametrize("place", ("on_fit_start", "on_sanity_check_start", "on_train_start"))
def test_told_before_the_first_step_it_ends_with_nothing_saved(
    launcher: LightningLauncher, tmp_path: Path, place: str
) -> None:
    settings = {} if place != "on_sanity_check_start" else {"validate": True}
    (ended,) = launcher.run(preempted_runs.told, tmp_path / "run", place, ranks=1, **settings)
    assert (ended["status"], ended["losses"]) == (143, [])
    assert steps_of(tmp_path / "run") == []


@pytest.mark.parametrize("place", ("on_train_batch_start:11", "on_train_end", "on_fit_end"))
def test_told_at_the_end_the_run_ends_as_it_would_have(
    launcher: LightningLauncher, tmp_path: Path, place: str
) -> None:
    (ended,) = launcher.run(preempted_runs.told, tmp_path / "run", place, ranks=1, strategy="auto")
    assert (ended["status"], ended["error"], ended["handlers"]) == (None, None, True)
    assert steps_of(tmp_path / "run") == [STEPS]


def test_signals_that_follow_change_nothing(launcher: LightningLauncher, tmp_path: Path) -> None:
    (ended,) = launcher.run(
        preempted_runs.told, tmp_path / "run", numbers=[USR1, TERM, TERM], ranks=1, strategy="auto"
    )
    assert ended["status"] == 138
    assert steps_of(tmp_path / "run") == [5]


def test_an_interrupt_can_be_one_of_the_signals_and_a_second_one_ends_at_once(
    launcher: LightningLauncher, tmp_path: Path
) -> None:
    chosen = {"preemption_signals": ["SIGINT"]}
    for name, numbers, status, saved in (("once", [INT], 130, [5]), ("twice", [INT, INT], 1, [])):
        root = tmp_path / name
        (ended,) = launcher.run(
            preempted_runs.told, root, numbers=numbers, checkpoint=chosen, ranks=1, strategy="auto"
        )
        assert (ended["status"], steps_of(root)) == (status, saved)


def test_without_signals_of_its_own_lightnings_handlers_stay(
    launcher: LightningLauncher, tmp_path: Path
) -> None:
    (ended,) = launcher.run(
        preempted_runs.told, tmp_path / "run", checkpoint={"preemption_signals": []}, ranks=1, strategy="auto"
    )
    assert ended["kind"] == "SIGTERMException"
    assert ended["status"] is None  # Lightning 2.6's own, which a shell sees as 0
    assert steps_of(tmp_path / "run") == []


def test_a_commit_that_fails_at_the_end_is_an_error_and_not_a_clean_stop(
    launcher: LightningLauncher, tmp_path: Path
) -> None:
    (ended,) = launcher.run(
        preempted_runs.told, tmp_path / "run", checkpoint={"tolerate_failures": 5}, full=True, every=3,
        ranks=1, strategy="auto",
    )  # fmt: skip
    assert ended["error"] is not None
    assert ended["error"].startswith("SaveError: the save of step 5 failed")
    assert ended["status"] is None


@pytest.mark.parametrize(
    ("wrong", "words"),
    (
        ({"preemption_signals": ["SIGKILL"]}, "cannot tell a run to stop"),
        ({"spot_notice": "aws"}, "spot_notice must be a function"),
        ({"spot_notice_every_s": 0}, "spot_notice_every_s"),
        ({"tolerate_failures": -1}, "tolerate_failures"),
    ),
)
def test_arguments_that_cannot_work_are_refused(tmp_path: Path, wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        StrongroomCheckpoint(tmp_path / "run", **wrong)
