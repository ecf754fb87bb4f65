"""Going on under another id, where one cannot be used any more: no event stays behind."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from strongroom.auditing import Act, Action, Outcome, Phase
from strongroom.errors import FormatError
from strongroom_security.auditlog.format.segments import read_segment
from strongroom_security.auditlog.recording.actors import Actors
from strongroom_security.auditlog.recording.losing import NO_OPERATION, Losses
from strongroom_security.auditlog.recording.salvage import Event, missing_events, recorded_again
from strongroom_security.auditlog.recording.writing import RunWriter, Segment

__all__ = ["Renewing"]

_LOG: Final = logging.getLogger("strongroom")
_ANY_ROOM: Final = sys.maxsize


class Renewing:
    """Records again what a writer had recorded that is no more.

    Args:
        actors: who does that.
        losses: takes what is gone.
        writer_of: the writer of a run, in a process that is being closed as well.
        retire: takes a writer that has ended from those in use.
        is_closing: whether the process is being closed.
    """

    def __init__(
        self,
        *,
        actors: Actors,
        losses: Losses,
        writer_of: Callable[[str | None], RunWriter],
        retire: Callable[[RunWriter], None],
        is_closing: Callable[[], bool],
    ) -> None:
        self._actors = actors
        self._losses = losses
        self._writer_of = writer_of
        self._retire = retire
        self._is_closing = is_closing

    def begin_anew(self, writer: RunWriter, found: bytes, why: str) -> None:
        """Go on under another id, and record again what did not get into the sink under this one.

        Args:
            found: what stands there in the place of the first segment that did not.
            why: the id cannot be used any more.
        """
        left = writer.give_up()
        self._retire(writer)
        missing: list[tuple[Segment, Sequence[Event]]] = []
        for segment in left:
            try:
                data = writer.content(segment)
            except FileNotFoundError:
                writer.replaced(segment, None, is_lost=True)
                self._losses.add(writer.key.run, "removed", segment.events)
            else:
                missing.append((segment, missing_events(read_segment(segment.key, data), found)))
        all_missing = [event for _, events in missing for event in events]
        _LOG.warning(
            "the audit log's writer %s ends: %s; of %d events that were not sent, %d are recorded again",
            writer.key.writer,
            why,
            sum(segment.events for segment in left),
            len(all_missing),
        )
        last: Segment | None = None
        # At the end of a program a new writer would say that, and nothing else.
        if all_missing or not self._is_closing():
            last = self.record_again(writer.key.run, writer.key.writer, all_missing, why=why)
        for segment, events in missing:
            writer.replaced(segment, last if events else None)
        writer.release()

    def record_again(
        self, run: str | None, writer: str, events: Iterable[Event], *, why: str
    ) -> Segment | None:
        """Record events again under a writer of this process; the last segment that they stand in."""
        again = list(events)
        act = Act(
            action=Action.AUDIT,
            phase=Phase.OBSERVED,
            outcome=Outcome.FAILURE,
            operation=NO_OPERATION,
            run=run,
            reason=f"the writer {writer} is no more: {why}; {len(again)} events are recorded again",
            details={"ended_writer": writer, "events_again": len(again)},
        )
        fresh = self._writer_of(run)
        fresh.append(act, self._actors.of(act), room=_ANY_ROOM)
        for event in again:
            try:
                act, actor, time_ms = recorded_again(event)
            except (FormatError, ValueError) as error:
                _LOG.error("an event of the log's writer %s cannot be recorded again: %s", writer, error)
                continue
            if fresh.append(act, actor, time_ms=time_ms, room=_ANY_ROOM) is None:
                self._losses.add(run, act.action.value)
        fresh.seal(is_last=self._is_closing())
        fresh.flush()
        sealed = fresh.sealed()
        for segment in sealed:
            fresh.sync(segment)
        return sealed[-1] if sealed else None
