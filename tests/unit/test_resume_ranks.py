"""What the ranks of a job find out together: what differs, where in the data they are, what time it is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from strongroom import PerRank
from strongroom.errors import ConfigError, StateMismatchError
from strongroom.resume import JobShape, batches_behind
from strongroom.resume.clock import SharedClock
from strongroom.resume.dividing import mark_differing


class Table:
    """Ranks in threads, who lay their words on one table."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.words: list[Any] = [None] * ranks
        self.talks: list[str] = []
        self._meeting = threading.Barrier(ranks, timeout=10)

    def confer_as(self, rank: int) -> Callable[[str, Callable[[], Any]], list[Any]]:
        def confer(about: str, say: Callable[[], Any]) -> list[Any]:
            self.words[rank] = say()
            self._meeting.wait()
            heard = list(self.words)
            if rank == 0:
                self.talks.append(about)
            self._meeting.wait()
            return heard

        return confer

    def run(self, act: Callable[[int, Any], Any]) -> list[Any]:
        with ThreadPoolExecutor(self.ranks) as pool:
            return list(pool.map(lambda rank: act(rank, self.confer_as(rank)), range(self.ranks)))


def marked(value_of: Callable[[int], Any], ranks: int = 2) -> tuple[list[Any], list[str]]:
    table = Table(ranks)
    found = table.run(lambda rank, confer: mark_differing("mine", lambda: value_of(rank), confer))
    return found, table.talks


def test_what_is_alike_is_left_as_it_is_and_costs_one_talk() -> None:
    found, talks = marked(lambda rank: {"a": [1, 2.0], "t": torch.arange(3.0)})
    assert all(not isinstance(one, PerRank) for one in found)
    assert list(found[0]) == ["a", "t"]
    assert len(talks) == 1


def test_what_differs_is_marked_as_small_as_it_can_be_cut() -> None:
    found, _ = marked(
        lambda rank: {"alike": 1, "deep": {"timer": 0.5 + rank, "count": 3, "list": [rank, 1]}, 7: "x"}, 3
    )
    for rank, one in enumerate(found):
        assert one == {
            "alike": 1,
            "deep": {"timer": PerRank(0.5 + rank), "count": 3, "list": PerRank([rank, 1])},
            7: "x",
        }


def test_a_small_tensor_that_differs_is_marked_and_a_large_one_is_not() -> None:
    found, _ = marked(
        lambda rank: {"small": torch.full((3,), float(rank)), "large": torch.full((20_000,), float(rank))}
    )
    assert isinstance(found[0]["small"], PerRank)
    assert isinstance(found[1]["large"], torch.Tensor)


def test_where_the_keys_differ_the_whole_is_marked() -> None:
    found, _ = marked(lambda rank: {"same": 1, "deep": {"always": 2, **({"first": 3} if rank == 0 else {})}})
    assert found[0] == {"same": 1, "deep": PerRank({"always": 2, "first": 3})}
    assert found[1] == {"same": 1, "deep": PerRank({"always": 2})}


def test_values_that_are_equal_and_not_the_same_are_told_apart() -> None:
    found, _ = marked(lambda rank: {"flag": True if rank else 1})
    assert isinstance(found[0]["flag"], PerRank)


SHAPE = {"world_size": 2, "replicas": 2, "batch_size": 4}


@pytest.mark.parametrize(
    ("batches", "now", "expected"),
    (
        (6, {"world_size": 4, "replicas": 4, "batch_size": 4}, (3, 0)),
        (6, {"world_size": 4, "replicas": 4, "batch_size": 2}, (6, 0)),
        (5, {"world_size": 4, "replicas": 4, "batch_size": 4}, (2, 8)),
        (3, {"world_size": 1, "replicas": 1, "batch_size": 4}, (6, 0)),
        (6, {"world_size": 8, "replicas": 4, "batch_size": None}, (3, 0)),
        (1, {"world_size": 8, "replicas": 8, "batch_size": 4}, (1, -24)),
    ),
)
def test_another_number_of_processes_goes_on_behind_what_was_taken(
    batches: int, now: dict[str, Any], expected: tuple[int, int]
) -> None:
    assert batches_behind(batches, JobShape(**SHAPE), JobShape(**now)) == expected


def test_a_step_is_not_begun_in_the_middle() -> None:
    now = JobShape(world_size=1, replicas=1, batch_size=4)
    assert batches_behind(5, JobShape(**SHAPE), now, multiple_of=4) == (8, 8)


def test_the_shape_of_a_job_is_carried_and_checked() -> None:
    shape = JobShape(**SHAPE)
    assert JobShape.from_state(shape.to_state()) == shape
    with pytest.raises(ConfigError, match="a job has processes"):
        JobShape(world_size=0, replicas=1, batch_size=None)
    with pytest.raises(StateMismatchError, match="not one that this release writes"):
        JobShape.from_state({"world_size": 2})


def test_all_ranks_read_the_clock_of_the_first_and_ask_seldom() -> None:
    table = Table(2)

    def act(rank: int, confer: Any) -> list[float]:
        now = [1000.0 * rank]

        def clock() -> float:
            return now[0]

        shared, readings = SharedClock(clock, confer, interval_s=100.0), []
        for step in range(200):
            now[0] += 1.0
            readings.append(shared.read(step))
        return readings

    first, second = table.run(act)
    assert first == second
    # At a step a second and an interval of 100 s: late by 5 s at most, after the first looks.
    assert max(step + 1.0 - reading for step, reading in enumerate(first)) <= 5.0
    assert len(table.talks) <= 200 / 5 + 3
