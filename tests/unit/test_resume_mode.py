"""The choice to resume: who wins, and what is an error."""

from __future__ import annotations

from typing import Any

import pytest

from strongroom.errors import CheckpointNotFoundError, ConfigError
from strongroom.resume import ResumeMode, ResumePlan, plan_resume
from strongroom.resume.mode import check_resume_mode


def plan(mode: ResumeMode, **changes: Any) -> ResumePlan:
    return plan_resume(mode, **{"is_first_run": True, "steps_done": 0, **changes})


@pytest.mark.parametrize(
    ("mode", "restore", "required"), (("auto", True, False), ("must", True, True), ("never", False, False))
)
def test_each_mode_in_a_fresh_run(mode: ResumeMode, restore: bool, required: bool) -> None:
    chosen = plan(mode)
    assert (chosen.restore, chosen.required) == (restore, required)
    assert f"resume={mode!r}" in chosen.reason


@pytest.mark.parametrize("mode", ("auto", "must", "never"))
def test_a_checkpoint_that_the_user_names_wins(mode: ResumeMode) -> None:
    chosen = plan(mode, explicit="ckpt_path='other.ckpt'")
    assert not chosen.restore
    assert "other.ckpt" in chosen.reason


@pytest.mark.parametrize("mode", ("auto", "must"))
@pytest.mark.parametrize("changes", ({"is_first_run": False}, {"steps_done": 5}))
def test_training_that_has_begun_is_never_overwritten(mode: ResumeMode, changes: dict[str, Any]) -> None:
    chosen = plan(mode, **changes)
    assert not chosen.restore
    assert "in memory" in chosen.reason


def test_only_must_makes_an_empty_root_an_error() -> None:
    assert "runs/a holds no checkpoint" in plan("auto").nothing_found("runs/a")
    with pytest.raises(CheckpointNotFoundError, match="resume='must', but runs/a holds no"):
        plan("must").nothing_found("runs/a")


def test_an_unknown_mode_is_refused_with_the_known_ones() -> None:
    assert check_resume_mode("auto") == "auto"
    with pytest.raises(ConfigError, match="'auto', 'never', 'must'; got 'always'"):
        check_resume_mode("always")
