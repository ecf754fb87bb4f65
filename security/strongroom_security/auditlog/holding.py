"""What the log's tree holds: its entries, put together to the segments that they are the lines of. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from strongroom import canonical
from strongroom.errors import FormatError
from strongroom_security.auditlog.lines import LINE_BOUNDS, Open, segment_key
from strongroom_security.auditlog.segments import hour_of

__all__ = ["HeldSegment", "Holding", "hold"]

_OPENS: Final = b'{"certificate":'
"""How an opening line begins, and no other: members are sorted."""

_MAX_PROBLEMS: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldSegment:
    """A segment in the tree.

    Attributes:
        first_leaf: the number of its opening line's leaf.
        lines: how many leaves it has.
        first_seq: of its opening line.
        digest: SHA-256 of it as it stands in the sink, each line with its line feed.
    """

    key: str
    run: str | None
    writer: str
    number: int
    first_leaf: int
    lines: int
    first_seq: int
    digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """All that a tree holds.

    Attributes:
        segments: by key.
        problems: what in it is no segment, or one a second time: the leaf, and why.
    """

    segments: dict[str, HeldSegment]
    problems: tuple[tuple[int, str], ...]


def hold(entries: Iterable[bytes], size: int) -> Holding:
    """Put a tree's entries together.

    Args:
        entries: from the first leaf on.
        size: of the tree. Where the entries end before it, the segment that they end in is left out.
    """
    segments: dict[str, HeldSegment] = {}
    problems: list[tuple[int, str]] = []
    opened: Open | None = None
    first, digest, count = 0, hashlib.sha256(), 0

    def end(leaf: int) -> None:
        if opened is None:
            return
        key = segment_key(opened.run, hour_of(opened.time), opened.writer, opened.segment)
        if key in segments:
            problems.append((first, f"{key} is in the tree already, from leaf {segments[key].first_leaf}"))
            return
        segments[key] = HeldSegment(
            key=key,
            run=opened.run,
            writer=opened.writer,
            number=opened.segment,
            first_leaf=first,
            lines=leaf - first,
            first_seq=opened.seq,
            digest=digest.digest(),
        )

    for leaf, entry in enumerate(entries):
        count = leaf + 1
        if entry.startswith(_OPENS):
            end(leaf)
            opened, first, digest = _opened(entry), leaf, hashlib.sha256()
            if opened is None and len(problems) < _MAX_PROBLEMS:
                problems.append((leaf, "the entry begins like an opening line, and is none"))
        elif leaf == 0:
            problems.append((leaf, "the tree does not begin with an opening line"))
        digest.update(entry)
        digest.update(b"\n")
    if count == size:
        end(count)
    return Holding(segments=segments, problems=tuple(problems))


def _opened(entry: bytes) -> Open | None:
    try:
        return Open.from_json(canonical.decode(entry, "the entry", LINE_BOUNDS), "the entry")
    except FormatError:
        return None
