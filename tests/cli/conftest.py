"""A run with one of everything that the command shows; the command, here and as a program of its own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from strongroom import Checkpointer, PerRank
from strongroom_cli.main import main

HOSTILE = "evil\x1b[31m\x07[red]bold[/red]\r\n\u202e\u2066:smiley:"
"""Escape sequences, a bell, rich's markup and emoji, line breaks, characters that turn text around."""


def save_everything(root: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    with Checkpointer(root, run_id="demo") as checkpointer:
        for step in (100, 200, 300):
            model(torch.ones(4, 3)).sum().backward()
            optimizer.step()
            state = {
                "model": model,
                "optimizer": optimizer,
                "scheduler": scheduler,
                "generator": torch.Generator(),
                "tied": model[0].weight,
                "extra": {
                    "epoch": step,
                    "nan": float("nan"),
                    "at": (1, torch.arange(3)),
                    "array": np.arange(3.0),
                    "big": 2**70,
                    "raw": b"abc",
                    "by": {(1, 2): "pair", 3: "number"},
                    HOSTILE: HOSTILE,
                },
                "mine": PerRank({"rank": 0}),
            }
            checkpointer.save(
                step,
                state,
                metrics={"loss": 0.5, "worst": float("inf"), "top": [1, 2], HOSTILE: HOSTILE},
                provenance={"git": "abc123", "nested": {"a": {"b": None}}},
                tags=["good", HOSTILE],
            )
        checkpointer.wait()
        checkpointer.restore(step=200)
        checkpointer.save(250, {"only": torch.ones(2)})


@dataclass(frozen=True)
class Done:
    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        assert self.out.isascii()
        assert self.out.count("\n") == 1
        return json.loads(self.out)


Strongroom = Callable[..., Done]


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("cli") / "run"
    save_everything(root)
    return root


@pytest.fixture
def root(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "run"))


@pytest.fixture
def newest(root: Path) -> Path:
    (found,) = root.glob("step-000000000250-*")
    return found


@pytest.fixture
def strongroom(capsys: pytest.CaptureFixture[str]) -> Strongroom:
    """The command in this process."""

    def run(*arguments: Any) -> Done:
        capsys.readouterr()
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else -1
        captured = capsys.readouterr()
        return Done(status, captured.out, captured.err)

    return run


@pytest.fixture
def program() -> Strongroom:
    """The command as a program of its own."""

    def run(*arguments: Any, **options: Any) -> Done:
        done = subprocess.run(
            [sys.executable, "-m", "strongroom_cli", *map(str, arguments)],
            capture_output=True,
            text=True,
            **options,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    return run
