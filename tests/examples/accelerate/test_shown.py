"""What the README and the guide show of Accelerate runs as it stands there."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from shown import HOW_TO, README, run_shown

from strongroom import Checkpointer

pytest.importorskip("accelerate", reason="needs accelerate, which is not installed")


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def parts() -> dict[str, Any]:
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {
        "model": model,
        "optimizer": optimizer,
        "loader": torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=4),
        "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 3),
    }


def steps(root: str) -> list[int]:
    with Checkpointer(root) as reader:
        return [found.step for found in reader.checkpoints()]


def test_the_readmes_loop_saves_and_is_over_when_it_is_started_again() -> None:
    run_shown(README, "strongroom_accelerate", given=parts(), trains="optimizer.step()")
    assert steps("runs/a") == [20]
    names = run_shown(README, "strongroom_accelerate", given=parts(), trains="optimizer.step()")
    assert names["strongroom"].steps_done == 20


def test_a_script_that_calls_save_state_saves_into_the_root_by_the_guides_line() -> None:
    from accelerate import Accelerator

    page = HOW_TO / "from-save-state.md"
    names = run_shown(page, "save_state(", given=parts())
    names["strongroom"].close()
    assert len(steps("runs/a")) == 1
    assert not Path("out").exists()
    given = {"accelerator": Accelerator(), **_named(), **parts()}
    again = run_shown(page, "strongroom.epochs", given=given, trains="optimizer.step()")
    assert again["strongroom"].steps_done == 6
    assert steps("runs/a")[0] == 6


def _named() -> dict[str, Any]:
    from strongroom_accelerate import Strongroom

    return {"Strongroom": Strongroom}
