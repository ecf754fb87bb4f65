"""What the ranks say that they stored becomes one index, or the save fails and names tensor and shard."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strongroom.completeness import merge
from strongroom.errors import FormatError, SaveError
from strongroom.index import Chunk, Index, ShardFile, TensorRecord, decode_index, encode_index
from strongroom.layout import CheckpointName
from strongroom.shards import binding

BOUND = binding("run", CheckpointName(launch=1, step=7, attempt="0123456789abcdef"))


def shard(rank: int) -> str:
    return f"{rank:05d}-00.safetensors"


def part(rank: int, *tensors: tuple[str, tuple[int, ...], list[tuple[Any, Any]]], **more: Any) -> Index:
    """What one rank stored: names, whole shapes, (offsets, sizes)."""
    dtype, placements = more.pop("dtype", "F32"), more.pop("placements", "")
    records = [
        TensorRecord(
            name,
            dtype,
            shape,
            tuple(
                Chunk(offsets, sizes, shard(rank), 100 * number)
                for number, (offsets, sizes) in enumerate(boxes)
            ),
            placements,
        )
        for name, shape, boxes in tensors
    ]
    return Index(records, [ShardFile(shard(rank), bytes([rank]) * 32)], **more)


def through_bytes(index: Index) -> Index:
    """As a rank's part reaches the coordinator."""
    return decode_index(encode_index(index, BOUND), "a part", is_partial=True)[0]


def test_the_parts_of_all_ranks_become_one_index() -> None:
    parts = [
        part(0, ("a", (4, 2), [((0, 0), (2, 2))]), ("only 0", (), [((), ())]), placements="mesh 2: Shard(0)"),
        part(1, ("only 1", (3,), [((0,), (3,))]), ("a", (4, 2), [((2, 0), (2, 2))])),
    ]
    merged = merge([through_bytes(one) for one in parts], {"alias": "a"})
    assert list(merged.tensors.values()) == [
        TensorRecord(
            "a",
            "F32",
            (4, 2),
            (Chunk((0, 0), (2, 2), shard(0), 0), Chunk((2, 0), (2, 2), shard(1), 0)),
            "mesh 2: Shard(0)",
        ),
        TensorRecord("only 0", "F32", (), (Chunk((), (), shard(0), 0),), "mesh 2: Shard(0)"),
        TensorRecord("only 1", "F32", (3,), (Chunk((0,), (3,), shard(1), 0),)),
    ]
    assert list(merged.files.values()) == [ShardFile(shard(0), bytes(32)), ShardFile(shard(1), b"\1" * 32)]
    assert merged.aliases == {"alias": "a"}
    # What was merged is what is read.
    found, _ = decode_index(encode_index(merged, BOUND), "the index")
    assert found.tensors == merged.tensors
    assert found.files == merged.files


@given(st.data())
def test_however_a_state_is_divided_among_ranks_merging_gives_it_back(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 4))
    shapes = data.draw(st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), max_size=4))
    boxes: list[list[tuple[str, tuple[int, ...], tuple[Any, Any]]]] = [[] for _ in range(ranks)]
    for number, shape in enumerate(shapes):
        rows = shape[0] if shape else 1
        bounds = sorted({0, rows, *data.draw(st.lists(st.integers(0, rows), max_size=3))})
        for low, high in list(itertools.pairwise(bounds)) or [(0, rows)]:
            box = ((low, *(0,) * (len(shape) - 1)), (high - low, *shape[1:])) if shape else ((), ())
            boxes[data.draw(st.integers(0, ranks - 1))].append((f"t{number}", shape, box))
    merged = merge(
        (
            through_bytes(
                part(
                    rank,
                    *(
                        (name, shape, [box for other, _, box in mine if other == name])
                        for name, shape in {name: shape for name, shape, _ in mine}.items()
                    ),
                )
            )
            for rank, mine in enumerate(boxes)
        ),
        {},
    )
    assert {name: record.shape for name, record in merged.tensors.items()} == {
        f"t{number}": shape for number, shape in enumerate(shapes)
    }
    for name, record in merged.tensors.items():
        stored = [(chunk.offsets, chunk.sizes, chunk.path) for chunk in record.chunks]
        assert stored == [
            (*box, shard(rank)) for rank, mine in enumerate(boxes) for other, _, box in mine if other == name
        ]
    decode_index(encode_index(merged, BOUND), "the index")


