"""The keys of notes: who may have signed one, in the specification's text form, and signing. Pure.

Of C2SP signed-note's types these are known: Ed25519 (0x01), ECDSA (0x02, on P-256), and the cosignatures of
C2SP tlog-cosignature, by Ed25519 (0x04) and, to verify only, by ML-DSA-44 (0x06). An ECDSA key's id is cut
off the SHA-256 of its public key alone (SPKI in DER), as transparency-dev's witness and Sigstore's Rekor have
it; every other id covers the name and the type too. There is no text form of a private key: the
specification has none.
"""

from __future__ import annotations

import enum
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from typing import Final, NoReturn

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from strongroom.errors import ConfigError, FormatError, IntegrityError, UntrustedError
from strongroom_security.tlog.checkpoints import Checkpoint
from strongroom_security.tlog.edwards import is_of_small_order
from strongroom_security.tlog.notes import (
    Note,
    NoteSignature,
    check_key_name,
    decode_base64,
    encode_base64,
)

__all__ = ["KeyType", "NoteSigner", "Verified", "VerifierKey", "verify_note"]

_ED25519_BYTES: Final = 32
_ML_DSA_44_BYTES: Final = 1312
"""FIPS 204, table 2."""
_STAMP_BYTES: Final = 8
_KEY_ID: Final = re.compile(r"[0-9a-f]{8}")
_MAX_KEY_TEXT: Final = 4096
_SUBTREE_LABEL: Final = b"subtree/v1\n\x00"


class KeyType(enum.IntEnum):
    """The signature type byte of a key."""

    ED25519 = 0x01
    ECDSA = 0x02
    COSIGNATURE = 0x04
    COSIGNATURE_ML_DSA_44 = 0x06

    @property
    def is_cosignature(self) -> bool:
        """Whether it is a witness's, and says when."""
        return self in (KeyType.COSIGNATURE, KeyType.COSIGNATURE_ML_DSA_44)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierKey:
    """A public key under a name.

    Attributes:
        name: whose it is; a URL without its scheme, by custom.
        type: of its signatures.
        public: the key: raw for Ed25519 and ML-DSA-44, SPKI in DER for ECDSA.

    Raises:
        FormatError: it is no such key.
    """

    name: str
    type: KeyType
    public: bytes

    def __post_init__(self) -> None:
        check_key_name(self.name)
        if self.type is KeyType.ECDSA:
            _p256(self.public, self.name)
            return
        expected = _ML_DSA_44_BYTES if self.type is KeyType.COSIGNATURE_ML_DSA_44 else _ED25519_BYTES
        if len(self.public) != expected:
            raise FormatError(
                f"the key {self.name} of type {self.type:#04x} has {expected} bytes, found {len(self.public)}"
            )
        if expected == _ED25519_BYTES and is_of_small_order(self.public):
            raise FormatError(
                f"the key {self.name} is a point of small order, by which anybody can sign anything"
            )

    @property
    def key_id(self) -> bytes:
        """Four bytes that tell it from other keys of its name."""
        if self.type is KeyType.ECDSA:
            return sha256(self.public).digest()[:4]
        return sha256(self.name.encode() + b"\n" + bytes([self.type]) + self.public).digest()[:4]

    def __str__(self) -> str:
        """``<name>+<key id in hex>+<base64 of type and key>``, the specification's text form."""
        return f"{self.name}+{self.key_id.hex()}+{encode_base64(bytes([self.type]) + self.public)}"

    @classmethod
    def parse(cls, text: str) -> VerifierKey:
        """A key in its text form.

        Raises:
            FormatError: it is none, is of an unknown type, or says another id than it has.
        """
        name, _, rest = text.partition("+")
        key_id, _, encoded = rest.partition("+")
        if len(text) > _MAX_KEY_TEXT or not _KEY_ID.fullmatch(key_id):
            raise FormatError(
                f"a verifier key is written NAME+KEYID+BASE64 with eight lower-case hex digits, found "
                f"{text[:80]!r}"
            )
        data = decode_base64(encoded, f"the verifier key {name[:80]!r}")
        if not data or data[0] not in list(KeyType):
            raise FormatError(
                f"the verifier key {name[:80]!r} is of type {data[:1].hex() or 'none'}; known are "
                + ", ".join(f"{each:02x}" for each in KeyType)
            )
        key = cls(name=name, type=KeyType(data[0]), public=data[1:])
        if key.key_id.hex() != key_id:
            raise FormatError(
                f"the verifier key {name} says that its id is {key_id}; it is {key.key_id.hex()}"
            )
        return key

    def matches(self, signature: NoteSignature) -> bool:
        """Whether a signature says that it is by this key."""
        return (signature.name, signature.key_id) == (self.name, self.key_id)

    def check(self, text: str, value: bytes) -> int:
        """Check a signature over a note's text; when it was made, in seconds since the epoch, or 0 if it
        does not say.

        Raises:
            IntegrityError: it is not by this key, over this text.
        """
        stamp_s, value = (0, value) if not self.type.is_cosignature else _stamped(value, self.name)
        try:
            self._verify(text, value, stamp_s)
        except (InvalidSignature, ValueError):
            raise IntegrityError(
                f"a signature that says it is by {self.name} ({self.key_id.hex()}) is not over this text"
            ) from None
        except UnsupportedAlgorithm:
            raise ConfigError(
                f"the key {self.name} is of type {self.type:#04x}, for which the package cryptography that "
                "is installed has no code; use one that has, or another key"
            ) from None
        return stamp_s

    def _verify(self, text: str, value: bytes, stamp_s: int) -> None:
        if self.type is KeyType.ECDSA:
            _p256(self.public, self.name).verify(value, text.encode(), ec.ECDSA(hashes.SHA256()))
        elif self.type is KeyType.COSIGNATURE_ML_DSA_44:
            from cryptography.hazmat.primitives.asymmetric.mldsa import MLDSA44PublicKey

            head = Checkpoint.parse(text, "the cosigned text")
            message = _cosigned_message(self.name, stamp_s, head)
            MLDSA44PublicKey.from_public_bytes(self.public).verify(value, message)
        else:
            message = text.encode()
            if self.type is KeyType.COSIGNATURE:
                message = f"cosignature/v1\ntime {stamp_s}\n".encode() + message
            Ed25519PublicKey.from_public_bytes(self.public).verify(value, message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """A signature that holds.

    Attributes:
        key: whose it is.
        signature: as it stands in the note.
        stamp_s: when a cosignature was made, in seconds since the epoch; 0 for the others.
    """

    key: VerifierKey
    signature: NoteSignature
    stamp_s: int


def verify_note(note: Note, keys: Iterable[VerifierKey], what: str) -> tuple[Verified, ...]:
    """The signatures of a note that are by these keys, one a key; those by other keys are passed over.

    Raises:
        IntegrityError: one that says it is by one of the keys is not.
        UntrustedError: none is by any of the keys.
    """
    known = list(keys)
    found: list[Verified] = []
    for signature in note.signatures:
        for key in known:
            if key.matches(signature):
                stamp_s = key.check(note.text, signature.value)
                if all(each.key != key for each in found):
                    found.append(Verified(key=key, signature=signature, stamp_s=stamp_s))
    if not found:
        expected = ", ".join(f"{key.name} ({key.key_id.hex()})" for key in known) or "nobody"
        signers = ", ".join(f"{each.name} ({each.key_id.hex()})" for each in note.signatures[:8])
        raise UntrustedError(f"{what} is signed by {signers}; expected {expected}")
    return tuple(found)


class NoteSigner:
    """A private key that signs notes under a name.

    Args:
        name: whose key it is.
        private: Ed25519, or ECDSA on P-256.

    Raises:
        ConfigError: it is another kind of key.
        FormatError: the name is none.
    """

    def __init__(self, name: str, private: Ed25519PrivateKey | ec.EllipticCurvePrivateKey) -> None:
        self._private = private
        if isinstance(private, Ed25519PrivateKey):
            self.key = VerifierKey(
                name=name, type=KeyType.ED25519, public=private.public_key().public_bytes_raw()
            )
        elif isinstance(private.curve, ec.SECP256R1):
            public = private.public_key().public_bytes(
                serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
            )
            self.key = VerifierKey(name=name, type=KeyType.ECDSA, public=public)
        else:
            raise ConfigError(f"the key {name} is on {private.curve.name}; a log signs by Ed25519 or P-256")

    def sign(self, text: str) -> NoteSignature:
        """A signature over a note's text."""
        message = text.encode("utf-8")
        if isinstance(self._private, Ed25519PrivateKey):
            value = self._private.sign(message)
        else:
            value = self._private.sign(message, ec.ECDSA(hashes.SHA256()))
        return NoteSignature(name=self.key.name, key_id=self.key.key_id, value=value)

    def __repr__(self) -> str:
        return f"NoteSigner({str(self.key)!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a NoteSigner holds a private key and is not pickled or copied")


