"""What each rank of a test's job runs under a policy; importable by name, since ranks are other processes.

The policy is the file beside the root, ``strongroom.toml``.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dcp_ranks import sharded, whole
from torch.distributed.checkpoint import CheckpointException

from strongroom import StrongroomReader, StrongroomWriter
from strongroom_security import SecurityPolicy
from strongroom_security.secret import Secret

__all__ = ["load_resharded", "save_sharded", "save_where_one_rank_has_no_policy"]


def policy_of(root: Path) -> SecurityPolicy:
    return SecurityPolicy.load(root.parent / "strongroom.toml")


def state(world_size: int) -> dict[str, Any]:
    return {
        "sharded": sharded(whole(), world_size, 0),
        "replicated": torch.ones(3),
        "extra": {"epoch": 4},
    }


class Listening(StrongroomWriter):
    """Keeps what travels between ranks through DCP, as DCP sends it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.sent = b""

    def prepare_global_plan(self, plans: Any) -> Any:
        plans = super().prepare_global_plan(plans)
        self.sent += pickle.dumps(plans)
        return plans

    def write_data(self, plan: Any, planner: Any) -> Any:
        future = super().write_data(plan, planner)
        self.sent += pickle.dumps(future.value())
        return future


def save_sharded(rank: int, world_size: int, root: Path) -> None:
    """Save; nothing that travels holds a key."""
    keys: set[bytes] = set()
    made = Secret.__init__

    def noting(secret: Secret, data: Any) -> None:
        made(secret, data)
        keys.add(secret.reveal())

    Secret.__init__ = noting  # type: ignore[method-assign]
    writer = Listening(root, security=policy_of(root))
    dcp.save(state(world_size), checkpoint_id="11", storage_writer=writer)
    (shard,) = root.glob(f"step-*/data/{rank:05d}-*.floe")
    assert shard.name.encode().removesuffix(b".floe") in writer.sent
    assert len(keys) > 1
    for key in keys:
        assert not any(key[start : start + 8] in writer.sent for start in range(len(key) - 7))


def load_resharded(rank: int, world_size: int, root: Path) -> None:
    target = {
        "sharded": sharded(torch.zeros(8, 5), world_size, 1),
        "replicated": torch.zeros(3),
        "extra": {"epoch": None},
    }
    reader = StrongroomReader(root, security=policy_of(root))
    dcp.load(target, checkpoint_id="11", storage_reader=reader)
    assert torch.equal(target["sharded"].full_tensor(), whole())
    assert torch.equal(target["replicated"], torch.ones(3))
    assert target["extra"] == {"epoch": 4}


def save_where_one_rank_has_no_policy(rank: int, world_size: int, root: Path) -> None:
    for without in range(world_size):
        security = None if rank == without else policy_of(root)
        writer = StrongroomWriter(root, security=security)
        with pytest.raises(CheckpointException, match="some ranks seal and others do not"):
            dcp.save(state(world_size), checkpoint_id=str(20 + without), storage_writer=writer)
        dist.barrier()
