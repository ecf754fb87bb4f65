"""Fixtures of the Accelerate front end's tests; the loop that they train is in `accelerate_runs`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

# Ranks are other processes: what they run must be importable there by name.
sys.path.insert(0, str(Path(__file__).parent))

from accelerate_runs import FrontEndLauncher, Outcome, expected_warnings, launcher_of, train

torch.set_num_threads(1)  # the models are tiny: threads would only wait for each other


def pytest_itemcollected(item: pytest.Item) -> None:
    """What frameworks say about small runs is no finding."""
    if item.path.is_relative_to(Path(__file__).parent):
        for warning in expected_warnings:
            item.add_marker(pytest.mark.filterwarnings(warning))


@pytest.fixture(autouse=True)
def words() -> Iterator[None]:
    """Everything is said, as a program that sets up logging has it."""
    logger = logging.getLogger("strongroom_accelerate")
    before = logger.level
    logger.setLevel("INFO")
    yield
    logger.setLevel(before)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root that does not exist yet; the working directory is where Accelerate would write by itself."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run"


@pytest.fixture(scope="session")
def uninterrupted() -> Callable[..., Outcome]:
    """The same training without us, once for all tests that ask for it."""
    known: dict[str, Outcome] = {}

    def reference(**options: object) -> Outcome:
        key = repr(sorted(options.items()))
        if key not in known:
            known[key] = train(None, **options)  # type: ignore[arg-type]  # passed on
        return known[key]

    return reference


@pytest.fixture(scope="session")
def launcher() -> Iterator[FrontEndLauncher]:
    """Starts jobs of several ranks under Accelerate, each rank a real process."""
    with launcher_of() as launcher:
        yield launcher
