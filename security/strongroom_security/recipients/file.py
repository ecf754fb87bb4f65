"""A recipient that is a file: 32 random bytes on a disk that the store's operator cannot reach.

The file has two lines, `_HEADER` and the key in base64. A wrapped key is a 12-byte random nonce and the
AES-256-GCM of the key under it, with `recipient_info` of the context as associated data: 60 bytes
(`docs/format.md`, on keyrings). Nonces are random, so one key is good for 2^32 wraps (NIST SP 800-38D,
8.3): a save an hour for as long as anyone likes, and where each file's key is wrapped, for 1,000 files
an hour for 490 years.
"""

from __future__ import annotations

import base64
import binascii
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from strongroom.errors import ConfigError, IntegrityError
from strongroom_security.fields import recipient_info
from strongroom_security.recipients.base import KEY_BYTES, opaque_id
from strongroom_security.recipients.keyfiles import create_private, read_private
from strongroom_security.secret import Secret

if TYPE_CHECKING:
    from strongroom_security.fields import Context

__all__ = ["FileKey", "create_key_file"]

_HEADER: Final = (
    b"# Strongroom key file: the next line opens every checkpoint that was sealed to it. Keep it secret."
)
_ID_INFO: Final = b"strongroom.v1 file id"
_NONCE_BYTES: Final = 12
_TAG_BYTES: Final = 16
_WRAPPED_BYTES: Final = _NONCE_BYTES + KEY_BYTES + _TAG_BYTES
_LIMIT_BYTES: Final = 4096


def create_key_file(path: Path) -> FileKey:
    """Draw a key and write it to a new file of mode 0600.

    Raises:
        ConfigError: the file exists, or cannot be written.
    """
    key = Secret.draw(KEY_BYTES)
    create_private(path, b"%s\n%s\n" % (_HEADER, base64.b64encode(key.reveal())))
    return FileKey(key, uri=f"file:{path}")


class FileKey:
    """A recipient and identity that holds its key itself. It waits for nothing, so no bound applies."""

    kind: Final = "file"

    def __init__(self, key: Secret, *, uri: str) -> None:
        if key.size_bytes != KEY_BYTES:
            raise ConfigError(f"the key of {uri} has {key.size_bytes} bytes; expected {KEY_BYTES}")
        self._key = key
        self.uri: Final = uri
        # Keyrings are public, so the id must not help to find the key: HKDF under a label of its own.
        self.id: Final = opaque_id(
            self.kind, HKDF(algorithm=SHA384(), length=32, salt=None, info=_ID_INFO).derive(key.reveal())
        )

    @classmethod
    def read(cls, path: Path, *, uri: str | None = None) -> FileKey:
        """The key of a file.

        Args:
            path: of the file.
            uri: as the policy names it; without one, ``file:`` and the path.

        Raises:
            ConfigError: the file cannot be read, others can reach it, or it holds no key.
        """
        key = _key_in(read_private(path, limit_bytes=_LIMIT_BYTES))
        if key is None:
            raise ConfigError(
                f"{path} is not a key file of Strongroom: expected a line that says so and a line of "
                f"{KEY_BYTES} bytes in base64, each ended by a line feed alone; make one with "
                f"create_key_file or `strongroom keys init`"
            )
        return cls(key, uri=uri or f"file:{path}")

    def wrap(self, key: Secret, context: Context, *, within_s: float) -> bytes:
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + AESGCM(self._key.reveal()).encrypt(nonce, key.reveal(), recipient_info(context))

    def unwrap(self, wrapped: bytes, context: Context, *, within_s: float) -> Secret:
        if len(wrapped) != _WRAPPED_BYTES:
            raise IntegrityError(
                f"a key wrapped by {self.uri} has {_WRAPPED_BYTES} bytes, and {len(wrapped)} were found"
            )
        nonce, sealed = wrapped[:_NONCE_BYTES], wrapped[_NONCE_BYTES:]
        try:
            return Secret(AESGCM(self._key.reveal()).decrypt(nonce, sealed, recipient_info(context)))
        except InvalidTag:
            raise IntegrityError(
                f"{self.uri} did not wrap this key for this checkpoint: the wrapped bytes were changed, or "
                f"come from another checkpoint"
            ) from None

    def __repr__(self) -> str:
        return f"FileKey(id={self.id!r}, uri={self.uri!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a FileKey holds a key and is not pickled or copied; read its file where it is needed"
        )


def _key_in(data: bytes) -> Secret | None:
    """The key of a file; None where it holds none, so that no error has the file's bytes in a frame."""
    lines = data.split(b"\n")
    if len(lines) != 3 or lines[0] != _HEADER or lines[2]:
        return None
    try:
        raw = base64.b64decode(lines[1], validate=True)
    except binascii.Error:
        return None
    return Secret(raw) if len(raw) == KEY_BYTES else None
