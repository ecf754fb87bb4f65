"""The files of a tree by C2SP tlog-tiles: their names and bytes, and which of them come as it grows. Pure.

A tile holds up to 256 hashes of one level, and eight levels of the tree stand between one level of tiles and
the next. The tiles that are not full, one a level at most, are the tree's right edge (`Edge`): all that is
needed to tell its root, and to go on.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from strongroom.errors import ConfigError, FormatError
from strongroom_security.tlog.merkle import EMPTY_ROOT, HASH_BYTES, node_hash, root_of

__all__ = [
    "ENTRIES",
    "MAX_ENTRY_BYTES",
    "MAX_SIZE",
    "TILE_BYTES",
    "TILE_WIDTH",
    "Edge",
    "Growth",
    "Tile",
    "TileName",
    "decode_bundle",
    "edge_levels",
    "encode_bundle",
    "parse_tile_name",
    "tile_name",
    "width_at",
]

TILE_WIDTH: Final = 256
TILE_BYTES: Final = TILE_WIDTH * HASH_BYTES

MAX_ENTRY_BYTES: Final = 0xFFFF
"""An entry's length takes two bytes."""

MAX_SIZE: Final = 1 << 62
"""More entries than anything can write; it bounds the levels that are looked at."""

ENTRIES: Final = -1
"""The level of a `TileName` that names a bundle of entries."""

_HEIGHT: Final = 8
_NAME: Final = re.compile(
    r"tile/(?P<level>entries|0|[1-9][0-9]?)/(?P<index>(?:x[0-9]{3}/){0,6}[0-9]{3})(?:\.p/(?P<width>[1-9][0-9]{0,2}))?"
)
_MAX_LEVEL: Final = 63


@dataclass(frozen=True, slots=True, kw_only=True)
class TileName:
    """Which tile, or bundle of entries.

    Attributes:
        level: of tiles, from 0 (leaves) to 63; `ENTRIES` for a bundle.
        index: within its level.
        width: how many hashes or entries it holds; 256: it is full.
    """

    level: int
    index: int
    width: int


def tile_name(level: int, index: int, width: int = TILE_WIDTH) -> str:
    """Where a tile, or with `ENTRIES` a bundle of entries, stands below a log's prefix.

    ``tile/0/x001/x234/067`` is tile 1234067 of level 0, and ``tile/entries/000.p/5`` five entries.
    """
    if not ENTRIES <= level <= _MAX_LEVEL or index < 0 or not 1 <= width <= TILE_WIDTH:
        raise ConfigError(f"no tile has level {level}, index {index} and width {width}")
    parts = [f"{index % 1000:03d}"]
    while index >= 1000:
        index //= 1000
        parts.append(f"x{index % 1000:03d}")
    partial = "" if width == TILE_WIDTH else f".p/{width}"
    return f"tile/{'entries' if level == ENTRIES else level}/{'/'.join(reversed(parts))}{partial}"


