"""What a signer promises: a signature by one key over any message, in bounded time.

`strongroom_security.signer_testing` holds an implementation to what is said here.

The rules that hold for all:

- A signature is ECDSA in DER over the message, with the hash of the key's curve
  (`strongroom_security.publickeys.hash_of`): what OpenSSF Model Signing verifies.
- The same signer has the same public key for as long as it is used, on every machine and in every process.
- ``sign`` ends after ``within_s`` seconds, one way or the other.
- What fails says which signer by its ``uri``, and never shows a key or a passphrase.
- It may be used from several threads at once, and after a fork.

=================  ==========================================================================
`NoKeyError`       the keeper refused, or holds another key than before
`KeyServiceError`  the keeper is out of reach, throttles, was too slow, or answered nonsense
`ConfigError`      the policy or the machine: no such file, no key to sign with, no such extra
=================  ==========================================================================

A keeper may be anybody's code or machine. `sign_checked` therefore is how it is asked: what it answers is
verified before anybody commits to it.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol, TypeGuard, runtime_checkable

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec

from strongroom.errors import ConfigError, KeyServiceError
from strongroom_security.asking import ask
from strongroom_security.publickeys import PublicKey

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes

__all__ = [
    "PUBLIC_KEY_WITHIN_S",
    "SIGNING_CURVES",
    "Signer",
    "check_leaf",
    "check_signature",
    "check_signing_curve",
    "is_signer",
    "sign_checked",
]

SIGNING_CURVES: Final = ("P-256", "P-384")
"""What the signers here sign on. Signatures on P-521 are verified, too, and nothing here makes them."""

PUBLIC_KEY_WITHIN_S: Final = 30.0
"""Seconds that a keeper may take to say which public key it has, where nobody said how many."""


@runtime_checkable
class Signer(Protocol):
    """Who signs.

    Whether something is one, `is_signer` finds out: before Python 3.12, ``isinstance`` reads every
    property, and so would ask the keeper for its public key.
    """

    @property
    def kind(self) -> str:
        """How the key is kept: ``file``, ``aws-kms``, ``pkcs11``."""

    @property
    def uri(self) -> str:
        """As the policy names it, for people; no secret."""

    @property
    def public_key(self) -> PublicKey:
        """Verifies what is signed. It may have to be asked for, once.

        Raises:
            NoKeyError, KeyServiceError, ConfigError: as `sign`.
        """

    @property
    def certificates(self) -> tuple[bytes, ...]:
        """Whose key it is by the word of an authority: X.509 in DER, the key's own first; empty: nobody's."""

    def sign(self, message: bytes, *, within_s: float) -> bytes:
        """Sign a message.

        Args:
            message: of any length.
            within_s: seconds after which the call has ended.

        Returns:
            ECDSA in DER, by `public_key`.

        Raises:
            NoKeyError: the keeper refused, or holds another key than before.
            KeyServiceError: the keeper is out of reach, throttles, or was too slow.
            ConfigError: the policy names a key that cannot sign, or this machine lacks what it takes.
        """


_MEMBERS: Final = ("kind", "uri", "public_key", "certificates", "sign")


def is_signer(value: object) -> TypeGuard[Signer]:
    """Whether something has all that a signer has. Nothing of it is called, and no keeper is asked."""
    if isinstance(value, type):
        return False
    missing = object()
    return all(inspect.getattr_static(value, name, missing) is not missing for name in _MEMBERS)


def sign_checked(signer: Signer, message: bytes, *, within_s: float) -> bytes:
    """A signature that holds.

    Whatever the signer does, there is a signature or an error that names it, in time.

    Args:
        signer: anybody's.
        message: what to sign.
        within_s: seconds that it may take, the public key's asking included.

    Raises:
        NoKeyError, KeyServiceError, ConfigError: as `Signer.sign`.
        KeyServiceError: also where it answered something else than its signature, raised something else, or
            did not end.
    """

    def question(allowed_s: float) -> bytes:
        signature = signer.sign(message, within_s=allowed_s)
        check_signature(signer.public_key, message, signature, who=signer.uri)
        return signature

    return ask(question, who=signer.uri, within_s=within_s)


def check_signature(public_key: PublicKey, message: bytes, signature: bytes, *, who: str) -> None:
    """Refuse a signature that does not hold, at the signer's own side: a wrong one must never be stored.

    Raises:
        KeyServiceError: it is none, or one over something else or by another key.
    """
    if not isinstance(signature, bytes):
        raise KeyServiceError(f"{who} answered with a {type(signature).__name__}, where a signature is bytes")
    if not public_key.verify(message, signature):
        raise KeyServiceError(
            f"{who} answered with {len(signature)} bytes that are no signature of its key {public_key.id} "
            f"over what it was given; nothing was stored. See which key it signs by, and whether it hashes "
            f"what is a hash already"
        )


def check_signing_curve(public_key: PublicKey, uri: str) -> PublicKey:
    """Return a public key unchanged if the signers here sign on its curve.

    Raises:
        ConfigError: they do not.
    """
    if public_key.curve not in SIGNING_CURVES:
        raise ConfigError(
            f"{uri} is a key on the curve {public_key.curve}; keys that sign are on "
            f"{' or '.join(SIGNING_CURVES)}"
        )
    return public_key


def check_leaf(certificates: Sequence[bytes], public_key: PublicKey, *, uri: str) -> None:
    """Find out whether the first of a signer's certificates is for its key; without any, nothing is said.

    Raises:
        ConfigError: it is for another key, or the chain begins at its wrong end.
    """
    keys = [_key_of(x509.load_der_x509_certificate(each).public_key()) for each in certificates]
    if not keys or keys[0] == public_key:
        return
    if public_key in keys:
        raise ConfigError(
            f"{uri}: the certificate of this key stands at place {keys.index(public_key) + 1} of the chain; "
            f"put it first, and behind each certificate the one that issued it"
        )
    raise ConfigError(
        f"{uri}: the first certificate is for another key than this signer's {public_key.id}; name the "
        f"certificate that was issued for it"
    )


def _key_of(key: CertificatePublicKeyTypes) -> PublicKey | None:
    if not isinstance(key, ec.EllipticCurvePublicKey):
        return None
    try:
        return PublicKey.of(key)
    except (ConfigError, UnsupportedAlgorithm):
        return None
