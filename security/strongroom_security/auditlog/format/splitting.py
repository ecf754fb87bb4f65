"""The entries of the log's tree, split into the segments that they are the lines of. Pure.

A segment begins with an opening line where none is open, and ends with its own closing line. What stands
between is not asked what it looks like: a line that looks like another segment's opening is no such thing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import Final

from strongroom import canonical
from strongroom.errors import FormatError
from strongroom_security.auditlog.format.lines import LINE_BOUNDS, Close, Open

__all__ = ["Piece", "Stray", "split"]

_CLOSES: Final = b'{"events":'
"""How a closing line begins: members are sorted. An event may not: it has a member ``actor``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One segment in the tree.

    Attributes:
        first: the number of its opening line's entry.
        lines: how many entries it has.
        digest: SHA-256 of it as it stands in the sink, each line with its line feed.
        last_line: its closing line.
    """

    first: int
    lines: int
    opened: Open
    close: Close
    digest: bytes
    last_line: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Stray:
    """What belongs to no segment.

    Attributes:
        first: the number of the first such entry.
        is_end: the entries end in the midst of a segment, which begins there.
    """

    first: int
    message: str
    is_end: bool = False


def split(entries: Iterable[tuple[int, bytes]]) -> Iterator[Piece | Stray]:
    """
    Args:
        entries: with their numbers, one after the other.

    Yields:
        segments, and of several entries in a row that are in none the first.
    """
    opened: Open | None = None
    first, digest, has_strayed = 0, sha256(), False
    for index, entry in entries:
        if opened is None:
            found = _opened(entry)
            if isinstance(found, str):
                if not has_strayed:
                    yield Stray(first=index, message=found)
                has_strayed = True
                continue
            opened, first, digest, has_strayed = found, index, sha256(), False
        digest.update(entry)
        digest.update(b"\n")
        close = _closed(entry, opened, index - first) if entry.startswith(_CLOSES) else None
        if close is not None:
            yield Piece(
                first=first,
                lines=index + 1 - first,
                opened=opened,
                close=close,
                digest=digest.digest(),
                last_line=entry,
            )
            opened = None
    if opened is not None:
        yield Stray(
            first=first,
            message=f"segment {opened.segment} of writer {opened.writer} opens there, and no closing line of "
            "it follows",
            is_end=True,
        )


def _opened(entry: bytes) -> Open | str:
    try:
        return Open.from_json(canonical.decode(entry, "it", LINE_BOUNDS), "it")
    except FormatError as error:
        return f"it is not the beginning of a segment: {error}"


def _closed(entry: bytes, opened: Open, place: int) -> Close | None:
    """The closing line of this segment, at this place of it from 0; None: it is none."""
    try:
        close = Close.from_json(canonical.decode(entry, "it", LINE_BOUNDS), "it")
    except FormatError:
        return None
    is_its = (
        (close.writer, close.segment) == (opened.writer, opened.segment)
        and close.events == place - 1
        and close.seq == opened.seq + place
    )
    return close if is_its else None
