"""An event's line as a row of the index, and back. Pure.

`strongroom_security.auditlog.format.events.recorded_of` reads the same members from the same places. Here it
is for a million of them: nothing is built for each that is not stored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from json.encoder import encode_basestring_ascii
from sys import intern
from typing import Any, Final

from strongroom.canonical import MAX_INTEGER, Json
from strongroom.errors import FormatError
from strongroom_security.auditlog.format.events import CLASS_UID, Recorded, event_id, recorded_of
from strongroom_security.auditlog.format.lines import Open, Salvage

__all__ = [
    "ActorRow",
    "EventRow",
    "Opening",
    "SegmentRows",
    "recorded_from",
    "rows_of",
]

EventRow = tuple[Any, ...]
"""seq, prev, time, action, phase, outcome, operation, root, run, step, launch, attempt, path, range_begin,
range_end, reason, details."""

ActorRow = tuple[Any, ...]
"""user, host, ip, pid, identity, role, rank, job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """Whose a segment is, or who closed it, by its own word; and whose word there is on that.

    Attributes:
        public: the key that signs, raw.
        run: empty: none.
        key_id, signature: of the certificate; None: there is none.
    """

    writer: str
    public: bytes
    run: str
    host: str
    pid: int
    key_id: str | None
    signature: bytes | None

    @classmethod
    def of(cls, said: Open | Salvage) -> Opening:
        vouched = said.certificate
        return cls(
            writer=said.writer,
            public=said.key,
            run=said.run or "",
            host=said.host,
            pid=said.pid,
            key_id=None if vouched is None else vouched.key_id,
            signature=None if vouched is None else vouched.signature,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentRows:
    """A segment as the index takes it in.

    Attributes:
        digest: SHA-256 of it.
        leaves: SHA-256 of the hashes that its lines have as leaves of the tree.
        lines: how many it has; ``first_seq`` is the first one's.
        first_prev, last_hash: by which it hangs together with the segments before and behind it.
        opened: None: that cannot be read.
        salvager: who closed it for a writer that had died; None: nobody.
        is_last: its writer has ended with it.
        events: line, event and actor of each.
        problem: what is wrong with it, at its first place; None: nothing in itself.
    """

    key: str
    run: str | None
    writer: str
    number: int
    digest: bytes
    leaves: bytes
    lines: int
    first_seq: int
    first_prev: str
    last_hash: str
    opened: Opening | None
    salvager: Opening | None
    is_last: bool
    events: tuple[tuple[int, EventRow, ActorRow], ...]
    problem: str | None


_ENCODER: Final = json.JSONEncoder(ensure_ascii=True, separators=(",", ":"), allow_nan=False)
_TEXT: Final = frozenset([str])
_OPTIONAL_TEXT: Final = frozenset([str, type(None)])
_OPTIONAL_NUMBER: Final = frozenset([int, type(None)])


def rows_of(value: Json, writer: str) -> tuple[EventRow, ActorRow]:
    """What the index holds of an event: its row, and its actor's, in the order of these columns.

    Args:
        value: the decoded line.
        writer: whose segment it stands in.

    Raises:
        FormatError: it is no event, holds what canonical JSON could not, or calls itself otherwise than its
            place does.
    """
    try:
        extension, actor, endpoint = value["strongroom"], value["actor"], value["src_endpoint"]
        span = extension.get("byte_range")
        begin, end = (None, None) if span is None else (span[0], span[1])
        job, details = extension.get("job"), extension.get("details")
        user = actor["user"]
        seq, prev, time, pid = extension["seq"], extension["prev"], value["time"], actor["process"]["pid"]
        action, phase, outcome = extension["action"], extension["phase"], extension["outcome"]
        operation, root, name = extension["operation"], value["databucket"]["name"], user["name"]
        host = endpoint["hostname"]
        run, attempt, path = extension["run"], extension["attempt"], extension.get("path")
        step, launch, rank = extension["step"], extension["launch"], extension.get("rank")
        reason, ip = value.get("status_detail"), endpoint.get("ip")
        identity, role = user.get("credential_uid"), extension.get("role")
        called = value["metadata"]["uid"]
        is_event = value["class_uid"] == CLASS_UID
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise FormatError(f"it is no event of this log: {type(error).__name__} {error}"[:300]) from None
    for number in (step, launch, rank, begin, end):
        if type(number) not in _OPTIONAL_NUMBER or (number is not None and not 0 <= number <= MAX_INTEGER):
            raise _wrong(value)
    texts = (prev, action, phase, outcome, operation, root, name, host)
    perhaps = (run, attempt, path, reason, ip, identity, role)
    if not (
        is_event
        and type(seq) is type(time) is type(pid) is int
        and 0 <= seq <= MAX_INTEGER
        and 0 <= time <= MAX_INTEGER
        and 0 <= pid <= MAX_INTEGER
        and _TEXT.issuperset(map(type, texts))
        and _OPTIONAL_TEXT.issuperset(map(type, perhaps))
        and (job is None or type(job) is dict)
        and (details is None or type(details) is dict)
    ):
        raise _wrong(value)
    if called != event_id(writer, seq):
        raise FormatError(f"the event calls itself {called!r:.80}; it stands where {writer}-{seq} does")
    written = "".join([*texts, *filter(None, perhaps)])
    if not written.isascii():
        try:
            written.encode("utf-8")
        except UnicodeEncodeError:
            raise FormatError("a text of the event is not Unicode") from None
    return (
        (
            seq,
            _packed(prev),
            time,
            # What many say alike goes from process to process once.
            intern(action),
            intern(phase),
            intern(outcome),
            operation,
            intern(root),
            None if run is None else intern(run),
            step,
            launch,
            attempt,
            path,
            begin,
            end,
            reason,
            _spelled(details) if details else None,
        ),
        (name, host, ip, pid, identity, role, rank, _job(job) if job else "{}"),
    )


def recorded_from(event: EventRow, actor: ActorRow, writer: str) -> Recorded:
    """The event that rows were made of."""
    seq, prev, time, action, phase, outcome, operation, root, run, step, launch, attempt, path = event[:13]
    begin, end, reason, details = event[13:]
    user, host, ip, pid, identity, role, rank, job = actor
    return Recorded(
        id=event_id(writer, seq),
        seq=seq,
        prev=prev.hex() if len(prev) == _HASH_BYTES else prev.decode("utf-8", "replace"),
        time=time,
        action=action,
        phase=phase,
        outcome=outcome,
        operation=operation,
        root=root,
        run=run,
        step=step,
        launch=launch,
        attempt=attempt,
        path=path,
        byte_range=None if begin is None or end is None else (begin, end),
        reason=reason,
        user=user,
        host=host,
        ip=ip,
        pid=pid,
        identity=identity,
        role=role,
        rank=rank,
        job=_decoded(job),
        details=_decoded(details),
    )


_HASH_BYTES: Final = 32


def _spelled(members: Mapping[str, Any]) -> str:
    """An object as JSON. One whose values are texts, numbers and truths, as they are, without an encoder."""
    parts = []
    for name, value in members.items():
        kind = type(value)
        if kind is str:
            parts.append(f"{encode_basestring_ascii(name)}:{encode_basestring_ascii(value)}")
        elif kind is int:
            if not -MAX_INTEGER <= value <= MAX_INTEGER:
                raise FormatError("a number in the event's details is none that canonical JSON holds")
            parts.append(f"{encode_basestring_ascii(name)}:{value}")
        elif kind is bool:
            parts.append(f"{encode_basestring_ascii(name)}:{'true' if value else 'false'}")
        else:
            try:
                return _ENCODER.encode(members)
            except (ValueError, RecursionError):
                raise FormatError(
                    "a number in the event's details or job is none that canonical JSON holds"
                ) from None
    return f"{{{','.join(parts)}}}"


@lru_cache(maxsize=4_096)
def _job_of(members: tuple[tuple[str, str], ...]) -> str:
    return _spelled(dict(members))


def _job(job: Mapping[str, Any]) -> str:
    # The same for all that a process records.
    return _job_of(tuple(job.items())) if _TEXT.issuperset(map(type, job.values())) else _spelled(job)


def _wrong(value: Json) -> FormatError:
    """In words what is wrong, by whoever owns that."""
    try:
        recorded_of(value, "it")
    except FormatError as error:
        return error
    return FormatError("a number or a text of the event is none that canonical JSON holds")


def _packed(prev: str) -> bytes:
    """A line's ``prev`` in half the room; what is no hash stays as it is spelled."""
    try:
        packed = bytes.fromhex(prev)
    except ValueError:
        return prev.encode()
    return packed if len(packed) == _HASH_BYTES and len(prev) == 2 * _HASH_BYTES else prev.encode()


def _decoded(text: str | None) -> Mapping[str, Any]:
    return json.loads(text) if text else {}
