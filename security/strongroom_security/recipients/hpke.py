"""Recipients that are public keys: who has only the public half can seal, and never open.

HPKE (RFC 9180), single-shot base mode, with `recipient_info` of the context as ``info`` and no
associated data; a wrapped key is the encapsulated key and then the ciphertext. Every suite has
HKDF-SHA-256 and AES-256-GCM; what differs is the KEM (`docs/format.md`, on keyrings):

========================  ===============================  ================================
kind                      KEM                              key files
========================  ===============================  ================================
``hpke-x25519``           DHKEM(X25519, HKDF-SHA256)       PEM: PKCS #8, SubjectPublicKeyInfo
``hpke-p256``             DHKEM(P-256, HKDF-SHA256)        the same; the FIPS profile's
``hpke-mlkem768-x25519``  MLKEM768-X25519, that is X-Wing  armour like PEM's, see below
========================  ===============================  ================================

No standard form of file exists for the hybrid KEM's keys, so ours holds, in base64 between lines that
say ``MLKEM768-X25519 PRIVATE KEY`` or ``... PUBLIC KEY``, what X-Wing defines: a seed of 32 bytes, which
SHAKE256 expands to the ML-KEM seed (64) and the X25519 key (32); or the ML-KEM key (1,184) and the
X25519 key (32).

A private key of the first two kinds may be encrypted under a passphrase. The passphrase is asked of
nobody, since a restore has nobody to ask: it stands in a file of mode 0600 that the environment
variable ``STRONGROOM_KEY_PASSPHRASE_FILE`` names. A policy or a keyring cannot name it.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, get_args

from cryptography.exceptions import InvalidTag, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey, MLKEM768PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hpke import (
    AEAD,
    KDF,
    KEM,
    MLKEM768X25519PrivateKey,
    MLKEM768X25519PublicKey,
    Suite,
)

from strongroom.errors import ConfigError, IntegrityError
from strongroom_security.fields import recipient_info
from strongroom_security.recipients.base import KEY_BYTES, opaque_id
from strongroom_security.recipients.keyfiles import (
    create_private,
    create_public,
    read_private,
    read_public,
)
from strongroom_security.secret import Secret

if TYPE_CHECKING:
    from strongroom_security.fields import Context

__all__ = [
    "PASSPHRASE_FILE",
    "HpkePrivateKey",
    "HpkePublicKey",
    "HpkeSuite",
    "create_key_pair",
    "read_key",
]

PASSPHRASE_FILE: Final = "STRONGROOM_KEY_PASSPHRASE_FILE"  # noqa: S105 - names no secret
"""The environment variable that names the file with the passphrase of encrypted private keys."""

HpkeSuite = Literal["x25519", "p256", "mlkem768-x25519"]

_LIMIT_BYTES: Final = 16384
_PASSPHRASE_LIMIT_BYTES: Final = 1024
_SEED_BYTES: Final = 32
_MLKEM_SEED_BYTES: Final = 64
_MLKEM_PUBLIC_BYTES: Final = 1184
_X25519_BYTES: Final = 32

_KEM: Final[dict[HpkeSuite, KEM]] = {
    "x25519": KEM.X25519,
    "p256": KEM.P256,
    "mlkem768-x25519": KEM.MLKEM768_X25519,
}

_HYBRID = re.compile(
    rb"-----BEGIN MLKEM768-X25519 (PRIVATE|PUBLIC) KEY-----\n([A-Za-z0-9+/=\n]+)"
    rb"-----END MLKEM768-X25519 \1 KEY-----\n"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Key:
    """A key as the library has it; its types have no parent in common.

    Attributes:
        public_bytes: the public key as HPKE writes it (RFC 9180, SerializePublicKey).
        private: None: only the public half is here.
    """

    suite: HpkeSuite
    public: Any
    public_bytes: bytes
    private: Any = None

    def __repr__(self) -> str:
        return f"<HPKE key of suite {self.suite}>"


class HpkePublicKey:
    """A recipient and no identity. It waits for nothing, so no bound applies."""

    def __init__(self, key: _Key, *, uri: str) -> None:
        self._key = key
        self._suite = Suite(_KEM[key.suite], KDF.HKDF_SHA256, AEAD.AES_256_GCM)
        self.kind: Final = f"hpke-{key.suite}"
        self.uri: Final = uri
        self.id: Final = opaque_id(self.kind, key.public_bytes)

    def wrap(self, key: Secret, context: Context, *, within_s: float) -> bytes:
        try:
            return self._suite.encrypt(key.reveal(), self._key.public, info=recipient_info(context))
        except ValueError:  # a point of small order, which agrees on the same secret with everybody
            raise ConfigError(
                f"nothing can be sealed to {self.uri}: it is no public key in earnest"
            ) from None

    def __repr__(self) -> str:
        return f"{type(self).__name__}(id={self.id!r}, uri={self.uri!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} is not pickled or copied; read its file where it is needed")


class HpkePrivateKey(HpkePublicKey):
    """A recipient and identity."""

    def unwrap(self, wrapped: bytes, context: Context, *, within_s: float) -> Secret:
        try:
            opened = self._suite.decrypt(wrapped, self._key.private, info=recipient_info(context))
        except InvalidTag:
            raise IntegrityError(
                f"nobody sealed this key to {self.uri} for this checkpoint: the wrapped bytes were changed, "
                f"or come from another checkpoint"
            ) from None
        # Anyone can seal to a public key, so what was sealed need not be a key.
        if len(opened) != KEY_BYTES:
            raise IntegrityError(
                f"{len(opened)} bytes were sealed to {self.uri}, where a key of {KEY_BYTES} was expected"
            )
        return Secret(opened)


def create_key_pair(
    path: Path, suite: HpkeSuite = "x25519", *, passphrase: Secret | None = None
) -> HpkePrivateKey:
    """Draw a key pair and write its halves to ``<path>.key`` (mode 0600) and ``<path>.pub``.

    Args:
        path: of both files, without their endings; the folder exists.
        suite: of HPKE.
        passphrase: encrypts the private key's file.

    Raises:
        ConfigError: a file exists or cannot be written, or this build of ``cryptography`` lacks the suite.
    """
    if suite not in get_args(HpkeSuite):
        raise ConfigError(f"an HPKE suite is one of {', '.join(get_args(HpkeSuite))}, got {suite!r:.60}")
    if suite == "mlkem768-x25519":
        if passphrase is not None:
            raise ConfigError(
                "no form of file exists for an encrypted mlkem768-x25519 key; keep it unencrypted on a "
                "medium that is, or choose x25519 or p256"
            )
        seed = Secret.draw(_SEED_BYTES)
        if isinstance(key := _hybrid_from_seed(seed), ConfigError):
            raise key
        private, public = _armoured("PRIVATE", seed.reveal()), _armoured("PUBLIC", key.public_bytes)
    else:
        key = _drawn(suite)
        private, public = _pem(key, passphrase)
    private_path, public_path = path.with_name(f"{path.name}.key"), path.with_name(f"{path.name}.pub")
    create_private(private_path, private)
    try:
        create_public(public_path, public)
    except ConfigError:
        private_path.unlink()  # nothing was sealed to it yet, and half a pair is of no use
        raise
    return HpkePrivateKey(key, uri=f"hpke:{private_path}")


def read_key(path: Path, *, uri: str | None = None) -> HpkePublicKey:
    """The key of a file; an `HpkePrivateKey` where the file holds a private key.

    Args:
        path: of the file.
        uri: as the policy names it; without one, ``hpke:`` and the path.

    Raises:
        ConfigError: it cannot be read, holds no key of a known suite, is a private key that others can
            reach, or one that is encrypted and whose passphrase is not at hand.
    """
    uri = uri or f"hpke:{path}"
    if not _holds_private(path):
        if isinstance(half := _parse_public(read_public(path, limit_bytes=_LIMIT_BYTES), path), ConfigError):
            raise half
        return HpkePublicKey(half, uri=uri)
    # Read again, since only now it is known that stricter rules apply; what is used was read under them.
    # No frame that an error passes through holds the bytes, and errors are returned from those that do.
    data = Secret(read_private(path, limit_bytes=_LIMIT_BYTES))
    passphrase = _passphrase(path) if _is_encrypted(data) else None
    if isinstance(key := _parse_private(data, passphrase, path), ConfigError):
        raise key
    return HpkePrivateKey(key, uri=uri)


def _holds_private(path: Path) -> bool:
    return b"PRIVATE KEY" in read_public(path, limit_bytes=_LIMIT_BYTES)


def _is_encrypted(data: Secret) -> bool:
    return b"ENCRYPTED" in data.reveal()


def _drawn(suite: HpkeSuite) -> _Key:
    if suite == "x25519":
        return _key_of(X25519PrivateKey.generate())
    return _key_of(ec.generate_private_key(ec.SECP256R1()))


def _key_of(private: X25519PrivateKey | ec.EllipticCurvePrivateKey) -> _Key:
    half = _public_half(private.public_key())
    return _Key(suite=half.suite, public=half.public, public_bytes=half.public_bytes, private=private)


def _public_half(public: X25519PublicKey | ec.EllipticCurvePublicKey) -> _Key:
    if isinstance(public, X25519PublicKey):
        return _Key(suite="x25519", public=public, public_bytes=public.public_bytes_raw())
    point = public.public_bytes(serialization.Encoding.X962, serialization.PublicFormat.UncompressedPoint)
    return _Key(suite="p256", public=public, public_bytes=point)


def _hybrid_from_seed(seed: Secret) -> _Key | ConfigError:
    expanded = hashlib.shake_256(seed.reveal()).digest(_MLKEM_SEED_BYTES + _X25519_BYTES)
    try:
        mlkem = MLKEM768PrivateKey.from_seed_bytes(expanded[:_MLKEM_SEED_BYTES])
    except UnsupportedAlgorithm:
        return _no_mlkem()
    x25519 = X25519PrivateKey.from_private_bytes(expanded[_MLKEM_SEED_BYTES:])
    private = MLKEM768X25519PrivateKey(mlkem, x25519)
    return _Key(
        suite="mlkem768-x25519",
        public=private.public_key(),
        public_bytes=mlkem.public_key().public_bytes_raw() + x25519.public_key().public_bytes_raw(),
        private=private,
    )


def _hybrid_from_public(raw: bytes) -> _Key | ConfigError:
    try:
        mlkem = MLKEM768PublicKey.from_public_bytes(raw[:_MLKEM_PUBLIC_BYTES])
    except UnsupportedAlgorithm:
        return _no_mlkem()
    x25519 = X25519PublicKey.from_public_bytes(raw[_MLKEM_PUBLIC_BYTES:])
    return _Key(suite="mlkem768-x25519", public=MLKEM768X25519PublicKey(mlkem, x25519), public_bytes=raw)


def _no_mlkem() -> ConfigError:
    return ConfigError(
        "this build of cryptography has no ML-KEM-768, which mlkem768-x25519 keys need; install a wheel "
        "from PyPI, or use another suite"
    )


def _parse_public(data: bytes, path: Path) -> _Key | ConfigError:
    try:
        hybrid = _unarmoured(data, _MLKEM_PUBLIC_BYTES + _X25519_BYTES)
        if hybrid is not None:
            return _hybrid_from_public(hybrid)
        public = serialization.load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm):
        return _no_key(path)
    if isinstance(public, X25519PublicKey) or (
        isinstance(public, ec.EllipticCurvePublicKey) and isinstance(public.curve, ec.SECP256R1)
    ):
        return _public_half(public)
    return _no_key(path)


def _parse_private(data: Secret, passphrase: Secret | None, path: Path) -> _Key | ConfigError:
    try:
        hybrid = _unarmoured(data.reveal(), _SEED_BYTES)
        if hybrid is not None:
            return _hybrid_from_seed(Secret(hybrid))
        private = serialization.load_pem_private_key(
            data.reveal(), passphrase.reveal() if passphrase else None
        )
    except (ValueError, TypeError, UnsupportedAlgorithm):
        if passphrase is not None:
            return ConfigError(
                f"the passphrase in the file that {PASSPHRASE_FILE} names does not open {path}"
            )
        return _no_key(path)
    if isinstance(private, X25519PrivateKey) or (
        isinstance(private, ec.EllipticCurvePrivateKey) and isinstance(private.curve, ec.SECP256R1)
    ):
        return _key_of(private)
    return _no_key(path)


def _no_key(path: Path) -> ConfigError:
    return ConfigError(
        f"{path} holds no key of a known suite: expected PEM of an X25519 or P-256 key, or a key of "
        f"mlkem768-x25519 as create_key_pair writes it"
    )


def _passphrase(path: Path) -> Secret:
    named = os.environ.get(PASSPHRASE_FILE)
    if not named:
        raise ConfigError(
            f"the private key {path} is encrypted; put its passphrase into a file of mode 0600, and that "
            f"file's path into the environment variable {PASSPHRASE_FILE}"
        )
    text = read_private(Path(named), limit_bytes=_PASSPHRASE_LIMIT_BYTES).removesuffix(b"\n")
    if not text:
        raise ConfigError(f"the passphrase file {named} is empty")
    return Secret(text)


def _pem(key: _Key, passphrase: Secret | None) -> tuple[bytes, bytes]:
    """The files of a pair: PKCS #8 and SubjectPublicKeyInfo."""
    private = key.private.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(passphrase.reveal())
        if passphrase
        else serialization.NoEncryption(),
    )
    public = key.public.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return private, public


def _armoured(half: str, raw: bytes) -> bytes:
    text = base64.b64encode(raw).decode()
    lines = [text[start : start + 64] for start in range(0, len(text), 64)]
    label = f"MLKEM768-X25519 {half} KEY"
    return "\n".join([f"-----BEGIN {label}-----", *lines, f"-----END {label}-----", ""]).encode()


def _unarmoured(data: bytes, length_bytes: int) -> bytes | None:
    """What `_armoured` was given; None where the file is of another form.

    Raises:
        ValueError: it has that form and holds something else.
    """
    if b"MLKEM768-X25519" not in data:
        return None
    match = _HYBRID.fullmatch(data)
    if match is None:
        raise ValueError("not the armour of such a key")
    raw = base64.b64decode(match[2].replace(b"\n", b""), validate=True)
    if len(raw) != length_bytes:
        raise ValueError("not the length of such a key")
    return raw
