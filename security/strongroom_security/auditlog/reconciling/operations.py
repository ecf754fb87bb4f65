"""Our own events, drawn together for joining: what each process did to which checkpoint, and when.

An activity has two events or more, and what it asks of storage lies between them. Only what joining needs
is kept of each, so that a million events fit into memory. Pure.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

from strongroom.auditing import Action, Outcome, Phase, unlisted
from strongroom_security.auditlog.format.events import Recorded
from strongroom_security.auditlog.reconciling.identities import principal

__all__ = ["LONGEST_MS", "Operation", "Operations"]

LONGEST_MS: Final = 24 * 3600 * 1000
"""How long an operation of which no end is on record may have gone on, at most."""

_REQUESTS: Final = "kms_request_id"
_ASKING: Final = frozenset({Action.AUDIT.value, Action.ALERT.value})


@dataclass(slots=True, kw_only=True, eq=False)
class Operation:
    """What one process says of one operation on one checkpoint, or on a run.

    Attributes:
        event: the id of the first of its events.
        folder: the checkpoint's; None: it is about none.
        first, last: when, in ms since the epoch, by the clock of its process.
        has_ended: its end is on record.
        has_started: its beginning, or its intent, is.
        is_observed: it was found to have happened, by somebody else, later.
    """

    event: str
    root: str
    run: str | None
    folder: str | None
    action: str
    first: int
    last: int
    identity: str | None
    address: str | None
    host: str
    has_ended: bool = False
    has_started: bool = False
    is_observed: bool = False
    has_succeeded: bool = False


@dataclass(slots=True)
class _Line:
    """When somebody was at work: intervals, of which any point can be asked for."""

    spans: list[tuple[int, int, Operation]] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    """The latest end of all that began until then."""

    def close(self) -> None:
        self.spans.sort(key=lambda span: span[0])
        self.starts = [first for first, _, _ in self.spans]
        self.ends = list(accumulate((last for _, last, _ in self.spans), max))

    def at(self, time: int, window: int) -> Operation | None:
        place = bisect_right(self.starts, time + window) - 1
        if place < 0 or self.ends[place] < time - window:
            return None
        while self.spans[place][1] < time - window:
            place -= 1
        return self.spans[place][2]


class Operations:
    """The operations on one run.

    Args:
        events: in any order.
        run: its id.
        root: its URI: what is about no run yet counts by it.
    """

    def __init__(self, events: Iterable[Recorded], *, run: str, root: str) -> None:
        self.count = 0
        self.first: int | None = None
        """When the log of this run begins; who only asks about it begins nothing."""
        self._by_folder: dict[str, list[Operation]] = {}
        self._by_request: dict[str, Operation] = {}
        self._lines: dict[str | None, _Line] = {}
        made: dict[tuple[str, str, str, str | None], Operation] = {}
        latest: dict[str, int] = {}
        for event in events:
            if event.run != run and not (event.run is None and event.root.rstrip("/") == root.rstrip("/")):
                continue
            self.count += 1
            if event.action not in _ASKING:
                self.first = event.time if self.first is None else min(self.first, event.time)
            writer = event.id.rpartition("-")[0]
            latest[writer] = max(latest.get(writer, event.time), event.time)
            self._take(made, event, writer)
        for (_, writer, _, _), operation in made.items():
            if not operation.has_ended and operation.has_started:
                # It may have gone on for as long as its process is known to have lived.
                until = min(latest[writer], operation.first + LONGEST_MS)
                operation.last = max(operation.last, until)
            if operation.folder is not None:
                self._by_folder.setdefault(operation.folder, []).append(operation)
            if not operation.is_observed:
                who = None if operation.identity is None else principal(operation.identity)
                line = self._lines.setdefault(who, _Line())
                line.spans.append((operation.first, operation.last, operation))
        for line in self._lines.values():
            line.close()

    def _take(
        self, made: dict[tuple[str, str, str, str | None], Operation], event: Recorded, writer: str
    ) -> None:
        name = (event.operation, writer, event.action, event.checkpoint)
        operation = made.get(name)
        if operation is None:
            operation = made[name] = Operation(
                event=event.id,
                root=event.root,
                run=event.run,
                folder=event.checkpoint,
                action=event.action,
                first=event.time,
                last=event.time,
                identity=event.identity,
                address=event.ip,
                host=event.host,
                is_observed=event.phase == Phase.OBSERVED.value,
            )
        operation.first, operation.last = min(operation.first, event.time), max(operation.last, event.time)
        operation.identity = operation.identity or event.identity
        if event.phase == Phase.FINISHED.value:
            operation.has_ended = True
            operation.has_succeeded |= event.outcome == Outcome.SUCCESS.value
        elif event.phase in (Phase.INTENDED.value, Phase.STARTED.value):
            operation.has_started = True
        if event.phase != Phase.OBSERVED.value:
            operation.is_observed = False
        for request in unlisted(_REQUESTS, event.details):
            self._by_request[request] = operation

    def __iter__(self) -> Iterator[Operation]:
        """Those about a checkpoint."""
        for operations in self._by_folder.values():
            yield from operations

    def on(self, folder: str) -> list[Operation]:
        """Those on a checkpoint."""
        return self._by_folder.get(folder, [])

    def of_request(self, request: str | None) -> Operation | None:
        """The one that asked a key service by a request."""
        return None if request is None else self._by_request.get(request)

    def by(self, identity: str | None, time: int, window: int) -> Operation | None:
        """Any that an identity was at, at a time."""
        line = self._lines.get(None if identity is None else principal(identity))
        return None if line is None else line.at(time, window)

    def is_committed(self, folder: str) -> bool:
        """Whether a save of a checkpoint is on record as committed, by who did it."""
        return any(
            each.action in _SAVES and each.has_succeeded and not each.is_observed for each in self.on(folder)
        )

    def is_started(self, folder: str) -> bool:
        """Whether the beginning of a save is."""
        return any(each.action in _SAVES and each.has_started for each in self.on(folder))

    def is_observed(self, folder: str) -> bool:
        """Whether a commit was found by a later launch."""
        return any(each.is_observed for each in self.on(folder))


_SAVES: Final = frozenset({Action.SAVE.value, Action.IMPORT.value, Action.REPLICATE.value})
