"""FLOE: one file sealed under a key of its own, any part of which can be opened alone.

The construction is C2SP's `FLOE <https://c2sp.org/FLOE>`_, with AES-256-GCM and HKDF-Expand-SHA-384;
nothing is added to it, so that any implementation opens these files. In its words::

    header    = parameters (10) || IV (32) || header tag (32)
    segment   = final length (4) || nonce (12) || ciphertext || tag (16)
    file      = header || segment || ... || segment

    parameters    = AEAD 0 (1) || KDF 0 (1) || ENC_SEG_LEN (4) || IV length (4)
    KDF(k, p, n)  = HKDF-Expand-SHA-384(k, parameters || IV || p || AAD), n bytes
    header tag    = KDF(DEK, "HEADER_TAG:", 32)
    message key   = KDF(DEK, "MESSAGE_KEY:", 48)
    segment key i = KDF(message key, "DEK:" || i with its low 20 bits cleared (8), 32)
    segment AAD i = i (8) || 1 if it is the last segment, else 0 (1)

Integers are big-endian. The final length is the last segment's own length, and ``ff ff ff ff`` in all
others. The header tag commits to key, IV, parameters and AAD, so it refuses a wrong key before any
segment is looked at. Position and end are bound by the segment's AAD: a segment that was moved,
dropped, repeated or taken from another file does not open.

This module knows neither where keys come from nor what the AAD says (`strongroom_security.fields`),
and trusts its caller for one thing: the length of the file. With the true one (the manifest's) every
truncation is refused; with a false one, when the segment that is taken for the last one is opened.
"""

from __future__ import annotations

import hmac
import mmap
import os
import struct
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from strongroom.contents import SealedReader
from strongroom.errors import ConfigError, FormatError, IntegrityError, SaveError
from strongroom.manifest import SEGMENT_BYTES
from strongroom_security.secret import KEY_BYTES, Secret

if TYPE_CHECKING:
    from strongroom.stores.base import ObjectReader

__all__ = ["PIECE_BYTES", "STRONGROOM", "FloeOpener", "FloeSealer", "Parameters", "open_sealed"]

Buffer = bytes | bytearray | memoryview

PIECE_BYTES: Final = 4 << 20
"""What a sealer hands out at once: a multiple of any page and device block, so that memory, offset in the
file and length are all fit for a write past the page cache."""

_PARAMETERS: Final = struct.Struct(">BBII")
_AES_256_GCM: Final = 0
_HKDF_EXPAND_SHA_384: Final = 0
_HEADER_TAG_BYTES: Final = 32
_MESSAGE_KEY_BYTES: Final = 48

