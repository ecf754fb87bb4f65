"""Auditors for tests, what is given to them, and what has come of it in a sink that is a folder."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from strongroom.auditing import Act, Action, Outcome, Phase
from strongroom.stores.base import Store
from strongroom.stores.local import LocalStore
from strongroom_security.auditlog.format.events import Recorded, recorded_of
from strongroom_security.auditlog.format.segments import SegmentReading, continues, read_segment
from strongroom_security.auditlog.recording.auditor import LogAuditor
from strongroom_security.auditlog.recording.settings import Settings

__all__ = ["Place", "act", "soon"]

LONG_S = 20.0
"""Far longer than anything here takes."""


def act(number: int = 0, *, run: str | None = "run-a", action: Action = Action.SAVE, **members: Any) -> Act:
    """An act that is told from others by its ``number``."""
    return Act(
        action=action,
        phase=members.pop("phase", Phase.FINISHED),
        outcome=members.pop("outcome", Outcome.SUCCESS),
        operation=members.pop("operation", f"{number:016x}"),
        root="file:///runs/a",
        run=run,
        details={"number": number, **members.pop("details", {})},
        **members,
    )


def soon(is_so: Callable[[], bool], within_s: float = LONG_S) -> bool:
    """Whether something comes to be so."""
    end = time.monotonic() + within_s
    while not is_so():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


class Place:
    """A sink and a spool in one folder, and whatever is written to them."""

    def __init__(self, folder: Path) -> None:
        self.sink = folder / "sink"
        self.spool = folder / "spool"

    def settings(self, **changes: Any) -> Settings:
        usual: dict[str, Any] = {
            "sink": self.sink.as_uri(),
            "open_sink": lambda: LocalStore(self.sink),
            "spool": self.spool,
            "seal_s": 3600.0,
            "intent_s": LONG_S,
        }
        return Settings(**{**usual, **changes})

    @contextmanager
    def auditor(self, **changes: Any) -> Iterator[LogAuditor]:
        made = LogAuditor(self.settings(**changes))
        try:
            yield made
        finally:
            made.close(within_s=LONG_S)

    def readings(self) -> list[SegmentReading]:
        """Every segment in the sink, in the order of writers and numbers."""
        found = sorted(
            (path.name, path) for path in self.sink.rglob("*.jsonl") if not path.name.startswith(".")
        )
        return [read_segment(str(path.relative_to(self.sink)), path.read_bytes()) for _, path in found]

    def events(self) -> list[Recorded]:
        """Every event in the sink; each segment is whole, and goes on where the one before it ended."""
        events: list[Recorded] = []
        before: SegmentReading | None = None
        for reading in self.readings():
            assert reading.problems == (), reading.problems
            if before is not None and before.writer == reading.writer:
                assert continues(before, reading)
            before = reading
            events += [recorded_of(value, reading.key) for _, value in reading.events()]
        return events

    def numbers(self) -> list[int]:
        """The numbers of the acts in the sink, in their order."""
        return [each.details["number"] for each in self.events() if "number" in each.details]

    def waiting(self) -> list[Path]:
        """The files of segments in the spool."""
        # Unlike a glob, a walk takes it that a folder goes meanwhile.
        every = [Path(folder) / name for folder, _, names in os.walk(self.spool) for name in names]
        return sorted(path for path in every if path.suffix in (".open", ".jsonl"))

    def is_cleared(self) -> bool:
        """Whether nothing is left in the spool: what the sink has goes from there right after."""
        return soon(lambda: self.waiting() == [])


class HangingStore:
    """A sink that takes a connection and never answers, until it is let go."""

    def __init__(self, beneath: Store, is_free: Callable[[float], bool]) -> None:
        self._beneath = beneath
        self._is_free = is_free

    def put_if_absent(self, key: str, data: bytes) -> bool:
        self._is_free(LONG_S)
        return self._beneath.put_if_absent(key, data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._beneath, name)
