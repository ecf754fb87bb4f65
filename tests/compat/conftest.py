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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what runs a module of FSDP2 where this torch does that on accelerators alone."""
    if hasattr(torch.get_device_module("cpu").current_stream(), "record_event"):
        return
    reason = "this torch runs what fully_shard has sharded on accelerators alone: CPU streams have no events"
    for item in items:
        runs_it = any(word in item.nodeid for word in ("fully_shard", "fsdp2", "gathered_for_use"))
        if runs_it and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


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
