"""Ranks are other processes: what they run must be importable there by name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from crews import Crews
from launching import Launcher


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    """Starts jobs of several ranks, each rank a real process, from one preloaded forkserver."""
    with Launcher() as launcher:
        yield launcher


@pytest.fixture(scope="session")
def fsdp2_on_cpus(launcher: Launcher) -> None:
    """Skips what trains with FSDP2, where this torch does that on GPUs alone."""
    import model_jobs

    problem = launcher.run(model_jobs.can_train, ranks=4)[0]
    if problem is not None:
        pytest.skip(f"this torch trains with FSDP2 on GPUs alone ({problem})")


@pytest.fixture(scope="session")
def crews(launcher: Launcher) -> Iterator[Crews]:
    """Runs functions on jobs that stay for the whole session: for tests that leave their ranks alive."""
    crews = Crews(launcher)
    yield crews
    crews.leave()
