"""A ranking of several ranks: all of them have one, whatever each of them has measured."""

from __future__ import annotations

from pathlib import Path

import pytest
import rank_runs
from lightning_ranks import LightningLauncher
from scripted import all_steps


@pytest.mark.parametrize("monitor", ("apart", "of_one"))
def test_all_ranks_go_by_what_the_first_has_measured(
    launcher: LightningLauncher, tmp_path: Path, monitor: str
) -> None:
    root = tmp_path / "run"
    said = launcher.run(rank_runs.rank_by, root, monitor, save_top_k=2, ranks=2)
    assert all_steps(root) == [4, 6]
    for one in said:
        assert one["best"] == f"strongroom://{root}#step=4"
        assert one["scores"] == pytest.approx([0.2, 0.3])
        assert one["last"] == f"strongroom://{root}#step=6"
    assert said[0]["weights"] == said[1]["weights"]
