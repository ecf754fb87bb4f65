"""A rank that is killed: who is left ends soon, and a run under torchrun is taken up where it stood."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import rank_runs
import restarted_run
from lightning_ranks import LightningLauncher

PROGRAM = Path(restarted_run.__file__)
LEFT_BEHIND_S = 120
"""Far less than the half hour within which a save must have committed, however busy this machine is."""


def test_torchrun_begins_a_run_again_that_lost_a_rank_and_it_ends_as_the_uninterrupted_one(
    launcher: LightningLauncher, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    torchrun = subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"),
            # One for the rank that is killed, the others for ranks that miss each other in gloo after it.
            *("--max-restarts=4", "--monitor-interval=0.1"),
            *(str(PROGRAM), str(root), "1", "7"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
    )
    try:
        said, _ = torchrun.communicate(timeout=270)
    finally:
        torchrun.terminate()  # and with it its ranks
        torchrun.wait()
    assert torchrun.returncode == 0, said
    found = json.loads(Path(f"{root}.json").read_text())
    (expected, _) = launcher.run(restarted_run.train, None, ranks=2)
    assert found["weights"] == expected["weights"]
    assert found["step"] == expected["step"] == 12
    # From the last save that was whole when it died, before batch 7: step 6, or 4 where 6 was under way.
    assert found["batches"] in (list(range(6, 12)), list(range(4, 12)))
    assert sorted(path.name for path in (root / "launches").iterdir()) == ["000001.json", "000002.json"]


@pytest.mark.parametrize("place", ("on_train_batch_start", "on_save_checkpoint"))
def test_where_no_launcher_follows_up_the_ranks_that_are_left_end_by_themselves(
    launcher: LightningLauncher, tmp_path: Path, place: str
) -> None:
    """In a collective of the training's, or in ours, which would wait for as long as a save may take."""
    began = time.monotonic()
    job = launcher.start(rank_runs.die_at, tmp_path / "run", place, ranks=2)
    first, second = job.outcomes(limit_s=LEFT_BEHIND_S)
    assert second.exit_code == -9
    assert first.error is not None
    assert time.monotonic() - began < LEFT_BEHIND_S
    if place == "on_save_checkpoint":
        assert "RanksMissingError: rank 1 ended, or went with the host" in first.error[1]
