"""A real process, really killed: it goes on by itself and ends with the uninterrupted run's weights."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("killed_run.py")
BATCHES = 60


def start(root: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, str(PROGRAM), str(root)], stdout=subprocess.PIPE, text=True)


def finish(root: Path) -> tuple[list[int], str]:
    """The batches that a run trains to its end, and the digest of its weights."""
    with start(root) as child:
        assert child.stdout is not None
        lines = child.stdout.read().splitlines()
    assert child.returncode == 0
    return [int(line.split()[1]) for line in lines[:-1]], lines[-1]


def kill_at(root: Path, batch: int) -> None:
    """Kill a run with SIGKILL when it begins this batch."""
    with start(root) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if line == f"batch {batch}\n":
                child.kill()
                break
    assert child.returncode == -signal.SIGKILL


def test_a_run_that_is_killed_ends_with_the_uninterrupted_runs_weights(tmp_path: Path) -> None:
    batches, weights = finish(tmp_path / "whole")
    assert batches == list(range(BATCHES))
    root = tmp_path / "killed"
    moment = random.randrange(25, BATCHES - 5)
    kill_at(root, moment)
    batches, resumed_weights = finish(root)
    assert batches == list(range(batches[0], BATCHES)), moment
    # At most one save is in flight, so at most two intervals are lost.
    assert moment - 6 <= batches[0] <= moment, moment
    assert resumed_weights == weights, moment
