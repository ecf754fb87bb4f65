"""Several ranks under Lightning: each gets back what it had, and the run ends as the uninterrupted one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import rank_runs
from multiprocess import LightningLauncher

MID_EPOCH, EPOCHS_LAST_STEP, SECOND_EPOCH = 4, 6, 9
"""Batches done when the run breaks off, of 2 epochs of 6."""


def ends_like(resumed: list[dict[str, Any]], reference: list[dict[str, Any]], done: int) -> None:
    """On every rank: the losses from where it broke off, and all weights, equal as floats."""
    for rank, (one, expected) in enumerate(zip(resumed, reference, strict=True)):
        assert one["losses"] == expected["losses"][done:], rank
        assert one["weights"] == expected["weights"], rank
        assert (one["step"], one["lr"]) == (expected["step"], expected["lr"])


@pytest.mark.parametrize("done", (MID_EPOCH, EPOCHS_LAST_STEP, SECOND_EPOCH))
def test_ddp_broken_off_anywhere_ends_as_the_uninterrupted_run(
    launcher: LightningLauncher, tmp_path: Path, done: int
) -> None:
    reference = launcher.run(rank_runs.train, None, ranks=2)
    assert reference[0]["losses"] != reference[1]["losses"]
    broken = launcher.run(rank_runs.train, tmp_path / "run", until=done, ranks=2)
    assert all(one["stopped"] for one in broken)
    resumed = launcher.run(rank_runs.train, tmp_path / "run", draw_from=99, ranks=2)
    ends_like(resumed, reference, done)
