"""What ranks run in the tests of a root that has little room; importable by name, as ranks need it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from layout_jobs import checkpointer

from strongroom import PerRank, SaveError
from strongroom.stores.local import LocalStore
from strongroom.stores.offers import Space


class Small(LocalStore):
    """As full as the job says, as rank 0 sees it; the others are not to ask."""

    free_bytes = 10**9

    def space(self) -> Space:
        if dist.get_rank() != 0:
            raise AssertionError("a rank asked that is not to decide")
        return Space(total_bytes=10**9, free_bytes=self.free_bytes)


def state() -> dict[str, Any]:
    """8,000 bytes of each rank's own, and 4,000 that all have alike."""
    return {"own": PerRank(torch.ones(2000) * dist.get_rank()), "common": torch.ones(1000)}


def save_with_little_room(root: Path) -> list[str]:
    """What became of a save that has room for one rank's part alone, and of the next one, on this rank."""
    store = Small(root)
    told = []
    with checkpointer(store) as opened:
        opened.save(1, state()).result(60)
        store.free_bytes = 8000 * dist.get_world_size() + 4000 - 1
        handle = opened.save(2, state())
        try:
            handle.result(60)
        except SaveError as error:
            told.append(f"{type(error.__cause__).__name__}: {error}")
        told.append(",".join(sorted(path.name[:17] for path in root.glob("step-*"))))
        store.free_bytes += 1
        told.append(f"step {opened.save(2, state()).result(60).step}")
    return told
