"""Calls to AWS KMS about one key: who makes them, for how long they are tried, and what failures mean.

What is asked of the key, and what to make of the answer, is its user's, who recipients and signers are.
Where to ask, and as whom, is boto3's to find on this machine: environment, profile, role; or a policy's
``[role]`` says as whom (`KmsKey.act_as`).
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, TypeVar

from strongroom.errors import (
    AccessDeniedError,
    ConfigError,
    IntegrityError,
    KeyServiceError,
    NoKeyError,
    StoreUnavailableError,
)
from strongroom.roles import Duty
from strongroom_security import aws
from strongroom_security.aws import Failure, Sessions
from strongroom_security.keyrequests import note_request
from strongroom_security.recipients.calling import (
    Deadline,
    PerProcess,
    TryAgainError,
    ask,
    check_endpoint,
)

__all__ = ["KmsKey", "key_id"]

_LOG: Final = logging.getLogger("strongroom")

_T = TypeVar("_T")

_DUTIES: Final = {"decrypt": Duty.RESTORE}
"""What each operation is for; all others are for saving, or for whoever changes who can open."""

_CONNECT_S: Final = 3.0
_READ_S: Final = 10.0

_ARN: Final = re.compile(
    r"arn:(?P<partition>aws[a-z-]{0,20}):kms:(?P<region>[a-z0-9-]{1,32}):(?P<account>[0-9]{12})"
    r":(?P<resource>key/[A-Za-z0-9-]{1,64}|alias/[A-Za-z0-9/_-]{1,250})"
)
_BARE: Final = re.compile(r"[A-Za-z0-9-]{1,64}|alias/[A-Za-z0-9/_-]{1,250}")
_MULTI_REGION: Final = "key/mrk-"
_NO_MISTAKES: Final[Mapping[str, str]] = {}

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
        "ServiceUnavailable",
    }
)


class KmsKey:
    """A key by the name that a policy gives it.

    Args:
        name: the key's ARN, its id, or an alias (``alias/NAME`` or the alias's ARN). An ARN says which
            region; otherwise it is boto3's.
        uri: the name as the policy has it, for people.
        endpoint_url: where to ask; without one, boto3's choice.

    Raises:
        ConfigError: it is no name of a key.
    """

    def __init__(self, name: str, *, uri: str, endpoint_url: str | None = None) -> None:
        self.uri: Final = uri
        arn = _ARN.fullmatch(name)
        if arn is None and not _BARE.fullmatch(name):
            raise ConfigError(
                f"{self.uri[:200]!r} names no KMS key; expected aws-kms: and a key's ARN "
                "(arn:aws:kms:REGION:ACCOUNT:key/ID), its id, or alias/NAME"
            )
        self.name: Final = name
        self._endpoint_url: Final = endpoint_url
        self._arn: Final = arn
        self._sessions: Sessions | None = None
        self._clients: Final = {duty: PerProcess(partial(self._connect, duty)) for duty in Duty}

    @property
    def shared_name(self) -> str:
        """What the same key is called in every region."""
        if self._arn is not None and self._arn["resource"].startswith(_MULTI_REGION):
            # Replicas in other regions are the same key, and open what this one wrapped.
            return ":".join((self._arn["partition"], self._arn["account"], self._arn["resource"]))
        return self.name

    @property
    def is_alias(self) -> bool:
        """Whether which key it is may change."""
        return self._resource.startswith("alias/")

    @property
    def _resource(self) -> str:
        return self.name.rpartition(":")[2]

    def is_meant_by(self, answered: object) -> bool:
        """Whether an answer's ``KeyId``, an id or an ARN, is of this key; of an alias it may be any."""
        return self.is_alias or key_id(answered) == self._resource.removeprefix("key/")

    def place(self) -> tuple[str | None, str | None]:
        """Region and endpoint: where they are the same, one call can name both keys."""
        return self._region(), self._endpoint_url

    def _region(self) -> str | None:
        if self._arn is not None:
            return str(self._arn["region"])
        found = aws.new_session(whom=self.uri).region_name
        return found or os.environ.get("AWS_REGION")

    def bytes_in(self, answer: Mapping[str, Any], name: str) -> bytes:
        """A member of an answer.

        Raises:
            KeyServiceError: it is not there, or holds no bytes.
        """
        value = answer.get(name)
        if not isinstance(value, bytes):
            raise KeyServiceError(f"{self.uri}: what answered is no KMS: its answer has no {name}")
        return value

    def ask(
        self,
        operation: str,
        read: Callable[[Mapping[str, Any]], _T],
        parameters: Callable[[], Mapping[str, Any]],
        *,
        within_s: float,
        mistakes: Mapping[str, str] = _NO_MISTAKES,
    ) -> _T:
        """What KMS answers to a request, which is repeated while its failures pass.

        Args:
            operation: boto3's name of it.
            read: what to make of the answer.
            parameters: called for each try, so that what they hold stands in no frame that an error shows.
            within_s: seconds, tries included.
            mistakes: error codes that say that the policy names the wrong key, and what to do about each.

        Raises:
            NoKeyError, KeyServiceError, ConfigError: as recipients' and signers' protocols say.
            IntegrityError: the bytes that KMS was to open are wrong.
        """
        renewed: list[bool] = []

        def attempt(_: Deadline) -> _T:
            answer, failure = self._once(operation, parameters)
            if failure is None:
                return read(answer)
            if failure.code in _EXPIRED and not renewed:
                # The client reads a static credential once; whoever keeps it fresh has written a new one.
                renewed.append(True)
                self._client_for(operation).forget()
                raise TryAgainError(failure.reason)
            if failure.code in mistakes:
                raise ConfigError(f"{self.uri}: {mistakes[failure.code]} (KMS answered: {failure.reason})")
            # Raised out here, so that no error of boto3's, with the request in its frames, is its context.
            raise self._meaning(operation, failure)

        return ask(attempt, whom=self.uri, within_s=within_s)

    def _once(
        self, operation: str, parameters: Callable[[], Mapping[str, Any]]
    ) -> tuple[Mapping[str, Any], Failure | None]:
        def call(**asked: Any) -> Any:
            try:
                client = self._client_for(operation).get()
                with _hushed():
                    return getattr(client, operation)(**asked)
            except AccessDeniedError as error:  # of a role's credentials, which were to be had first
                raise NoKeyError(f"{self.uri}: {error}") from None
            except StoreUnavailableError as error:
                raise TryAgainError(str(error)) from None

        answer, failure = aws.once(call, parameters(), whom=self.uri)
        if failure is not None:
            note_request(failure.request_id)
        elif isinstance(answer, Mapping):
            metadata = answer.get("ResponseMetadata")
            note_request(metadata.get("RequestId") if isinstance(metadata, Mapping) else None)
        return ({} if answer is None else answer), failure

    def _meaning(self, operation: str, failure: Failure) -> Exception:
        told = f"{self.uri}: KMS answered {operation} with {failure.reason}"
        if failure.may_pass or failure.code in _PASSING:
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
        if failure.code in _MISTAKEN:
            return ConfigError(f"{self.uri}: {failure.reason}")
        return KeyServiceError(told)

    def act_as(self, sessions: Sessions) -> None:
        """Ask with a session for each duty instead of with this process's own."""
        self._sessions = sessions
        sessions.when_dropped(self._clients[Duty.RESTORE].forget)
        for each in self._clients.values():
            each.forget()

    def _client_for(self, operation: str) -> PerProcess[Any]:
        return self._clients[_DUTIES.get(operation, Duty.SAVE)]

    def _connect(self, duty: Duty) -> Any:
        session = None if self._sessions is None else self._sessions.session(duty)
        if session is None:
            session = aws.new_session(whom=self.uri)
        # Repeating is `calling.ask`'s to do, which knows how long it may.
        client = aws.client(
            session,
            "kms",
            whom=self.uri,
            connect_s=_CONNECT_S,
            read_s=_READ_S,
            region=self._region(),
            endpoint_url=self._endpoint_url,
        )
        check_endpoint(client.meta.endpoint_url, whom=self.uri)
        if self._sessions is None:
            _warn_of_long_lived(session.get_credentials())
        return client


def key_id(answered: object) -> str:
    """The id in an answer's ``KeyId``, which is an ARN in most of them."""
    return str(answered).rpartition("/")[2]


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
