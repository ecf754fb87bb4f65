"""A tree in a store, as its readers have it: nothing is believed that does not hash up to a root they trust.

Reading begins at the right edge, whose tiles alone make the root; a full tile is then believed if its hash
stands in the tile above, and an entry if its hash stands in its tile. So a proof costs a tile a level,
however many entries there are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

from strongroom.errors import FormatError, IntegrityError, ObjectNotFoundError
from strongroom.parallel import run_all
from strongroom.stores.base import Store
from strongroom.stores.offers import tuning_of
from strongroom_security.tlog import merkle
from strongroom_security.tlog.checkpoints import Checkpoint
from strongroom_security.tlog.merkle import HASH_BYTES
from strongroom_security.tlog.notes import MAX_NOTE_BYTES
from strongroom_security.tlog.tiles import (
    ENTRIES,
    MAX_ENTRY_BYTES,
    TILE_BYTES,
    TILE_WIDTH,
    Edge,
    decode_bundle,
    edge_levels,
    tile_name,
    width_at,
)

__all__ = ["CHECKPOINT", "MAX_BUNDLE_BYTES", "PREFIX", "TreeReader", "read_checkpoint"]

PREFIX: Final = "tlog"
"""The folder of a sink that is the log's prefix."""

CHECKPOINT: Final = "checkpoint"

MAX_BUNDLE_BYTES: Final = TILE_WIDTH * (2 + MAX_ENTRY_BYTES)

_CACHED_TILES: Final = 2048
"""16 MiB."""
_AHEAD: Final = 16
"""Bundles that are read ahead, at most: 256 MiB of the longest entries."""


def read_checkpoint(store: Store, prefix: str = PREFIX) -> bytes | None:
    """The log's latest signed tree head, not verified; None: there is none."""
    try:
        return store.read(f"{prefix}/{CHECKPOINT}", limit_bytes=MAX_NOTE_BYTES)
    except ObjectNotFoundError:
        return None


