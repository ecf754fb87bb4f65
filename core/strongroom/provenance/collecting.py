"""What is gathered about this process: once, on a thread of its own, within bounds, and never an error.

The thread begins when the first `Checkpointer` is built, so that the code is looked at before anyone
goes on editing it, and is done long before anything is saved. Whoever asks earlier waits a while, and
gets what is there.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final

from strongroom.provenance.code import UNKNOWN, Entry, collect_code, entry_of_this_process
from strongroom.provenance.environment import collect_environment
from strongroom.provenance.host import collect_host
from strongroom.provenance.job import container_in, job_in

__all__ = ["COLLECT_S", "Collection", "collection_of_this_process"]

_LOG: Final = logging.getLogger("strongroom")

COLLECT_S: Final = 10.0
"""For all that is asked of git; what takes longer is not worth holding anything up."""


class Collection:
    """Facts about a process, as they are gathered.

    Args:
        environment: its variables.
        entry: what was started.
        within_s: seconds for what may take long.
    """

    def __init__(self, environment: Mapping[str, str], entry: Entry, *, within_s: float = COLLECT_S) -> None:
        # Now, and not when the thread comes to it: a program may change its variables and its folder.
        self._environment = dict(environment)
        self._entry = entry
        self._within_s = within_s
        self._found: dict[str, Any] = {}
        self._is_done = threading.Event()

    def begin(self) -> None:
        """Gather on a thread for which nobody waits at the end of the program."""
        try:
            threading.Thread(target=self.gather, name="strongroom-provenance", daemon=True).start()
        except RuntimeError as error:
            # No thread is to be had, or the interpreter is ending: nobody is to wait for facts.
            _LOG.info("provenance: nothing is gathered: %s", error)
            self._is_done.set()

    def gather(self) -> None:
        """Gather on this thread."""
        environment = self._environment
        try:
            job = job_in(environment)
            if job:
                self._found["job"] = job
            container = container_in(environment)
            if container is not None:
                self._found["container_digest"] = container
            self._take("host", lambda: collect_host(environment))
            self._take("code", lambda: collect_code(self._entry, environment, within_s=self._within_s))
            self._take("environment", collect_environment)
        finally:
            self._is_done.set()

    def _take(self, name: str, collect: Callable[[], Mapping[str, Any]]) -> None:
        try:
            self._found[name] = collect()
        except Exception as error:  # noqa: BLE001 - a save never fails because something cannot be told of it
            _LOG.info("provenance: %s could not be gathered: %s: %s", name, type(error).__name__, error)
            self._found[name] = UNKNOWN

    def facts(self, within_s: float) -> dict[str, Any]:
        """What is known; after so many seconds, what is not is ``"unknown"``."""
        self._is_done.wait(max(0.0, within_s))
        unknown = dict.fromkeys(("code", "environment", "host"), UNKNOWN)
        return unknown | dict(self._found)


_lock: Final = threading.Lock()
_known: dict[int, Collection] = {}


def collection_of_this_process() -> Collection:
    """The one of this process, which begins with the first call; a fork gathers its own."""
    with _lock:
        found = _known.get(os.getpid())
        if found is None:
            found = Collection(os.environ, entry_of_this_process())
            _known.clear()
            _known[os.getpid()] = found
            found.begin()
        return found
