"""A segment: the lines of one process, in order, from its opening to its closing; made, and read again.

A `SegmentChain` makes the lines of one writer, segment after segment. `read_segment` reads one, holds line
against line, and tells what is wrong and where; it never raises for what it finds in it. Nothing here touches
a disk or a clock.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any, Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from strongroom import canonical
from strongroom.auditing import Act
from strongroom.canonical import Json
from strongroom.errors import FormatError
from strongroom_security.auditlog.format.events import Actor, check_event, event_id, event_of
from strongroom_security.auditlog.format.lines import (
    FIRST_PREV,
    LINE_BOUNDS,
    MAX_LINE_BYTES,
    Certificate,
    Close,
    Open,
    Salvage,
    certified_bytes,
    close_bytes,
    hash_of,
    parse_segment_key,
    segment_key,
)

__all__ = [
    "MAX_SEGMENT_BYTES",
    "MAX_SEGMENT_LINES",
    "Problem",
    "ProblemKind",
    "SegmentChain",
    "SegmentReading",
    "WriterKey",
    "closed_for",
    "continues",
    "hour_of",
    "read_segment",
]

MAX_SEGMENT_LINES: Final = 100_000
MAX_SEGMENT_BYTES: Final = 256 << 20
"""What is read of one object of a sink."""

_DECODER: Final = json.JSONDecoder()


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterKey:
    """Who writes a chain: an id and a key of its own, drawn for it and kept in memory alone.

    Attributes:
        writer: 32 lower-case hex digits.
        run: whose events it writes; None: those about no run.
        private: signs its closing lines.
        host, pid: where it runs.
    """

    writer: str
    run: str | None
    private: Ed25519PrivateKey = field(repr=False)
    host: str
    pid: int

    @property
    def public(self) -> bytes:
        return self.private.public_key().public_bytes_raw()

    def certified(self) -> bytes:
        """What a long-lived signer signs to vouch for it."""
        return certified_bytes(
            writer=self.writer, run=self.run, key=self.public, host=self.host, pid=self.pid
        )

    def sign(self, close: Close) -> bytes:
        return self.private.sign(close_bytes(close))


class SegmentChain:
    """Makes the lines of one writer. Used by one thread at a time.

    Every line that it returns ends in a line feed, and counts as written: who loses one has broken the chain.
    """

    def __init__(self, key: WriterKey) -> None:
        self._key = key
        self._seq = 0
        self._prev = FIRST_PREV
        self._segment = 0
        self._events = 0
        self._is_open = False
        self._name = ""

    @property
    def is_open(self) -> bool:
        """Whether a segment is open: `add` and `close` need one."""
        return self._is_open

    @property
    def segment(self) -> int:
        """The number of the segment that is open, or was opened last; 0: none was."""
        return self._segment

    @property
    def events(self) -> int:
        """How many events the open segment holds."""
        return self._events

    @property
    def key(self) -> str:
        """Where the segment goes that is open, or was opened last."""
        return self._name

    def open(self, *, time_ms: int, certificate: Certificate | None) -> bytes:
        """Begin the next segment."""
        self._check(is_open=False)
        self._segment += 1
        self._events = 0
        self._name = segment_key(self._key.run, hour_of(time_ms), self._key.writer, self._segment)
        line = self._link(
            Open(
                writer=self._key.writer,
                segment=self._segment,
                seq=self._seq,
                prev=self._prev,
                run=self._key.run,
                time=time_ms,
                host=self._key.host,
                pid=self._key.pid,
                key=self._key.public,
                certificate=certificate,
            ).to_json()
        )
        self._is_open = True
        return line

    def add(self, act: Act, actor: Actor, *, time_ms: int) -> bytes:
        """Add an event."""
        self._check(is_open=True)
        members = event_of(
            act, actor, writer=self._key.writer, seq=self._seq, prev=self._prev, time_ms=time_ms
        )
        line = self._link(members)
        self._events += 1
        return line

    def close(self, *, time_ms: int, is_last: bool = False) -> bytes:
        """End the open segment, and sign it."""
        self._check(is_open=True)
        unsigned = Close(
            writer=self._key.writer,
            segment=self._segment,
            seq=self._seq,
            prev=self._prev,
            events=self._events,
            is_last=is_last,
            time=time_ms,
        )
        line = self._link(_signed(unsigned, self._key).to_json())
        self._is_open = False
        return line

    def _link(self, members: Json) -> bytes:
        line = canonical.encode(members)
        if len(line) > MAX_LINE_BYTES:
            raise FormatError(f"a line of the audit log has {len(line)} bytes; at most {MAX_LINE_BYTES}")
        self._seq += 1
        self._prev = hash_of(line)
        return line + b"\n"

    def _check(self, *, is_open: bool) -> None:
        if self._is_open is not is_open:
            raise FormatError("a segment is opened, filled and closed, in this order")


def closed_for(
    reading: SegmentReading, by: WriterKey, certificate: Certificate | None, time_ms: int
) -> bytes:
    """A segment whose writer has died, whole again: its whole lines, and a closing line by somebody else.

    Args:
        reading: of what was found. Nothing but its end may be wrong.

    Raises:
        FormatError: it is closed already, or more is wrong with it.
    """
    if reading.opened is None or reading.close is not None:
        raise FormatError(f"{reading.key} is closed already, or was never opened")
    wrong = [each for each in reading.problems if each.kind not in (ProblemKind.UNCLOSED, ProblemKind.TORN)]
    if wrong:
        raise FormatError(f"{reading.key} is damaged, and is not closed for its writer: {wrong[0]}")
    unsigned = Close(
        writer=reading.opened.writer,
        segment=reading.opened.segment,
        seq=reading.next_seq,
        prev=reading.last_hash,
        events=len(reading.lines) - 1,
        is_last=True,
        time=time_ms,
        salvaged=Salvage(
            writer=by.writer,
            run=by.run,
            host=by.host,
            pid=by.pid,
            key=by.public,
            certificate=certificate,
            torn=reading.torn[: MAX_LINE_BYTES // 2],
        ),
    )
    lines = [*reading.lines, canonical.encode(_signed(unsigned, by).to_json())]
    return b"".join(line + b"\n" for line in lines)


def _signed(close: Close, key: WriterKey) -> Close:
    return replace(close, signature=key.sign(close))


def hour_of(time_ms: int) -> str:
    """The hour, in UTC, by which a segment's key names when it was opened; ``-``: beyond any calendar."""
    try:
        return datetime.fromtimestamp(time_ms / 1000, timezone.utc).strftime("%Y%m%dT%H")
    except (ValueError, OverflowError, OSError):
        return "-"  # a line may say any time; no key has this hour


