"""The vote: threads as ranks over a real store, which train in step as a collective makes them."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from strongroom.channel import Channel, open_channel
from strongroom.errors import RankFailedError, RanksMissingError
from strongroom.ranks import Ranks
from strongroom.resume.preemption import StopNotice
from strongroom.resume.stopping import StopVote


def votes(world_size: int, *, timeout_s: float = 20.0) -> list[StopVote]:
    """One vote on each of so many ranks, which meet over a future instead of a process group."""
    address: Future[bytes] = Future()

    def share(data: bytes | None) -> bytes:
        if data is not None:
            address.set_result(data)
        return address.result(10)

    def meeting(rank: int) -> Callable[[float], Channel]:
        return lambda _: open_channel(rank, world_size, share)

    return [
        StopVote(Ranks(rank, world_size, meeting(rank) if world_size > 1 else None), timeout_s=timeout_s)
        for rank in range(world_size)
    ]


class Job:
    """Ranks that pass boundaries; each may be at most ``ahead`` steps before the slowest.

    Attributes:
        stopped_at: where each rank was told to stop; None: it came to the end.
    """

    def __init__(
        self, world_size: int, *, ahead: int = 1, steps: int = 100_000, timeout_s: float = 20.0
    ) -> None:
        self.votes = votes(world_size, timeout_s=timeout_s)
        self.done = [0] * world_size
        self.ahead = ahead
        self.steps = steps
        self.notices: list[StopNotice | None] = [None] * world_size
        self.failing: dict[int, Exception] = {}
        self.over = threading.Event()

    def run(self, act: Callable[[], None] = lambda: None) -> list[Any]:
        """Train on every rank; ``act`` is called once all have begun. What each rank came to."""
        with ThreadPoolExecutor(len(self.votes)) as pool:
            ranks = [pool.submit(self._train, rank) for rank in range(len(self.votes))]
            while not self.over.is_set() and min(self.done) < 3:
                time.sleep(0.001)
            act()
            return [rank.exception(60) or rank.result(60) for rank in ranks]

    def _train(self, rank: int) -> int | None:
        vote = self.votes[rank]
        vote.begin()
        error: Exception | None = None
        try:
            for step in range(1, self.steps + 1):
                while step - min(self.done) > self.ahead and not self.over.is_set():
                    time.sleep(0.0002)  # in a collective, for which another rank is missing
                if self.over.is_set():
                    time.sleep(0.01)  # no step takes no time, and the news needs half a second
                if rank in self.failing:
                    raise self.failing[rank]
                self.done[rank] = step
                notice = vote.at_boundary()
                if notice is not None:
                    self.notices[rank] = notice
                    return step
            return None
        except Exception as raised:
            error = raised
            raise
        finally:
            vote.end(error)
            if error is not None:
                self.over.set()  # its process ends, and what others wait for in a collective gives up


@pytest.mark.parametrize("told", (0, 1, 2))
@pytest.mark.parametrize("ahead", (1, 4))
def test_all_ranks_stop_at_one_boundary_whoever_was_told(told: int, ahead: int) -> None:
    job = Job(3, ahead=ahead)
    notice = StopNotice(reason="SIGTERM", signal=15, rank=told)
    outcomes = job.run(lambda: job.votes[told].tell(notice))
    assert len(set(outcomes)) == 1, outcomes
    assert outcomes[0] is not None
    assert job.notices == [notice] * 3


def test_ranks_that_are_all_told_stop_at_one_boundary() -> None:
    job = Job(3, ahead=2)

    def tell_all() -> None:
        for vote in job.votes:
            vote.tell(StopNotice(reason="SIGTERM", signal=15, rank=vote.rank))

    outcomes = job.run(tell_all)
    assert len(set(outcomes)) == 1
    assert outcomes[0] is not None
    assert len({notice.rank for notice in job.notices if notice}) == 1


def test_one_rank_alone_stops_at_its_next_boundary() -> None:
    (vote,) = votes(1)
    vote.begin()
    assert vote.at_boundary() is None
    notice = StopNotice(reason="SIGTERM", signal=15)
    vote.tell(notice)
    vote.tell(StopNotice(reason="SIGINT", signal=2))
    assert vote.at_boundary() == notice
    assert vote.at_boundary() == notice
    vote.end()


def test_a_notice_that_comes_when_the_run_is_over_keeps_nobody_waiting() -> None:
    for _ in range(3):
        job = Job(2, steps=20)
        tell = functools.partial(job.votes[1].tell, StopNotice(reason="SIGTERM", signal=15, rank=1))
        began = time.monotonic()
        outcomes = job.run(tell)
        assert time.monotonic() - began < 8
        assert outcomes[0] == outcomes[1]


def test_a_rank_that_ended_first_is_not_waited_for() -> None:
    """Rank 1 has passed its last boundary; rank 0 is at the one before, and is told."""
    first, second = votes(2)
    begun = threading.Thread(target=second.begin)
    begun.start()
    first.begin()
    begun.join()
    assert second.at_boundary() is None
    second.end()
    first.tell(StopNotice(reason="SIGTERM", signal=15))
    began = time.monotonic()
    time.sleep(0.1)
    assert first.at_boundary() is None  # where both have been
    first.end()
    assert time.monotonic() - began < 5


def test_a_rank_that_does_not_come_is_named_and_the_wait_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    """Its threads stand still, as those of a stopped process: here it never began to watch."""
    first, second, third = votes(3, timeout_s=1.0)
    third._watch = lambda channel: None  # type: ignore[method-assign]
    threads = [threading.Thread(target=one.begin) for one in (second, third)]
    for thread in threads:
        thread.start()
    first.begin()
    for thread in threads:
        thread.join()
    began = time.monotonic()
    second.tell(StopNotice(reason="SIGTERM", signal=15, rank=1))
    while caplog.text.count("rank 2, dead or stopped, did not answer") < 2:  # whatever training is stuck in
        time.sleep(0.01)
        assert time.monotonic() - began < 20
    raised: list[RanksMissingError] = []
    for vote in (first, second):
        while len(raised) < 1 + (vote is second):
            try:
                assert vote.at_boundary() is None
                time.sleep(0.01)
            except RanksMissingError as error:
                raised.append(error)
            assert time.monotonic() - began < 20
    assert [error.ranks for error in raised] == [(2,), (2,)]
    assert all("last committed" in str(error) for error in raised)
    for vote in (second, third, first):
        vote.end(raised[0])


@pytest.mark.parametrize("failing", (0, 1))
def test_a_rank_that_fails_is_named_on_the_others(failing: int, caplog: pytest.LogCaptureFixture) -> None:
    job = Job(2)
    with caplog.at_level(logging.ERROR, logger="strongroom"):
        outcomes = job.run(lambda: job.failing.update({failing: ValueError("loss is nan")}))
    assert isinstance(outcomes[failing], ValueError)
    other = outcomes[1 - failing]
    assert isinstance(other, RankFailedError)
    assert other.ranks == (failing,)
    assert "ValueError: loss is nan" in str(other)
    assert "loss is nan" in caplog.text  # told at once, whatever the rank's main thread is stuck in


def test_a_boundary_at_which_nothing_was_said_costs_next_to_nothing() -> None:
    job = votes(2)
    begun = threading.Thread(target=job[1].begin)
    begun.start()
    job[0].begin()
    begun.join()
    best = min(_time_of(job[0].at_boundary, 2000) for _ in range(5))
    for vote in (job[1], job[0]):
        vote.end()
    assert best < 20e-6  # about 0.3e-6 s; a talk to another rank would take ten times the bound


def _time_of(act: Callable[[], Any], times: int) -> float:
    began = time.perf_counter()
    for _ in range(times):
        act()
    return (time.perf_counter() - began) / times
