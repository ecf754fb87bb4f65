"""A signer that is a file: a private key in PEM, for this user alone, encrypted or not.

The key is ECDSA on P-256 or P-384, in PKCS #8 or the older SEC 1 form, as ``strongroom``, ``openssl``
and most tools write it. It is read once. A file is judged before a byte of it is read
(`strongroom_security.recipients.keyfiles`), and no frame that an error passes through holds what is in it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from strongroom.errors import ConfigError
from strongroom_security.publickeys import PublicKey, hash_of
from strongroom_security.recipients.keyfiles import read_private, read_public
from strongroom_security.secret import Secret
from strongroom_security.signers.base import check_leaf, check_signing_curve

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes

__all__ = ["LIMIT_BYTES", "FileSigner", "holds_private_key", "pem_labels"]

LIMIT_BYTES: Final = 16384
"""The longest file that is read for a key."""

_LABEL: Final = re.compile(rb"-----BEGIN ([A-Z0-9 ]{1,40})-----")
_EXPECTED: Final = "expected an ECDSA private key on P-256 or P-384 in PEM (PKCS #8 or SEC 1)"


class FileSigner:
    """Signs by a key that it holds itself. It waits for nobody, so no bound applies.

    Args:
        key: on P-256 or P-384.
        uri: as the policy names it.
        certificates: in DER, the key's own first.

    Raises:
        ConfigError: the key is on another curve, or the first certificate is for another key.
    """

    kind: Final = "file"

    def __init__(
        self, key: ec.EllipticCurvePrivateKey, *, uri: str, certificates: tuple[bytes, ...] = ()
    ) -> None:
        self.uri: Final = uri
        public = key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        self.public_key: Final = check_signing_curve(PublicKey.from_pem(public, uri), uri)
        check_leaf(certificates, self.public_key, uri=uri)
        self.certificates: Final = certificates
        self._key: Final = key
        self._algorithm: Final = ec.ECDSA(hash_of(self.public_key.curve))

    @classmethod
    def read(
        cls,
        path: Path,
        *,
        uri: str | None = None,
        passphrase: Secret | None = None,
        certificates: tuple[bytes, ...] = (),
    ) -> FileSigner:
        """The signer whose key is in a file.

        Args:
            path: of the file.
            uri: as the policy names it; without one, ``file:`` and the path.
            passphrase: of an encrypted key.
            certificates: in DER, the key's own first.

        Raises:
            ConfigError: the file cannot be read, others can reach it, it holds no key that can sign, or
                the passphrase is missing, wrong or not needed.
        """
        uri = uri or f"file:{path}"
        labels = pem_labels(path)
        if not holds_private_key(labels):
            raise ConfigError(f"{uri} holds {_what(labels)}; {_EXPECTED}")
        key = _read(path, passphrase, uri)
        if isinstance(key, ConfigError):
            raise key
        return cls(key, uri=uri, certificates=certificates)

    def sign(self, message: bytes, *, within_s: float) -> bytes:
        """See `Signer.sign`."""
        return self._key.sign(message, self._algorithm)

    def __repr__(self) -> str:
        return f"FileSigner(uri={self.uri!r}, public_key={self.public_key!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a FileSigner holds a private key and is not pickled or copied; read its file where it is needed"
        )


def pem_labels(path: Path) -> tuple[str, ...]:
    """What a file says that it holds, as ``EC PRIVATE KEY``: the labels of its PEM blocks, and nothing else.

    Raises:
        ConfigError: it cannot be read, or anyone may write it.
    """
    found = _LABEL.findall(read_public(path, limit_bytes=LIMIT_BYTES))
    return tuple(label.decode("ascii") for label in found)


def holds_private_key(labels: tuple[str, ...]) -> bool:
    """Whether a file with these labels holds a private key, and is for its owner alone."""
    return any(label.endswith("PRIVATE KEY") for label in labels)


def _what(labels: tuple[str, ...]) -> str:
    if any(label.endswith("PUBLIC KEY") for label in labels):
        return "a public key, which verifies and cannot sign"
    if "CERTIFICATE" in labels:
        return "a certificate, which verifies and cannot sign"
    return "no private key"


def _read(path: Path, passphrase: Secret | None, uri: str) -> ec.EllipticCurvePrivateKey | ConfigError:
    """The key of a file, or what is wrong with it: an error that left this frame would show the bytes."""
    # Read again, since only now it is known that stricter rules apply; what is used was read under them.
    data = Secret(read_private(path, limit_bytes=LIMIT_BYTES))
    is_encrypted = b"ENCRYPTED" in data.reveal()
    if is_encrypted and passphrase is None:
        return ConfigError(
            f"{uri} is encrypted, and nothing says where its passphrase is; name it by passphrase = "
            f'"env:NAME" or "file:PATH"'
        )
    if passphrase is not None and not is_encrypted:
        return ConfigError(
            f"{uri} is not encrypted, and a passphrase was named for it; encrypt the key (openssl pkey "
            f"-aes256), or name no passphrase if that is meant"
        )
    try:
        key: PrivateKeyTypes = serialization.load_pem_private_key(
            data.reveal(), None if passphrase is None else passphrase.reveal()
        )
    except (ValueError, TypeError, UnsupportedAlgorithm):
        if is_encrypted:
            return ConfigError(f"{uri}: the passphrase does not open this key, or the file is damaged")
        return ConfigError(f"{uri} holds a private key that cannot be read; {_EXPECTED}")
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        kind = type(key).__name__.removesuffix("PrivateKey")
        return ConfigError(f"{uri} is a private key of kind {kind}; {_EXPECTED}")
    return key
