"""The benchmarks of the front ends run and report every figure; no time is judged.

Each runs where its framework is installed; none is in the environment of the core.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from strongroom_bench import accelerated, composed, trainers
from strongroom_bench.families import FAMILIES, NEEDS, can_be_measured
from strongroom_bench.scale import TINY
from strongroom_bench.stepping import EVERY, Steps


@pytest.fixture(autouse=True)
def loggers_as_they_were() -> Iterator[None]:
    """A benchmark is quiet for the rest of its process, which here has other tests to run."""
    names = {*accelerated.TALKATIVE, *composed.TALKATIVE, *trainers.TALKATIVE}
    loggers = [logging.getLogger(name) for name in names]
    levels = [one.level for one in loggers]
    yield
    for one, level in zip(loggers, levels, strict=True):
        one.setLevel(level)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ("accelerate", "transformers", "composer"))
def test_every_figure_of_a_run_is_reported(family: str, tmp_path: Path) -> None:
    if not can_be_measured(family):
        pytest.skip(f"needs {NEEDS[family]}, which is not installed")
    figures = FAMILIES[family](TINY, tmp_path)
    assert len({figure.figure for figure in figures}) == 3
    for figure in figures:
        assert figure.value is not None
        assert figure.value > 0
        assert len(figure.peers) >= 3
    assert not list(tmp_path.iterdir()), "what it wrote is gone"


def test_a_stall_is_what_a_step_with_a_save_takes_more_than_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = Steps(EVERY)
    at = 0.0
    monkeypatch.setattr("strongroom_bench.stepping.time.perf_counter", lambda: at)
    for number in range(3 * EVERY + 1):
        steps.tick()
        at += 1.0 + (0.5 if (number + 1) % EVERY == 0 else 0.0)
    taken = steps.taken()
    assert taken["stall"] == pytest.approx(0.5)
    assert taken["step"] == taken["p95"] == 1.0
