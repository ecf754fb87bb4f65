"""Which segments the log's tree holds, and from which leaf on: found out little by little, and verified.

Plans say what went in, and anybody who may write to the tree's folder may have put one there. So a plan is
a hint alone: a segment is in the tree if the hashes of its lines stand in tiles that make the root of the
signed tree head. Where a plan is missing or turns out wrong, the tree's own entries are read.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Final

from strongroom.errors import FormatError, IntegrityError, ObjectNotFoundError
from strongroom.stores.base import Store
from strongroom_security.auditlog.format.splitting import Stray, split
from strongroom_security.auditlog.sequencing.ordering import place_of
from strongroom_security.auditlog.sequencing.plans import MAX_PLAN_BYTES, Plan, plan_key
from strongroom_security.tlog.checkpoints import Checkpoint
from strongroom_security.tlog.merkle import HASH_BYTES, leaf_hashes
from strongroom_security.tlog.notes import Note
from strongroom_security.tlog.reading import TreeReader, read_checkpoint
from strongroom_security.tlog.tiles import TILE_WIDTH
from strongroom_security.tlog.witnesses import LogKeys, open_checkpoint

__all__ = ["NO_TREE", "Held", "HeldLeaves", "KnownTree", "leaves_digest", "look_up", "read_on"]

_LOG: Final = logging.getLogger("strongroom")
_WHAT: Final = "the tree's checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownTree:
    """The tree up to where it is known what it holds.

    Attributes:
        root: that it had at that size.
        is_signed: whether a key that was named had signed it.
    """

    size: int
    root: bytes
    is_signed: bool


NO_TREE: Final = KnownTree(size=0, root=b"", is_signed=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A segment in the tree.

    Attributes:
        leaf: of its opening line.
        leaves: SHA-256 of the hashes of its leaves.
    """

    leaf: int
    leaves: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldLeaves:
    """What was found out.

    Attributes:
        tree: up to where; None: there is no tree that could be believed in anything.
        begin: from which leaf on; 0 where the tree is not the known one, grown, and all was looked at anew.
        segments: by key. As plans say, or as the entries do.
    """

    tree: KnownTree | None
    begin: int
    segments: Mapping[str, Held]


def leaves_digest(hashes: bytes) -> bytes:
    """By which a segment is compared with the tree: of the hashes of its leaves, one behind the other."""
    return sha256(hashes).digest()


def look_up(store: Store, known: KnownTree, log: LogKeys | None) -> tuple[TreeReader | None, HeldLeaves]:
    """What the tree holds that is not known yet, by plans and tiles.

    Args:
        known: up to where it is.
        log: who must have signed the tree; None: nobody was named.

    Returns:
        Reads the tree, for `read_on`; and which segments stand there if the plans are right.
    """
    reader = _open(store, log)
    if reader is None:
        return None, HeldLeaves(tree=None, begin=0, segments={})
    begin = known.size
    try:
        reader.edge()
        if begin > reader.size or (begin and reader.root_at(begin) != known.root):
            begin = 0  # another tree than it was: whoever may write there has made it anew
            _LOG.warning(
                "the log's tree is not the one that it was, grown; see 'strongroom audit verify --against'"
            )
        segments, end = _by_plans(store, reader, begin)
        tree = _known(reader, end, log)
    except (FormatError, IntegrityError) as error:
        _tell(begin, error)
        return None, HeldLeaves(tree=None, begin=0, segments={})
    return reader, HeldLeaves(tree=tree, begin=begin, segments=segments)


def read_on(reader: TreeReader, begin: int, log: LogKeys | None) -> HeldLeaves:
    """What the tree holds from a leaf on, by its entries."""
    segments: dict[str, Held] = {}
    end = begin
    hashes: list[bytes] = []

    def walked() -> Iterator[tuple[int, bytes]]:
        for index, entry in reader.walk(begin):
            hashes.append(leaf_hashes([entry]))
            yield index, entry

    try:
        for piece in split(walked()):
            if isinstance(piece, Stray):
                continue
            digest = leaves_digest(b"".join(hashes[-piece.lines :]))
            hashes.clear()
            segments.setdefault(place_of(piece.opened), Held(leaf=piece.first, leaves=digest))
            end = piece.first + piece.lines
    except (FormatError, IntegrityError) as error:
        _tell(end, error)
    return HeldLeaves(tree=_known(reader, end, log), begin=begin, segments=segments)


def _open(store: Store, log: LogKeys | None) -> TreeReader | None:
    try:
        note = read_checkpoint(store)
        if note is None:
            return None
        if log is None:
            head = Checkpoint.parse(Note.parse(note, _WHAT).text, _WHAT)
        else:
            head = open_checkpoint(note, log, _WHAT).head
    except (FormatError, IntegrityError) as error:  # UntrustedError is one
        _tell(0, error)
        return None
    return TreeReader(store, head)


def _by_plans(store: Store, reader: TreeReader, begin: int) -> tuple[dict[str, Held], int]:
    segments: dict[str, Held] = {}
    while begin < reader.size:
        key = plan_key(begin)
        try:
            plan = Plan.parse(store.read(key, limit_bytes=MAX_PLAN_BYTES), begin, key)
        except (FormatError, ObjectNotFoundError):
            break  # its entries will tell
        if plan.end > reader.size:
            break
        for each in plan.segments:
            digest = leaves_digest(_hashes(reader, begin, begin + each.lines))
            segments[each.key] = Held(leaf=begin, leaves=digest)
            begin += each.lines
    return segments, begin


def _hashes(reader: TreeReader, begin: int, end: int) -> bytes:
    """The hashes of leaves, verified."""
    tiles = range(begin // TILE_WIDTH, (end - 1) // TILE_WIDTH + 1)
    hashes = b"".join(reader.tile(0, index) for index in tiles)
    skipped = begin - tiles.start * TILE_WIDTH
    return hashes[skipped * HASH_BYTES : (skipped + end - begin) * HASH_BYTES]


def _known(reader: TreeReader, size: int, log: LogKeys | None) -> KnownTree:
    return KnownTree(size=size, root=reader.root_at(size) if size else b"", is_signed=log is not None)


def _tell(begin: int, error: Exception) -> None:
    _LOG.warning(
        "what the log's tree holds is not known any further than its entry %d: %s; see 'strongroom audit "
        "verify'",
        begin,
        error,
    )
