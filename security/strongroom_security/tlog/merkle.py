"""The tree of RFC 6962: hashes, proofs that an entry is in it or that it only grew, and checking those. Pure.

Hashes lie behind one another in byte strings, 32 bytes each, and a level is hashed in one go: there is no
object for each node, which is what makes a million entries a matter of a second.

Proofs ask for the hashes of whole subtrees only (`Node`), so that they can be made from leaves in memory and
from tiles alike. Checking follows RFC 9162, 2.1.3.2 and 2.1.4.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from typing import Final

from strongroom.errors import ConfigError, IntegrityError

__all__ = [
    "EMPTY_ROOT",
    "HASH_BYTES",
    "MAX_PROOF_HASHES",
    "GrowingTree",
    "Node",
    "check_consistency",
    "check_inclusion",
    "consistency_proof",
    "hash_of_range",
    "inclusion_proof",
    "leaf_hash",
    "leaf_hashes",
    "node_hash",
    "parents",
    "root_of",
]

HASH_BYTES: Final = 32

EMPTY_ROOT: Final = sha256(b"").digest()
"""RFC 6962, 2.1: the hash of an empty tree is that of the empty string."""

MAX_PROOF_HASHES: Final = 64
"""No tree has more than 2^63 entries, so no proof is longer (C2SP tlog-witness allows 63 lines)."""

_LEAF: Final = b"\x00"
_NODE: Final = b"\x01"

Node = Callable[[int, int], bytes]
"""The hash of a whole subtree: of the entries from ``index << level`` up to ``index + 1 << level``."""


def leaf_hash(entry: bytes) -> bytes:
    """The hash of one entry."""
    return sha256(_LEAF + entry).digest()


def leaf_hashes(entries: Iterable[bytes]) -> bytes:
    """The hashes of entries, one behind the other."""
    return b"".join([sha256(_LEAF + entry).digest() for entry in entries])


def node_hash(left: bytes, right: bytes) -> bytes:
    """The hash over two subtrees."""
    return sha256(_NODE + left + right).digest()


def parents(hashes: bytes) -> bytes:
    """The level above: the hash over each pair. An odd one at the end has none, and is left out."""
    return b"".join(
        [sha256(_NODE + hashes[at : at + 64]).digest() for at in range(0, len(hashes) - HASH_BYTES, 64)]
    )


def root_of(hashes: bytes) -> bytes:
    """The root over the hashes of leaves, or of whole subtrees of one size."""
    if not hashes:
        return EMPTY_ROOT
    while len(hashes) > HASH_BYTES:
        # An odd one goes up unchanged: it is the right half of some node above.
        odd = hashes[-HASH_BYTES:] if len(hashes) % 64 else b""
        hashes = parents(hashes) + odd
    return hashes


class GrowingTree:
    """A tree in memory that entries are appended to; used by one thread at a time.

    It keeps every hash, 64 bytes an entry.
    """

    def __init__(self) -> None:
        self._levels: list[bytearray] = [bytearray()]

    @property
    def size(self) -> int:
        """How many entries it has."""
        return len(self._levels[0]) // HASH_BYTES

    def append(self, hashes: bytes) -> None:
        """Append entries by their hashes."""
        self._levels[0] += hashes
        level = 0
        while True:
            below = self._levels[level]
            if level + 1 == len(self._levels):
                if len(below) < 64:
                    return
                self._levels.append(bytearray())
            above = self._levels[level + 1]
            # Whole pairs that have no parent yet.
            begin, end = 2 * len(above), len(below) - len(below) % 64
            if begin >= end:
                return
            above += parents(bytes(below[begin:end]))
            level += 1

    def node(self, level: int, index: int) -> bytes:
        """See `Node`."""
        return bytes(self._levels[level][index * HASH_BYTES : (index + 1) * HASH_BYTES])

    def root(self, size: int | None = None) -> bytes:
        """The root of the tree, or of what it was when it had ``size`` entries."""
        return hash_of_range(self.node, 0, self.size if size is None else size)


def hash_of_range(node: Node, begin: int, end: int) -> bytes:
    """The hash of the entries from ``begin`` up to ``end``, as a proof or a root has it.

    Args:
        begin: a multiple of the smallest power of two that is not below the range's length.
    """
    if begin == end:
        return EMPTY_ROOT
    pieces: list[bytes] = []
    while begin < end:
        level = (end - begin).bit_length() - 1
        pieces.append(node(level, begin >> level))
        begin += 1 << level
    found = pieces.pop()
    while pieces:
        found = node_hash(pieces.pop(), found)
    return found


def inclusion_proof(node: Node, index: int, size: int) -> list[bytes]:
    """That an entry is in a tree: RFC 6962, 2.1.1, from the leaf's sibling up.

    Raises:
        ConfigError: the tree has no such entry.
    """
    if not 0 <= index < size:
        raise ConfigError(f"a tree of {size} entries has none with index {index}")
    ranges: list[tuple[int, int]] = []
    begin, end = 0, size
    while end - begin > 1:
        middle = begin + _split(end - begin)
        if index < middle:
            ranges.append((middle, end))
            end = middle
        else:
            ranges.append((begin, middle))
            begin = middle
    return [hash_of_range(node, *each) for each in reversed(ranges)]


def consistency_proof(node: Node, old_size: int, size: int) -> list[bytes]:
    """That a tree only grew since it had ``old_size`` entries: RFC 6962, 2.1.2.

    Empty for equal sizes, and for an empty old tree, with which every tree agrees.

    Raises:
        ConfigError: the old tree is the larger one.
    """
    if not 0 <= old_size <= size:
        raise ConfigError(f"a tree of {size} entries never had {old_size}")
    if old_size == 0:
        return []
    ranges: list[tuple[int, int]] = []
    begin, end = 0, size
    while old_size != end:
        middle = begin + _split(end - begin)
        if old_size <= middle:
            ranges.append((middle, end))
            end = middle
        else:
            ranges.append((begin, middle))
            begin = middle
    if begin > 0:
        ranges.append((begin, end))
    return [hash_of_range(node, *each) for each in reversed(ranges)]


def check_inclusion(*, leaf: bytes, index: int, size: int, proof: Sequence[bytes], root: bytes) -> None:
    """Check that a leaf is in the tree of this root.

    Raises:
        IntegrityError: the proof does not show it.
    """
    wrong = f"the proof does not show that entry {index} is in the tree of {size} entries"
    if not 0 <= index < size:
        raise IntegrityError(f"{wrong}: there is no such entry")
    at, last, found = index, size - 1, leaf
    for step in proof:
        if last == 0:
            raise IntegrityError(f"{wrong}: it has {len(proof)} hashes, more than it takes")
        if at & 1 or at == last:
            found = node_hash(step, found)
            while not at & 1 and at != 0:
                at, last = at >> 1, last >> 1
        else:
            found = node_hash(found, step)
        at, last = at >> 1, last >> 1
    if last != 0:
        raise IntegrityError(f"{wrong}: it has {len(proof)} hashes, fewer than it takes")
    if found != root:
        raise IntegrityError(f"{wrong}: it leads to the root {found.hex()}, expected {root.hex()}")


def check_consistency(
    *, old_size: int, old_root: bytes, size: int, root: bytes, proof: Sequence[bytes]
) -> None:
    """Check that the tree of one root is the other's, grown.

    Raises:
        IntegrityError: the proof does not show it.
    """
    wrong = f"the tree of {size} entries is not shown to be that of {old_size} entries, grown"
    if not 0 <= old_size <= size:
        raise IntegrityError(f"{wrong}: it is smaller")
    if old_size in (0, size):
        if proof:
            raise IntegrityError(f"{wrong}: {len(proof)} hashes where none is needed")
        if old_size == 0 and old_root != EMPTY_ROOT:
            raise IntegrityError(f"{wrong}: the root of an empty tree is not {old_root.hex()}")
        if old_size == size and old_root != root:
            raise IntegrityError(
                f"two trees of {size} entries have different roots: {old_root.hex()} and {root.hex()}"
            )
        return
    # RFC 9162, 2.1.4.2: where the old tree is one whole subtree, its root is where the proof begins.
    steps = [old_root, *proof] if old_size & (old_size - 1) == 0 else list(proof)
    if not steps:
        raise IntegrityError(f"{wrong}: the proof is empty")
    at, last = old_size - 1, size - 1
    while at & 1:
        at, last = at >> 1, last >> 1
    old_found = found = steps[0]
    for step in steps[1:]:
        if last == 0:
            raise IntegrityError(f"{wrong}: the proof has {len(proof)} hashes, more than it takes")
        if at & 1 or at == last:
            old_found, found = node_hash(step, old_found), node_hash(step, found)
            while not at & 1 and at != 0:
                at, last = at >> 1, last >> 1
        else:
            found = node_hash(found, step)
        at, last = at >> 1, last >> 1
    if last != 0:
        raise IntegrityError(f"{wrong}: the proof has {len(proof)} hashes, fewer than it takes")
    if old_found != old_root:
        raise IntegrityError(
            f"{wrong}: the proof leads to the old root {old_found.hex()}, expected {old_root.hex()}"
        )
    if found != root:
        raise IntegrityError(f"{wrong}: the proof leads to the root {found.hex()}, expected {root.hex()}")


def _split(count: int) -> int:
    """The largest power of two below a count of at least 2."""
    return 1 << ((count - 1).bit_length() - 1)
