from __future__ import annotations

from pathlib import Path

import jobs
import torch
from launching import Launcher
from torch.distributed.tensor import Shard


def test_first(launcher: Launcher, tmp_path: Path) -> None:
    saved = launcher.run(jobs.save_sharded, tmp_path / "a", (10, 4), (4,), [Shard(0)], ranks=4)
    assert len(set(saved)) == 1
    loaded = launcher.run(jobs.load_sharded, tmp_path / "a", (10, 4), (2,), [Shard(1)], ranks=2)
    print(loaded)
    for step, w, extra, rng, missing in loaded:
        assert torch.equal(torch.tensor(w), torch.arange(40.0).reshape(10, 4))
