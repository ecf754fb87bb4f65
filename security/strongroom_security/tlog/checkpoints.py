"""Tree heads by C2SP tlog-checkpoint: the origin, the size and the root of a log, as a note's text. Pure.

A checkpoint here is a log's, and no training run's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from strongroom.errors import FormatError
from strongroom_security.tlog.merkle import EMPTY_ROOT, HASH_BYTES
from strongroom_security.tlog.notes import decode_base64, encode_base64
from strongroom_security.tlog.tiles import MAX_SIZE

__all__ = ["Checkpoint", "parse_decimal"]

_DECIMAL: Final = re.compile(r"0|[1-9][0-9]{0,18}")


def parse_decimal(text: str, what: str) -> int:
    """A number below `MAX_SIZE` in its one spelling.

    Raises:
        FormatError: it is not spelled so, or too large.
    """
    if not _DECIMAL.fullmatch(text) or int(text) >= MAX_SIZE:
        raise FormatError(f"{what} is a decimal number below {MAX_SIZE}, found {text[:40]!r}")
    return int(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What a log says that it is.

    Attributes:
        origin: which log.
        size: how many entries its tree has.
        root: the tree's root.
        extensions: lines that mean something to the log alone.
    """

    origin: str
    size: int
    root: bytes
    extensions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for line in (self.origin, *self.extensions):
            if not line or any(each < " " for each in line):
                raise FormatError("a line of a tree head is not empty and holds no control character")
        if not 0 <= self.size < MAX_SIZE or len(self.root) != HASH_BYTES:
            raise FormatError(
                f"a tree head has a size below {MAX_SIZE} and a root of {HASH_BYTES} bytes, found "
                f"{self.size} and {len(self.root)}"
            )
        if self.size == 0 and self.root != EMPTY_ROOT:
            raise FormatError(f"an empty tree has the root {EMPTY_ROOT.hex()}, found {self.root.hex()}")

    def text(self) -> str:
        """As it is signed."""
        lines = (self.origin, str(self.size), encode_base64(self.root), *self.extensions)
        return "".join(line + "\n" for line in lines)

    @classmethod
    def parse(cls, text: str, what: str) -> Checkpoint:
        """
        Args:
            text: of a note.
            what: names it in errors.

        Raises:
            FormatError: it is no tree head.
        """
        lines = text.split("\n")
        if len(lines) < 4 or lines.pop() != "" or "" in lines:
            raise FormatError(f"{what} is no tree head: it has three lines or more, and no empty one")
        return cls(
            origin=lines[0],
            size=parse_decimal(lines[1], f"the size of {what}"),
            root=decode_base64(lines[2], f"the root of {what}"),
            extensions=tuple(lines[3:]),
        )
