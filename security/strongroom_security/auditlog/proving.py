"""Proving one event: its line, where it is in the log's tree, and that it is, for whoever has no log at hand.

A proof is a file by C2SP tlog-proof. Its extra data is the line itself, so that nothing else is needed to
read it; that the line is the one in the tree is just what the proof shows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from strongroom import canonical
from strongroom.errors import ConfigError, FormatError, IntegrityError
from strongroom.parallel import run_all
from strongroom.stores.base import Store
from strongroom.stores.offers import tuning_of
from strongroom_security.auditlog.lines import LINE_BOUNDS, Open, parse_segment_key
from strongroom_security.auditlog.listing import list_segments, read_segments
from strongroom_security.auditlog.plans import MAX_PLAN_BYTES, PLANS, Plan, plan_key
from strongroom_security.tlog.proofs import TlogProof
from strongroom_security.tlog.reading import CHECKPOINT, PREFIX, TreeReader, read_checkpoint
from strongroom_security.tlog.witnesses import LogKeys, SignedCheckpoint, open_checkpoint

__all__ = ["EventId", "Proven", "Unproven", "prove", "read_proof"]

_EVENT: Final = re.compile(r"(?P<writer>[0-9a-f]{32})-(?P<seq>0|[1-9][0-9]{0,15})")
_PLAN: Final = re.compile(r"(0|[1-9][0-9]{0,18})\.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class EventId:
    """Which line of the audit log: its writer, and its number among that writer's lines."""

    writer: str
    seq: int

    @classmethod
    def parse(cls, text: str) -> EventId:
        """
        Raises:
            ConfigError: it is none.
        """
        match = _EVENT.fullmatch(text)
        if match is None:
            raise ConfigError(
                f"an event is named WRITER-SEQ, as its metadata.uid says, with 32 lower-case hex digits and "
                f"a number; got {text[:80]!r}"
            )
        return cls(writer=match["writer"], seq=int(match["seq"]))

    def __str__(self) -> str:
        return f"{self.writer}-{self.seq}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Proven:
    """A proof, checked.

    Attributes:
        event: which line.
        line: its bytes.
        index: of its entry.
        proof: the file's bytes.
        signed: the head that it leads to.
    """

    event: EventId
    line: bytes
    index: int
    proof: bytes
    signed: SignedCheckpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Unproven:
    """Why there is no proof.

    Attributes:
        segment: where the line stands; None: it is not in the sink either.
        message: for people.
    """

    segment: str | None
    message: str


def prove(sink: Store, event: EventId, log: LogKeys) -> Proven | Unproven:
    """Make the proof of one line, and check it.

    Raises:
        FormatError, IntegrityError, UntrustedError: the log's head or tree is not whole, or not the log's.
        StoreError: the sink could not be asked.
    """
    note = read_checkpoint(sink)
    where = f"{sink.uri}/{PREFIX}/{CHECKPOINT}"
    segment = _segment_of(sink, event)
    if note is None:
        return Unproven(
            segment=None if segment is None else segment[0],
            message=f"{where} is absent: nothing of this sink was ever sequenced",
        )
    signed = open_checkpoint(note, log, where)
    tree = TreeReader(sink, signed.head)
    index = None if segment is None else _index_by_plans(sink, tree, *segment)
    if index is None:
        index = _index_by_entries(tree, event)
    if index is None:
        if segment is None:
            message = f"no segment of {sink.uri} and no entry of its log holds {event}"
            return Unproven(segment=None, message=message)
        return Unproven(
            segment=segment[0],
            message=f"{event} is in {segment[0]}, which is not in the log yet (size {signed.head.size}): "
            "sequence the log first",
        )
    line = tree.entry(index)
    if not _is(line, event):
        raise IntegrityError(
            f"entry {index} of {sink.uri}/{PREFIX} is not {event}: the plan that led there is wrong"
        )
    proof = TlogProof(index=index, path=tuple(tree.inclusion_proof(index)), note=note, extra=line)
    proof.check(line, log, str(event))
    return Proven(event=event, line=line, index=index, proof=proof.to_bytes(), signed=signed)


def read_proof(data: bytes, log: LogKeys, what: str) -> tuple[Mapping[str, Any], SignedCheckpoint]:
    """The line that a proof file is about, once it is shown to be in the log.

    Args:
        what: names the file in errors.

    Raises:
        FormatError: it is no proof of this log's.
        IntegrityError, UntrustedError: it does not show it.
    """
    proof = TlogProof.parse(data, what)
    if proof.extra is None:
        raise FormatError(f"{what} does not hold the line that it is about")
    signed = proof.check(proof.extra, log, what)
    value = canonical.decode(proof.extra, f"the line of {what}", LINE_BOUNDS)
    if not isinstance(value, dict):
        raise FormatError(f"the line of {what} is no JSON object")
    return value, signed


def _segment_of(sink: Store, event: EventId) -> tuple[str, int] | None:
    """The segment that a line stands in, and its place there from 0."""
    keys = [
        (parts[3], key)
        for key in list_segments(sink).segments
        if (parts := parse_segment_key(key)) is not None and parts[2] == event.writer
    ]
    for key, data in read_segments(sink, [key for _, key in sorted(keys)]):
        if isinstance(data, str):
            continue
        try:
            opened = Open.from_json(
                canonical.decode(data.partition(b"\n")[0], "its opening line", LINE_BOUNDS), key
            )
        except FormatError:
            continue  # whatever it is, the tree does not hold it
        place = event.seq - opened.seq
        if 0 <= place < data.count(b"\n"):
            return key, place
    return None


def _index_by_plans(sink: Store, tree: TreeReader, key: str, place: int) -> int | None:
    """Where a segment went, by the plan that lists it; None: none does."""
    sizes = sorted(
        int(match[1]) for name in sink.list_names(PLANS) if (match := _PLAN.fullmatch(name)) is not None
    )
    sizes = [size for size in sizes if size < tree.size]
    looks = tuning_of(sink).looks
    for first in range(0, len(sizes), looks):
        some = sizes[first : first + looks]
        plans = run_all(
            [lambda size=size: _read_plan(sink, size) for size in some],  # type: ignore[misc]
            workers=looks,
            name="audit-plans",
        )
        for plan in plans:
            index = plan.size
            for each in plan.segments:
                if each.key == key:
                    return index + place
                index += each.lines
    return None


def _read_plan(sink: Store, size: int) -> Plan:
    key = plan_key(size)
    return Plan.parse(sink.read(key, limit_bytes=MAX_PLAN_BYTES), size, f"{sink.uri}/{key}")


def _index_by_entries(tree: TreeReader, event: EventId) -> int | None:
    """Where a line is in a tree, by looking at all of it."""
    writer = event.writer.encode()
    return next((index for index, entry in tree.walk() if writer in entry and _is(entry, event)), None)


def _is(line: bytes, event: EventId) -> bool:
    try:
        value = canonical.decode(line, "an entry", LINE_BOUNDS)
    except FormatError:
        return False
    if not isinstance(value, dict):
        return False
    if "class_uid" not in value:
        return bool(value.get("writer") == event.writer and value.get("seq") == event.seq)
    metadata = value.get("metadata")
    return isinstance(metadata, dict) and metadata.get("uid") == str(event)
