"""Keys under keys: a checkpoint's key wraps its files' keys, and ranks hand files' keys to one another.

It owns the bytes of both (`docs/format.md`, on keyrings), and neither stores nor sends them::

    wrapping key = HKDF-SHA-384(IKM = checkpoint's key, no salt, info = wrap_info, 32 bytes)
    wrapped key  = nonce (12) || AES-256-GCM(wrapping key, nonce, file's key, AAD = path) (32 + 16)

    handed over  = HPKE single-shot to a one-off key, info = handover_info, no AAD, of
                   generation (4) || { length of path (4) || path || file's key (32) } ...

Paths are UTF-8, as stored under ``data/``; integers are big-endian; the paths are sorted, and each stands
once. The suite of the hand-over is DHKEM(P-256, HKDF-SHA256), HKDF-SHA256, AES-256-GCM: the one that
every profile allows, so that nothing has to be agreed on first.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NoReturn

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from strongroom import layout
from strongroom.errors import ConfigError, FormatError, IntegrityError, NoKeyError
from strongroom_security.fields import Context, handover_info, wrap_info
from strongroom_security.keyring import WRAPPED_KEY_BYTES
from strongroom_security.secret import KEY_BYTES, Secret

__all__ = ["CheckpointKey", "HandOverKey", "HandedOver", "hand_over"]

_NONCE_BYTES: Final = 12
_LENGTH_BYTES: Final = 4
_MAX_HANDED_BYTES: Final = 256 << 20
"""As a keyring's bound: the keys of a million files."""

_SUITE: Final = Suite(KEM.P256, KDF.HKDF_SHA256, AEAD.AES_256_GCM)


class CheckpointKey:
    """The key of one attempt, which every recipient wraps, and under which its files' keys are wrapped.

    Args:
        secret: the key's bytes.
        context: of the attempt.
    """

    def __init__(self, secret: Secret, context: Context) -> None:
        if secret.size_bytes != KEY_BYTES:
            raise ConfigError(f"a checkpoint's key has {KEY_BYTES} bytes, got {secret.size_bytes}")
        self.secret: Final = secret
        hkdf = HKDF(algorithm=SHA384(), length=KEY_BYTES, salt=None, info=wrap_info(context))
        self._aead = AESGCM(hkdf.derive(secret.reveal()))

    @classmethod
    def draw(cls, context: Context) -> CheckpointKey:
        """A new one, from the operating system's generator."""
        return cls(Secret.draw(KEY_BYTES), context)

    def wrap(self, path: str, key: Secret) -> bytes:
        """A file's key, wrapped: `WRAPPED_KEY_BYTES` bytes, others on every call.

        The nonce is random. A checkpoint of a million files, wrapped anew a hundred times under one key,
        has two equal ones with a chance of 2^-44.
        """
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + self._aead.encrypt(nonce, key.reveal(), path.encode())

    def unwrap(self, path: str, wrapped: bytes) -> Secret:
        """A file's key.

        Raises:
            IntegrityError: it was not wrapped under this key for this path.
        """
        if len(wrapped) != WRAPPED_KEY_BYTES:
            raise IntegrityError(
                f"the wrapped key of {path} has {len(wrapped)} bytes; expected {WRAPPED_KEY_BYTES}"
            )
        try:
            key = self._aead.decrypt(wrapped[:_NONCE_BYTES], wrapped[_NONCE_BYTES:], path.encode())
        except InvalidTag:
            raise IntegrityError(
                f"the wrapped key of {path} is not what was wrapped under the checkpoint's key: it was "
                f"changed, or comes from another file or checkpoint"
            ) from None
        return Secret(key)

    def __repr__(self) -> str:
        return "<CheckpointKey>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a checkpoint's key is not pickled or copied; recipients wrap it")


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedOver:
    """What one rank handed to another.

    Attributes:
        generation: of the keyring that the keys come from; 0 while the checkpoint is being saved.
        keys: by path, as stored.
    """

    generation: int
    keys: Mapping[str, Secret]


class HandOverKey:
    """A key pair for one save or restore; fills `strongroom.sealing.OneOff`."""

    def __init__(self, private: ec.EllipticCurvePrivateKey) -> None:
        self._private = private
        self._public = private.public_key().public_bytes(
            serialization.Encoding.X962, serialization.PublicFormat.UncompressedPoint
        )

    @classmethod
    def draw(cls) -> HandOverKey:
        """A new one."""
        return cls(ec.generate_private_key(ec.SECP256R1()))

    @property
    def public(self) -> bytes:
        """A point of P-256, uncompressed: 65 bytes."""
        return self._public

    def open(self, handed: bytes, context: Context) -> HandedOver | None:
        """What `hand_over` sealed; None where it was not sealed to this key for this attempt."""
        if len(handed) > _MAX_HANDED_BYTES:
            return None
        try:
            return _unpacked(_SUITE.decrypt(handed, self._private, info=handover_info(context)))
        except (InvalidTag, FormatError):
            return None

    def __repr__(self) -> str:
        return "<HandOverKey>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a one-off key is not pickled or copied; only its public half travels")


def hand_over(public: bytes, handed: HandedOver, context: Context) -> bytes:
    """Seal files' keys to another rank's one-off key.

    Raises:
        NoKeyError: the public key is none, or there are more keys than are opened. No `IntegrityError`:
            this says something of another rank, and nothing of the checkpoint.
    """
    try:
        key = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), public)
    except ValueError:
        raise NoKeyError(
            f"{len(public)} bytes that are no point of P-256 came as a rank's one-off key, so it can be "
            f"handed no keys; see that every rank runs the same release, then do it again"
        ) from None
    packed = _packed(handed)
    try:
        sealed = _SUITE.encrypt(packed, key, info=handover_info(context))
    finally:
        packed[:] = bytes(len(packed))
    if len(sealed) > _MAX_HANDED_BYTES:
        raise NoKeyError(
            f"{len(handed.keys)} keys come to more than the {_MAX_HANDED_BYTES} bytes that a rank is handed; "
            f"write fewer files"
        )
    return sealed


def _packed(handed: HandedOver) -> bytearray:
    packed = bytearray(handed.generation.to_bytes(_LENGTH_BYTES, "big"))
    for path in sorted(handed.keys):
        name = path.encode()
        packed += len(name).to_bytes(_LENGTH_BYTES, "big")
        packed += name
        packed += handed.keys[path].reveal()
    return packed


def _unpacked(packed: bytes) -> HandedOver:
    """Raises FormatError: `_packed` never gives such bytes."""
    generation = int.from_bytes(packed[:_LENGTH_BYTES], "big")
    keys: dict[str, Secret] = {}
    position = _LENGTH_BYTES
    last = ""
    while position < len(packed):
        start = position + _LENGTH_BYTES
        end = start + int.from_bytes(packed[position:start], "big")
        position = end + KEY_BYTES
        if position > len(packed):
            raise FormatError("ends within a key")
        try:
            path = layout.check_relative_path(packed[start:end].decode())
        except UnicodeDecodeError:
            raise FormatError("a path is not UTF-8") from None
        if path <= last:
            raise FormatError("the paths are not in order")
        keys[path] = Secret(packed[end:position])
        last = path
    if position != len(packed) or generation > layout.MAX_KEYRING:
        raise FormatError("is too short, or of a generation that no keyring has")
    return HandedOver(generation=generation, keys=keys)