class TreeReader:
    """The tree of one tree head; used by one thread at a time.

    Args:
        store: what it lies in.
        head: its size and root, which the caller trusts.
        prefix: the log's folder.
    """

    def __init__(self, store: Store, head: Checkpoint, *, prefix: str = PREFIX) -> None:
        self.head: Final = head
        self._store = store
        self._prefix = prefix
        self._edge: Edge | None = None
        self._tiles: OrderedDict[tuple[int, int], bytes] = OrderedDict()

    @property
    def size(self) -> int:
        """How many entries it has."""
        return self.head.size

    def edge(self) -> Edge:
        """The tree's right edge, verified.

        Raises:
            IntegrityError: a tile of it is absent, of another length, or they do not make the root.
            StoreError: the store could not be asked.
        """
        if self._edge is None:
            tiles = []
            for level in range(edge_levels(self.size)):
                index = (self.size >> (8 * level)) // TILE_WIDTH
                width = width_at(self.size, level, index)
                tiles.append(self._read_tile(level, index, width) if width else b"")
            edge = Edge(size=self.size, tiles=tuple(tiles))
            if edge.root() != self.head.root:
                raise IntegrityError(
                    f"{self._store.uri}: the tiles at the right edge of {self._prefix} make the root "
                    f"{edge.root().hex()} for {self.size} entries; the signed tree head says "
                    f"{self.head.root.hex()}"
                )
            self._edge = edge
        return self._edge

    def tile(self, level: int, index: int) -> bytes:
        """The hashes of a tile, verified.

        Raises:
            IntegrityError: it is absent, or has other hashes than the tree.
            StoreError: the store could not be asked.
        """
        width = width_at(self.size, level, index)
        if width == 0:
            raise IntegrityError(f"a tree of {self.size} entries has no tile {tile_name(level, index)}")
        if width < TILE_WIDTH:
            return self.edge().tiles[level]
        found = self._tiles.get((level, index))
        if found is None:
            found = self._read_tile(level, index, width)
            self._check_hash(level, index, found)
            self._tiles[level, index] = found
            if len(self._tiles) > _CACHED_TILES:
                self._tiles.popitem(last=False)
        else:
            self._tiles.move_to_end((level, index))
        return found

    def node(self, level: int, index: int) -> bytes:
        """The hash of a whole subtree; see `strongroom_security.tlog.merkle.Node`."""
        height, rest = divmod(level, 8)
        begin = index << rest
        at = begin % TILE_WIDTH * HASH_BYTES
        tile = self.tile(height, begin // TILE_WIDTH)
        return merkle.root_of(tile[at : at + (HASH_BYTES << rest)])

    def inclusion_proof(self, index: int) -> list[bytes]:
        """That an entry is in this tree."""
        return merkle.inclusion_proof(self.node, index, self.size)

    def consistency_proof(self, old_size: int) -> list[bytes]:
        """That this tree is the one of ``old_size`` entries, grown."""
        return merkle.consistency_proof(self.node, old_size, self.size)

    def root_at(self, size: int) -> bytes:
        """The root that this tree had when it had ``size`` entries."""
        return merkle.hash_of_range(self.node, 0, size)

    def entries(self, index: int) -> list[bytes]:
        """The entries of a bundle, verified.

        Raises:
            IntegrityError: it is absent, or holds other entries than the tree.
            StoreError: the store could not be asked.
        """
        return self._checked_entries(index, self._read_bundle(index))

    def entry(self, index: int) -> bytes:
        """One entry, verified."""
        if not 0 <= index < self.size:
            raise IntegrityError(f"a tree of {self.size} entries has none with index {index}")
        return self.entries(index // TILE_WIDTH)[index % TILE_WIDTH]

    def walk(self, begin: int = 0) -> Iterator[tuple[int, bytes]]:
        """Every entry from one on, verified, with its index; some bundles are read ahead."""
        looks = min(_AHEAD, tuning_of(self._store).looks)
        bundles = range(begin // TILE_WIDTH, (self.size + TILE_WIDTH - 1) // TILE_WIDTH)
        for at in range(0, len(bundles), looks):
            several = bundles[at : at + looks]
            read = run_all(
                [lambda index=index: self._read_bundle(index) for index in several],  # type: ignore[misc]
                workers=looks,
                name="strongroom-tlog",
            )
            for index, data in zip(several, read, strict=True):
                for offset, entry in enumerate(self._checked_entries(index, data), index * TILE_WIDTH):
                    if offset >= begin:
                        yield offset, entry

    def _read_bundle(self, index: int) -> bytes:
        width = width_at(self.size, ENTRIES, index)
        if width == 0:
            raise IntegrityError(f"a tree of {self.size} entries has no bundle {index}")
        return self._read(ENTRIES, index, width, MAX_BUNDLE_BYTES)

    def _checked_entries(self, index: int, data: bytes) -> list[bytes]:
        width = width_at(self.size, ENTRIES, index)
        what = f"{self._store.uri}/{self._prefix}/{tile_name(ENTRIES, index, width)}"
        entries = decode_bundle(data, width, what)
        expected, found = self.tile(0, index), merkle.leaf_hashes(entries)
        if found != expected:
            wrong = next(
                at for at in range(width) if found[at * 32 : at * 32 + 32] != expected[at * 32 : at * 32 + 32]
            )
            raise IntegrityError(
                f"{what}: entry {index * TILE_WIDTH + wrong} is not the one that the tree was made of; it "
                "was changed after it was signed"
            )
        return entries

    def _check_hash(self, level: int, index: int, tile: bytes) -> None:
        at = index % TILE_WIDTH * HASH_BYTES
        expected = self.tile(level + 1, index // TILE_WIDTH)[at : at + HASH_BYTES]
        found = merkle.root_of(tile)
        if found != expected:
            raise IntegrityError(
                f"{self._store.uri}/{self._prefix}/{tile_name(level, index)} has the hash {found.hex()}, and "
                f"the tile above it says {expected.hex()}; it was changed after it was signed"
            )

    def _read_tile(self, level: int, index: int, width: int) -> bytes:
        data = self._read(level, index, width, TILE_BYTES)
        if len(data) != width * HASH_BYTES:
            raise FormatError(
                f"{self._store.uri}/{self._prefix}/{tile_name(level, index, width)} holds {len(data)} bytes, "
                f"expected {width * HASH_BYTES}"
            )
        return data

    def _read(self, level: int, index: int, width: int, limit_bytes: int) -> bytes:
        name = tile_name(level, index, width)
        try:
            return self._store.read(f"{self._prefix}/{name}", limit_bytes=limit_bytes)
        except ObjectNotFoundError:
            pass
        # A partial one may be removed once the full one stands.
        try:
            full = self._store.read(f"{self._prefix}/{tile_name(level, index)}", limit_bytes=limit_bytes)
        except ObjectNotFoundError:
            raise IntegrityError(
                f"{self._store.uri}/{self._prefix}/{name} is absent, and the tree of {self.size} entries has "
                "it; it was removed after it was signed"
            ) from None
        return _cut(full, width) if level == ENTRIES else full[: width * HASH_BYTES]


def _cut(bundle: bytes, count: int) -> bytes:
    """The first entries of a bundle, as bytes."""
    at = 0
    for _ in range(count):
        at += 2 + int.from_bytes(bundle[at : at + 2], "big")
    return bundle[:at]
