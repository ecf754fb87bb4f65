"""Slurm's requeue, with a program of our own that stands where ``scontrol`` would."""

from __future__ import annotations

from pathlib import Path

import pytest

from strongroom.resume.requeue import requeue, slurm_job


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The arguments that it was called with, once it was; it fails where a file ``fails`` is beside it."""
    program = tmp_path / "scontrol"
    program.write_text(
        '#!/bin/sh\nhere=$(dirname "$0")\necho "$@" >> "$here/calls"\n'
        '[ -e "$here/hangs" ] && exec sleep 60\n'
        '[ -e "$here/fails" ] && { echo "Requested operation not permitted" >&2; exit 3; }\nexit 0\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path / "calls"


@pytest.mark.parametrize(
    ("environment", "job"),
    (
        ({}, None),
        ({"SLURM_JOB_ID": "1234"}, "1234"),
        ({"SLURM_JOB_ID": "1240", "SLURM_ARRAY_JOB_ID": "1234", "SLURM_ARRAY_TASK_ID": "6"}, "1234_6"),
        ({"SLURM_JOB_ID": "1234; rm -r /"}, None),
        ({"SLURM_JOB_ID": "--all"}, None),
    ),
)
def test_the_job_is_named_as_slurm_does(environment: dict[str, str], job: str | None) -> None:
    assert slurm_job(environment) == job


def test_a_job_is_put_back_into_the_queue(scontrol: Path) -> None:
    assert requeue({"SLURM_JOB_ID": "1234"}) is None
    assert requeue({"SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "3", "SLURM_JOB_ID": "80"}) is None
    assert scontrol.read_text() == "requeue 1234\nrequeue 77_3\n"


def test_what_slurm_refuses_is_told_in_its_words(scontrol: Path) -> None:
    (scontrol.parent / "fails").touch()
    told = requeue({"SLURM_JOB_ID": "1234"})
    assert told == "scontrol requeue 1234 ended with 3: Requested operation not permitted"


def test_a_controller_that_does_not_answer_is_not_waited_for(scontrol: Path) -> None:
    (scontrol.parent / "hangs").touch()
    told = requeue({"SLURM_JOB_ID": "1234"}, limit_s=0.3)
    assert told is not None
    assert "timed out" in told


def test_without_slurm_nothing_is_called(scontrol: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "SLURM_JOB_ID" in (requeue({}) or "")
    monkeypatch.setenv("PATH", "")
    assert "no scontrol" in (requeue({"SLURM_JOB_ID": "1"}) or "")
    assert not scontrol.exists()
