"""What dead processes left in the spool, on its way into the log all the same.

A segment that was closed is sent as it is. One that was not is closed for its writer, by the key of whoever
found it; where its last line ends in the middle that is told. One whose opening line is damaged goes
nowhere under its writer's id: what can be read of it is recorded again, and the file is kept aside. Two
who salvage at once never have the same folder, and what one sent and could not clear away the next one
finds in the sink, and clears.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from strongroom.auditing import Act, Action, Outcome, Phase
from strongroom.errors import FormatError, StrongroomError
from strongroom.layout import CheckpointName
from strongroom_security.auditlog.format.events import Actor, recorded_of
from strongroom_security.auditlog.format.lines import Certificate, segment_key
from strongroom_security.auditlog.format.segments import (
    SegmentReading,
    WriterKey,
    closed_for,
    hour_of,
    read_segment,
)
from strongroom_security.auditlog.recording.spool import WriterFolder
from strongroom_security.auditlog.recording.writing import WriterEndedError

__all__ = ["Again", "Salvaged", "Salvager", "missing_events", "recorded_again"]

_LOG: Final = logging.getLogger("strongroom")

Event = Mapping[str, Any]
"""An event's line, decoded."""
Again = Callable[[str | None, str, list[Event]], None]
"""Records events again under a writer of this process: the run, the first writer's id, the events."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Salvaged:
    """What became of dead processes' segments.

    Attributes:
        writers: how many had left something.
        segments, events: that are in the sink now.
        torn: segments whose last line ended in the middle.
        left: segments that still wait.
        error: why they do; None: nothing went wrong.
    """

    writers: int = 0
    segments: int = 0
    events: int = 0
    torn: int = 0
    left: int = 0
    error: str | None = None

    def __add__(self, other: Salvaged) -> Salvaged:
        return Salvaged(
            writers=self.writers + other.writers,
            segments=self.segments + other.segments,
            events=self.events + other.events,
            torn=self.torn + other.torn,
            left=self.left + other.left,
            error=self.error or other.error,
        )


@dataclass(frozen=True, kw_only=True)
class Salvager:
    """Sends what it is given the folders of.

    Attributes:
        by: who closes what was left open.
        certificate: of ``by``.
        send: puts a segment into the sink; what stands there instead, or None.
        record: takes an act into this process's own record.
        again: records events again.
        now_ms: the clock.
        may_go_on: asked before each segment: False lets the folder go until later.
    """

    by: WriterKey
    certificate: Certificate | None
    send: Callable[[str, bytes], bytes | None]
    record: Callable[[Act], None]
    again: Again
    now_ms: Callable[[], int]
    may_go_on: Callable[[], bool] = lambda: True

    def take(self, folder: WriterFolder) -> Salvaged:
        """Send what one dead process left, in order, and let its folder go."""
        done = Salvaged(writers=1)
        try:
            segments = folder.segments()
            for place, (number, is_closed) in enumerate(segments):
                left = len(segments) - place
                if not self.may_go_on():
                    return done + Salvaged(left=left)
                try:
                    done += self._take_one(folder, number, is_closed=is_closed)
                except WriterEndedError:
                    raise
                except (StrongroomError, OSError) as error:
                    return done + Salvaged(left=left, error=str(error))
                except Exception as error:  # noqa: BLE001 - a sink is anybody's code
                    return done + Salvaged(left=left, error=f"{type(error).__name__}: {error}")
        except OSError as error:
            return done + Salvaged(error=str(error))
        finally:
            folder.release()
        return done

    def _take_one(self, folder: WriterFolder, number: int, *, is_closed: bool) -> Salvaged:
        data = folder.read(number, is_closed=is_closed)
        reading = _read(folder.writer, number, data)
        if reading is None:
            if b"\n" in data:
                return self._take_apart(folder, number, data, is_closed=is_closed)
            # Not even its first line is whole: no event was recorded in it.
            if data:
                self._tell(None, folder.writer, number, events=0, torn=len(data), problem="it never began")
            folder.remove(number)
            return Salvaged(torn=1 if data else 0)
        problem, torn = "", len(reading.torn)
        if reading.close is None:
            try:
                data = closed_for(reading, self.by, self.certificate, self.now_ms())
            except FormatError as error:
                # As evidence: who verifies the log is told what is wrong with it.
                problem = str(error)
            else:
                # Whoever comes by after this one sends the same bytes.
                _keep(folder, number, data)
        found = self.send(reading.key, data)
        if found is not None:
            self._recover(reading, found)
        if reading.close is None:
            self._tell(
                reading.run, folder.writer, number, events=len(reading.events()), torn=torn, problem=problem
            )
        folder.remove(number)
        return Salvaged(segments=1, events=len(reading.events()), torn=1 if torn else 0)

    def _take_apart(self, folder: WriterFolder, number: int, data: bytes, *, is_closed: bool) -> Salvaged:
        """Record again what can be read of a segment that does not say which one it is."""
        of_runs: dict[str | None, list[Event]] = {}
        count = 0
        for line in data.split(b"\n"):
            event = _event(line)
            if event is not None:
                of_runs.setdefault(recorded_of(event, "an event in the spool").run, []).append(event)
                count += 1
        for run, events in of_runs.items():
            self.again(run, folder.writer, events)
        folder.put_aside(number, is_closed=is_closed)
        problem = (
            "its opening line is damaged: what can be read is recorded again, and the file is kept aside"
        )
        for run in of_runs or [None]:
            self._tell(run, folder.writer, number, events=count, torn=0, problem=problem)
        return Salvaged(events=count)

    def _recover(self, reading: SegmentReading, found: bytes) -> None:
        missing = missing_events(reading, found)
        if missing:
            self.again(reading.run, reading.writer, missing)

    def _tell(
        self, run: str | None, writer: str, number: int, *, events: int, torn: int, problem: str
    ) -> None:
        _LOG.info(
            "salvaged segment %d of the audit log's writer %s, whose process had died: %d events%s",
            number,
            writer,
            events,
            f", and the beginning of another in {torn} bytes" if torn else "",
        )
        self.record(
            Act(
                action=Action.AUDIT,
                phase=Phase.OBSERVED,
                outcome=Outcome.FAILURE if problem else Outcome.SUCCESS,
                operation="0" * 16,
                run=run,
                reason=problem or None,
                details={
                    "salvaged_writer": writer,
                    "segment": number,
                    "events": events,
                    "torn_bytes": torn,
                },
            )
        )


def _keep(folder: WriterFolder, number: int, data: bytes) -> None:
    try:
        folder.put_closed(number, data)
    except OSError as error:
        # A spool that is full or can only be read: it is sent all the same.
        _LOG.debug("segment %d of writer %s stays as it was: %s", number, folder.writer, error)


def _read(writer: str, number: int, data: bytes) -> SegmentReading | None:
    """A segment, under the key that its first line says; None: that line is no such line."""
    key = segment_key(None, "00000000T00", writer, number)
    first, is_whole, _ = data.partition(b"\n")
    opened = read_segment(key, first + is_whole).opened
    if opened is None or opened.writer != writer or opened.segment != number:
        return None
    return read_segment(segment_key(opened.run, hour_of(opened.time), writer, number), data)


def _event(line: bytes) -> Event | None:
    """A line as an event; None: it is none."""
    try:
        value = json.loads(line)
        recorded_again(value)
    except (FormatError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def missing_events(reading: SegmentReading, found: bytes) -> list[Event]:
    """The events of a segment that do not stand in what has its place."""
    there = set(found.split(b"\n"))
    return [value for line, value in reading.events() if reading.lines[line - 1] not in there]


def recorded_again(line: Event) -> tuple[Act, Actor, int]:
    """An event as the act that it tells of, the actor, and when it was: to be recorded under another writer.

    Raises:
        FormatError, ValueError: it is no event of this release.
    """
    event = recorded_of(line, "an event in the spool")
    checkpoint = None
    if event.launch is not None and event.step is not None and event.attempt is not None:
        checkpoint = CheckpointName(launch=event.launch, step=event.step, attempt=event.attempt)
    details: Mapping[str, Any] = {**event.details, "first_recorded_as": event.id}
    act = Act(
        action=Action(event.action),
        phase=Phase(event.phase),
        outcome=Outcome(event.outcome),
        operation=event.operation,
        root="" if event.root == "none" else event.root,
        run=event.run,
        checkpoint=checkpoint,
        path=event.path,
        byte_range=event.byte_range,
        reason=event.reason,
        details=details,
    )
    actor = Actor(
        user=event.user,
        uid=str(line["actor"]["user"].get("uid", "")),
        pid=event.pid,
        process=str(line["actor"]["process"].get("name", "")),
        host=event.host,
        ip=event.ip,
        job=event.job,
        rank=event.rank,
        identity=event.identity,
        role=event.role,
    )
    return act, actor, event.time
