"""What the tests of PyTorch's own ways share: a process group of one, and a way there and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from strongroom import Checkpointer
from strongroom.stores.memory import MemoryStore


@pytest.fixture(autouse=True)
def _the_same_numbers_every_time() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A gloo group of this process alone."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "group"), 1), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.fixture
def mesh(group: None) -> DeviceMesh:
    return init_device_mesh("cpu", (1,))


@pytest.fixture
def round_trip() -> Callable[..., Any]:
    """Saves a state and restores it in a checkpointer of its own; returns what came back."""

    def go(state: dict[str, Any], template: dict[str, Any] | None = None, **options: Any) -> Any:
        memory = MemoryStore()
        with Checkpointer(memory) as writer:
            writer.save(1, state).result()
        with Checkpointer(memory) as reader:
            restored = reader.restore(template, **options)
        assert restored is not None
        return restored.state

    return go
