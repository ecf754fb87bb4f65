"""The public half of a signing key: three curves, one name for each key, and the check of a signature.

What OpenSSF Model Signing verifies, and so all that is here: ECDSA on the NIST curves P-256, P-384 and
P-521, with the hash that belongs to the curve. A key is named as that format names it, by the SHA-256
of its PEM text. Who is trusted with what is not decided here.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Final

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

from strongroom.errors import ConfigError, FormatError

__all__ = ["CURVES", "PublicKey", "check_signature_form", "curve_name", "hash_of"]

CURVES: Final[dict[str, str]] = {"secp256r1": "P-256", "secp384r1": "P-384", "secp521r1": "P-521"}
"""The curves that a signing key may be on, from the name that the library has for them."""

_HASHES: Final[dict[str, type[hashes.HashAlgorithm]]] = {
    "P-256": hashes.SHA256,
    "P-384": hashes.SHA384,
    "P-521": hashes.SHA512,
}
_EXPECTED: Final = "expected an elliptic-curve key on P-256, P-384 or P-521"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class PublicKey:
    """A key that signatures are checked with; two of them are equal if they are the same key.

    Built by `of`, `from_pem` or `from_der`.

    Attributes:
        key: the library's own.
        curve: ``"P-256"``, ``"P-384"`` or ``"P-521"``.
        pem: the SubjectPublicKeyInfo in PEM, with the line break at its end.
        id: 64 lower-case hex digits: the SHA-256 of ``pem``. Bundles name their key by it.

    Raises:
        ConfigError: the key is on another curve.
    """

    key: ec.EllipticCurvePublicKey
    curve: str = field(init=False)
    pem: bytes = field(init=False)
    id: str = field(init=False)

    def __post_init__(self) -> None:
        pem = self.key.public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        object.__setattr__(self, "curve", curve_name(self.key.curve))
        object.__setattr__(self, "pem", pem)
        object.__setattr__(self, "id", hashlib.sha256(pem).hexdigest())

    @classmethod
    def of(cls, key: ec.EllipticCurvePublicKey) -> PublicKey:
        """The library's key as ours.

        Raises:
            ConfigError: it is on another curve.
        """
        return cls(key)

    @classmethod
    def from_pem(cls, pem: bytes, what: str) -> PublicKey:
        """A public key's PEM file, as ``openssl pkey -pubout`` writes it.

        Args:
            what: names the file in errors.

        Raises:
            ConfigError: it is something else, or a key that is not for signing here.
        """
        if b"PRIVATE KEY-----" in pem:
            raise ConfigError(
                f"{what} holds a private key, and is read as a public one; give the public half, as "
                f"'openssl pkey -pubout' writes it"
            )
        if b"-----BEGIN CERTIFICATE-----" in pem:
            raise ConfigError(
                f"{what} holds a certificate, and is read as a public key; give the key, as "
                f"'openssl x509 -pubkey -noout' writes it"
            )
        if pem.count(b"-----BEGIN ") > 1:
            # The first one would be taken, and whoever reads the file may mean the other.
            raise ConfigError(
                f"{what} holds {pem.count(b'-----BEGIN ')} keys or other things in PEM; give each key a file "
                f"of its own"
            )
        try:
            key = serialization.load_pem_public_key(pem)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise ConfigError(f"{what} is not a public key in PEM: {_first_line(error)}") from None
        return cls._checked(key, what)

    @classmethod
    def from_der(cls, der: bytes, what: str) -> PublicKey:
        """A SubjectPublicKeyInfo in DER, as a key service hands it out or a certificate holds it.

        Args:
            what: names whose key it is in errors.

        Raises:
            FormatError: it is something else, or a key that is not for signing here.
        """
        try:
            key = serialization.load_der_public_key(der)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise FormatError(f"{what} is not a public key in DER: {_first_line(error)}") from None
        try:
            return cls._checked(key, what)
        except ConfigError as error:
            raise FormatError(str(error)) from None

    @classmethod
    def _checked(cls, key: object, what: str) -> PublicKey:
        if not isinstance(key, ec.EllipticCurvePublicKey):
            kind = type(key).__name__.lstrip("_").removesuffix("PublicKey")
            raise ConfigError(f"{what} is a key of kind {kind}; {_EXPECTED}")
        try:
            return cls(key)
        except ConfigError as error:
            raise ConfigError(f"{what}: {error}") from None

    def verify(self, message: bytes, signature: bytes) -> bool:
        """Whether a signature over a message is this key's.

        Args:
            signature: ECDSA in DER. Of the two values that are equally valid (``s`` and ``n - s``)
                either is accepted, as signers of this format give both; any other spelling is not.
        """
        try:
            check_signature_form(signature, "the signature")
            self.key.verify(signature, message, ec.ECDSA(hash_of(self.curve)))
        except (InvalidSignature, FormatError):
            return False
        return True

    def __eq__(self, other: object) -> bool:
        return self.id == other.id if isinstance(other, PublicKey) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return f"<PublicKey {self.curve} {self.id}>"


def hash_of(curve: str) -> hashes.HashAlgorithm:
    """The hash that a curve's signatures are made with: of the curve's own size.

    Args:
        curve: as `PublicKey.curve` names it.

    Raises:
        ConfigError: another curve.
    """
    if curve not in _HASHES:
        raise ConfigError(f"{curve} is not a curve that is signed on; {_EXPECTED}")
    return _HASHES[curve]()


def curve_name(curve: ec.EllipticCurve) -> str:
    """``"P-256"``, ``"P-384"`` or ``"P-521"``.

    Raises:
        ConfigError: another curve.
    """
    if curve.name not in CURVES:
        raise ConfigError(f"a key on the curve {curve.name} is not one that is signed with; {_EXPECTED}")
    return CURVES[curve.name]


def check_signature_form(signature: bytes, what: str) -> None:
    """Find out whether bytes can be an ECDSA signature on one of the curves, in the one spelling of DER.

    Raises:
        FormatError: they cannot.
    """
    try:
        r, s = decode_dss_signature(signature)  # it reads DER in its one spelling alone
    except ValueError:
        raise FormatError(f"{what} is not an ECDSA signature in DER: {signature[:8].hex()}...") from None
    if not (0 < r < 2**521 and 0 < s < 2**521):
        raise FormatError(f"{what} holds a number that no signature holds")


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:200]