def parse_tile_name(name: str) -> TileName:
    """What a name says, if it is spelled as `tile_name` does.

    Raises:
        FormatError: it is not.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise FormatError(f"{name[:80]!r} is not the name of a tile")
    level = ENTRIES if match["level"] == "entries" else int(match["level"])
    index = int(match["index"].replace("x", "").replace("/", ""))
    width = int(match["width"] or TILE_WIDTH)
    found = TileName(level=level, index=index, width=width)
    if level > _MAX_LEVEL or width > TILE_WIDTH or tile_name(level, index, width) != name:
        raise FormatError(f"{name[:80]!r} is not how that tile is named")
    return found


def width_at(size: int, level: int, index: int) -> int:
    """How many hashes (entries, for `ENTRIES`) a tile holds in a tree of so many entries; 0: it has none."""
    count = size >> (_HEIGHT * max(level, 0))
    return max(0, min(TILE_WIDTH, count - index * TILE_WIDTH))


def encode_bundle(entries: Sequence[bytes]) -> bytes:
    """The bytes of a bundle: each entry with its length before it, in two bytes, the higher one first.

    Raises:
        FormatError: an entry is too long, or there are too many.
    """
    if len(entries) > TILE_WIDTH:
        raise FormatError(f"a bundle holds at most {TILE_WIDTH} entries, got {len(entries)}")
    parts: list[bytes] = []
    for entry in entries:
        if len(entry) > MAX_ENTRY_BYTES:
            raise FormatError(f"an entry holds at most {MAX_ENTRY_BYTES} bytes, got {len(entry)}")
        parts += (len(entry).to_bytes(2, "big"), entry)
    return b"".join(parts)


def decode_bundle(data: bytes, count: int, what: str) -> list[bytes]:
    """The entries of a bundle.

    Args:
        count: how many there have to be.
        what: names the bundle in errors.

    Raises:
        FormatError: there are more or fewer, or one is cut short.
    """
    entries: list[bytes] = []
    at = 0
    while at < len(data):
        begin = at + 2
        at = begin + int.from_bytes(data[at:begin], "big")
        if begin > len(data) or at > len(data):
            raise FormatError(f"{what} ends in the middle of entry {len(entries)}")
        if len(entries) == count:
            raise FormatError(f"{what} holds more than {count} entries")
        entries.append(data[begin:at])
    if len(entries) != count:
        raise FormatError(f"{what} holds {len(entries)} entries, expected {count}")
    return entries


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One tile, full or not."""

    level: int
    index: int
    data: bytes

    @property
    def name(self) -> str:
        return tile_name(self.level, self.index, len(self.data) // HASH_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """The right edge of a tree: for each level the hashes of the tile that is not full.

    Attributes:
        size: how many entries the tree has.
        tiles: from level 0 up; empty where that level's last tile is full.
    """

    size: int = 0
    tiles: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        expected = tuple(
            self.size >> (_HEIGHT * level) & (TILE_WIDTH - 1) for level in range(edge_levels(self.size))
        )
        found = tuple(len(tile) // HASH_BYTES for tile in self.tiles)
        if found != expected or any(len(tile) % HASH_BYTES for tile in self.tiles):
            raise FormatError(
                f"the right edge of a tree of {self.size} entries has {expected} hashes, found {found}"
            )

    def root(self) -> bytes:
        """The tree's root."""
        found: bytes | None = None
        for tile in self.tiles:
            # Right to left: within a tile the smallest subtree comes last.
            end = len(tile)
            while end:
                count = (end // HASH_BYTES) & -(end // HASH_BYTES)
                subtree = root_of(tile[end - count * HASH_BYTES : end])
                found = subtree if found is None else node_hash(subtree, found)
                end -= count * HASH_BYTES
        return EMPTY_ROOT if found is None else found

    def extended(self, hashes: bytes) -> Growth:
        """What the tree is with more leaves, and which tiles come with them."""
        grown: list[Tile] = []
        edge = list(self.tiles)
        level, new = 0, hashes
        while new:
            if level == len(edge):
                edge.append(b"")
            index = (self.size >> (_HEIGHT * level)) // TILE_WIDTH
            data = edge[level] + new
            full_bytes = len(data) - len(data) % TILE_BYTES
            above: list[bytes] = []
            for begin in range(0, full_bytes, TILE_BYTES):
                tile = data[begin : begin + TILE_BYTES]
                grown.append(Tile(level=level, index=index, data=tile))
                above.append(root_of(tile))
                index += 1
            edge[level] = data[full_bytes:]
            if edge[level]:
                grown.append(Tile(level=level, index=index, data=edge[level]))
            level, new = level + 1, b"".join(above)
        size = self.size + len(hashes) // HASH_BYTES
        return Growth(edge=Edge(size=size, tiles=tuple(edge)), tiles=tuple(grown))


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """What more leaves make of a tree.

    Attributes:
        edge: of the larger tree.
        tiles: those that did not stand before; the lower level first.
    """

    edge: Edge
    tiles: tuple[Tile, ...]


def edge_levels(size: int) -> int:
    """How many levels of tiles a tree has."""
    levels = 0
    while size >> (_HEIGHT * levels):
        levels += 1
    return levels
