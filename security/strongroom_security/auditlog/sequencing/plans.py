"""Which segments come next in the log's tree, decided once for each size of it: docs/format.md, 18. Pure.

A plan is created once, before anything of it is carried out, and whoever sequences next carries out the plan
that stands. So of two sequencers, or of one that died and one that went on, both make the same tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final

from strongroom import canonical
from strongroom.canonical import Bounds, Json
from strongroom.errors import FormatError
from strongroom_security.auditlog.format.lines import Close, Open, hash_of, parse_segment_key
from strongroom_security.auditlog.format.segments import SegmentReading
from strongroom_security.tlog.reading import PREFIX

__all__ = ["MAX_PLAN_BYTES", "PLANS", "Facts", "Plan", "Planned", "plan_key"]

PLANS: Final = f"{PREFIX}/plans"

MAX_PLAN_BYTES: Final = 4 << 20

_FORMAT: Final = "strongroom.audit-plan/1"
_BOUNDS: Final = Bounds(length_bytes=MAX_PLAN_BYTES, depth=4, items=100_000)
_PLAN_MEMBERS: Final = frozenset({"format", "segments", "size"})
_SEGMENT_MEMBERS: Final = frozenset({"follows_gap", "key", "lines", "sha256"})


def plan_key(size: int) -> str:
    """Where the plan stands that begins when the tree has ``size`` entries."""
    return f"{PLANS}/{size}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One segment of a plan.

    Attributes:
        key: where it stands in the sink.
        digest: SHA-256 of its bytes, in hex.
        lines: how many it has, each of which becomes an entry.
        follows_gap: it goes into the tree although the writer's segment before it is missing.
    """

    key: str
    digest: str
    lines: int
    follows_gap: bool

    @classmethod
    def of(cls, reading: SegmentReading, data: bytes, *, follows_gap: bool) -> Planned:
        return cls(
            key=reading.key,
            digest=sha256(data).hexdigest(),
            lines=len(reading.lines),
            follows_gap=follows_gap,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is appended to a tree of one size.

    Attributes:
        size: of the tree before.
        segments: in the order of their entries; at least one.
    """

    size: int
    segments: tuple[Planned, ...]

    @property
    def end(self) -> int:
        """The size of the tree once it is carried out."""
        return self.size + sum(each.lines for each in self.segments)

    def to_bytes(self) -> bytes:
        segments: list[Json] = [
            {
                "key": each.key,
                "sha256": each.digest,
                "lines": each.lines,
                "follows_gap": each.follows_gap,
            }
            for each in self.segments
        ]
        value = {"format": _FORMAT, "size": self.size, "segments": segments}
        return canonical.encode(value, what="a plan", bounds=_BOUNDS)

    @classmethod
    def parse(cls, data: bytes, size: int, what: str) -> Plan:
        """
        Args:
            size: the one that its name says.
            what: names it in errors.

        Raises:
            FormatError: it is no plan for that size.
        """
        value = canonical.decode(data, what, _BOUNDS)
        members = _members(value, _PLAN_MEMBERS, what)
        if members["format"] != _FORMAT or members["size"] != size:
            raise FormatError(
                f"{what} says format {members['format']!r:.60} and size {members['size']!r:.40}, expected "
                f"{_FORMAT} and {size}"
            )
        listed = members["segments"]
        if not isinstance(listed, list) or not listed:
            raise FormatError(f"{what} lists no segments")
        segments = tuple(_planned(each, what) for each in listed)
        if len({each.key for each in segments}) != len(segments):
            raise FormatError(f"{what} lists a segment twice")
        return cls(size=size, segments=segments)


def _planned(value: Json, what: str) -> Planned:
    members = _members(value, _SEGMENT_MEMBERS, f"a segment of {what}")
    key, digest, lines, follows_gap = (
        members["key"],
        members["sha256"],
        members["lines"],
        members["follows_gap"],
    )
    if (
        not isinstance(key, str)
        or parse_segment_key(key) is None
        or not isinstance(digest, str)
        or len(digest) != 64
        or digest.strip("0123456789abcdef")
        or type(lines) is not int
        or lines < 1
        or not isinstance(follows_gap, bool)
    ):
        raise FormatError(f"a segment of {what} is not described as it must be: {value!r:.200}")
    return Planned(key=key, digest=digest, lines=lines, follows_gap=follows_gap)


def _members(value: Json, names: frozenset[str], what: str) -> dict[str, Any]:
    if not isinstance(value, dict) or value.keys() != names:
        raise FormatError(f"{what} has the members {sorted(names)}, found {value!r:.200}")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What has to be known of a segment in the tree, to tell whether another goes on from it.

    Attributes:
        key: where it stands in the sink.
        writer, number: by its key.
        first_seq, first_prev: of its opening line.
        next_seq, last_hash: what the writer's next segment has to open with.
        public: the writer's key.
        is_last: whether the writer has ended with it.
        lines: how many it has.
    """

    key: str
    writer: str
    number: int
    first_seq: int
    first_prev: str
    next_seq: int
    last_hash: str
    public: str
    is_last: bool
    lines: int

    @classmethod
    def of(cls, key: str, opened: Open, close: Close, lines: int, last_line: bytes) -> Facts:
        return cls(
            key=key,
            writer=opened.writer,
            number=opened.segment,
            first_seq=opened.seq,
            first_prev=opened.prev,
            next_seq=opened.seq + lines,
            last_hash=hash_of(last_line),
            public=opened.key.hex(),
            is_last=close.is_last,
            lines=lines,
        )

    @classmethod
    def read(cls, reading: SegmentReading) -> Facts | None:
        """Of a segment that is whole; None: it is not."""
        if reading.problems or reading.opened is None or reading.close is None:
            return None
        return cls.of(reading.key, reading.opened, reading.close, len(reading.lines), reading.lines[-1])

    def to_json(self) -> Json:
        return {name: getattr(self, name) for name in _FACTS}

    @classmethod
    def from_json(cls, value: Json, what: str) -> Facts:
        """
        Raises:
            FormatError: it is none.
        """
        members = _members(value, frozenset(_FACTS), what)
        if any(type(members[name]) is not kind for name, kind in _FACTS.items()):
            raise FormatError(f"{what} has a member of another type: {value!r:.200}")
        return cls(**members)


_FACTS: Final[dict[str, type]] = {
    "key": str,
    "writer": str,
    "number": int,
    "first_seq": int,
    "first_prev": str,
    "next_seq": int,
    "last_hash": str,
    "public": str,
    "is_last": bool,
    "lines": int,
}