def test_chunks_stand_in_the_order_of_ranks_however_many() -> None:
    ranks, names = 50, ("a", "b", "c")
    parts = [
        part(rank, *((name, (ranks,), [((ranks - 1 - rank,), (1,))]) for name in names))
        for rank in range(ranks)
    ]
    merged = merge(parts, {})
    for name in names:
        assert [chunk.path for chunk in merged.tensors[name].chunks] == [shard(rank) for rank in range(ranks)]


def test_no_parts_are_an_empty_checkpoint() -> None:
    assert len(merge([], {}).tensors) == 0


HALVES = [("a", (4,), [((0,), (2,))]), ("a", (4,), [((2,), (2,))])]


def test_a_tensor_that_no_rank_stored_whole_is_named_with_what_is_there() -> None:
    with pytest.raises(SaveError, match=r"'a' hold 2 of 4 elements, in 00001-00\.safetensors"):
        merge([part(0), part(1, HALVES[0])], {})


def test_a_tensor_that_was_planned_and_that_no_rank_stored_is_named() -> None:
    merge([part(0, HALVES[0]), part(1, HALVES[1])], {}, planned=["a"])
    with pytest.raises(SaveError, match="'b' was planned"):
        merge([part(0, HALVES[0]), part(1, HALVES[1])], {}, planned=["a", "b"])


def test_a_chunk_that_two_ranks_stored_is_named_with_both_shards() -> None:
    with pytest.raises(
        SaveError, match=r"'a' at \[0\] is stored twice, in 00000-00\.safetensors and 00002-00"
    ):
        merge([part(0, HALVES[0]), part(1, HALVES[1]), part(2, HALVES[0])], {})


def test_chunks_that_overlap_are_named_with_both_shards() -> None:
    slipped = ("a", (4,), [((1,), (2,))])
    with pytest.raises(SaveError, match=r"'a' overlap.*00000-00\.safetensors and 00001-00\.safetensors"):
        merge([part(0, HALVES[0]), part(1, slipped)], {})


@pytest.mark.parametrize(
    ("other", "dtype", "told"),
    (
        (("a", (4, 1), [((2, 0), (2, 1))]), "F32", r"F32\[4\] in 00000.*F32\[4, 1\] in 00001"),
        (("a", (5,), [((2,), (3,))]), "F32", r"F32\[4\].*F32\[5\]"),
        (HALVES[1], "BF16", r"F32\[4\].*BF16\[4\]"),
        (("a", (9,), []), "F32", r"F32\[4\] in 00000-00\.safetensors, and F32\[9\];"),
    ),
)
def test_a_tensor_that_ranks_describe_differently_is_named(other: Any, dtype: str, told: str) -> None:
    with pytest.raises(SaveError, match=f"'a' is not the same tensor on all ranks: {told}"):
        merge([part(0, ("first", (), [((), ())]), HALVES[0]), part(1, other, dtype=dtype)], {})


def test_a_shard_that_two_ranks_wrote_is_named() -> None:
    with pytest.raises(SaveError, match=r"two ranks wrote the shard 00000-00\.safetensors"):
        merge([part(0, HALVES[0]), part(0, HALVES[1])], {})


def test_aliases_of_all_ranks_are_kept_and_must_agree() -> None:
    whole = ("a", (4,), [((0,), (4,))]), ("b", (4,), [((0,), (4,))])
    merged = merge([part(0, *whole, aliases={"x": "a"}), part(1)], {"y": "b"})
    assert merged.aliases == {"y": "b", "x": "a"}
    with pytest.raises(SaveError, match="'x' is another name of 'b' on one rank"):
        merge([part(0, *whole, aliases={"x": "a"})], {"x": "b"})
    for alias, tensor in (("x", "nobody"), ("a", "b")):
        with pytest.raises(SaveError, match=f"'{alias}' is to be another name"):
            merge([part(0, *whole)], {alias: tensor})


def test_a_part_that_claims_more_than_its_tensor_is_refused_when_it_arrives() -> None:
    data = encode_index(part(0, ("a", (4,), [((0,), (3,)), ((1,), (3,))])), BOUND)
    with pytest.raises(FormatError, match="chunks of 'a' overlap"):
        decode_index(data, "a part", is_partial=True)
