"""DCP's view of the index: complete for whoever looks, and built only where someone does."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator, Mapping

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

from strongroom.index import Chunk, TensorRecord
from strongroom.metadata import dcp_metadata


class Watched(Mapping[str, TensorRecord]):
    """Records that remember which of them were read."""

    def __init__(self, count: int) -> None:
        self._names = [f"t{number}" for number in range(count)]
        self.read: list[str] = []

    def __getitem__(self, name: str) -> TensorRecord:
        if name not in self._names:
            raise KeyError(name)
        self.read.append(name)
        halves = (
            Chunk((0, 0), (2, 3), "00000-00.safetensors", 0),
            Chunk((2, 0), (2, 3), "00001-00.safetensors", 0),
        )
        return TensorRecord(name, "BF16", (4, 3), halves)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def test_only_what_a_planner_asks_for_is_built_and_that_once() -> None:
    records = Watched(100)
    metadata = dcp_metadata(records)
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    target = torch.zeros(4, 3, dtype=torch.bfloat16)
    planner.set_up_planner({"t7": target}, metadata=metadata, is_coordinator=True)
    items = planner.create_local_plan().items
    assert [(tuple(item.storage_index.offset), tuple(item.lengths)) for item in items] == [
        ((0, 0), (2, 3)),
        ((2, 0), (2, 3)),
    ]
    assert [item.storage_index.index for item in items] == [0, 1]
    planner.create_local_plan()
    assert records.read == ["t7"]


def test_a_planner_that_looks_at_all_names_builds_none() -> None:
    records = Watched(5)
    metadata = dcp_metadata(records, ["step"], planner_data={"step": ("step",)})
    # The default planner of dcp.load takes the set of them to know a checkpoint of torch 2.3.
    assert set(metadata.state_dict_metadata.keys()) == {"t0", "t1", "t2", "t3", "t4", "step"}
    assert "t3" in metadata.state_dict_metadata
    assert "nobody" not in metadata.state_dict_metadata
    assert len(metadata.state_dict_metadata) == 6
    assert records.read == []
    assert metadata.planner_data == {"step": ("step",)}


def test_what_is_looked_at_is_dcps_own() -> None:
    metadata = dcp_metadata(Watched(2), ["step"])
    entry = metadata.state_dict_metadata["t1"]
    assert isinstance(entry, TensorStorageMetadata)
    assert entry.size == torch.Size((4, 3))
    assert entry.properties.dtype is torch.bfloat16
    assert [(chunk.offsets, chunk.sizes) for chunk in entry.chunks] == [
        (torch.Size((0, 0)), torch.Size((2, 3))),
        (torch.Size((2, 0)), torch.Size((2, 3))),
    ]
    assert isinstance(metadata.state_dict_metadata["step"], BytesStorageMetadata)
    assert dict(metadata.state_dict_metadata.items())["t1"] is entry
    with pytest.raises(KeyError):
        metadata.state_dict_metadata["nobody"]


def test_a_copy_is_plain() -> None:
    metadata = dcp_metadata(Watched(2), ["step"])
    for copied in (copy.deepcopy(metadata), pickle.loads(pickle.dumps(metadata))):
        assert type(copied.state_dict_metadata) is dict
        assert copied.state_dict_metadata == dict(metadata.state_dict_metadata)
