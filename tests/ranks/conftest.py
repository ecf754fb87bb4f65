"""Ranks are other processes: what they run must be importable there by name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from launching import Launcher  # noqa: E402


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    """Starts jobs of several ranks, each rank a real process, from one preloaded forkserver."""
    with Launcher() as launcher:
        yield launcher
