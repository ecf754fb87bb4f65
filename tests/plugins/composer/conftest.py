"""A small run with everything in it that an exact resume has to bring back, and a way to break it off."""

from __future__ import annotations

import logging
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from composer.callbacks import checkpoint_saver

# Ranks are other processes: what they run must be importable there by name.
sys.path.insert(0, str(Path(__file__).parent))

from composer_ranks import COMPOSERS_OWN_WARNINGS, ComposerLauncher
from composer_runs import Outcome, train

torch.set_num_threads(1)  # the models are tiny: threads would only wait for each other


def pytest_itemcollected(item: pytest.Item) -> None:
    """What Composer, and what it imports, says of itself is no finding."""
    if item.path.is_relative_to(Path(__file__).parent):
        for warning in COMPOSERS_OWN_WARNINGS:
            item.add_marker(pytest.mark.filterwarnings(warning))


@pytest.fixture(autouse=True)
def _composers_saver_is_tidied_up_after(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Its CheckpointSaver makes a temporary folder and leaves it to the garbage collection, which warns."""
    made: list[tempfile.TemporaryDirectory[str]] = []

    def make() -> tempfile.TemporaryDirectory[str]:
        made.append(tempfile.TemporaryDirectory())
        return made[-1]

    monkeypatch.setattr(checkpoint_saver, "tempfile", SimpleNamespace(TemporaryDirectory=make))
    yield
    for folder in made:
        folder.cleanup()


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root that does not exist yet; the working directory is where Composer would write by itself."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run"


@pytest.fixture
def fit(root: Path) -> Callable[..., Outcome]:
    """`train`, with the test's root; ``fit(None)`` trains without our callback."""
    return lambda *args, **options: train(*(args or (root,)), **options)


@pytest.fixture(scope="session")
def uninterrupted() -> Callable[..., Outcome]:
    """The same training without our callback, once for all tests that ask for it."""
    # With the options themselves: functions among them are known by an address, which must stay theirs.
    known: dict[str, tuple[dict[str, Any], Outcome]] = {}

    def reference(**options: Any) -> Outcome:
        key = repr(sorted(options.items()))
        if key not in known:
            known[key] = (options, train(None, **options))
        return known[key][1]

    return reference


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What our front end says, from its information on."""
    with caplog.at_level(logging.INFO, logger="composer.strongroom"):
        yield caplog


@pytest.fixture(scope="session")
def launcher() -> Iterator[ComposerLauncher]:
    """Starts jobs of several ranks under Composer, each rank a real process."""
    with ComposerLauncher() as launcher:
        yield launcher
