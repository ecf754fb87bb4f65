"""A signer that is an elliptic-curve key of AWS KMS: it signs there, and never leaves.

One request asks for the public key, once a process and its signer; one request a signature. What is sent
is the message's hash (``MessageType`` DIGEST): KMS takes at most 4,096 bytes of a message, and a manifest's
list is longer.

How KMS is reached is `strongroom_security.recipients.aws_kms_calls`'s to know. Only the key's name comes from
the policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from cryptography.hazmat.primitives.hashes import Hash

from strongroom.errors import ConfigError, FormatError, NoKeyError
from strongroom_security.aws import Sessions
from strongroom_security.publickeys import PublicKey, hash_of
from strongroom_security.recipients.aws_kms_calls import KmsKey, key_id
from strongroom_security.recipients.calling import Deadline
from strongroom_security.signers.base import PUBLIC_KEY_WITHIN_S, check_leaf, check_signing_curve

__all__ = ["AwsKmsSigner"]

_ALGORITHMS: Final = {"P-256": "ECDSA_SHA_256", "P-384": "ECDSA_SHA_384"}
"""A curve's ``SigningAlgorithm`` (KMS API reference, Sign)."""

_USAGE: Final = "SIGN_VERIFY"
_NO_SIGNING_KEY: Final = (
    "this key does not sign; name one that was made with key usage SIGN_VERIFY and key spec ECC_NIST_P256 or "
    "ECC_NIST_P384"
)
_MISTAKES: Final = dict.fromkeys(
    ("InvalidKeyUsageException", "UnsupportedOperationException"), _NO_SIGNING_KEY
)
"""What KMS answers about a key of another usage, and about one that has no public half."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """What KMS said of the key.

    Attributes:
        key_id: which one it is; what an alias is called is no answer.
    """

    public_key: PublicKey
    key_id: str


class AwsKmsSigner:
    """Signs by a key of AWS KMS with usage SIGN_VERIFY and spec ECC_NIST_P256 or ECC_NIST_P384.

    Args:
        key: the key's ARN, its id, or an alias (``alias/NAME`` or the alias's ARN). An ARN says which
            region; otherwise it is boto3's. A signer whose alias is pointed at another key signs no more.
        endpoint_url: where to ask; without one, boto3's choice.
        certificates: in DER, the key's own first.
        within_s: seconds that asking for the public key may take where nobody says how many.

    Raises:
        ConfigError: it is none of these.
    """

    kind: Final = "aws-kms"

    def __init__(
        self,
        key: str,
        *,
        endpoint_url: str | None = None,
        certificates: tuple[bytes, ...] = (),
        within_s: float = PUBLIC_KEY_WITHIN_S,
    ) -> None:
        self.uri: Final = f"{self.kind}:{key}"
        self.certificates: Final = certificates
        self._kms: Final = KmsKey(key, uri=self.uri, endpoint_url=endpoint_url)
        self._within_s: Final = within_s
        # What two threads find at once is the same, and a forked child may have its parent's.
        self._known: _Known | None = None

    @property
    def public_key(self) -> PublicKey:
        """See `Signer.public_key`; one call of ``GetPublicKey``."""
        return self._ask_once(self._within_s).public_key

    def sign(self, message: bytes, *, within_s: float) -> bytes:
        """One call of ``Sign``; see `Signer.sign`."""
        deadline = Deadline(within_s)
        known = self._ask_once(within_s)
        hasher = Hash(hash_of(known.public_key.curve))
        hasher.update(message)
        digest = hasher.finalize()

        def read(answer: Mapping[str, Any]) -> bytes:
            if key_id(answer.get("KeyId")) != known.key_id:
                raise NoKeyError(
                    f"{self.uri} signed by another key than the one that it had before; where an alias was "
                    f"moved on purpose, start this process anew, and see that the new key is trusted"
                )
            return self._kms.bytes_in(answer, "Signature")

        return self._kms.ask(
            "sign",
            read,
            lambda: {
                "KeyId": self._kms.name,
                "Message": digest,
                "MessageType": "DIGEST",
                "SigningAlgorithm": _ALGORITHMS[known.public_key.curve],
            },
            within_s=deadline.remaining_s(),
            mistakes=_MISTAKES,
        )

    def _ask_once(self, within_s: float) -> _Known:
        if self._known is None:
            self._known = self._kms.ask(
                "get_public_key",
                self._read_public_key,
                lambda: {"KeyId": self._kms.name},
                within_s=within_s,
                mistakes=_MISTAKES,
            )
        return self._known

    def _read_public_key(self, answer: Mapping[str, Any]) -> _Known:
        if not self._kms.is_meant_by(answer.get("KeyId")):
            raise NoKeyError(f"{self.uri}: KMS answered with the public key of another key")
        if answer.get("KeyUsage") != _USAGE:
            raise ConfigError(f"{self.uri}: {_NO_SIGNING_KEY} (its usage is {answer.get('KeyUsage')!r:.60})")
        der = self._kms.bytes_in(answer, "PublicKey")
        try:
            public_key = PublicKey.from_der(der, self.uri)
        except FormatError as error:
            spec = answer.get("KeySpec", answer.get("CustomerMasterKeySpec"))
            raise ConfigError(f"{error}; {_NO_SIGNING_KEY} (its spec is {spec!r:.60})") from None
        check_signing_curve(public_key, self.uri)
        check_leaf(self.certificates, public_key, uri=self.uri)
        return _Known(public_key=public_key, key_id=key_id(answer.get("KeyId")))

    def act_as(self, sessions: Sessions) -> None:
        """See `KmsKey.act_as`."""
        self._kms.act_as(sessions)

    def __repr__(self) -> str:
        return f"<{self.uri}>"
