"""Runs of a Trainer for each test, in a folder of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch
import trained
from transformers.utils import logging

torch.set_num_threads(1)  # the models are tiny: threads would only wait for each other


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where the run lies."""
    return tmp_path / "run"


@pytest.fixture
def train(tmp_path: Path, root: Path) -> Callable[..., Any]:
    """Trains a run under `root`, whose program is always started anew."""
    return partial(trained.train, tmp_path, root=root)


@pytest.fixture
def build(tmp_path: Path, root: Path) -> Callable[..., Any]:
    """A Trainer that is about to train."""
    return partial(trained.build, tmp_path, root=root)


@pytest.fixture
def uninterrupted(tmp_path: Path) -> Callable[..., Any]:
    """The same run without Strongroom, saving nothing."""
    return partial(trained.train, tmp_path / "alone", root=None, save_strategy="no")


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], str]]:
    """What was said through the logger of transformers."""
    logging.enable_propagation()
    before = logging.get_verbosity()
    logging.set_verbosity_info()
    yield lambda: caplog.text
    logging.set_verbosity(before)
    logging.disable_propagation()