class ProblemKind(enum.Enum):
    """What is wrong with a segment."""

    MALFORMED = "malformed"
    """A line that is none of this format."""
    CHANGED = "changed"
    """The next line's ``prev`` is not this line's hash."""
    MISSING = "missing"
    """Lines were taken out before this one."""
    OUT_OF_ORDER = "out-of-order"
    """A line that was put in, repeated or moved."""
    UNCLOSED = "unclosed"
    """The end is missing: the writer died, or the segment was cut."""
    TORN = "torn"
    """The last line ends in the middle."""
    FORGED_CLOSE = "forged-close"
    """The closing line is not signed by the segment's key, or says something else than stands there."""
    ELSEWHERE = "elsewhere"
    """The segment says that it is another one than its key."""
    AFTER_CLOSE = "after-close"
    """Lines follow the closing line."""
    MISNAMED = "misnamed"
    """An event calls itself otherwise than its place does."""
    FOREIGN_RUN = "foreign-run"
    """An event is about another run than its segment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something wrong, and where.

    Attributes:
        key: the segment's.
        line: from 1; 0: it is about the segment as a whole.
    """

    key: str
    line: int
    kind: ProblemKind
    message: str

    def __str__(self) -> str:
        at = f", line {self.line}" if self.line else ""
        return f"{self.key}{at}: {self.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentReading:
    """What a segment holds.

    Attributes:
        run, writer, number: by its key.
        lines: whole ones, without line feeds.
        values: the lines decoded; None where one cannot be.
        opened, close: None where they are missing or malformed.
        torn: what follows the last line feed.
        problems: in the order of lines; empty: the segment is whole in itself.
    """

    key: str
    run: str | None
    writer: str
    number: int
    lines: tuple[bytes, ...]
    values: tuple[Mapping[str, Any] | None, ...]
    opened: Open | None
    close: Close | None
    torn: bytes
    problems: tuple[Problem, ...]

    @property
    def is_whole(self) -> bool:
        return not self.problems

    @property
    def first_seq(self) -> int:
        return self.opened.seq if self.opened is not None else 0

    @property
    def first_prev(self) -> str:
        return self.opened.prev if self.opened is not None else FIRST_PREV

    @property
    def next_seq(self) -> int:
        """Of the line that would follow its last."""
        return self.first_seq + len(self.lines)

    @property
    def last_hash(self) -> str:
        return hash_of(self.lines[-1]) if self.lines else FIRST_PREV

    def events(self) -> list[tuple[int, Mapping[str, Any]]]:
        """The event lines: their numbers from 1, and their decoded values."""
        return [
            (number, value)
            for number, value in enumerate(self.values, 1)
            if value is not None and "class_uid" in value
        ]


