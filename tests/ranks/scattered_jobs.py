"""What ranks run in the tests of shards in folders; importable by name, as ranks need it."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from layout_jobs import checkpointer

from strongroom import PerRank


def save_and_restore_scattered(root: Path) -> list[str]:
    """What is not as it was, on this rank."""
    rank = dist.get_rank()
    own, common = torch.full((3000,), float(rank)), torch.arange(3000.0)
    with checkpointer(root, scatter=16) as opened:
        opened.save(1, {"own": PerRank(own), "common": common}).result(60)
    with checkpointer(root) as opened:
        restored = opened.restore()
    found = {"own": restored.state["own"], "common": restored.state["common"]}
    return [
        name
        for name, tensor in {"own": own, "common": common}.items()
        if not torch.equal(found[name], tensor)
    ]
