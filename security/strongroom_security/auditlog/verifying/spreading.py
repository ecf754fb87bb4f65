"""Work on many segments, over the processors that this process may use. What the work is, others say.

Reading a line takes Python, which one process does one at a time: so there are several processes where a log
is large enough for that to pay.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from typing import Final, TypeVar

from strongroom.workers import processors

__all__ = ["WORTH_IT_BYTES", "spread"]

WORTH_IT_BYTES: Final = 48 << 20
"""What a process reads in two or three seconds; processes take half a second to start."""

_MAX_PROCESSES: Final = 8
"""More do not help: one process takes in what they hand over."""

_AHEAD: Final = 3
"""Things for each process that are handed over before the first comes back."""

_T = TypeVar("_T")
_R = TypeVar("_R")


def spread(
    work: Callable[[_T], _R], things: Iterable[_T], *, size_bytes: int, processes: int | None = None
) -> Iterator[_R]:
    """What work on each thing comes to, in the order of the things.

    Args:
        work: can be pickled, as can what it takes and returns.
        size_bytes: of all things.
        processes: how many at most; None: as many as there are processors for.
    """
    count = min(_MAX_PROCESSES, processors() if processes is None else processes)
    if size_bytes < WORTH_IT_BYTES or count < 2:
        yield from map(work, things)
        return
    waiting: deque[tuple[_T, Future[_R] | None]] = deque()
    pool = ProcessPoolExecutor(
        max_workers=count, mp_context=multiprocessing.get_context("spawn"), initializer=_begin
    )
    is_broken = False

    def result() -> _R:
        nonlocal is_broken
        thing, future = waiting.popleft()
        if future is not None and not is_broken:
            try:
                return future.result()
            except (BrokenExecutor, OSError):
                is_broken = True  # processes are not to be had here, or one was killed for want of memory
        return work(thing)

    try:
        for thing in things:
            future = None
            if not is_broken:
                try:
                    future = pool.submit(work, thing)
                except (BrokenExecutor, OSError):
                    is_broken = True
            waiting.append((thing, future))
            if len(waiting) > _AHEAD * count or is_broken:
                yield result()
        while waiting:
            yield result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _begin() -> None:
    """Leave interrupts to whoever started this process, and end with it."""
    gc.disable()  # lines make no cycles, and to look for some among so many takes a tenth of the time
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: object) -> None:
    join = getattr(parent, "join", None)
    if callable(join):
        join()
        os._exit(1)
