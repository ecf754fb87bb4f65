"""A rate of writing that holds over all threads, and lets a pause save up nothing."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strongroom.errors import ConfigError
from strongroom.pace import Pace


class Time:
    """A clock that moves only when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def paced(rate: float) -> tuple[Pace, Time]:
    clock = Time()
    return Pace(rate, monotonic=lambda: clock.now, sleep=clock.sleep), clock


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=50), st.integers(100, 100_000))
def test_what_was_spent_takes_the_time_of_its_rate_less_a_short_burst(sizes: list[int], rate: int) -> None:
    pace, clock = paced(rate)
    for size in sizes:
        pace.spend(size)
    due_s = sum(sizes) / rate
    assert clock.now - 100 == pytest.approx(max(0.0, due_s - 0.1), abs=1e-6)


def test_a_pause_saves_up_no_more_than_a_burst() -> None:
    pace, clock = paced(1000)
    pace.spend(1000)
    clock.now += 3600
    began = clock.now
    pace.spend(1000)
    assert clock.now - began == pytest.approx(0.9)


def test_nothing_waits_without_a_rate_or_for_nothing() -> None:
    clock = Time()
    Pace(None, monotonic=lambda: clock.now, sleep=clock.sleep).spend(1 << 40)
    Pace(1, monotonic=lambda: clock.now, sleep=clock.sleep).spend(0)
    assert clock.slept == []


def test_threads_share_one_rate() -> None:
    waits: list[float] = []
    pace = Pace(1000, monotonic=lambda: 5.0, sleep=waits.append)
    threads = [threading.Thread(target=pace.spend, args=(1000,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(waits) == pytest.approx([number + 0.9 for number in range(8)])


def test_with_the_real_clock_nothing_is_faster_than_its_rate() -> None:
    pace = Pace(1 << 20)
    began = time.monotonic()
    for _ in range(4):
        pace.spend(64 << 10)
    assert time.monotonic() - began >= 0.25 - 0.1


@pytest.mark.parametrize("rate", (0, -1, float("nan"), float("inf"), True, "fast", 1j))
def test_a_rate_is_a_positive_number(rate: Any) -> None:
    with pytest.raises(ConfigError, match="max_bytes_per_second must be a positive number"):
        Pace(rate)