def _p256(public: bytes, name: str) -> ec.EllipticCurvePublicKey:
    try:
        key = serialization.load_der_public_key(public)
        again = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise FormatError(f"the key {name} of type 0x02 is no public key in DER") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise FormatError(f"the key {name} of type 0x02 is not ECDSA on P-256")
    if again != public:
        raise FormatError(f"the key {name} of type 0x02 is not spelled as DER has it")
    return key


def _stamped(value: bytes, name: str) -> tuple[int, bytes]:
    stamp_s = int.from_bytes(value[:_STAMP_BYTES], "big")
    # Of a whole tree it says when; 0 is what a cosignature of a subtree has, which is no tree head.
    if len(value) <= _STAMP_BYTES or not 0 < stamp_s < 1 << 63:
        raise IntegrityError(
            f"a cosignature by {name} has a time of eight bytes, above 0 and below 2^63, and bytes behind it"
        )
    return stamp_s, value[_STAMP_BYTES:]


def _cosigned_message(name: str, stamp_s: int, head: Checkpoint) -> bytes:
    """What an ML-DSA-44 cosignature signs: ``cosigned_message`` of C2SP tlog-cosignature."""
    cosigner, origin = name.encode(), head.origin.encode()
    if len(cosigner) > 255 or len(origin) > 255:
        raise ValueError("a cosigned name has at most 255 bytes")
    return b"".join(
        [
            _SUBTREE_LABEL,
            bytes([len(cosigner)]),
            cosigner,
            struct.pack(">Q", stamp_s),
            bytes([len(origin)]),
            origin,
            struct.pack(">QQ", 0, head.size),
            head.root,
        ]
    )
