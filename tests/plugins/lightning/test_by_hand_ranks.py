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


def test_a_file_that_rank_0_cannot_write_is_an_error_on_every_rank(
    launcher: LightningLauncher, tmp_path: Path
) -> None:
    first, second = launcher.start(by_hand_ranks.hand_over_into_a_folder, tmp_path, ranks=2).outcomes(
        limit_s=60
    )
    assert first.error is not None
    assert first.error[0] == "ConfigError"
    assert second.error is not None
    assert second.error[0] == "RankFailedError"
    assert "rank 0 did not write folder.safetensors (ConfigError: " in second.error[1]
