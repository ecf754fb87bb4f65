"""From a policy's text to a signer or a public key. The only place that knows all kinds.

=================  =======================================  ==============================================
text               signs                                    verifies
=================  =======================================  ==============================================
``file:PATH``      a private key in PEM, for this user      a public key, a certificate or a private key
                   alone; it may be encrypted               in PEM
``aws-kms:KEY``    an AWS KMS key's ARN, id or alias        the same
``pkcs11:URI``     a key in a PKCS #11 token (RFC 7512)     the same
=================  =======================================  ==============================================

Relative paths are relative to the policy's folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization

from strongroom.errors import ConfigError
from strongroom_security.publickeys import PublicKey
from strongroom_security.recipients.keyfiles import read_public
from strongroom_security.signers.base import Signer, is_signer

__all__ = ["open_public_key", "open_signer", "read_certificates"]

_KINDS: Final = ("file:PATH", "aws-kms:ARN", "pkcs11:URI")
_CHAIN_LIMIT_BYTES: Final = 262_144
_MAX_CERTIFICATES: Final = 10


def open_signer(
    text: str | Signer, *, base: Path, certificate: str | None = None, passphrase: str | None = None
) -> Signer:
    """The signer that a policy names. A key file is read now; a keeper is asked when it first signs.

    Args:
        text: as in the policy, or a signer of your own.
        base: what relative paths are relative to.
        certificate: a file with the certificate chain of the key in PEM, the key's own first.
        passphrase: where the passphrase of an encrypted key file is, ``env:NAME`` or ``file:PATH``.

    Raises:
        ConfigError: no such kind, no such key, one that cannot sign, a certificate or passphrase that is not
            the key's, or an extra that is not installed.
    """
    if not isinstance(text, str):
        if not is_signer(text):
            raise ConfigError(f"expected a text or a signer, got a {type(text).__name__}")
        if certificate is not None or passphrase is not None:
            raise ConfigError("a signer of your own brings its certificates and opens its key itself")
        return text
    kind, colon, rest = text.partition(":")
    if kind not in {"file", "aws-kms", "pkcs11"} or not colon or not rest:
        raise _unknown(text, "signer")
    if passphrase is not None and kind != "file":
        raise ConfigError(f"{text}: a passphrase is for a key file; this keeper has its own credentials")
    certificates = () if certificate is None else read_certificates(base / certificate.removeprefix("file:"))
    # Each is imported where it is asked for: a key service's library takes long to import, if it is there.
    if kind == "file":
        from strongroom_security.signers.file import FileSigner
        from strongroom_security.signers.passphrases import read_passphrase

        secret = None if passphrase is None else read_passphrase(passphrase, base=base)
        return FileSigner.read(base / rest, uri=text, passphrase=secret, certificates=certificates)
    if kind == "aws-kms":
        from strongroom_security.signers.aws_kms import AwsKmsSigner

        return AwsKmsSigner(rest, certificates=certificates)
    from strongroom_security.signers.pkcs11 import Pkcs11Signer

    return Pkcs11Signer(rest, certificates=certificates)


def open_public_key(text: str, *, base: Path) -> PublicKey:
    """The public key that a policy names. A keeper is asked for it here, and may take its time.

    Args:
        text: as in the policy.
        base: what relative paths are relative to.

    Raises:
        ConfigError: no such kind, no such key, one on another curve, or an extra that is not installed.
        NoKeyError, KeyServiceError: the keeper refused or was not reached.
    """
    kind, _, rest = text.partition(":")
    if kind != "file" or not rest:
        if kind == "file" or kind not in {"aws-kms", "pkcs11"}:
            raise _unknown(text, "public key")
        return open_signer(text, base=base).public_key
    from strongroom_security.signers.file import LIMIT_BYTES, FileSigner, holds_private_key, pem_labels

    path = base / rest
    labels = pem_labels(path)
    if holds_private_key(labels):
        if any(label.startswith("ENCRYPTED") for label in labels):
            raise ConfigError(
                f"{text} is an encrypted private key; name its public half, which takes no passphrase"
            )
        return FileSigner.read(path, uri=text).public_key
    data = read_public(path, limit_bytes=LIMIT_BYTES)
    if "CERTIFICATE" in labels and not any(label.endswith("PUBLIC KEY") for label in labels):
        return _certified(data, text)
    return PublicKey.from_pem(data, text)


def read_certificates(path: Path) -> tuple[bytes, ...]:
    """The certificates of a PEM file in DER, in the file's order.

    Raises:
        ConfigError: it cannot be read, anyone may write it, or it holds none, too many or something else.
    """
    data = read_public(path, limit_bytes=_CHAIN_LIMIT_BYTES)
    try:
        chain = x509.load_pem_x509_certificates(data)
    except ValueError as error:
        raise ConfigError(f"{path} is no chain of certificates in PEM: {error}") from None
    if len(chain) > _MAX_CERTIFICATES:
        raise ConfigError(f"{path} holds {len(chain)} certificates; a chain has at most {_MAX_CERTIFICATES}")
    return tuple(each.public_bytes(serialization.Encoding.DER) for each in chain)


def _certified(data: bytes, text: str) -> PublicKey:
    try:
        key = x509.load_pem_x509_certificates(data)[0].public_key()
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{text} is no certificate in PEM: {error}") from None
    pem = key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return PublicKey.from_pem(pem, text)


def _unknown(text: str, what: str) -> ConfigError:
    return ConfigError(f"{text[:100]!r} names no {what}; expected one of {', '.join(_KINDS)}")
