"""What ``plan`` tells of a job of N ranks, to people and to programs."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from strongroom_cli.plan import _ranks

Strongroom = Callable[..., Any]


def test_plan_tells_what_each_rank_would_read(strongroom: Strongroom, root: Path) -> None:
    done = strongroom("plan", root, 300, "--ranks", 3)
    assert (done.status, done.err) == (0, "")
    assert "step 300" in done.out
    assert "saved by 1 rank; restored on 3 ranks" in done.out
    rows = [line.split() for line in done.out.splitlines() if line[:6].strip().isdigit()]
    assert [row[0] for row in rows] == ["0", "1", "2"]
    assert [" ".join(row[4:]) for row in rows] == ["read", "none stored", "none stored"]
    assert "no values of their own are stored for ranks 1, 2: they keep what they have" in done.out


def test_plan_as_json_has_the_documented_members(strongroom: Strongroom, root: Path) -> None:
    found = strongroom("plan", root, 300, "--ranks", 2, "--json").json
    assert set(found) == {
        "checkpoint", "common_bytes", "lacking", "ownerless", "ranks", "root", "saved_by", "size_bytes",
    }  # fmt: skip
    assert found["checkpoint"]["step"] == 300
    assert (found["lacking"], found["ownerless"], found["saved_by"]) == ([1], [], 1)
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    for rank in found["ranks"]:
        assert set(rank) == {"files", "has_own_state", "rank", "size_bytes"}
        assert rank["size_bytes"] == sum(file["size_bytes"] for file in rank["files"]) > 0
        assert {file["file"] for file in rank["files"]} == {"00000-00.safetensors"}
    assert found["size_bytes"] == sum(rank["size_bytes"] for rank in found["ranks"])
    assert found["common_bytes"] > 1000


def test_plan_opens_no_shard(strongroom: Strongroom, root: Path) -> None:
    for shard in root.rglob("*-*.safetensors"):
        shard.unlink()
    assert strongroom("plan", root, "--ranks", 2).status == 0


def test_plan_takes_the_newest_and_says_how_it_stands(strongroom: Strongroom, root: Path) -> None:
    assert strongroom("plan", root, "--ranks", 1, "--json").json["checkpoint"]["step"] == 250
    assert "superseded" in strongroom("plan", root, 300, "--ranks", 1).out


def test_plan_of_many_ranks_is_cut_for_people(strongroom: Strongroom, root: Path) -> None:
    assert "... 60 more" in strongroom("plan", root, 300, "--ranks", 100).out
    assert len(strongroom("plan", root, 300, "--ranks", 100, "--json").json["ranks"]) == 100


@pytest.mark.parametrize(
    ("arguments", "status"),
    (
        (("--ranks", 0), 2),
        (("--ranks", 100_001), 2),
        (("--ranks", "x"), 2),
        ((), 2),
        ((999, "--ranks", 2), 3),
    ),
)
def test_plan_that_cannot_be(
    strongroom: Strongroom, root: Path, arguments: tuple[Any, ...], status: int
) -> None:
    done = strongroom("plan", root, *arguments)
    assert done.status == status
    assert done.out == ""


def test_plan_of_a_damaged_index_is_damage(strongroom: Strongroom, root: Path, newest: Path) -> None:
    (newest / "data/index.safetensors").write_bytes(b"x")
    done = strongroom("plan", root, "--ranks", 2)
    assert done.status == 1
    assert "index.safetensors" in done.err
    (newest / "COMMIT").write_bytes(b"x")
    assert strongroom("plan", root, 250, "--ranks", 2).status == 1


def test_plan_where_nothing_was_committed_is_not_found(strongroom: Strongroom, root: Path) -> None:
    for folder in root.glob("step-*"):
        shutil.rmtree(folder)
    assert strongroom("plan", root, "--ranks", 2).status == 3


def test_ranks_are_told_in_spans() -> None:
    assert _ranks((3,)) == "rank 3"
    assert _ranks((1, 2)) == "ranks 1, 2"
    assert _ranks((0, 1, 2, 5, 7, 8)) == "ranks 0 to 2, 5, 7, 8"
