"""Interleaved timing: each round runs every contestant once, in an order of its own.

Before a contestant is timed, dirty pages of the one before are flushed and garbage is collected, so
that nobody pays for another's leavings.
"""

from __future__ import annotations

import gc
import os
import random
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Contestant", "interleave", "seconds"]


def _nothing() -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """Something that is timed.

    Attributes:
        name: under which its times are reported.
        run: does it once; the seconds that it took, by what was measured.
        tidy: removes what a run left, untimed.
    """

    name: str
    run: Callable[[], Mapping[str, float]]
    tidy: Callable[[], None] = _nothing


def seconds(work: Callable[[], object]) -> float:
    """How long something takes once."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def interleave(
    contestants: Sequence[Contestant], *, rounds: int, warm_ups: int, flushes: bool
) -> dict[str, dict[str, list[float]]]:
    """Time all of them, ``rounds`` times; by contestant and measure, in the order of the rounds.

    Args:
        warm_ups: rounds before that are not counted: they allocate buffers and fill caches.
        flushes: whether every dirty page is written out before each run.
    """
    taken: dict[str, dict[str, list[float]]] = {
        contestant.name: defaultdict(list) for contestant in contestants
    }
    for number in range(-warm_ups, rounds):
        # Shuffled, so that nobody always comes after the same one; the same way in every run.
        for contestant in random.Random(number).sample(contestants, len(contestants)):
            gc.collect()
            if flushes:
                os.sync()
            found = contestant.run()
            contestant.tidy()
            if number >= 0:
                for measure, value in found.items():
                    taken[contestant.name][measure].append(value)
    return {name: dict(measures) for name, measures in taken.items()}
