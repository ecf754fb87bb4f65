"""A recipient that is a symmetric key of AWS KMS: it wraps and unwraps there, and never leaves.

One request wraps, one unwraps, one re-wraps for another KMS key. The context travels as KMS's encryption
context: KMS binds the wrapped bytes to it, writes it to CloudTrail in clear, and lets key policies
demand it. The wrapped bytes are KMS's own ciphertext blob, nothing added.

Where to ask, and as whom, is boto3's to find on this machine: environment, profile, role. Only the key's
name comes from the policy, and nothing from a keyring.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

from strongroom.errors import ConfigError, IntegrityError, KeyServiceError, NoKeyError
from strongroom_security.recipients.base import KEY_BYTES, Recipient, check_wrapped, opaque_id
from strongroom_security.recipients.calling import (
    Deadline,
    PerProcess,
    TryAgainError,
    ask,
    check_endpoint,
    library,
)
from strongroom_security.secret import Secret

if TYPE_CHECKING:
    from strongroom_security.fields import Context

__all__ = ["AwsKms"]

_LOG: Final = logging.getLogger("strongroom")

_T = TypeVar("_T")

_CONNECT_S: Final = 3.0
_READ_S: Final = 10.0
_MAX_BLOB_BYTES: Final = 6144
"""The longest ciphertext that ``Decrypt`` takes (KMS API reference)."""

_ARN: Final = re.compile(
    r"arn:(?P<partition>aws[a-z-]{0,20}):kms:(?P<region>[a-z0-9-]{1,32}):(?P<account>[0-9]{12})"
    r":(?P<resource>key/[A-Za-z0-9-]{1,64}|alias/[A-Za-z0-9/_-]{1,250})"
)
_BARE: Final = re.compile(r"[A-Za-z0-9-]{1,64}|alias/[A-Za-z0-9/_-]{1,250}")
_MULTI_REGION: Final = "key/mrk-"

# The error codes are those of the KMS API reference, with the codes that every AWS service shares.
_EXPIRED: Final = frozenset({"ExpiredToken", "ExpiredTokenException"})
_REFUSED: Final = frozenset(
    {
        "AccessDenied",
        "AccessDeniedException",
        "DisabledException",
        "IncompleteSignature",
        "IncorrectKeyException",
        "InvalidClientTokenId",
        "InvalidKeyUsageException",
        "InvalidSignatureException",
        "KMSInvalidStateException",
        "NotAuthorized",
        "NotFoundException",
        "OptInRequired",
        "RequestExpired",
        "SignatureDoesNotMatch",
        "UnauthorizedOperation",
        "UnrecognizedClientException",
        *_EXPIRED,
    }
)
_MISTAKEN: Final = frozenset({"Configuration", "InvalidArnException", "ValidationException"})
_PASSING: Final = frozenset(
    {
        "DependencyTimeoutException",
        "InternalFailure",
        "KMSInternalException",
        "KeyUnavailableException",
        "LimitExceededException",
        "RequestLimitExceeded",
        "ServiceUnavailable",
        "Throttling",
        "ThrottlingException",
        "TooManyRequestsException",
    }
)


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
        arn = _ARN.fullmatch(key)
        if arn is None and not _BARE.fullmatch(key):
            raise ConfigError(
                f"{self.uri[:200]!r} names no KMS key; expected aws-kms: and a key's ARN "
                "(arn:aws:kms:REGION:ACCOUNT:key/ID), its id, or alias/NAME"
            )
        self._key: Final = key
        self._endpoint_url: Final = endpoint_url
        self._arn_region: Final = None if arn is None else arn["region"]
        named = key
        if arn is not None and arn["resource"].startswith(_MULTI_REGION):
            # Replicas in other regions are the same key, and open what this one wrapped.
            named = ":".join((arn["partition"], arn["account"], arn["resource"]))
        self.id: Final = opaque_id(self.kind, named.encode())
        self._client: Final = PerProcess(self._connect)

    @classmethod
    def of(cls, text: str) -> AwsKms:
        """The recipient that a policy names.

        Args:
            text: what stands behind ``aws-kms:``.
        """
        return cls(text)

    def __repr__(self) -> str:
        return f"<{self.uri}>"

    def wrap(self, key: Secret, context: Context, *, within_s: float) -> bytes:
        """One call of ``Encrypt``; see `Recipient.wrap`."""

        def read(answer: Mapping[str, Any]) -> bytes:
            return check_wrapped(self._bytes(answer, "CiphertextBlob"), self.uri)

        return self._ask(
            "encrypt",
            read,
            within_s,
            lambda: {"KeyId": self._key, "Plaintext": key.reveal(), "EncryptionContext": context.pairs()},
        )

    def unwrap(self, wrapped: bytes, context: Context, *, within_s: float) -> Secret:
        """One call of ``Decrypt``, by this key alone; see `Identity.unwrap`."""
        self._check_blob(wrapped)

        def read(answer: Mapping[str, Any]) -> Secret:
            self._check_key(answer.get("KeyId"))
            plain = self._bytes(answer, "Plaintext")
            if len(plain) != KEY_BYTES:
                raise IntegrityError(f"{self.uri} unwrapped {len(plain)} bytes; a key has {KEY_BYTES}")
            return Secret(plain)

        # The key is named although KMS finds it in the blob: else whoever writes keyrings could have this
        # machine's role use another key of its own.
        return self._ask(
            "decrypt",
            read,
            within_s,
            lambda: {"KeyId": self._key, "CiphertextBlob": wrapped, "EncryptionContext": context.pairs()},
        )

    def rewrap(self, wrapped: bytes, context: Context, to: Recipient, *, within_s: float) -> bytes | None:
        """One call of ``ReEncrypt``, where ``to`` is a KMS key of the same region; see `Rewrapper.rewrap`."""
        self._check_blob(wrapped)
        if not isinstance(to, AwsKms) or self._place() != to._place():
            return None

        def read(answer: Mapping[str, Any]) -> bytes:
            self._check_key(answer.get("SourceKeyId"))
            return check_wrapped(self._bytes(answer, "CiphertextBlob"), to.uri)

        return self._ask(
            "re_encrypt",
            read,
            within_s,
            lambda: {
                "SourceKeyId": self._key,
                "SourceEncryptionContext": context.pairs(),
                "DestinationKeyId": to._key,
                "DestinationEncryptionContext": context.pairs(),
                "CiphertextBlob": wrapped,
            },
        )

    def _place(self) -> tuple[str | None, str | None]:
        return self._region(), self._endpoint_url

    def _region(self) -> str | None:
        if self._arn_region is not None:
            return self._arn_region
        found = library("boto3", extra="aws", whom=self.uri).session.Session().region_name
        return found or os.environ.get("AWS_REGION")

    def _check_blob(self, wrapped: bytes) -> None:
        if not 1 <= len(wrapped) <= _MAX_BLOB_BYTES:
            raise IntegrityError(
                f"a key wrapped by {self.uri} has {len(wrapped)} bytes; KMS makes 1 to {_MAX_BLOB_BYTES}"
            )

    def _check_key(self, answered: object) -> None:
        """A server that ignores which key was asked for must not choose it."""
        asked = self._key.rpartition(":")[2].removeprefix("key/")
        if not asked.startswith("alias/") and str(answered).rpartition("/")[2] != asked:
            raise NoKeyError(f"{self.uri} did not wrap this; another key of the same service did")

    def _bytes(self, answer: Mapping[str, Any], name: str) -> bytes:
        value = answer.get(name)
        if not isinstance(value, bytes):
            raise KeyServiceError(f"{self.uri}: what answered is no KMS: its answer has no {name}")
        return value

    def _ask(
        self,
        operation: str,
        read: Callable[[Mapping[str, Any]], _T],
        within_s: float,
        parameters: Callable[[], Mapping[str, Any]],
    ) -> _T:
        renewed: list[bool] = []

        def attempt(_: Deadline) -> _T:
            answer, failure = self._once(operation, parameters)
            if failure is None:
                return read(answer)
            if failure.code in _EXPIRED and not renewed:
                # The client reads a static credential once; whoever keeps it fresh has written a new one.
                renewed.append(True)
                self._client.forget()
                raise TryAgainError(failure.reason)
            # Raised out here, so that no error of boto3's, with the request in its frames, is its context.
            raise self._meaning(operation, failure)

        return ask(attempt, whom=self.uri, within_s=within_s)

    def _once(
        self, operation: str, parameters: Callable[[], Mapping[str, Any]]
    ) -> tuple[Mapping[str, Any], _Failure | None]:
        exceptions = library("botocore.exceptions", extra="aws", whom=self.uri)
        asked = parameters()
        try:
            call = getattr(self._client.get(), operation)
            with _hushed():
                return call(**asked), None
        except exceptions.ClientError as error:
            details = error.response.get("Error", {})
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            return {}, _Failure(str(details.get("Code", "")), str(details.get("Message", "")), status)
        except exceptions.BotoCoreError as error:
            return {}, _Failure(_kind_of(error, exceptions), str(error), 0)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            # What boto3 comes to when an answer has not the form that it takes for granted.
            return {}, _Failure("no answer of a KMS", type(error).__name__, 0)

    def _meaning(self, operation: str, failure: _Failure) -> Exception:
        told = f"{self.uri}: KMS answered {operation} with {failure.reason}"
        if failure.code in _PASSING or failure.status >= 500 or failure.status == 429:
            return TryAgainError(failure.reason)
        if failure.code == "InvalidCiphertextException":
            return IntegrityError(f"{told}; these bytes were not wrapped by this key for this checkpoint")
        if failure.code in _EXPIRED:
            return NoKeyError(f"{told}; renew this machine's credentials (AWS STS, SSO or instance role)")
        if failure.code in _REFUSED:
            return NoKeyError(
                f"{told}; see that the key exists here and is enabled, and that this identity may use it "
                "so (key policy, IAM policy, encryption context)"
            )
        if failure.code == "NoCredentials":
            return NoKeyError(
                f"{self.uri}: this machine has no AWS credentials; give it a role (instance, pod or SSO "
                "profile), as for the AWS command line"
            )
        if failure.code == "Unreachable":
            return TryAgainError(failure.reason)
        if failure.code in _MISTAKEN:
            return ConfigError(f"{self.uri}: {failure.reason}")
        return KeyServiceError(told)

    def _connect(self) -> Any:
        boto3 = library("boto3", extra="aws", whom=self.uri)
        config = library("botocore.config", extra="aws", whom=self.uri).Config(
            connect_timeout=_CONNECT_S,
            read_timeout=_READ_S,
            # Repeating is `calling.ask`'s to do, which knows how long it may.
            retries={"mode": "standard", "total_max_attempts": 1},
            user_agent_extra="strongroom",
        )
        try:
            session = boto3.session.Session()
            client = session.client(
                "kms", region_name=self._region(), endpoint_url=self._endpoint_url, config=config
            )
        except ValueError as error:  # an endpoint that is no URL
            raise ConfigError(f"{self.uri}: {error}") from None
        check_endpoint(client.meta.endpoint_url, whom=self.uri)
        _warn_of_long_lived(session.get_credentials())
        return client


class _Failure:
    """What boto3 raised, without its frames."""

    def __init__(self, code: str, message: str, status: int) -> None:
        self.code = code
        self.message = message
        self.status = status

    @property
    def reason(self) -> str:
        return f"{self.code}: {self.message}" if self.message else self.code


def _kind_of(error: Exception, exceptions: Any) -> str:
    if isinstance(error, (exceptions.NoCredentialsError, exceptions.PartialCredentialsError)):
        return "NoCredentials"
    credentials = (
        exceptions.CredentialRetrievalError,
        exceptions.TokenRetrievalError,
        exceptions.UnauthorizedSSOTokenError,
        exceptions.SSOError,
    )
    if isinstance(error, credentials):
        return "NotAuthorized"
    if isinstance(
        error, (exceptions.ConnectionError, exceptions.HTTPClientError, exceptions.MetadataRetrievalError)
    ):
        return "Unreachable"
    return "Configuration"


_WARNED: Final[set[str]] = set()


def _warn_of_long_lived(credentials: Any) -> None:
    """Say once a process that a user's access key is in use: it is stolen once and works for years."""
    if credentials is None:
        return
    frozen = credentials.get_frozen_credentials()
    # AWS gives long-lived keys of users ids that begin with AKIA, temporary ones ASIA and a token.
    is_long_lived = not frozen.token and (frozen.access_key or "").startswith("AKIA")
    if is_long_lived and frozen.access_key not in _WARNED:
        _WARNED.add(frozen.access_key)
        _LOG.warning(
            "AWS KMS is used with the long-lived access key ...%s of a user (found by: %s); give this "
            "machine a role, whose credentials expire",
            frozen.access_key[-4:],
            credentials.method,
        )


class _Hush(logging.Filter):
    """Drops what botocore logs on a thread that hands keys to it: at DEBUG it writes whole requests."""

    here: Final = threading.local()

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno > logging.DEBUG or not getattr(self.here, "is_on", False)


_HUSH: Final = _Hush()


@contextmanager
def _hushed() -> Iterator[None]:
    # A filter counts for the logger that it hangs on and not for those below; all exist once there is a
    # client.
    for name in list(logging.root.manager.loggerDict):
        if name.partition(".")[0] in {"botocore", "boto3", "urllib3"}:
            logging.getLogger(name).addFilter(_HUSH)
    _Hush.here.is_on = True
    try:
        yield
    finally:
        _Hush.here.is_on = False
