"""DCP's view of the index: complete for whoever looks, and built only where someone does."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator, Mapping

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from strongroom.columns import Columns
from strongroom.index import Chunk, TensorRecord
from strongroom.metadata import dcp_metadata, narrowed
from strongroom.plan import chunk_number, plan_read


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


# ----------------------------------------------------------------------------------- only what is read


def stored(rows: int, width: int, pieces: int) -> TensorRecord:
    """A tensor in pieces of rows, as an index holds it that was read."""
    path = "00000-00.safetensors"
    piece = rows // pieces
    chunks = tuple(
        Chunk((piece * number, 0), (piece, width), path, 4 * piece * width * number)
        for number in range(pieces)
    )
    record = TensorRecord("t", "F32", (rows, width), chunks)
    return Columns.of([record], [path]).record(0)


@given(st.data())
def test_chunks_that_boxes_reach_are_those_that_share_an_element(data: st.DataObject) -> None:
    record = stored(12, 3, data.draw(st.sampled_from([1, 3, 12])))
    box = st.tuples(st.integers(0, 12), st.integers(0, 12)).map(
        lambda pair: ((pair[0], 0), (min(pair[1], 12 - pair[0]), 3))
    )
    boxes = data.draw(st.lists(box, max_size=3))
    rows = {row for offsets, sizes in boxes for row in range(offsets[0], offsets[0] + sizes[0])}
    expected = [
        chunk
        for chunk in record.chunks
        if rows & set(range(chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0]))
    ]
    by_hand = TensorRecord("t", "F32", (12, 3), tuple(record.chunks))
    assert record == by_hand
    assert list(record.reached_by(boxes).chunks) == expected
    assert list(by_hand.reached_by(boxes).chunks) == expected


@pytest.fixture
def rank_5_of_16() -> Iterator[None]:
    """One rank of a job whose others are made up: no data is ever exchanged here."""
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=16)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("rank_5_of_16")
@pytest.mark.parametrize(
    ("shape", "placements", "chunks"),
    (
        ((8, 2), [Shard(0), Shard(1)], 4),
        ((4, 4), [Replicate(), Shard(0)], 8),
        ((4, 4), [Replicate(), Replicate()], 32),
        ((8, 2), [Shard(1), Replicate()], 32),
    ),
)
def test_a_rank_plans_with_the_chunks_that_it_reads_and_reads_the_same(
    shape: tuple[int, int], placements: list[Shard | Replicate], chunks: int
) -> None:
    mesh = init_device_mesh("cpu", shape)
    whole = stored(128, 16, 32)
    sizes = [128, 16]
    for count, placement in zip(mesh.shape, placements, strict=True):
        if isinstance(placement, Shard):
            sizes[placement.dim] //= count
    target = DTensor.from_local(torch.zeros(sizes), mesh, placements, run_check=False)
    records = narrowed({"t": target, "plain": torch.zeros(128, 16)}, {"t": whole, "plain": whole})
    assert len(records["t"].chunks) == chunks
    assert len(records["plain"].chunks) == 32

    def reads(record: TensorRecord) -> list[tuple[Chunk, tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
        return [
            (
                record.chunks[chunk_number(record, item.storage_index)],
                tuple(item.storage_offsets),
                tuple(item.dest_offsets),
                tuple(item.lengths),
            )
            for item, _ in plan_read({"t": target}, {"t": record})
        ]

    assert sorted(reads(records["t"]), key=str) == sorted(reads(whole), key=str)
