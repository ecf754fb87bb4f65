"""What the log's tree holds: its entries, put together to the segments that they are the lines of. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from strongroom_security.auditlog.format.lines import segment_key
from strongroom_security.auditlog.format.segments import hour_of
from strongroom_security.auditlog.format.splitting import Stray, split

__all__ = ["HeldSegment", "Holding", "hold"]

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
    counted = _Counted(entries)
    for each in split(counted):
        if isinstance(each, Stray):
            is_told = not each.is_end or counted.count == size
            if is_told and len(problems) < _MAX_PROBLEMS:
                problems.append((each.first, each.message))
            continue
        key = segment_key(each.opened.run, hour_of(each.opened.time), each.opened.writer, each.opened.segment)
        if key in segments:
            if len(problems) < _MAX_PROBLEMS:
                already = segments[key].first_leaf
                problems.append((each.first, f"{key} is in the tree already, from leaf {already}"))
            continue
        segments[key] = HeldSegment(
            key=key,
            run=each.opened.run,
            writer=each.opened.writer,
            number=each.opened.segment,
            first_leaf=each.first,
            lines=each.lines,
            first_seq=each.opened.seq,
            digest=each.digest,
        )
    return Holding(segments=segments, problems=tuple(problems))


class _Counted:
    """Entries with their numbers, and how many there were."""

    def __init__(self, entries: Iterable[bytes]) -> None:
        self._entries = entries
        self.count = 0

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        for index, entry in enumerate(self._entries):
            self.count = index + 1
            yield index, entry
