"""The example that fine-tunes on Accelerate: killed and started again, it ends as if nothing had happened."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from fine_tuning import EXAMPLES, Program

pytest.importorskip("accelerate", reason="needs accelerate, which is not installed")

SCRIPT = EXAMPLES / "accelerate" / "fine_tune" / "train.py"


def test_a_killed_run_ends_with_the_weights_and_the_losses_of_the_other(tmp_path: Path) -> None:
    base = str(tmp_path / "base.safetensors")
    Program(script=SCRIPT, folder=tmp_path / "base").run(
        "runs/base", "--text", "source", "--steps", "6", "--out", base
    )
    command = ("runs/a", "--weights", base)
    undisturbed = Program(script=SCRIPT, folder=tmp_path / "whole").run(*command)
    program = Program(script=SCRIPT, folder=tmp_path / "killed")
    killed = program.kill_at(22, *command)
    resumed = program.run(*command)

    assert "the run begins at its first step" in undisturbed.told
    assert "resuming from step" in resumed.told
    assert 10 <= min(resumed.losses) <= 22
    assert max(resumed.losses) == max(undisturbed.losses) == 60
    assert undisturbed.last.startswith("done; weights ")
    assert resumed.last == undisturbed.last
    for step, losses in killed.losses.items():  # of the last one, perhaps the first batch alone
        assert losses == undisturbed.losses[step][: len(losses)], step
    for step, losses in resumed.losses.items():  # of the one that was saved, the batch behind it
        assert losses == undisturbed.losses[step][-len(losses) :], step
