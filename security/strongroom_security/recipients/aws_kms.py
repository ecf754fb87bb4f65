"""A recipient that is a symmetric key of AWS KMS: it wraps and unwraps there, and never leaves.

One request wraps, one unwraps, one re-wraps for another KMS key. The context travels as KMS's encryption
context: KMS binds the wrapped bytes to it, writes it to CloudTrail in clear, and lets key policies
demand it. The wrapped bytes are KMS's own ciphertext blob, nothing added.

How KMS is reached is `aws_kms_calls`'s to know. Only the key's name comes from the policy, and nothing from
a keyring.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from strongroom.errors import IntegrityError, NoKeyError
from strongroom_security.recipients.aws_kms_calls import KmsKey
from strongroom_security.recipients.base import KEY_BYTES, Recipient, check_wrapped, opaque_id
from strongroom_security.secret import Secret

if TYPE_CHECKING:
    from strongroom_security.aws import Sessions
    from strongroom_security.fields import Context

__all__ = ["AwsKms"]

_MAX_BLOB_BYTES: Final = 6144
"""The longest ciphertext that ``Decrypt`` takes (KMS API reference)."""


class AwsKms:
    """Wraps and unwraps by a symmetric encryption key of AWS KMS; re-wraps for another one.

    Args:
        key: the key's ARN, its id, or an alias (``alias/NAME`` or the alias's ARN). An ARN says which
            region; otherwise it is boto3's. An alias that is pointed at another key no longer opens what
            the first one wrapped.
        endpoint_url: where to ask; without one, boto3's choice.

    Raises:
        ConfigError: it is none of these.
    """

    kind: Final = "aws-kms"

    def __init__(self, key: str, *, endpoint_url: str | None = None) -> None:
        self.uri: Final = f"{self.kind}:{key}"
        self._kms: Final = KmsKey(key, uri=self.uri, endpoint_url=endpoint_url)
        self.id: Final = opaque_id(self.kind, self._kms.shared_name.encode())

    @classmethod
    def of(cls, text: str) -> AwsKms:
        """The recipient that a policy names.

        Args:
            text: what stands behind ``aws-kms:``.
        """
        return cls(text)

    def act_as(self, sessions: Sessions) -> None:
        """See `KmsKey.act_as`."""
        self._kms.act_as(sessions)

    def __repr__(self) -> str:
        return f"<{self.uri}>"

    def wrap(self, key: Secret, context: Context, *, within_s: float) -> bytes:
        """One call of ``Encrypt``; see `Recipient.wrap`."""

        def read(answer: Mapping[str, Any]) -> bytes:
            return check_wrapped(self._kms.bytes_in(answer, "CiphertextBlob"), self.uri)

        return self._kms.ask(
            "encrypt",
            read,
            lambda: {
                "KeyId": self._kms.name,
                "Plaintext": key.reveal(),
                "EncryptionContext": context.pairs(),
            },
            within_s=within_s,
        )

    def unwrap(self, wrapped: bytes, context: Context, *, within_s: float) -> Secret:
        """One call of ``Decrypt``, by this key alone; see `Identity.unwrap`."""
        self._check_blob(wrapped)

        def read(answer: Mapping[str, Any]) -> Secret:
            self._check_key(answer.get("KeyId"))
            plain = self._kms.bytes_in(answer, "Plaintext")
            if len(plain) != KEY_BYTES:
                raise IntegrityError(f"{self.uri} unwrapped {len(plain)} bytes; a key has {KEY_BYTES}")
            return Secret(plain)

        # The key is named although KMS finds it in the blob: else whoever writes keyrings could have this
        # machine's role use another key of its own.
        return self._kms.ask(
            "decrypt",
            read,
            lambda: {
                "KeyId": self._kms.name,
                "CiphertextBlob": wrapped,
                "EncryptionContext": context.pairs(),
            },
            within_s=within_s,
        )

    def rewrap(self, wrapped: bytes, context: Context, to: Recipient, *, within_s: float) -> bytes | None:
        """One call of ``ReEncrypt``, where ``to`` is a KMS key of the same region; see `Rewrapper.rewrap`."""
        self._check_blob(wrapped)
        if not isinstance(to, AwsKms) or self._kms.place() != to._kms.place():
            return None

        def read(answer: Mapping[str, Any]) -> bytes:
            self._check_key(answer.get("SourceKeyId"))
            return check_wrapped(self._kms.bytes_in(answer, "CiphertextBlob"), to.uri)

        return self._kms.ask(
            "re_encrypt",
            read,
            lambda: {
                "SourceKeyId": self._kms.name,
                "SourceEncryptionContext": context.pairs(),
                "DestinationKeyId": to._kms.name,
                "DestinationEncryptionContext": context.pairs(),
                "CiphertextBlob": wrapped,
            },
            within_s=within_s,
        )

    def _check_blob(self, wrapped: bytes) -> None:
        if not 1 <= len(wrapped) <= _MAX_BLOB_BYTES:
            raise IntegrityError(
                f"a key wrapped by {self.uri} has {len(wrapped)} bytes; KMS makes 1 to {_MAX_BLOB_BYTES}"
            )

    def _check_key(self, answered: object) -> None:
        """A server that ignores which key was asked for must not choose it."""
        if not self._kms.is_meant_by(answered):
            raise NoKeyError(f"{self.uri} did not wrap this; another key of the same service did")
