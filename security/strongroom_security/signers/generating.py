"""New signing keys: a private key for one user alone, and its public half for everybody who verifies."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from strongroom.errors import ConfigError
from strongroom_security.publickeys import PublicKey
from strongroom_security.recipients.keyfiles import create_private, create_public
from strongroom_security.secret import Secret
from strongroom_security.signers.base import SIGNING_CURVES
from strongroom_security.signers.passphrases import read_passphrase

__all__ = ["generate_key", "public_path"]

_CURVES: Final[dict[str, ec.EllipticCurve]] = {"P-256": ec.SECP256R1(), "P-384": ec.SECP384R1()}


def generate_key(path: Path, *, curve: str = "P-256", passphrase: str | None = None) -> PublicKey:
    """Draw a key, write it to a new file of mode 0600, and its public half beside it.

    Both files' bytes and names survive a power cut on return.

    Args:
        path: of the private key, in PKCS #8; the public half's is `public_path` of it.
        curve: one of `SIGNING_CURVES`.
        passphrase: where the passphrase is that the private key is encrypted by, ``env:NAME`` or
            ``file:PATH``; None: it is not encrypted.

    Returns:
        The public half.

    Raises:
        ConfigError: one of the files exists or cannot be written, it is no such curve, or there is no
            passphrase where it was said to be.
    """
    if curve not in _CURVES:
        raise ConfigError(
            f"{curve!r:.60} is no curve that is signed on; expected {' or '.join(SIGNING_CURVES)}"
        )
    secret = None if passphrase is None else read_passphrase(passphrase, base=Path())
    private, public_key = _drawn(_CURVES[curve], secret)
    create_private(path, private.reveal())
    try:
        create_public(public_path(path), public_key.pem)
    except ConfigError:
        path.unlink()  # nothing was signed by it yet, and half a pair is of no use
        raise
    return public_key


def public_path(path: Path) -> Path:
    """Where the public half of a private key's file is: its name with ``.pub`` for ``.pem``, or behind it."""
    return path.with_suffix(".pub") if path.suffix == ".pem" else path.with_name(f"{path.name}.pub")


def _drawn(curve: ec.EllipticCurve, passphrase: Secret | None) -> tuple[Secret, PublicKey]:
    key = ec.generate_private_key(curve)
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption()
        if passphrase is None
        else serialization.BestAvailableEncryption(passphrase.reveal()),
    )
    return Secret(pem), PublicKey.of(key.public_key())