def continues(before: SegmentReading, after: SegmentReading) -> bool:
    """Whether a segment goes on where the one before it, of the same writer, has ended."""
    return (
        after.opened is not None
        and after.number == before.number + 1
        and after.first_seq == before.next_seq
        and after.first_prev == before.last_hash
        and after.opened.key == (before.opened.key if before.opened is not None else b"")
    )


def read_segment(
    key: str, data: bytes, *, is_canonical: bool = True, checks_events: bool = True
) -> SegmentReading:
    """Read a segment and hold its lines against each other.

    Args:
        key: where it was found in the sink.
        data: all of it.
        is_canonical: whether lines must be spelled canonically. Without it reading is quicker by half; what
            the log's tree holds was held to it when it was sequenced.
        checks_events: whether each line between the first and the last must be an event of this segment. Who
            looks at each event anyway can do without.

    Returns:
        all that can be read, and what is wrong with it.

    Raises:
        FormatError: ``key`` is no segment's, or the segment is too long to be read.
    """
    parts = parse_segment_key(key)
    if parts is None:
        raise FormatError(f"{key[:200]!r} is not the name of a segment of the audit log")
    if len(data) > MAX_SEGMENT_BYTES:
        raise FormatError(f"{key} has {len(data)} bytes; at most {MAX_SEGMENT_BYTES} are read")
    run, _, writer, number = parts
    # Before they are split: a line takes some fifty bytes of memory, and these may all be empty.
    count = data.count(b"\n")
    if count > MAX_SEGMENT_LINES:
        raise FormatError(f"{key} has {count} lines; at most {MAX_SEGMENT_LINES} are read")
    *lines, torn = data.split(b"\n")
    return _Reader(key, run, writer, number, lines, torn, is_canonical, checks_events).read()


