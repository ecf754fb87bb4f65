"""FLOE by the letter of C2SP's FLOE.md: slow, in whole files, and sharing nothing with the product.

HKDF-Expand comes from the standard library, and AES-GCM by another interface than the product uses. IV
and nonces may be given, so that a vector is the same each time that it is made; what is sealed for
real draws them.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Callable

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

MIB = 1 << 20
NOT_FINAL = b"\xff\xff\xff\xff"
Random = Callable[[int], bytes]


def i2be(value: int, length: int) -> bytes:
    return value.to_bytes(length, "big")


def param_encode(segment_bytes: int) -> bytes:
    return i2be(0, 1) + i2be(0, 1) + i2be(segment_bytes, 4) + i2be(32, 4)


def hkdf_expand(key: bytes, info: bytes, length: int) -> bytes:
    done = block = b""
    for counter in range(1, -(-length // 48) + 1):
        block = hmac.new(key, block + info + i2be(counter, 1), hashlib.sha384).digest()
        done += block
    return done[:length]


class File:
    """The keys of one file: `startEncryption` and `startDecryption`."""

    def __init__(
        self, key: bytes, aad: bytes, iv: bytes, segment_bytes: int, rotation_mask: int = 20
    ) -> None:
        self.segment_bytes = segment_bytes
        self.rotation_mask = rotation_mask
        self.iv = iv
        self.aad = aad
        tag = self.floe_kdf(key, b"HEADER_TAG:", 32)
        self.header = param_encode(segment_bytes) + iv + tag
        self.message_key = self.floe_kdf(key, b"MESSAGE_KEY:", 48)

    def floe_kdf(self, key: bytes, purpose: bytes, length: int) -> bytes:
        return hkdf_expand(key, param_encode(self.segment_bytes) + self.iv + purpose + self.aad, length)

    def derive_key(self, position: int) -> bytes:
        masked = position >> self.rotation_mask << self.rotation_mask
        return self.floe_kdf(self.message_key, b"DEK:" + i2be(masked, 8), 32)

    def encrypt_segment(self, plaintext: bytes, position: int, is_final: bool, random: Random) -> bytes:
        iv = random(12)
        cipher = Cipher(algorithms.AES(self.derive_key(position)), modes.GCM(iv)).encryptor()
        cipher.authenticate_additional_data(i2be(position, 8) + (b"\x01" if is_final else b"\x00"))
        ciphertext = cipher.update(plaintext) + cipher.finalize()
        head = i2be(len(plaintext) + 32, 4) if is_final else NOT_FINAL
        return head + iv + ciphertext + cipher.tag

    def decrypt_segment(self, segment: bytes, position: int, is_final: bool) -> bytes:
        if is_final:
            assert 32 <= len(segment) <= self.segment_bytes
            assert segment[:4] == i2be(len(segment), 4)
        else:
            assert len(segment) == self.segment_bytes
            assert segment[:4] == NOT_FINAL
        iv, ciphertext, tag = segment[4:16], segment[16:-16], segment[-16:]
        cipher = Cipher(algorithms.AES(self.derive_key(position)), modes.GCM(iv, tag)).decryptor()
        cipher.authenticate_additional_data(i2be(position, 8) + (b"\x01" if is_final else b"\x00"))
        return cipher.update(ciphertext) + cipher.finalize()


def seal(
    key: bytes, aad: bytes, plain: bytes, *, segment_bytes: int = MIB, random: Random = os.urandom
) -> bytes:
    """A whole file: full segments, and a last one that is empty only where the file is."""
    return b"".join(seal_parts(key, aad, plain, segment_bytes=segment_bytes, random=random))


def seal_parts(
    key: bytes, aad: bytes, plain: bytes, *, segment_bytes: int = MIB, random: Random = os.urandom
) -> list[bytes]:
    """As `seal`: the header, and each segment."""
    file = File(key, aad, random(32), segment_bytes)
    held = segment_bytes - 32
    pieces = [plain[at : at + held] for at in range(0, len(plain), held)] or [b""]
    last = len(pieces) - 1
    return [
        file.header,
        *(file.encrypt_segment(piece, at, at == last, random) for at, piece in enumerate(pieces)),
    ]


def unseal(
    key: bytes, aad: bytes, sealed: bytes, *, segment_bytes: int = MIB, rotation_mask: int = 20
) -> bytes:
    """What a whole file holds."""
    header, body = sealed[:74], sealed[74:]
    file = File(key, aad, header[10:42], segment_bytes, rotation_mask)
    assert header == file.header
    segments = [body[at : at + segment_bytes] for at in range(0, len(body), segment_bytes)]
    last = len(segments) - 1
    return b"".join(file.decrypt_segment(segment, at, at == last) for at, segment in enumerate(segments))
