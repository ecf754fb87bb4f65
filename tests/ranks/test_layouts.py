"""Tensors of every layout: stored once, restored into every other, bit for bit; what cannot be is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import layout_jobs
import pytest
import torch
from crews import Crews
from layout_jobs import PLAIN, Layout
from looking import chunks, index_of, stored_bytes

SHAPES = {
    "even": (8, 4),
    "uneven": (5, 3),
    "one row": (1, 6),
    "one column": (6, 1),
    "deep": (3, 5, 2),
    "no rows": (0, 3),
    "no columns": (3, 0),
}
LAYOUTS = {
    "plain": PLAIN,
    "rows": Layout((4,), "0"),
    "columns": Layout((4,), "1"),
    "replicas": Layout((4,), "R"),
    "grid": Layout((2, 2), "01"),
    "transposed grid": Layout((2, 2), "10", (0, 2, 1, 3)),
    "rows of rows": Layout((2, 2), "00"),
    "FSDP2 of rows": Layout((2, 2), "S0"),
    "hybrid": Layout((2, 2), "R0"),
    "hybrid, outside in": Layout((2, 2), "0R"),
    "two ranks": Layout((2,), "0", (1, 3)),
    "one rank": Layout((1,), "0", (2,)),
}


def turned(turn: int) -> dict[str, Layout]:
    """For every shape and layout a tensor, in the layout so many places on."""
    layouts = list(LAYOUTS.values())
    after = [*layouts[turn:], *layouts[:turn]]
    return {f"{shape}, {name}": one for shape in SHAPES for name, one in zip(LAYOUTS, after, strict=True)}


def test_a_tensor_of_any_layout_is_restored_into_every_other(crews: Crews, tmp_path: Path) -> None:
    tensors = {f"{shape}, {name}": (SHAPES[shape], torch.float32) for shape in SHAPES for name in LAYOUTS}
    turns = [turned(turn) for turn in range(len(LAYOUTS))]
    wrong = crews.run(layout_jobs.move_tensors, tmp_path, tensors, turns[0], *turns, ranks=4)
    assert wrong == [[]] * 4


@pytest.mark.parametrize("mesh", ((3, 2), (2, 3)))
def test_fsdp2_over_uneven_rows_is_restored_as_it_lies(
    mesh: tuple[int, int], crews: Crews, tmp_path: Path
) -> None:
    # DCP's planners take some rank's piece of these for another one.
    tensors = {f"{rows} rows": ((rows, 2), torch.float32) for rows in (1, 7, 13, 16)}
    fsdp2, rows = (dict.fromkeys(tensors, Layout(*made)) for made in ((mesh, "S0"), ((6,), "0")))
    wrong = crews.run(layout_jobs.move_tensors, tmp_path, tensors, fsdp2, rows, fsdp2, ranks=6)
    assert wrong == [[]] * 6
    wrong = crews.run(layout_jobs.move_tensors, tmp_path / "back", tensors, rows, fsdp2, ranks=6)
    assert wrong == [[]] * 6


def test_every_element_is_stored_once(crews: Crews, tmp_path: Path) -> None:
    tensors = {f"{shape}, {name}": (SHAPES[shape], torch.float32) for shape in SHAPES for name in LAYOUTS}
    crews.run(layout_jobs.save_tensors, tmp_path, tensors, turned(0), ranks=4)
    index = index_of(tmp_path)
    for name, record in index.tensors.items():
        # That they do not overlap, and leave nothing out, is checked where an index is read.
        assert (
            sum(torch.Size(chunk.sizes).numel() for chunk in record.chunks)
            == torch.Size(record.shape).numel()
        ), name
    assert sum(stored_bytes(tmp_path, 4)) == sum(record.size_bytes for record in index.tensors.values())


def test_types_and_scalars_survive_a_change_of_layout(crews: Crews, tmp_path: Path) -> None:
    kinds = [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.float64,
             torch.complex64, torch.bool, torch.int8, torch.uint16, torch.int64]  # fmt: skip
    tensors: Any = {str(kind): ((5, 2), kind) for kind in kinds} | {"scalar": ((), torch.float32)}
    rows = {name: Layout((4,), "0") for name in tensors} | {"scalar": Layout((4,), "R")}
    columns = {name: Layout((2, 2), "1R") for name in tensors} | {"scalar": Layout((2,), "R", (0, 2))}
    plain = dict.fromkeys(tensors, PLAIN)
    wrong = crews.run(layout_jobs.move_tensors, tmp_path, tensors, rows, columns, plain, ranks=4)
    assert wrong == [[]] * 4


def test_a_dimension_may_be_counted_from_the_end(crews: Crews, tmp_path: Path) -> None:
    tensors = {"w": ((2, 6), torch.float32)}
    last, first = {"w": Layout((4,), "-")}, {"w": Layout((4,), "0")}
    assert crews.run(layout_jobs.move_tensors, tmp_path, tensors, last, first, last, ranks=4) == [[]] * 4
    assert sorted(chunks(tmp_path, "w")) == [(0, 0), (0, 2), (0, 4)]


def test_a_tensor_on_some_ranks_is_stored_by_those(crews: Crews, tmp_path: Path) -> None:
    tensors = {"w": ((4, 2), torch.float32)}
    crews.run(layout_jobs.save_tensors, tmp_path, tensors, {"w": LAYOUTS["two ranks"]}, ranks=4)
    assert chunks(tmp_path, "w") == {(0, 0): (1, (2, 2)), (2, 0): (3, (2, 2))}


def test_more_ranks_than_rows_leave_some_without_any(crews: Crews, tmp_path: Path) -> None:
    tensors = {"w": ((5, 2), torch.float32)}
    crews.run(layout_jobs.save_tensors, tmp_path, tensors, {"w": LAYOUTS["rows"]}, ranks=4)
    assert chunks(tmp_path, "w") == {(0, 0): (0, (2, 2)), (2, 0): (1, (2, 2)), (4, 0): (2, (1, 2))}


def test_of_replicated_shards_each_is_stored_once_and_all_ranks_store_some(
    crews: Crews, tmp_path: Path
) -> None:
    crews.run(layout_jobs.save_state, tmp_path, layout_jobs.hybrid_module, 8, ranks=4)
    index = index_of(tmp_path)
    assert [len(record.chunks) for record in index.tensors.values()] == [2] * 8
    each = sum(record.size_bytes for record in index.tensors.values()) // 4
    assert stored_bytes(tmp_path, 4) == [each] * 4
    assert {record.placements for record in index.tensors.values()} == {"mesh 2x2: Replicate, Shard(0)"}


def test_replicas_are_staged_and_stored_once_by_all_ranks_in_equal_parts(
    crews: Crews, tmp_path: Path
) -> None:
    sizes = [1000, 10, 20, 700, 30, 900, 40, 800, 600, 500, 50, 60]
    staged = crews.run(layout_jobs.save_state, tmp_path, layout_jobs.replicas, sizes, ranks=4)
    stored = stored_bytes(tmp_path, 4)
    assert sum(stored) == 4 * sum(sizes)
    assert max(stored) < 1.2 * sum(sizes)
    # What is staged is what is stored, and a header beside it.
    assert all(0 <= size - own < 2048 for size, own in zip(staged, stored, strict=True))


def test_buffers_come_from_one_rank_the_first(crews: Crews, tmp_path: Path) -> None:
    crews.run(layout_jobs.save_state, tmp_path, layout_jobs.own_buffers, ranks=4)
    (saved,) = crews.run(layout_jobs.load_anew, tmp_path, ranks=1)
    model = saved["model"]
    assert model["running_mean"] == [0.0] * 3
    assert model["running_var"] == [10.0] * 3
    assert model["num_batches_tracked"] == 100


def test_parameters_that_become_buffers_between_two_saves_come_from_the_first_rank(
    crews: Crews, tmp_path: Path
) -> None:
    crews.run(layout_jobs.save_before_and_after_parameters_become_buffers, tmp_path, ranks=2)
    (saved,) = crews.run(layout_jobs.load_anew, tmp_path, ranks=1)
    biases = [values for name, values in saved["layers"].items() if name.endswith("bias")]
    assert biases == [[0.0] * 6] * 4


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    (
        (layout_jobs.unreduced, "StateEncodingError", ("w: ", "Partial", "redistribute")),
        (
            layout_jobs.in_several_pieces,
            "StateEncodingError",
            ("w: ", "several separate pieces", "redistribute"),
        ),
        (layout_jobs.of_other_shapes, "SaveError", ("'w'", "F32[2]", "F32[3]", "PerRank")),
        (layout_jobs.on_rank_2_alone, "SaveError", ("rank 2", "'more'", "on some ranks only")),
        (layout_jobs.of_other_values, "SaveError", ("ranks 1, 3", "['extra']['epoch']", "PerRank")),
        (layout_jobs.of_other_tensors, "SaveError", ("rank 3", "of w,", "PerRank")),
    ),
)
def test_what_cannot_be_stored_is_refused_by_all_ranks_every_time(
    make: Any, kind: str, words: tuple[str, ...], crews: Crews, tmp_path: Path
) -> None:
    for told in crews.run(layout_jobs.refused_save, tmp_path, make, ranks=4):
        for found, text in told:
            assert found == kind
            assert all(word in text for word in words), text


def test_a_target_in_several_pieces_is_refused_before_anything_is_read(crews: Crews, tmp_path: Path) -> None:
    tensors = {"w": ((8, 2), torch.float32)}
    crews.run(layout_jobs.save_tensors, tmp_path, tensors, {"w": LAYOUTS["rows"]}, ranks=4)
    for kind, text in crews.run(layout_jobs.refused_load, tmp_path, layout_jobs.in_several_pieces, ranks=4):
        assert kind == "StateMismatchError"
        assert "w: " in text
        assert "several separate pieces" in text


def test_an_unchanged_state_is_neither_planned_nor_gathered_again(crews: Crews, tmp_path: Path) -> None:
    for rank, seen in enumerate(crews.run(layout_jobs.save_again_and_again, tmp_path, ranks=4)):
        assert seen["planned"] == {
            "first": 1,
            "other values": 0,
            # Where one rank alone changes, it alone plans, and says so.
            "another shape on rank 1": int(rank == 1),
            "another mesh": 1,
            "another shape": 1,
            "another type": 1,
            "as at first": 1,
            "once more": 0,
        }
        assert seen["sent"] == seen["planned"]
        assert seen["wrong"] == []
