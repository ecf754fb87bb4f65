"""Chunks cover their tensors exactly once, or the tensor is named: any shape, any cut."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strongroom import cover
from strongroom.columns import Chunk, Columns, TensorRecord
from strongroom.cover import fault_of

SHARDS = [f"{rank:05d}-00.safetensors" for rank in range(8)]
Box = tuple[tuple[int, ...], tuple[int, ...]]


def columns(*tensors: tuple[tuple[int, ...], list[Box]]) -> Columns:
    """Tensors ``t0``, ``t1``... of these shapes, cut into these (offsets, sizes)."""
    records = [
        TensorRecord(
            f"t{number}",
            "F32",
            shape,
            tuple(
                Chunk(offsets, sizes, SHARDS[at % len(SHARDS)], 0)
                for at, (offsets, sizes) in enumerate(boxes)
            ),
        )
        for number, (shape, boxes) in enumerate(tensors)
    ]
    return Columns.of(records, SHARDS)


def problem(shape: tuple[int, ...], boxes: list[Box]) -> str:
    fault = fault_of(columns(((2,), [((0,), (2,))]), (shape, boxes), ((), [((), ())])))
    if fault is None:
        return ""
    assert fault.tensor == "t1"
    return fault.problem


def count_by_hand(
    shape: tuple[int, ...], boxes: list[Box]
) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    times = np.zeros(shape, np.int64)
    for offsets, sizes in boxes:
        times[tuple(slice(low, low + size) for low, size in zip(offsets, sizes, strict=True))] += 1
    return times


PINWHEEL: list[Box] = [
    ((0, 0), (2, 4)),
    ((0, 4), (4, 2)),
    ((2, 0), (4, 2)),
    ((4, 2), (2, 4)),
    ((2, 2), (2, 2)),
]
"""Five boxes of which no straight cut divides any two groups: no grid, and a cover."""


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """A tensor cut again and again, each piece along any dimension and anywhere: a cover, seldom a grid."""
    boxes: list[Box] = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 8))):
        offsets, sizes = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dimension = draw(st.integers(0, max(0, len(shape) - 1)))
        if not shape or sizes[dimension] < 2:
            boxes.append((offsets, sizes))
            continue
        at = draw(st.integers(1, sizes[dimension] - 1))
        for low, size in ((0, at), (at, sizes[dimension] - at)):
            boxes.append(
                (
                    (*offsets[:dimension], offsets[dimension] + low, *offsets[dimension + 1 :]),
                    (*sizes[:dimension], size, *sizes[dimension + 1 :]),
                )
            )
    return draw(st.permutations(boxes))


shapes = st.lists(st.integers(0, 6), max_size=4).map(tuple)


@given(st.data())
def test_any_cut_of_a_tensor_covers_it(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    assert problem(shape, data.draw(cuts(shape))) == ""


@given(st.data())
def test_chunks_cover_a_tensor_if_and_only_if_every_element_is_in_just_one(data: st.DataObject) -> None:
    """Boxes moved, resized, doubled and left out, against counting by hand."""
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple))
    boxes = data.draw(cuts(shape))
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(boxes) - 1))
        kind = data.draw(st.sampled_from(["move", "double", "drop"]))
        if kind == "double":
            boxes.append(boxes[at])
        elif kind == "drop" and len(boxes) > 1:
            boxes.pop(at)
        else:
            sizes = boxes[at][1]
            low = tuple(
                data.draw(st.integers(0, whole - size)) for whole, size in zip(shape, sizes, strict=True)
            )
            boxes[at] = low, sizes
    is_cover = bool((count_by_hand(shape, boxes) == 1).all())
    assert (problem(shape, boxes) == "") == is_cover


def test_a_pinwheel_covers_and_one_that_slipped_does_not() -> None:
    assert problem((6, 6), PINWHEEL) == ""
    slipped = [*PINWHEEL[:-1], ((2, 1), (2, 2))]
    assert "overlap" in problem((6, 6), slipped)


def test_boxes_of_the_right_number_of_elements_that_overlap_are_told_with_their_shards() -> None:
    told = problem((4,), [((0,), (2,)), ((1,), (2,))])
    assert told == (
        "chunks of 't1' overlap, so that a part of it is nowhere: those at [0] and [1], in "
        "00000-00.safetensors and 00001-00.safetensors"
    )


def test_a_chunk_stored_twice_is_told_as_that() -> None:
    told = problem((2, 2), [((0, 0), (1, 2)), ((0, 0), (1, 2))])
    assert (
        told
        == "the chunk of 't1' at [0, 0] is stored twice, in 00000-00.safetensors and 00001-00.safetensors"
    )


def test_what_is_missing_is_counted() -> None:
    boxes: list[Box] = [((row,), (1,)) for row in range(7)]
    told = problem((9,), boxes)
    assert told.startswith("the chunks of 't1' hold 7 of 9 elements, in 00000-00.safetensors, 00001-00")
    assert told.endswith("and 3 more")
    assert "hold 0 of 9 elements, in no shard" in problem((9,), [])


def test_what_lies_outside_is_told() -> None:
    assert "lies outside of it, in 00001" in problem((4,), [((0,), (2,)), ((3,), (2,))])
    assert "lies outside of it, in 00000" in problem((4, 2), [((0, 1), (4, 2))])
    assert "has the shape" in problem((2**40, 2**40, 0), [])


def test_a_scalar_is_stored_once() -> None:
    assert problem((), [((), ())]) == ""
    assert "stored twice" in problem((), [((), ()), ((), ())])
    assert "hold 0 of 1" in problem((), [])


def test_an_empty_tensor_may_have_a_chunk_or_several_or_none() -> None:
    boxes: list[Box] = [((0, 0), (0, 3))]
    for count in range(3):
        assert problem((0, 3), boxes * count) == ""


def test_chunks_without_elements_count_for_nothing() -> None:
    assert problem((4,), [((0,), (4,)), ((2,), (0,)), ((4,), (0,)), ((4,), (0,))]) == ""


def test_elements_that_would_wrap_around_when_summed_are_refused() -> None:
    """Sixteen times 2^60 elements is 0 in 64 bits."""
    whole = (2**60,)
    found = columns((whole, [((0,), whole)] * 16), ((2,), []))
    fault = fault_of(found)
    assert fault is not None
    assert fault.tensor == "t0"
    assert fault_of(found, is_partial=True) is not None


def test_a_part_need_not_cover_and_must_not_exceed() -> None:
    part = columns(((4, 4), [((0, 0), (2, 2)), ((2, 2), (1, 1))]))
    assert fault_of(part, is_partial=True) is None
    assert fault_of(part) is not None
    assert fault_of(columns(((4,), [((2,), (3,))])), is_partial=True) is not None
    assert fault_of(columns(((4,), [((0,), (3,))] * 2)), is_partial=True) is not None


@pytest.mark.parametrize("dimensions", (1, 2, 3))
def test_coordinates_of_any_size_are_told_apart(dimensions: int) -> None:
    """Places so far apart that tensor and place do not fit into one integer."""
    shape = (2**59, *(1,) * (dimensions - 1))
    tail = (0,) * (dimensions - 1), (1,) * (dimensions - 1)
    middle = 2**58 + 1
    good: list[Box] = [((0, *tail[0]), (middle, *tail[1])), ((middle, *tail[0]), (2**59 - middle, *tail[1]))]
    bad: list[Box] = [good[0], ((middle - 1, *tail[0]), good[1][1])]
    many = [(shape, good)] * 40
    assert fault_of(columns(*many)) is None
    fault = fault_of(columns(*many, (shape, bad), *many))
    assert fault is not None
    assert fault.tensor == "t40"


def test_a_tensor_in_many_pieces_that_form_no_grid_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cover, "MAX_CORNERS", 4 * len(PINWHEEL) - 1)
    assert "too many pieces" in problem((6, 6), PINWHEEL)
    grid: list[Box] = [((row, column), (1, 1)) for row, column in itertools.product(range(6), repeat=2)]
    assert problem((6, 6), grid) == ""


def test_a_grid_of_uneven_cells_is_known_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last cell reaches far beyond where any begins, and another tensor follows."""
    monkeypatch.setattr(cover, "MAX_CORNERS", 0)
    uneven = (9, 9), [((0, 0), (1, 9)), ((1, 0), (8, 2)), ((1, 2), (8, 7))]
    assert fault_of(columns(uneven, uneven, uneven)) is not None  # a chunk begins inside the first's extent
    grid: list[Box] = [
        ((row, at), (height, width)) for row, height in ((0, 1), (1, 8)) for at, width in ((0, 2), (2, 7))
    ]
    assert fault_of(columns(*[((9, 9), grid)] * 3)) is None


def test_a_tensor_cut_along_sixty_dimensions_is_looked_at_at_once() -> None:
    """Two halves along each of many dimensions have as many corners as there are atoms in a grain of sand."""
    shape = (2,) * 20
    halves: list[Box] = [((0,) * 20, (1, *shape[1:])), ((1, *(0,) * 19), (1, *shape[1:]))]
    assert problem(shape, halves) == ""
    # All corners of a cube of 60 dimensions: pairs of diagonal ones do not cover it, and are not tried.
    diagonal: list[Box] = [((0,) * 60, (1,) * 60), ((1,) * 60, (1,) * 60)]
    assert "hold 2 of" in problem((2,) * 60, diagonal)


def test_a_large_grid_in_any_order_is_checked() -> None:
    rows, width = 32, 16
    boxes: list[Box] = [
        ((4 * row, 3 * column), (4, 3)) for row, column in itertools.product(range(rows), range(width))
    ]
    random.Random(7).shuffle(boxes)
    shape = (4 * rows, 3 * width)
    assert math.prod(shape) == 12 * len(boxes)
    assert problem(shape, boxes) == ""
    moved = [*boxes[1:], boxes[1]]
    assert "stored twice" in problem(shape, moved)
