"""Planning of what one process holds, by itself; over several ranks it is tested with real ones."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from strongroom import plan
from strongroom.errors import SaveError, StateEncodingError
from strongroom.index import Chunk, TensorRecord
from strongroom.layout import CheckpointName
from strongroom.ownership import HeldChunk
from strongroom.pieces import has_layout_of_its_own, piece_of, placements_of, problem_of
from strongroom.plan import chunk_number, local_data, partial_index, plan_local, plan_read
from strongroom.shards import ChunkSpec, binding, lay_out

BOUND = binding("run", CheckpointName(launch=1, step=1, attempt="0" * 16))


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    """A mesh of this process alone."""
    meeting_point = tmp_path_factory.mktemp("group") / "meeting"
    dist.init_process_group("gloo", init_method=f"file://{meeting_point}", rank=0, world_size=1)
    try:
        yield DeviceMesh("cpu", torch.zeros((1, 1), dtype=torch.int64), mesh_dim_names=("dp", "tp"))
    finally:
        dist.destroy_process_group()


def planned(tensors: dict[str, torch.Tensor], spread: set[str] | None = None) -> plan.LocalPlan:
    return plan_local(tensors, {name: f"unit of {name}" for name in tensors}, spread or set())


def test_a_plain_tensor_is_one_chunk_with_its_unit() -> None:
    found = planned({"a": torch.zeros(3, 2, dtype=torch.bfloat16), "b": torch.zeros(())}, spread={"b"})
    assert found.chunks == (
        HeldChunk(ChunkSpec("a", "BF16", (0, 0), (3, 2), True), "unit of a", False),
        HeldChunk(ChunkSpec("b", "F32", (), (), True), "unit of b", True),
    )
    assert found.shapes == {"a": (3, 2), "b": ()}
    assert found.placements == {}


def test_an_empty_tensor_is_a_chunk_and_an_empty_part_of_one_is_none(mesh: DeviceMesh) -> None:
    assert [one.chunk.sizes for one in planned({"none": torch.zeros(0, 3)}).chunks] == [(0, 3)]
    part = DTensor.from_local(
        torch.zeros(0, 3),
        mesh,
        [Shard(0), Replicate()],
        run_check=False,
        shape=torch.Size((4, 3)),
        stride=(3, 1),
    )
    with pytest.raises(StateEncodingError, match=r"^w: .*chunk of \[4, 3\] at \[0, 0\]"):
        planned({"w": part})


def test_a_distributed_tensor_carries_its_layout_in_words(mesh: DeviceMesh) -> None:
    tensor = DTensor.from_local(torch.zeros(4, 3), mesh, [Shard(1), Replicate()], run_check=False)
    assert placements_of(tensor) == "mesh 1x1 (dp, tp): Shard(1), Replicate"
    assert placements_of(torch.zeros(2)) == ""
    found = planned({"w": tensor})
    assert found.placements == {"w": "mesh 1x1 (dp, tp): Shard(1), Replicate"}
    assert local_data(tensor, found.chunks[0].chunk).shape == (4, 3)


def test_unreduced_sums_are_refused_by_name(mesh: DeviceMesh) -> None:
    tensor = DTensor.from_local(torch.zeros(4), mesh, [Partial(), Replicate()], run_check=False)
    with pytest.raises(StateEncodingError, match=r"^model\.w: .*Partial.*redistribute"):
        planned({"model.w": tensor})


def test_what_is_not_held_in_one_piece_is_refused() -> None:
    class Odd(torch.Tensor):
        pass

    odd = torch.zeros(4).as_subclass(Odd)
    with pytest.raises(StateEncodingError, match="does not hold in one piece"):
        local_data(odd, ChunkSpec("w", "F32", (0,), (4,), True))


def test_a_partial_index_holds_what_was_stored_and_nothing_else() -> None:
    tensors = {"a": torch.zeros(3), "b": torch.zeros(2), "c": torch.zeros(1)}
    found = planned(tensors)
    specs = [one.chunk for one in found.chunks if one.chunk.tensor != "b"]
    (shard,) = lay_out(specs, rank=5, parts=1, metadata=BOUND)
    index = partial_index(found, [(shard, b"x" * 32)], {"tied": "a", "elsewhere": "b"})
    assert list(index.tensors) == ["a", "c"]
    assert dict(index.aliases) == {"tied": "a"}
    assert [chunk.path for chunk in index.tensors["a"].chunks] == ["00005-00.safetensors"]


def record(*offsets: int) -> TensorRecord:
    chunks = tuple(Chunk((offset,), (1,), "00000-00.safetensors", 64) for offset in offsets)
    return TensorRecord("w", "F32", (len(offsets),), chunks)


def test_a_chunk_is_found_by_its_offset_and_the_hint_only_helps() -> None:
    stored = record(2, 0, 1)
    assert chunk_number(stored, MetadataIndex("w", torch.Size((0,)), 1)) == 1
    assert chunk_number(stored, MetadataIndex("w", torch.Size((0,)), 2)) == 1
    assert chunk_number(stored, MetadataIndex("w", torch.Size((0,)), 99)) == 1
    assert chunk_number(stored, MetadataIndex("w", torch.Size((1,)))) == 2
    assert chunk_number(stored, MetadataIndex("w", None, 2)) == 2
    with pytest.raises(SaveError, match="no chunk at"):
        chunk_number(stored, MetadataIndex("w", torch.Size((7,))))


def test_reads_fill_a_view_of_the_very_target() -> None:
    target = torch.zeros(3)
    for item, view in plan_read({"w": target}, {"w": record(2, 0, 1)}):
        view.fill_(float(item.storage_index.offset[0]) + 1)
    assert target.tolist() == [1.0, 2.0, 3.0]


# ------------------------------------------------------------------------------ FSDP2 over another sharding


def piece(shape: tuple[int, ...], placements: list[Any], mesh: tuple[int, ...], *coordinate: int) -> Any:
    seen = SimpleNamespace(shape=mesh, get_coordinate=lambda: list(coordinate))
    tensor: Any = SimpleNamespace(
        shape=shape, dim=lambda: len(shape), device_mesh=seen, placements=placements
    )
    assert problem_of(tensor) is None
    assert has_layout_of_its_own(tensor)
    return piece_of(tensor)


@given(rows=st.integers(0, 40), outer=st.integers(1, 5), inner=st.integers(2, 5))
def test_what_fsdp2_leaves_of_sharded_rows_covers_them_once(rows: int, outer: int, inner: int) -> None:
    placements = [_StridedShard(0, split_factor=inner), Shard(0)]
    taken: list[int] = []
    for tp, part in enumerate(pad(torch.arange(rows).chunk(inner), inner)):
        for dp, expected in enumerate(pad(part.chunk(outer) if part.numel() else (), outer)):
            (start, column), (size, columns) = piece((rows, 3), placements, (outer, inner), dp, tp)
            assert (column, columns) == (0, 3)
            assert list(range(start, start + size)) == expected.tolist()
            taken += range(start, start + size)
    assert sorted(taken) == list(range(rows))


def pad(pieces: Any, count: int) -> list[torch.Tensor]:
    """With empty pieces up to the count."""
    return [*pieces, *(torch.empty(0, dtype=torch.int64) for _ in range(count - len(pieces)))]


def test_copies_and_other_dimensions_do_not_disturb_it() -> None:
    placements = [Replicate(), _StridedShard(0, split_factor=2), Shard(0), Shard(1)]
    assert piece((8, 6), placements, (2, 2, 2, 3), 1, 0, 1, 2) == ((4, 4), (2, 2))


@pytest.mark.parametrize(
    "placements",
    (
        [_StridedShard(0, split_factor=2), Replicate()],
        [_StridedShard(0, split_factor=2), Shard(1)],
        [_StridedShard(0, split_factor=3), Shard(0)],
        [Shard(0), _StridedShard(0, split_factor=2)],
        [_StridedShard(0, split_factor=2), _StridedShard(0, split_factor=2)],
    ),
)
def test_layouts_that_may_leave_separate_pieces_are_refused(placements: list[Any]) -> None:
    seen = SimpleNamespace(shape=(2, 2))
    tensor: Any = SimpleNamespace(shape=(8, 8), device_mesh=seen, placements=placements)
    assert "several separate pieces of dimension 0" in str(problem_of(tensor))
