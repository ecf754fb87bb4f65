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
from strongroom.errors import ConfigError, FormatError, ObjectNotFoundError
from strongroom.parallel import run_all
from strongroom.stores.base import Store
from strongroom.stores.offers import tuning_of
from strongroom_security.auditlog.format.events import recorded_of
from strongroom_security.auditlog.format.lines import LINE_BOUNDS, Open, parse_segment_key
from strongroom_security.auditlog.format.splitting import Stray, split
from strongroom_security.auditlog.listing import list_segments, read_segments
from strongroom_security.auditlog.sequencing.plans import MAX_PLAN_BYTES, PLANS, Plan, plan_key
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
    # A plan is evidence of nothing: it spares reading the tree where it is right.
    index = None if segment is None else _index_by_plans(sink, tree, *segment, event)
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
    listed = list_segments(sink).segments
    keys = [
        (parts[3], key)
        for key in listed
        if (parts := parse_segment_key(key)) is not None and parts[2] == event.writer
    ]
    for key, data in read_segments(sink, [key for _, key in sorted(keys)], listed):
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


def _index_by_plans(sink: Store, tree: TreeReader, key: str, place: int, event: EventId) -> int | None:
    """Where a line went, by the plans that list its segment; None: by none that is right."""
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
            index = 0 if plan is None else plan.size
            for each in () if plan is None else plan.segments:
                if each.key == key and _stands_at(tree, index, index + place, event):
                    return index + place
                index += each.lines
    return None


def _read_plan(sink: Store, size: int) -> Plan | None:
    key = plan_key(size)
    try:
        return Plan.parse(sink.read(key, limit_bytes=MAX_PLAN_BYTES), size, f"{sink.uri}/{key}")
    except (FormatError, ObjectNotFoundError):
        return None


def _stands_at(tree: TreeReader, first: int, index: int, event: EventId) -> bool:
    """Whether a line is at a place of the tree, in a segment of its writer that opens at another."""
    if index >= tree.size or not _is(tree.entry(index), event):
        return False
    try:
        opened = Open.from_json(canonical.decode(tree.entry(first), "it", LINE_BOUNDS), "it")
    except FormatError:
        return False
    return opened.writer == event.writer and opened.seq + index - first == event.seq


def _index_by_entries(tree: TreeReader, event: EventId) -> int | None:
    """Where a line is in a tree, by looking at all of it."""
    for each in split(tree.walk()):
        if isinstance(each, Stray) or each.opened.writer != event.writer:
            continue
        place = event.seq - each.opened.seq
        if 0 <= place < each.lines and _is(tree.entry(each.first + place), event):
            return each.first + place
    return None


def _is(line: bytes, event: EventId) -> bool:
    """Whether a line says that it is this one: as an event, or as one that opens or closes a segment."""
    try:
        value = canonical.decode(line, "an entry", LINE_BOUNDS)
        if not isinstance(value, dict):
            return False
        if "class_uid" in value:
            recorded = recorded_of(value, "an entry")
            return recorded.id == str(event) and recorded.seq == event.seq
    except FormatError:
        return False
    return bool(value.get("writer") == event.writer and value.get("seq") == event.seq)
