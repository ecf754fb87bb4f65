"""What the README shows of the Hugging Face Trainer runs as it stands there."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from shown import README, run_shown
from torch import nn

from strongroom import Checkpointer

transformers = pytest.importorskip("transformers", reason="needs transformers, which is not installed")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.net(x).square().mean()}


def parts() -> dict[str, Any]:
    return {
        "model": Model(),
        "dataset": [{"x": torch.randn(4)} for _ in range(8)],
        "arguments": transformers.TrainingArguments(
            output_dir="out", use_cpu=True, max_steps=4, save_steps=2, report_to="none", disable_tqdm=True
        ),
    }


def test_the_readmes_trainer_saves_and_is_over_when_it_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = run_shown(README, "strongroom_transformers", given=parts())
    with Checkpointer("runs/a") as reader:
        assert [found.step for found in reader.checkpoints()] == [4, 2]
    again = run_shown(README, "strongroom_transformers", given=parts())
    assert again["trainer"].state.global_step == 4
    weights = [names["trainer"].model.net.weight for names in (first, again)]
    assert torch.equal(*weights)
    assert not list(tmp_path.rglob("checkpoint-*"))
