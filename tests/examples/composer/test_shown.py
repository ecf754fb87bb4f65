"""What the README and the guide show of Composer runs as it stands there."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from shown import HOW_TO, README, run_shown

from strongroom import Checkpointer

composer = pytest.importorskip("composer", reason="needs mosaicml, which is not installed")

# Composer's own, of a Trainer that was given no optimizer and no device.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def parts() -> dict[str, Any]:
    class Model(composer.ComposerModel):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(4, 2)

        def forward(self, batch: torch.Tensor) -> Any:
            return self.net(batch)

        def loss(self, outputs: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
            return outputs.square().mean()

    loader = torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=4)
    return {"model": Model(), "loader": loader, "Trainer": composer.Trainer}


@pytest.mark.parametrize("page", (README, HOW_TO / "from-composer.md"), ids=("readme", "guide"))
def test_the_trainer_that_is_shown_saves_and_is_over_when_it_is_started_again(page: Path) -> None:
    first = run_shown(page, "strongroom_composer", given=parts())
    if not first["trainer"].state.timestamp.batch.value:  # the guide leaves that to the reader
        first["trainer"].fit()
    first["trainer"].close()
    with Checkpointer("runs/a") as reader:
        assert next(found.step for found in reader.checkpoints()) == 20
    again = run_shown(page, "strongroom_composer", given=parts())
    assert again["trainer"].state.timestamp.batch.value == 20
    again["trainer"].close()