class _Reader:
    def __init__(
        self,
        key: str,
        run: str | None,
        writer: str,
        number: int,
        lines: list[bytes],
        torn: bytes,
        is_canonical: bool,
        checks_events: bool,
    ) -> None:
        self._key = key
        self._run = run
        self._writer = writer
        self._number = number
        self._lines = lines
        self._torn = torn
        self._is_canonical = is_canonical
        self._checks_events = checks_events
        self._problems: list[Problem] = []
        self._opened: Open | None = None
        self._close: Close | None = None

    def read(self) -> SegmentReading:
        values = [self._decode(place, line) for place, line in enumerate(self._lines, 1)]
        if values:
            self._read_open(values[0])
        self._check_links(values)
        if self._checks_events:
            self._check_events(values)
        self._read_close(values)
        if self._torn:
            self._tell(
                len(self._lines) + 1,
                ProblemKind.TORN,
                f"it ends in the middle of a line, after {len(self._torn)} bytes",
            )
        return SegmentReading(
            key=self._key,
            run=self._run,
            writer=self._writer,
            number=self._number,
            lines=tuple(self._lines),
            values=tuple(values),
            opened=self._opened,
            close=self._close,
            torn=self._torn,
            problems=tuple(sorted(self._problems, key=lambda problem: problem.line)),
        )

    def _tell(self, line: int, kind: ProblemKind, message: str) -> None:
        self._problems.append(Problem(key=self._key, line=line, kind=kind, message=message))

    def _decode(self, place: int, line: bytes) -> Mapping[str, Any] | None:
        try:
            if self._is_canonical:
                value = canonical.decode(line, "it", LINE_BOUNDS)
            else:
                if len(line) > MAX_LINE_BYTES:
                    raise FormatError(f"it has {len(line)} bytes; at most {MAX_LINE_BYTES} are read")
                value = _DECODER.decode(line.decode("utf-8"))
            if not isinstance(value, dict):
                raise FormatError("it is no JSON object")
        except (FormatError, ValueError, RecursionError) as error:
            self._tell(place, ProblemKind.MALFORMED, f"the line is none of this format: {error}")
            return None
        return value

    def _read_open(self, value: Mapping[str, Any] | None) -> None:
        if value is None:
            return
        try:
            self._opened = opened = Open.from_json(value, "the opening line")
        except FormatError as error:
            self._tell(1, ProblemKind.MALFORMED, str(error))
            return
        said = segment_key(opened.run, "", opened.writer, opened.segment)
        if said != segment_key(self._run, "", self._writer, self._number):
            self._tell(
                1,
                ProblemKind.ELSEWHERE,
                f"it says that it is segment {opened.segment} of writer {opened.writer}, run {opened.run}; "
                "a segment of another name was put here",
            )

    def _check_links(self, values: list[Mapping[str, Any] | None]) -> None:
        """Hold each line's ``seq`` and ``prev`` against the line before."""
        expected: int | None = None
        seen: set[int] = set()
        for place, value in enumerate(values, 1):
            if value is None:
                expected = None if expected is None else expected + 1
                continue
            seq, prev = _link_of(value)
            if seq is None or prev is None:
                self._tell(place, ProblemKind.MALFORMED, "the line has no seq and prev")
                expected = None if expected is None else expected + 1
                continue
            is_linked = place == 1 or prev == hash_of(self._lines[place - 2])
            if expected is None or seq == expected:
                if not is_linked and values[place - 2] is not None:
                    self._tell(
                        place - 1,
                        ProblemKind.CHANGED,
                        f"the line was changed after line {place} was written, which has the hash "
                        f"{prev[:16]}... of it, and not {hash_of(self._lines[place - 2])[:16]}...",
                    )
                expected = seq + 1
            elif seq > expected:
                missing = seq - expected
                self._tell(
                    place,
                    ProblemKind.MISSING,
                    f"{missing} line{'s' if missing > 1 else ''} before it (seq {expected} to {seq - 1}) "
                    f"{'are' if missing > 1 else 'is'} missing",
                )
                expected = seq + 1
            else:
                what = "is there a second time" if seq in seen else "was moved here"
                self._tell(
                    place,
                    ProblemKind.OUT_OF_ORDER,
                    f"line seq {seq} {what}, where seq {expected} was expected",
                )
            seen.add(seq)

    def _check_events(self, values: list[Mapping[str, Any] | None]) -> None:
        """Hold each line between the first and the last to be an event, of this segment and in its place."""
        for place, value in enumerate(values, 1):
            if place == 1 or value is None or _is_close(value):
                continue
            try:
                name, seq, run = check_event(value, "the line")
            except FormatError as error:
                self._tell(place, ProblemKind.MALFORMED, str(error))
                continue
            if name != event_id(self._writer, seq):
                self._tell(
                    place,
                    ProblemKind.MISNAMED,
                    f"the event calls itself {name!r:.80}; here stands {self._writer}-{seq}",
                )
            if self._run is not None and run != self._run:
                self._tell(
                    place,
                    ProblemKind.FOREIGN_RUN,
                    f"the event is about {_run_in_words(run)}, in a segment of {_run_in_words(self._run)}",
                )

    def _read_close(self, values: list[Mapping[str, Any] | None]) -> None:
        at = [place for place, value in enumerate(values, 1) if value is not None and _is_close(value)]
        if not at:
            self._tell(
                len(values),
                ProblemKind.UNCLOSED,
                "no closing line follows: the writer died before it, or the segment was cut here",
            )
            return
        place = at[0]
        if place != len(values):
            self._tell(
                place + 1,
                ProblemKind.AFTER_CLOSE,
                f"{len(values) - place} lines follow the closing line, which ends a segment",
            )
        try:
            close = Close.from_json(values[place - 1], "the closing line")
        except FormatError as error:
            self._tell(place, ProblemKind.FORGED_CLOSE, str(error))
            return
        opened = self._opened
        if opened is None:
            return
        self._close = close
        if (close.writer, close.segment) != (opened.writer, opened.segment):
            self._tell(place, ProblemKind.FORGED_CLOSE, "the closing line is another segment's")
        elif close.events != place - 2 or close.seq != opened.seq + place - 1:
            self._tell(
                place,
                ProblemKind.FORGED_CLOSE,
                f"the closing line speaks of {close.events} events, up to seq {close.seq}; {place - 2} stand "
                f"there, up to {opened.seq + place - 1}",
            )
        elif not close.is_signed_by(opened.key if close.salvaged is None else close.salvaged.key):
            whose = "the segment's" if close.salvaged is None else "the salvager's"
            self._tell(place, ProblemKind.FORGED_CLOSE, f"the closing line's signature is not by {whose} key")
        elif close.salvaged is not None and close.salvaged.run not in (None, opened.run):
            self._tell(
                place,
                ProblemKind.FORGED_CLOSE,
                f"the segment of {_run_in_words(opened.run)} was closed by a process of "
                f"{_run_in_words(close.salvaged.run)}; only one of the same run, or of none, may close it",
            )


def _run_in_words(run: str | None) -> str:
    return "no run" if run is None else f"run {run[:128]!r}"


def _is_close(value: Mapping[str, Any]) -> bool:
    return value.get("kind") == "close"


def _link_of(value: Mapping[str, Any]) -> tuple[int | None, str | None]:
    holder = value.get("strongroom") if "class_uid" in value else value
    if not isinstance(holder, dict):
        return None, None
    seq, prev = holder.get("seq"), holder.get("prev")
    if type(seq) is not int or seq < 0 or not isinstance(prev, str):
        return None, None
    return seq, prev
