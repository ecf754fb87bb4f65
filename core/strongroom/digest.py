"""Digests of stored bytes: what a file's digest is, and how one is computed in one pass.

Two algorithms (`docs/format.md`, clause 5):

- ``blake3``: a file is a sequence of blocks of `BLOCK_BYTES` stored bytes, the last one
  shorter. The file's digest is BLAKE3 over the concatenated 32-byte BLAKE3 digests of its
  blocks, so that any block can be checked alone once the list of block digests is trusted.
- ``sha256``: the file's digest is SHA-256 over its bytes; a part of a file can only be
  checked by reading all of it.

Control documents (run, launch, manifest, commit) are always pinned by plain SHA-256, so that
anyone can check them with ``sha256sum``.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass
from typing import Any, Final, Literal

from blake3 import blake3

from strongroom.errors import ConfigError, FormatError

__all__ = [
    "BLOCK_BYTES",
    "DIGEST_ALGORITHMS",
    "Digest",
    "DigestAlgorithm",
    "FileHasher",
    "block_digest",
    "digest_of_blocks",
    "digest_of_bytes",
    "sha256_of",
]

Buffer = bytes | bytearray | memoryview
DigestAlgorithm = Literal["blake3", "sha256"]

BLOCK_BYTES: Final = 1 << 20
"""Bytes in a block. 1 MiB stays in a core's L2 cache while it is hashed and written."""

DIGEST_BYTES: Final = 32
"""Both algorithms give 256 bits."""

DIGEST_ALGORITHMS: Final[tuple[DigestAlgorithm, ...]] = ("blake3", "sha256")

_TEXT = re.compile(r"(blake3|sha256):([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class Digest:
    """An algorithm and its 32 bytes; written as ``blake3:<64 hex digits>``."""

    algorithm: DigestAlgorithm
    value: bytes

    @classmethod
    def parse(cls, text: str) -> Digest:
        """Read the written form.

        Raises:
            FormatError: the text is not ``<algorithm>:<64 lower-case hex digits>``.
        """
        match = _TEXT.fullmatch(text)
        if match is None:
            raise FormatError(f"{text[:80]!r} is not a digest; expected blake3: or sha256: and 64 hex digits")
        algorithm: DigestAlgorithm = "blake3" if match[1] == "blake3" else "sha256"
        return cls(algorithm, bytes.fromhex(match[2]))

    def matches(self, other: Digest) -> bool:
        """Whether both name the same algorithm and bytes, compared in constant time."""
        return self.algorithm == other.algorithm and hmac.compare_digest(self.value, other.value)

    def __str__(self) -> str:
        return f"{self.algorithm}:{self.value.hex()}"


def block_digest(block: Buffer) -> bytes:
    """BLAKE3 of one block of stored bytes, 32 bytes."""
    return blake3(block).digest()


def digest_of_blocks(block_digests: Buffer) -> Digest:
    """A file's ``blake3`` digest, from the concatenated digests of its blocks."""
    return Digest("blake3", blake3(block_digests).digest())


def sha256_of(data: Buffer) -> Digest:
    """Plain SHA-256, which pins control documents."""
    return Digest("sha256", hashlib.sha256(data).digest())


def digest_of_bytes(algorithm: DigestAlgorithm, data: Buffer) -> Digest:
    """The file digest of ``data`` as the whole content of one file."""
    hasher = FileHasher(algorithm)
    hasher.update(data)
    return hasher.digest()


class FileHasher:
    """Digests one file's stored bytes, handed over in order and in pieces of any size.

    One thread feeds it. With ``blake3`` it keeps each finished block's digest; with
    ``sha256`` `block_digests` stays empty.
    """

    def __init__(self, algorithm: DigestAlgorithm) -> None:
        if algorithm not in DIGEST_ALGORITHMS:
            raise ConfigError(f"digest must be one of {DIGEST_ALGORITHMS}, got {algorithm!r}")
        self._algorithm: DigestAlgorithm = algorithm
        self._sha256 = hashlib.sha256() if algorithm == "sha256" else None
        self._blocks = bytearray()
        self._open: Any = None
        self._open_bytes = 0

    def update(self, data: Buffer) -> None:
        """Take the file's next bytes."""
        if self._sha256 is not None:
            self._sha256.update(data)
            return
        view = memoryview(data)
        if view.nbytes == 0:
            return  # an empty array's memory cannot be cast
        view = view.cast("B")
        position = 0
        while position < len(view):
            piece = view[position : position + BLOCK_BYTES - self._open_bytes]
            position += len(piece)
            if self._open_bytes == 0 and len(piece) == BLOCK_BYTES:
                self._blocks += blake3(piece).digest()
                continue
            if self._open_bytes == 0:
                self._open = blake3()
            self._open.update(piece)
            self._open_bytes += len(piece)
            if self._open_bytes == BLOCK_BYTES:
                self._close_block()

    def digest(self) -> Digest:
        """The digest of all that was fed; nothing may be fed afterwards."""
        if self._sha256 is not None:
            return Digest("sha256", self._sha256.digest())
        if self._open_bytes:
            self._close_block()
        return digest_of_blocks(bytes(self._blocks))

    @property
    def block_digests(self) -> bytes:
        """The concatenated block digests (``blake3``, complete after `digest`), else empty."""
        return bytes(self._blocks)

    def _close_block(self) -> None:
        self._blocks += self._open.digest()
        self._open = None
        self._open_bytes = 0
