"""The benchmarks of this front end run and report every figure; no time is judged."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from strongroom_bench import fits
from strongroom_bench.scale import TINY


@pytest.fixture(autouse=True)
def loggers_as_they_were() -> Iterator[None]:
    """A benchmark is quiet for the rest of its process, which here has other tests to run."""
    loggers = [logging.getLogger(name) for name in fits.TALKATIVE]
    levels = [one.level for one in loggers]
    yield
    for one, level in zip(loggers, levels, strict=True):
        one.setLevel(level)


@pytest.mark.filterwarnings("ignore")
def test_every_figure_of_a_lightning_run_is_reported(tmp_path: Path) -> None:
    figures = fits.measure(TINY, tmp_path)
    assert len({figure.figure for figure in figures}) == 5
    for figure in figures:
        assert figure.value is not None
        assert figure.value > 0
    assert not list(tmp_path.iterdir()), "what it wrote is gone"
