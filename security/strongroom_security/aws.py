"""Sessions and clients of AWS: the one module of this package that knows boto3.

A session is the process's own, a profile's, or one whose credentials a function fetches and fetches anew
before they expire. What is asked of a service, and what its failures mean, is its user's to say.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from strongroom import chance
from strongroom.errors import ConfigError
from strongroom.roles import Duty
from strongroom_security.recipients.calling import library

__all__ = ["Failure", "Fetch", "Sessions", "client", "new_session", "once", "repeatedly"]

Fetch = Callable[[], Mapping[str, str]]
"""Temporary credentials: ``access_key``, ``secret_key``, ``token`` and ``expiry_time`` (ISO 8601)."""


class Sessions(Protocol):
    """Whose sessions are for which duty; a policy's role is one."""

    def session(self, duty: Duty) -> Any:
        """boto3's session for a duty; None: this process's own.

        Raises:
            AccessDeniedError: the credentials were let go of, or refused.
            ConfigError, StoreUnavailableError: they cannot be had, or not now.
        """

    def when_dropped(self, then: Callable[[], None]) -> None:
        """Have something called once the credentials for restoring are let go of."""


_EXTRA: Final = "aws"

_LONGEST_PAUSE_S: Final = 20.0
"""As in boto3's standard mode."""

_BUSY: Final = frozenset(
    {
        "IDPCommunicationError",
        "PriorRequestNotComplete",
        "RequestLimitExceeded",
        "RequestThrottled",
        "RequestThrottledException",
        "RequestTimeout",
        "RequestTimeoutException",
        "SlowDown",
        "ThrottledException",
        "Throttling",
        "ThrottlingException",
        "TooManyRequestsException",
        "Unreachable",
    }
)
"""What may be otherwise in a moment (AWS SDKs and Tools Reference Guide, "Retry behavior")."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What boto3 raised, without its frames, in which a request stands.

    Attributes:
        code: the service's, or one of ``NoCredentials``, ``NotAuthorized``, ``Unreachable`` and
            ``Configuration``, where it was not reached.
        message: for people.
        status: of HTTP; 0: there was no answer.
        request_id: what the service calls the request; empty: it did not say.
    """

    code: str
    message: str
    status: int
    request_id: str = ""

    @property
    def may_pass(self) -> bool:
        """Whether the same call may go through in a moment."""
        return self.status >= 500 or self.status == 429 or self.code in _BUSY

    @property
    def reason(self) -> str:
        return f"{self.code}: {self.message}" if self.message else self.code


def new_session(
    *,
    whom: str,
    profile: str | None = None,
    fetch: Fetch | None = None,
    before_each: Callable[[], None] | None = None,
) -> Any:
    """A session of boto3.

    Args:
        whom: who needs it, for errors.
        profile: whose credentials; None: those that boto3 finds in this process.
        fetch: where credentials come from instead; called when they are first needed, and again whenever they
            are about to expire.
        before_each: called before each request of every client of this session; what it raises its user gets.

    Raises:
        ConfigError: boto3 is not installed, or there is no such profile.
    """
    boto3 = library("boto3", extra=_EXTRA, whom=whom)
    if fetch is None:
        try:
            return _asking_first(boto3.session.Session(profile_name=profile), before_each)
        except library("botocore.exceptions", extra=_EXTRA, whom=whom).ProfileNotFound as error:
            raise ConfigError(f"{whom}: {error}; see the file that AWS_CONFIG_FILE names") from None
    credentials = library("botocore.credentials", extra=_EXTRA, whom=whom)

    class Fetched(credentials.CredentialProvider):  # type: ignore[misc, name-defined]
        METHOD = "strongroom"

        def load(self) -> Any:
            return credentials.DeferredRefreshableCredentials(fetch, self.METHOD)

    beneath = library("botocore.session", extra=_EXTRA, whom=whom).get_session()
    beneath.register_component("credential_provider", credentials.CredentialResolver([Fetched()]))
    return _asking_first(boto3.session.Session(botocore_session=beneath), before_each)


def _asking_first(session: Any, before_each: Callable[[], None] | None) -> Any:
    if before_each is not None:
        session.events.register("before-call", lambda **_: before_each())
    return session


def client(
    session: Any,
    service: str,
    *,
    whom: str,
    connect_s: float,
    read_s: float,
    region: str | None = None,
    endpoint_url: str | None = None,
) -> Any:
    """A client of a service.

    Args:
        connect_s, read_s: for which it waits for the service at a time.

    Raises:
        ConfigError: the endpoint is no URL, or nothing says which region.
    """
    config = library("botocore.config", extra=_EXTRA, whom=whom).Config(
        connect_timeout=connect_s,
        read_timeout=read_s,
        # Its own tries draw their pauses from the stream that training draws from.
        retries={"mode": "standard", "total_max_attempts": 1},
        user_agent_extra="strongroom",
    )
    try:
        return session.client(service, region_name=region, endpoint_url=endpoint_url, config=config)
    except (ValueError, library("botocore.exceptions", extra=_EXTRA, whom=whom).BotoCoreError) as error:
        raise ConfigError(f"{whom}: {error}") from None


def repeatedly(
    call: Callable[..., Any],
    parameters: Mapping[str, Any],
    *,
    whom: str,
    tries: int,
    sleep: Callable[[float], None] = time.sleep,
    draw: Callable[[float, float], float] = chance.uniform,
) -> tuple[Any, Failure | None]:
    """As `once`, and again after a pause where the service was busy, at fault or out of reach.

    Args:
        tries: how often at most.
        sleep: waits for so many seconds.
        draw: a random number between two others.
    """
    answer, failure = once(call, parameters, whom=whom)
    for earlier in range(tries - 1):
        if failure is None or not failure.may_pass:
            break
        sleep(draw(0.0, min(_LONGEST_PAUSE_S, 2.0**earlier)))
        answer, failure = once(call, parameters, whom=whom)
    return answer, failure


def once(call: Callable[..., Any], parameters: Mapping[str, Any], *, whom: str) -> tuple[Any, Failure | None]:
    """What one call answered, and what went wrong; nothing of boto3's is raised."""
    exceptions = library("botocore.exceptions", extra=_EXTRA, whom=whom)
    try:
        return call(**parameters), None
    except exceptions.ClientError as error:
        details = error.response.get("Error", {})
        metadata = error.response.get("ResponseMetadata", {})
        return None, Failure(
            code=str(details.get("Code", "")),
            message=str(details.get("Message", "")),
            status=metadata.get("HTTPStatusCode", 0),
            request_id=str(metadata.get("RequestId", "")),
        )
    except exceptions.BotoCoreError as error:
        return None, Failure(code=_kind_of(error, exceptions), message=str(error), status=0)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        # What boto3 comes to when an answer has not the form that it takes for granted.
        return None, Failure(code="no answer of the service", message=type(error).__name__, status=0)


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
