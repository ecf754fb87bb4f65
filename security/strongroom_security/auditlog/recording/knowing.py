"""Which commits are on record already: what this process recorded, and what the sink shows of a run.

A launch tells of commits of which no record is known. Whoever may read the log finds them there; whoever may
only create in it cannot tell, and says so. What is found is believed for that alone: nobody has verified it,
and a commit that is left out for a line that somebody forged still stands in the root that it is about.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

from strongroom.auditing import Act, Action, Outcome, Phase
from strongroom.errors import FormatError
from strongroom.layout import CheckpointName
from strongroom.stores.base import Store
from strongroom_security.auditlog.format.events import recorded_of
from strongroom_security.auditlog.format.lines import parse_segment_key
from strongroom_security.auditlog.format.segments import read_segment
from strongroom_security.auditlog.listing import SEGMENTS, read_segments

__all__ = ["Known"]

_LOG: Final = logging.getLogger("strongroom")

_MAX_SEGMENTS: Final = 2_000
"""Read of one run, the newest hours first."""
_LOOK_S: Final = 5.0
"""For which whoever asks waits at most; it is the background half of a launch's first save."""
_LOOK_AGAIN_S: Final = 60.0
"""How long what was found counts: a later launch in this process looks again."""
_AT_ONCE: Final = 64

_TOLD: Final = (Phase.FINISHED, Phase.OBSERVED)


class Known:
    """Commits on record, for one process; used by all of its threads, and by no fork of it.

    Args:
        open_sink: opens the sink; called on a thread of its own.
        within_s: what one look may take.
    """

    def __init__(self, open_sink: Callable[[], Store], *, within_s: float = _LOOK_S) -> None:
        self._open_sink = open_sink
        self._within_s = within_s
        self._lock = threading.RLock()
        self._own: set[tuple[str, str]] = set()
        self._looks: dict[str, _Look] = {}

    def note(self, act: Act) -> None:
        """Take in what this process has recorded."""
        if act.action is not Action.SAVE or act.phase not in _TOLD or act.outcome is not Outcome.SUCCESS:
            return
        if act.run is not None and act.checkpoint is not None:
            self._own.add((act.run, act.checkpoint.folder))

    def knows(self, run: str, checkpoint: CheckpointName) -> bool | None:
        """Whether a commit is on record; None: it cannot be told. The first question of a launch looks."""
        if (run, checkpoint.folder) in self._own:
            return True
        look = self._look(run)
        if checkpoint.folder in look.found:
            return True
        return False if look.is_whole else None

    def _look(self, run: str) -> _Look:
        # Whoever comes meanwhile waits for the same look.
        with self._lock:
            look = self._looks.get(run)
            if look is None or look.ended_s + _LOOK_AGAIN_S < time.monotonic():
                look = self._looks[run] = _Look(run, self._open_sink, self._within_s)
                look.wait()
            return look


class _Look:
    """One look at the segments of a run.

    Attributes:
        found: folders of checkpoints whose commit is on record; it may grow while the look goes on.
        is_whole: all of the run's segments were read in time.
        ended_s: by the monotonic clock.
    """

    def __init__(self, run: str, open_sink: Callable[[], Store], within_s: float) -> None:
        self.found: set[str] = set()
        self.is_whole = False
        self.ended_s = 0.0
        self._run = run
        self._open_sink = open_sink
        self._until = time.monotonic() + within_s
        self._has_ended = threading.Event()

    def wait(self) -> None:
        # A daemon: a sink that does not answer must keep neither a save nor the interpreter from ending.
        thread = threading.Thread(target=self._carry_out, name="strongroom-audit-known", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            self._has_ended.set()  # the program is ending
        self._has_ended.wait(max(0.0, self._until - time.monotonic()))
        self.ended_s = time.monotonic()

    def _carry_out(self) -> None:
        try:
            self.is_whole = self._read(self._open_sink(), self.found)
        except Exception as error:  # noqa: BLE001 - a sink is anybody's code, and nothing depends on this
            _LOG.debug("what is on record of run %s cannot be told: %s", self._run, error)
        finally:
            self._has_ended.set()

    def _read(self, store: Store, found: set[str]) -> bool:
        left = _MAX_SEGMENTS
        for keys in self._hours(store):
            if len(keys) > left:
                return False
            left -= len(keys)
            for first in range(0, len(keys), _AT_ONCE):
                if time.monotonic() >= self._until:
                    return False
                for key, data in read_segments(store, keys[first : first + _AT_ONCE]):
                    if isinstance(data, bytes):
                        found.update(_committed(key, data, self._run))
        return True

    def _hours(self, store: Store) -> Iterator[list[str]]:
        """The keys of each hour's segments, the newest hour first."""
        folder = f"{SEGMENTS}/{self._run}"
        hours = [name.removesuffix("/") for name in store.list_names(folder) if name.endswith("/")]
        for hour in sorted(hours, reverse=True):
            if time.monotonic() >= self._until:
                raise TimeoutError
            keys = [f"{folder}/{hour}/{name}" for name in store.list_names(f"{folder}/{hour}")]
            yield [key for key in keys if parse_segment_key(key) is not None]


def _committed(key: str, data: bytes, run: str) -> set[str]:
    """Of which checkpoints a segment tells that they were committed, or found to be."""
    found: set[str] = set()
    try:
        reading = read_segment(key, data, is_canonical=False)
        if not reading.is_whole:
            return found
        for number, value in reading.events():
            event = recorded_of(value, f"{key}, line {number}")
            is_told = event.phase in [phase.value for phase in _TOLD]
            is_commit = event.action == Action.SAVE.value and event.outcome == Outcome.SUCCESS.value
            if is_commit and is_told and event.run == run and event.checkpoint is not None:
                found.add(event.checkpoint)
    except FormatError:
        return found  # of a later release, or damaged: the rest of it is not told from here
    return found
