"""What saving costs: noted wherever it becomes known, and handed to the run's loggers between two steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from strongroom.events import CheckpointCommitted, CheckpointReplicated, Event, SaveFailed, SaveStarted

__all__ = ["Figures", "Log"]

Log = Callable[[Mapping[str, float]], None]
"""Takes figures by name."""

_PREFIX: Final = "strongroom/"

_REMEMBERED: Final = 1000
"""Events; the oldest go where a run has no step for so long."""


class Figures:
    """An event sink whose figures wait until somebody on the training thread takes them.

    What is noted: ``strongroom/step`` and, of that step, ``stall_s`` (how long training was held up),
    ``background_s``, ``bytes``, ``lag_s`` (until it stood on the next tier) and ``failures``.
    """

    def __init__(self) -> None:
        self._found: deque[dict[str, float]] = deque(maxlen=_REMEMBERED)
        self._silenced: set[str] = set()

    def emit(self, event: Event) -> None:
        """Note what an event says; called on any thread."""
        found: dict[str, float]
        if isinstance(event, SaveStarted):
            found = {"step": event.step, "stall_s": event.wait_s + event.stage_s}
        elif isinstance(event, CheckpointCommitted):
            found = {"step": event.step, "background_s": event.background_s, "bytes": event.size_bytes}
        elif isinstance(event, CheckpointReplicated):
            found = {"step": event.step, "lag_s": event.lag_s}
        elif isinstance(event, SaveFailed):
            found = {"step": event.step, "failures": event.failures}
        else:
            return
        self._found.append({f"{_PREFIX}{name}": float(value) for name, value in found.items()})

    @property
    def are_new(self) -> bool:
        """Whether anything was noted since; costs a look at an empty queue."""
        return bool(self._found)

    def hand_to(self, loggers: Sequence[tuple[str, Log]], complain: Callable[[str], None]) -> None:
        """Give what was noted since to a run's loggers; one that fails to take it is given no more.

        Args:
            loggers: by name; each takes the figures of one event, and whatever it raises, the run goes on.
            complain: is told that, once for each.
        """
        while self._found:
            found = self._found.popleft()
            for name, log in loggers:
                if name in self._silenced:
                    continue
                try:
                    log(found)
                except Exception as error:  # noqa: BLE001 - whatever a logger does, the run goes on
                    self._silenced.add(name)
                    complain(
                        f"{name} took no figures of saves, and is given no more in this run: {error!r:.200}"
                    )