_SEGMENT_HEAD: Final = struct.Struct(">I12s")
_SEGMENT_AAD: Final = struct.Struct(">Q?")
_NONCE_BYTES: Final = 12
_TAG_BYTES: Final = 16
_OVERHEAD_BYTES: Final = _SEGMENT_HEAD.size + _TAG_BYTES
_NOT_FINAL: Final = 0xFFFF_FFFF
_MAX_SEGMENTS: Final = 1 << 40
"""AEAD_MAX_SEGMENTS."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """What FLOE leaves open. Strongroom writes and reads `STRONGROOM` alone; others are for known answers.

    Attributes:
        segment_bytes: ENC_SEG_LEN, the stored length of every segment but the last.
        iv_bytes: FLOE_IV_LEN.
        rotation_bits: AEAD_ROTATION_MASK: a segment key serves 2 to this power of segments.
    """

    segment_bytes: int = SEGMENT_BYTES
    iv_bytes: int = 32
    rotation_bits: int = 20

    def __post_init__(self) -> None:
        if not _OVERHEAD_BYTES < self.segment_bytes <= PIECE_BYTES:
            raise ConfigError(
                f"segments have more than {_OVERHEAD_BYTES} and at most {PIECE_BYTES} bytes, "
                f"got {self.segment_bytes}"
            )

    @property
    def encoded(self) -> bytes:
        """As a header begins with them, and every derived key is bound to them."""
        return _PARAMETERS.pack(_AES_256_GCM, _HKDF_EXPAND_SHA_384, self.segment_bytes, self.iv_bytes)

    @property
    def header_bytes(self) -> int:
        return _PARAMETERS.size + self.iv_bytes + _HEADER_TAG_BYTES

    @property
    def plain_segment_bytes(self) -> int:
        """What every segment but the last holds."""
        return self.segment_bytes - _OVERHEAD_BYTES

    def segments_for(self, plain_bytes: int) -> int:
        """How many segments so many bytes fill. The last one is never empty, but for an empty file."""
        count = max(1, -(-plain_bytes // self.plain_segment_bytes))
        if plain_bytes < 0 or count > _MAX_SEGMENTS:
            raise ConfigError(
                f"a file to seal has 0 to {_MAX_SEGMENTS * self.plain_segment_bytes} bytes, got {plain_bytes}"
            )
        return count


STRONGROOM: Final = Parameters()
"""1 MiB segments: small enough that reading a little fetches little, and large enough that what Python
spends on each does not count."""


class _FileKeys:
    """The keys of one file: header tag at once, segment keys when they are needed. For any thread."""

    def __init__(self, parameters: Parameters, dek: Secret, iv: bytes, aad: bytes) -> None:
        if dek.size_bytes != KEY_BYTES:
            raise ConfigError(f"a file's key has {KEY_BYTES} bytes, got {dek.size_bytes}")
        self._rotation_bits = parameters.rotation_bits
        self._bound_to = parameters.encoded + iv
        self._aad = aad
        self.header: Final = self._bound_to + self._derive(dek, b"HEADER_TAG:", _HEADER_TAG_BYTES)
        self._message_key = Secret(self._derive(dek, b"MESSAGE_KEY:", _MESSAGE_KEY_BYTES))
        self._latest: tuple[int, AESGCM] | None = None

    def _derive(self, key: Secret, purpose: bytes, length_bytes: int) -> bytes:
        info = self._bound_to + purpose + self._aad
        return HKDFExpand(SHA384(), length_bytes, info).derive(key.reveal())

    def aead(self, number: int) -> AESGCM:
        """The cipher for a segment, made once for all that share a key."""
        turn = number >> self._rotation_bits
        # One look: another thread may replace it, and both tuples are right in themselves.
        latest = self._latest
        if latest is None or latest[0] != turn:
            first = turn << self._rotation_bits
            purpose = b"DEK:" + first.to_bytes(8, "big")
            latest = (turn, AESGCM(self._derive(self._message_key, purpose, KEY_BYTES)))
            self._latest = latest
        return latest[1]

    def forget(self) -> None:
        self._message_key.wipe()
        self._latest = None


class FloeSealer:
    """Seals one file; fills `strongroom.sealing.Sealer`.

    Args:
        dek: the file's key, which seals no other.
        aad: what the file is bound to; whoever opens it must say the same.
    """

    def __init__(self, dek: Secret, aad: bytes, *, parameters: Parameters = STRONGROOM) -> None:
        self._parameters = parameters
        self._keys = _FileKeys(parameters, dek, os.urandom(parameters.iv_bytes), aad)
        # Taken by the first use and never given back: of two threads one gets it.
        self._only_use = threading.Lock()
        self._made_in = os.getpid()

    @property
    def header(self) -> bytes:
        return self._keys.header

    def sealed_bytes(self, plain_bytes: int) -> int:
        parameters = self._parameters
        return parameters.header_bytes + plain_bytes + parameters.segments_for(plain_bytes) * _OVERHEAD_BYTES

    def seal(self, pieces: Iterable[Buffer], *, length_bytes: int) -> Iterator[memoryview]:
        """As `Sealer.seal`; each piece but the last is `PIECE_BYTES` long, and begins a page of memory.

        A segment whose bytes lie together in one piece is sealed from where they lie.
        """
        if not self._only_use.acquire(blocking=False):
            raise SaveError("this sealer was used before, and seals one file; take a new one, with a new key")
        if os.getpid() != self._made_in:
            # The parent has it too: one key and one header would seal two files.
            raise SaveError("this sealer was made before a fork; take a new one in the process that seals")
        count = self._parameters.segments_for(length_bytes)
        return self._seal(pieces, length_bytes, last=count - 1)

    def _seal(self, pieces: Iterable[Buffer], length_bytes: int, last: int) -> Iterator[memoryview]:
        # What is handed out, and room for the segment that passes its end. Anonymous mappings begin at
        # a page, and take memory only where they are written to.
        room_bytes = min(PIECE_BYTES + self._parameters.segment_bytes, self.sealed_bytes(length_bytes))
        room = memoryview(mmap.mmap(-1, room_bytes))
        filled = len(self.header)
        room[:filled] = self.header
        try:
            segments = _cut(pieces, length_bytes, self._parameters.plain_segment_bytes)
            for number, plain in enumerate(segments):
                end = filled + len(plain) + _OVERHEAD_BYTES
                self._seal_segment(number, number == last, plain, room[filled:end])
                filled = end
                if filled >= PIECE_BYTES:
                    yield room[:PIECE_BYTES]
                    filled -= PIECE_BYTES
                    room[:filled] = room[PIECE_BYTES : PIECE_BYTES + filled]
            if filled:
                yield room[:filled]
        finally:
            self._keys.forget()

    def _seal_segment(self, number: int, is_final: bool, plain: memoryview, target: memoryview) -> None:
        nonce = os.urandom(_NONCE_BYTES)
        _SEGMENT_HEAD.pack_into(target, 0, len(target) if is_final else _NOT_FINAL, nonce)
        aad = _SEGMENT_AAD.pack(number, is_final)
        self._keys.aead(number).encrypt_into(nonce, plain, aad, target[_SEGMENT_HEAD.size :])


def _cut(pieces: Iterable[Buffer], length_bytes: int, segment_bytes: int) -> Iterator[memoryview]:
    """Cut what is to be sealed into what each segment holds: all alike but the last one.

    A view counts until the next one is asked for. Bytes are copied only where a segment spans pieces.

    Raises:
        SaveError: the pieces are not ``length_bytes`` long together. Too much shows before any of it
            is handed out, and too little before the segment that would lack it.
    """
    gathered = memoryview(bytearray(min(segment_bytes, length_bytes)))
    held = seen = 0
    for piece in pieces:
        view = memoryview(piece)
        if view.nbytes == 0:
            continue
        view = view.cast("B")
        seen += len(view)
        if seen > length_bytes:
            raise SaveError(f"{length_bytes} bytes were announced to be sealed, and {seen} or more came")
        if held:
            taken = min(segment_bytes - held, len(view))
            gathered[held : held + taken] = view[:taken]
            held, view = held + taken, view[taken:]
            if held < segment_bytes:
                continue
            yield gathered
        whole = len(view) - len(view) % segment_bytes
        for start in range(0, whole, segment_bytes):
            yield view[start : start + segment_bytes]
        held = len(view) - whole
        gathered[:held] = view[whole:]
    if seen < length_bytes:
        raise SaveError(f"{length_bytes} bytes were announced to be sealed, and only {seen} came")
    if held or length_bytes == 0:
        yield gathered[:held]


class FloeOpener:
    """Opens one file's segments; fills `strongroom.sealing.Opener`.

    Args:
        dek: the file's key.
        aad: what the file must be bound to.
        header: its first bytes, or better those that the manifest pins.
        stored_bytes: its length; trusted.

    Raises:
        IntegrityError: no sealed file has this header or length, or the header was not made with this
            key for this AAD.
    """

    def __init__(
        self,
        dek: Secret,
        aad: bytes,
        header: bytes,
        stored_bytes: int,
        *,
        parameters: Parameters = STRONGROOM,
    ) -> None:
        _check_parameters(header, parameters)
        iv = header[_PARAMETERS.size : -_HEADER_TAG_BYTES]
        self._keys = _FileKeys(parameters, dek, iv, aad)
        if not hmac.compare_digest(self._keys.header, header):
            raise IntegrityError(
                "the header's tag does not fit: the key is another file's, or the file was sealed for "
                "another place (run, launch, step, attempt or path), or the header was changed"
            )
        self._parameters = parameters
        self._body_bytes = stored_bytes - parameters.header_bytes
        whole, rest = divmod(self._body_bytes, parameters.segment_bytes)
        self._count = whole + (rest > 0)
        if self._body_bytes <= 0 or 0 < rest < _OVERHEAD_BYTES or self._count > _MAX_SEGMENTS:
            raise FormatError(
                f"no sealed file is {stored_bytes} bytes long: it has a header of {parameters.header_bytes}, "
                f"and then segments of {parameters.segment_bytes}, the last one of at least {_OVERHEAD_BYTES}"
            )

    @property
    def size_bytes(self) -> int:
        return self._body_bytes - self._count * _OVERHEAD_BYTES

    @property
    def segment_bytes(self) -> int:
        return self._parameters.plain_segment_bytes

    @property
    def segment_count(self) -> int:
        """At least one; an empty file has one, which holds nothing."""
        return self._count

    def stored_range(self, first: int, count: int) -> tuple[int, int]:
        if not 0 <= first <= first + count <= self._count:
            raise ConfigError(
                f"segments {first} to {first + count - 1} were asked for, of 0 to {self._count - 1}"
            )
        at = self._parameters.header_bytes
        size = self._parameters.segment_bytes
        return at + first * size, at + min((first + count) * size, self._body_bytes)

    def open_into(self, first: int, stored: memoryview, target: memoryview) -> int:
        size = self._parameters.segment_bytes
        left_bytes = self._body_bytes - first * size
        is_whole = len(stored) == left_bytes or (len(stored) < left_bytes and len(stored) % size == 0)
        if first < 0 or len(stored) == 0 or not is_whole:
            raise IntegrityError(
                f"{len(stored)} bytes were read at segment {first} (of 0 to {self._count - 1}), "
                f"which are not whole segments of the file"
            )
        count = -(-len(stored) // size)
        plain_bytes = len(stored) - count * _OVERHEAD_BYTES
        if len(target) < plain_bytes:
            raise ConfigError(f"{plain_bytes} bytes are to be opened into room for {len(target)}")
        filled = 0
        for index in range(count):
            segment = stored[index * size : (index + 1) * size]
            room = target[filled : filled + len(segment) - _OVERHEAD_BYTES]
            self._open_segment(first + index, segment, room)
            filled += len(room)
        return filled

    def _open_segment(self, number: int, segment: memoryview, target: memoryview) -> None:
        is_final = number == self._count - 1
        found, nonce = _SEGMENT_HEAD.unpack_from(segment)
        expected = len(segment) if is_final else _NOT_FINAL
        if found != expected:
            raise IntegrityError(
                f"segment {number} (of 0 to {self._count - 1}) has {found:#x} in its length field, "
                f"expected {expected:#x}: it is damaged, or the file does not end where it did"
            )
        aad = _SEGMENT_AAD.pack(number, is_final)
        try:
            self._keys.aead(number).decrypt_into(nonce, segment[_SEGMENT_HEAD.size :], aad, target)
        except InvalidTag:
            # GCM decrypts before it knows: what it wrote is whatever an attacker made of it.
            target[:] = bytes(len(target))
            raise IntegrityError(
                f"segment {number} (of 0 to {self._count - 1}) is not what was sealed there: it is damaged, "
                f"or comes from another place or file"
            ) from None


def _check_parameters(header: bytes, parameters: Parameters) -> None:
    if len(header) != parameters.header_bytes:
        raise FormatError(
            f"a sealed file's header has {parameters.header_bytes} bytes, and {len(header)} were found"
        )
    if header[: _PARAMETERS.size] != parameters.encoded:
        aead, kdf, segment_bytes, iv_bytes = _PARAMETERS.unpack_from(header)
        raise FormatError(
            f"the header asks for AEAD {aead}, KDF {kdf}, segments of {segment_bytes} bytes and an IV of "
            f"{iv_bytes}; only AEAD {_AES_256_GCM} (AES-256-GCM), KDF {_HKDF_EXPAND_SHA_384} "
            f"(HKDF-Expand-SHA-384), segments of {parameters.segment_bytes} and an IV of "
            f"{parameters.iv_bytes} are opened"
        )


def open_sealed(stored: ObjectReader, dek: Secret, aad: bytes) -> SealedReader:
    """Read anywhere in what a sealed object of any store holds; closes the reader that it was given.

    Header and length are the object's own. That is fine for a file by itself; where a manifest pins
    both, build a `FloeOpener` with what it pins, and a `SealedReader` on that.

    Raises:
        IntegrityError: as `FloeOpener`.
    """
    header = memoryview(bytearray(STRONGROOM.header_bytes))
    found = stored.read_into(0, header)
    return SealedReader(stored, FloeOpener(dek, aad, bytes(header[:found]), stored.size_bytes))
