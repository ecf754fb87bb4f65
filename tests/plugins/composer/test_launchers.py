"""Composer's own launcher, and torchrun: it sets no ``NODE_RANK``, without which Composer cannot load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("launched.py")

LAUNCHERS = {
    "composer": ("composer.cli", "--nproc", "2", "--world_size", "2"),
    "torchrun": ("torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_job_that_was_broken_off_goes_on_exactly(tmp_path: Path, launcher: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
    environment.pop("NODE_RANK", None)
    done = subprocess.run(
        [sys.executable, "-m", *LAUNCHERS[launcher], str(PROGRAM), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=200,
        env={**environment, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    for rank in (0, 1):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert found == {"left": 4, "node_rank": "0" if launcher == "composer" else None}
