"""What ranks run in these tests; importable by name, since ranks are other processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from strongroom import Checkpointer, PerRank


def rank() -> int:
    return dist.get_rank()


def sharded_state(shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: Any, seed: int = 0) -> Any:
    whole = torch.arange(int(torch.tensor(shape).prod()), dtype=torch.float32).reshape(shape) + seed
    mesh = init_device_mesh("cpu", mesh_shape)
    return distribute_tensor(whole, mesh, placements)


def save_sharded(root: Path, shape: Any, mesh_shape: Any, placements: Any) -> Any:
    state = {
        "w": sharded_state(shape, mesh_shape, placements),
        "plain": torch.ones(3),
        "extra": {"epoch": 4},
        "rng": PerRank({"seed": 100 + rank(), "t": torch.full((2,), float(rank()))}),
    }
    with Checkpointer(root, timeout_s=30) as checkpointer:
        checkpoint = checkpointer.save(1, state).result(timeout_s=60)
        second = checkpointer.save(2, state).result(timeout_s=60)
    return checkpoint.step, second.manifest_digest


def load_sharded(root: Path, shape: Any, mesh_shape: Any, placements: Any) -> Any:
    state = {
        "w": sharded_state(shape, mesh_shape, placements, seed=-1000),
        "plain": torch.zeros(3),
        "extra": {},
        "rng": None,
    }
    with Checkpointer(root, timeout_s=30) as checkpointer:
        restored = checkpointer.restore(state)
    assert restored is not None
    return (
        restored.step,
        state["w"].full_tensor().tolist(),
        restored.state["extra"],
        str(restored.state["rng"]),
        restored.missing,
    )
