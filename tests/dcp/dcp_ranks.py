"""What each rank of a test's job runs; importable by name, since ranks are other processes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from strongroom import StrongroomReader, StrongroomWriter


def run(job: Any, rank: int, world_size: int, meeting_point: str, root: str) -> None:
    """Join the job's group, run one rank of it, leave."""
    dist.init_process_group("gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=world_size)
    try:
        job(rank, world_size, Path(root))
    finally:
        dist.destroy_process_group()
    sys.exit(0)


def whole() -> torch.Tensor:
    return torch.arange(40, dtype=torch.float32).reshape(8, 5)


def sharded(value: torch.Tensor, world_size: int, dimension: int) -> Any:
    return distribute_tensor(value, init_device_mesh("cpu", (world_size,)), [Shard(dimension)])


def save_sharded(rank: int, world_size: int, root: Path) -> None:
    state = {
        "sharded": sharded(whole(), world_size, 0),
        "replicated": torch.ones(3),
        "extra": {"epoch": 4},
    }
    dcp.save(state, checkpoint_id="11", storage_writer=StrongroomWriter(root))


def load_resharded(rank: int, world_size: int, root: Path) -> None:
    state = {
        "sharded": sharded(torch.zeros(8, 5), world_size, 1),
        "replicated": torch.zeros(3),
        "extra": {"epoch": None},
    }
    dcp.load(state, checkpoint_id="11", storage_reader=StrongroomReader(root))
    assert torch.equal(state["sharded"].full_tensor(), whole())
    assert torch.equal(state["replicated"], torch.ones(3))
    assert state["extra"] == {"epoch": 4}


def save_twice_with_cached_plans(rank: int, world_size: int, root: Path) -> None:
    from torch.distributed.checkpoint import DefaultSavePlanner

    writer = StrongroomWriter(root)

    def save(step: int) -> None:
        state = {"sharded": sharded(whole() * step, world_size, 0)}
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state, checkpoint_id=str(step), storage_writer=writer, planner=planner)

    save(1)
    with pytest.raises(CheckpointException, match="plan cache"):
        save(2)


def save_where_one_rank_fails(rank: int, world_size: int, root: Path) -> None:
    class Broken(StrongroomWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            if rank == 1:
                raise OSError("the disk of rank 1 went away")
            return super().write_data(plan, planner)

    state = {"sharded": sharded(whole(), world_size, 0)}
    with pytest.raises(CheckpointException, match="the disk of rank 1 went away"):
        dcp.save(state, checkpoint_id="12", storage_writer=Broken(root))
