"""What a recipient promises: to wrap a key so that one keeper alone can unwrap it.

Three protocols, each for another right. `Recipient` can wrap, `Identity` can unwrap, and most keys of
a key service can do both; a public key can only wrap. A `Rewrapper` passes a wrapped key on without
showing it. `strongroom_security.testing` holds an implementation to what is said here.

The rules that hold for all:

- The wrapped bytes are bound to the `Context`: they open under that context and under no other.
- Every call ends after ``within_s`` seconds, one way or the other.
- An ``id`` names the key, and stands in keyrings, in clear: it tells no endpoint, ARN or path, and
  nothing of a secret key can be learnt from it (`opaque_id`).
- Where to go (endpoint, key name, module, credentials) comes from the policy, the environment and
  the machine. Nothing in a keyring is an instruction.
- What fails says which recipient by its ``uri``, and never shows a key: an error that could carry
  key bytes has no cause (``raise ... from None``).
- All may be used from several threads at once, and after a fork.

=================  ==========================================================================
`NoKeyError`       the keeper refused, or holds another key than the one that wrapped
`KeyServiceError`  the keeper is out of reach, throttles, or was not done within the time
`IntegrityError`   the wrapped bytes are wrong, or were made for another context
`ConfigError`      the policy or the machine: no such file, an extra that is not installed
=================  ==========================================================================
"""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

from strongroom.errors import ConfigError, FormatError
from strongroom_security.secret import KEY_BYTES

if TYPE_CHECKING:
    from strongroom_security.fields import Context
    from strongroom_security.secret import Secret

__all__ = [
    "KEY_BYTES",
    "MAX_WRAPPED_BYTES",
    "Identity",
    "Recipient",
    "Rewrapper",
    "check_id",
    "check_kind",
    "check_wrapped",
    "opaque_id",
]

MAX_WRAPPED_BYTES: Final = 8192
"""A wrapped key's length. AWS KMS states 6,144 bytes at most; the hybrid HPKE suite comes to 1,168."""

_ID = re.compile(r"[a-z0-9](?:[a-z0-9-]{6,62})[a-z0-9]")
_KIND = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,30}[a-z0-9])?")


@runtime_checkable
class Recipient(Protocol):
    """Who a key can be wrapped for."""

    @property
    def id(self) -> str:
        """Names the key in keyrings: 8 to 64 of ``a-z 0-9 -``, the kind and ``-`` first; see `opaque_id`.

        The same key has the same id on every machine and in every process.
        """

    @property
    def kind(self) -> str:
        """How it wraps: ``file``, ``aws-kms``, ``openbao``, ``pkcs11``, ``hpke-...``."""

    @property
    def uri(self) -> str:
        """As the policy names it, for people; no secret."""

    def wrap(self, key: Secret, context: Context, *, within_s: float) -> bytes:
        """Wrap a key of `KEY_BYTES` bytes: a checkpoint's, or where ``wrap`` is direct a file's.

        Args:
            key: what to wrap.
            context: what the wrapped bytes are bound to. Its path is None for a checkpoint's key,
                and the file's path for a key that is wrapped directly.
            within_s: seconds after which the call has ended.

        Returns:
            At most `MAX_WRAPPED_BYTES` bytes, others on every call.

        Raises:
            NoKeyError: the keeper refused.
            KeyServiceError: the keeper is out of reach, throttles, or was too slow.
        """


@runtime_checkable
class Identity(Protocol):
    """Who may open what was wrapped for the recipient of the same id."""

    @property
    def id(self) -> str:
        """As `Recipient.id`."""

    @property
    def kind(self) -> str:
        """As `Recipient.kind`."""

    @property
    def uri(self) -> str:
        """As `Recipient.uri`."""

    def unwrap(self, wrapped: bytes, context: Context, *, within_s: float) -> Secret:
        """The key that was wrapped.

        Args:
            wrapped: from a keyring, so from a stranger.
            context: recomputed from the checkpoint, never read beside ``wrapped``.
            within_s: seconds after which the call has ended.

        Raises:
            NoKeyError: the keeper refused, or its key is not the one that wrapped.
            KeyServiceError: the keeper is out of reach, throttles, or was too slow.
            IntegrityError: the bytes are wrong, or were wrapped for another context. Where a keeper
                cannot tell that from another key, either error may be raised.
        """


@runtime_checkable
class Rewrapper(Protocol):
    """A keeper that wraps for another recipient what it unwraps, and shows nobody the key."""

    def rewrap(self, wrapped: bytes, context: Context, to: Recipient, *, within_s: float) -> bytes | None:
        """The key of ``wrapped``, wrapped for ``to`` under the same context.

        Returns:
            None where this keeper cannot do it for that recipient: unwrap, and wrap again.

        Raises:
            NoKeyError, KeyServiceError, IntegrityError: as `Identity.unwrap`.
        """


def check_kind(kind: str) -> str:
    """Return a kind unchanged if it is one: 1 to 32 of ``a-z 0-9 -``, no dash at either end.

    Raises:
        FormatError: it is not.
    """
    if not _KIND.fullmatch(kind):
        raise FormatError(
            f"{kind[:60]!r} is not a recipient's kind: 1 to 32 of a-z, 0-9 and '-', no dash at either end"
        )
    return kind


def check_id(text: str, kind: str | None = None) -> str:
    """Return a recipient's id unchanged if it is one: 8 to 64 of ``a-z 0-9 -``, no dash at either end.

    Args:
        text: the id.
        kind: the id must begin with this and ``-``.

    Raises:
        FormatError: it is not.
    """
    if not _ID.fullmatch(text):
        raise FormatError(
            f"{text[:80]!r} is not a recipient's id: 8 to 64 of a-z, 0-9 and '-', no dash at either end"
        )
    if kind is not None and not text.startswith(f"{kind}-"):
        raise FormatError(f"the recipient's id {text!r} does not begin with its kind, {kind!r}")
    return text


def opaque_id(kind: str, *names: bytes) -> str:
    """An id from what names a key: ``<kind>-`` and 32 hexadecimal digits of SHA-256.

    The names are hashed with their lengths, so that no two lists of them come to the same. They must be
    no secret: whoever guesses them can check the guess. For a secret key give what is derived from it by
    a one-way function under a label of its own.

    Args:
        kind: of the recipient.
        names: what the same key is called everywhere: an ARN, a public key's bytes.
    """
    if not names:
        raise ConfigError("an id is derived from what names the key, and nothing was given")
    hasher = hashlib.sha256()
    for name in (b"strongroom.v1 id", check_kind(kind).encode(), *names):
        hasher.update(len(name).to_bytes(4, "big"))
        hasher.update(name)
    return check_id(f"{kind}-{hasher.hexdigest()[:32]}", kind)


def check_wrapped(wrapped: bytes, uri: str) -> bytes:
    """Return wrapped bytes unchanged if a keyring may hold them.

    Raises:
        FormatError: there are none, or more than `MAX_WRAPPED_BYTES`.
    """
    if not 1 <= len(wrapped) <= MAX_WRAPPED_BYTES:
        raise FormatError(
            f"a key wrapped by {uri} has {len(wrapped)} bytes; expected 1 to {MAX_WRAPPED_BYTES} of them"
        )
    return wrapped
