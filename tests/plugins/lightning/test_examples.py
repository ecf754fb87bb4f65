"""The examples of several processes: killed for good, and resumed to the same weights."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
import rank_runs
from lightning_ranks import LightningLauncher

EXAMPLES = Path(__file__).parents[3] / "examples" / "lightning"
LIMIT_S = 60.0


@pytest.mark.parametrize("name", ("ddp", "fsdp2"))
def test_an_example_that_is_killed_ends_with_the_same_weights(
    launcher: LightningLauncher, tmp_path: Path, name: str
) -> None:
    script, root = EXAMPLES / name / "train.py", tmp_path / "killed"
    job = launcher.start(rank_runs.example, script, root, 10_000, ranks=2)
    until = time.monotonic() + LIMIT_S
    while not list(root.glob("step-*/COMMIT")) and time.monotonic() < until:
        time.sleep(0.01)
    for rank in (1, 0):
        job.signal(rank, signal.SIGKILL)
    assert [outcome.exit_code for outcome in job.outcomes()] == [-signal.SIGKILL] * 2
    reached = max(int(path.parent.name[5:17]) for path in root.glob("step-*/COMMIT"))
    assert 10 <= reached < 10_000
    steps = reached + 15
    resumed = launcher.run(rank_runs.example, script, root, steps, ranks=2)
    expected = launcher.run(rank_runs.example, script, tmp_path / "whole", steps, ranks=2)
    assert resumed == expected
    assert resumed[0] == resumed[1]
