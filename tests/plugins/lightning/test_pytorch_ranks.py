"""Several ranks under the package ``pytorch_lightning``, whose names are not those of ``lightning``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import pytorch_ranks
from processes import FrontEndLauncher

MID_EPOCH = 4
"""Batches done when the run breaks off, of 2 epochs of 6."""


@pytest.fixture(scope="module")
def launcher() -> Iterator[FrontEndLauncher]:
    preloaded = ("pytorch_lightning", "strongroom.dcp", "strongroom_lightning.pytorch_lightning")
    with FrontEndLauncher(preloaded, pytorch_ranks.as_rank) as launcher:
        yield launcher


@pytest.mark.parametrize("way", pytorch_ranks.WAYS)
def test_ranks_of_the_other_package_broken_off_end_as_the_uninterrupted_ones(
    launcher: FrontEndLauncher, tmp_path: Path, way: str
) -> None:
    expected = launcher.run(pytorch_ranks.train, None, way, ranks=2)
    assert expected[0][0] != expected[1][0]
    launcher.run(pytorch_ranks.train, tmp_path / "run", way, until=MID_EPOCH, ranks=2)
    resumed = launcher.run(pytorch_ranks.train, tmp_path / "run", way, draw_from=99, ranks=2)
    for (losses, weights), (all_losses, all_weights) in zip(resumed, expected, strict=True):
        assert losses == all_losses[MID_EPOCH:]
        assert weights == all_weights
