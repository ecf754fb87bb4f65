"""Threads beside the program that begin with its first event; what wakes them may be used anywhere."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from queue import Empty, SimpleQueue
from typing import Final

__all__ = ["Bell", "Threads"]


class Bell:
    """Wakes one thread. It is rung by anybody: by a signal's handler, or as an object is collected."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[None] = SimpleQueue()

    def ring(self) -> None:
        self._queue.put(None)

    def wait(self, within_s: float) -> None:
        """Return once it was rung, or after so long."""
        with contextlib.suppress(Empty):
            self._queue.get(timeout=within_s)
            while True:
                self._queue.get_nowait()


class Threads:
    """One daemon thread for each work, however often they are started.

    Args:
        works: by the names of their threads.
    """

    def __init__(self, works: Mapping[str, Callable[[], None]]) -> None:
        self._works: Final = works
        self._at_work: dict[str, threading.Thread] = {}

    def start(self) -> None:
        """Fine when repeated, and when an earlier call was broken off halfway."""
        if len(self._at_work) == len(self._works):
            return
        for name, work in self._works.items():
            if name not in self._at_work:
                try:
                    threading.Thread(target=self._run, args=(name, work), name=name, daemon=True).start()
                except RuntimeError:
                    return  # the program is ending: the next start sends what it leaves

    def _run(self, name: str, work: Callable[[], None]) -> None:
        this = threading.current_thread()
        if self._at_work.setdefault(name, this) is this:  # two may have been started; one works
            work()
