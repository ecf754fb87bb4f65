"""The log's own keys: files in PEM, for this user alone, that sign tree heads under the log's origin."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from strongroom.errors import ConfigError, FormatError
from strongroom_security.recipients.keyfiles import create_private, read_private
from strongroom_security.secret import Secret
from strongroom_security.tlog.notekeys import NoteSigner, VerifierKey

__all__ = ["KINDS", "check_origin", "generate_log_key", "parse_verifier", "read_log_key"]

KINDS: Final = ("ed25519", "ecdsa-p256")

_LIMIT_BYTES: Final = 16384
_EXPECTED: Final = "expected an Ed25519 or ECDSA P-256 private key in PEM (PKCS #8), not encrypted"
_FILE: Final = "file:"


def check_origin(origin: str) -> str:
    """Return a log's origin unchanged if it can be its key's name as well.

    Raises:
        ConfigError: it is empty, or holds a space, a plus or a control character.
    """
    if not origin or len(origin) > 255 or "+" in origin or any(x.isspace() or x < " " for x in origin):
        raise ConfigError(
            f"a log's origin has from 1 to 255 characters, and no space and no '+', as in example.com/audit; "
            f"found {origin[:80]!r}"
        )
    return origin


def read_log_key(text: str, origin: str) -> NoteSigner:
    """The signer whose key is in a file.

    Args:
        text: ``file:PATH``.
        origin: the log's, under which it signs.

    Raises:
        ConfigError: the file cannot be read, others can reach it, or it holds no key that can sign.
    """
    if not text.startswith(_FILE) or text == _FILE:
        raise ConfigError(f"a log's key is named file:PATH, found {text[:80]!r}")
    found = _read(Path(text.removeprefix(_FILE)))
    if isinstance(found, ConfigError):
        raise found
    return NoteSigner(check_origin(origin), found)


def generate_log_key(path: Path, origin: str, *, kind: str = KINDS[0]) -> VerifierKey:
    """Draw a key, and write it to a new file of mode 0600.

    Returns:
        Its public half, under the log's origin, for whoever verifies.

    Raises:
        ConfigError: the file exists or cannot be written, or it is no such kind.
    """
    check_origin(origin)
    if kind not in KINDS:
        raise ConfigError(f"a log's key is one of {', '.join(KINDS)}, got {kind!r}")
    private = Ed25519PrivateKey.generate() if kind == KINDS[0] else ec.generate_private_key(ec.SECP256R1())
    key = NoteSigner(origin, private).key
    create_private(
        path,
        private.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    )
    return key


def parse_verifier(text: str) -> VerifierKey:
    """A public key as an option names it, in the text form of C2SP signed-note.

    Raises:
        ConfigError: it is none.
    """
    try:
        return VerifierKey.parse(text)
    except FormatError as error:
        raise ConfigError(str(error)) from None


def _read(path: Path) -> Ed25519PrivateKey | ec.EllipticCurvePrivateKey | ConfigError:
    """The key of a file, or what is wrong with it: an error that left this frame would show the bytes."""
    raw = read_private(path, limit_bytes=_LIMIT_BYTES)
    if not raw:
        return ConfigError(f"the log's key file {path} is empty; {_EXPECTED}")
    data = Secret(raw)
    del raw
    try:
        key = serialization.load_pem_private_key(data.reveal(), None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        return ConfigError(f"the log's key file {path} cannot be used; {_EXPECTED}")
    if not isinstance(key, Ed25519PrivateKey | ec.EllipticCurvePrivateKey):
        kind = type(key).__name__.removesuffix("PrivateKey")
        return ConfigError(f"the log's key file {path} is a private key of kind {kind}; {_EXPECTED}")
    return key
