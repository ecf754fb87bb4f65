"""``trainer.save_checkpoint`` on several ranks, and what it left loaded by one process."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import by_hand_ranks
import pytest
import rank_runs
from lightning_ranks import LightningLauncher
from safetensors.torch import load_file

WAYS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "fsdp2": {"strategy": partial(rank_runs.sharded, 2, 1), "module": rank_runs.ShardedNet},
}


@pytest.mark.parametrize("way", WAYS)
def test_ranks_save_together_and_one_loads_the_whole(
    launcher: LightningLauncher, tmp_path: Path, way: str
) -> None:
    for done in launcher.run(by_hand_ranks.save_each_way, tmp_path, ranks=2, **WAYS[way]):
        assert done["read"].keys() == done["weights"].keys()
        assert done["read"] == done["weights"]
    file = {name: value.flatten().tolist() for name, value in load_file(tmp_path / "x.safetensors").items()}
    assert file == done["weights"]
    assert len(list((tmp_path / "run").glob("step-*"))) == 1
