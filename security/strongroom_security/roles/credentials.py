"""By whose credentials a duty is done: from a policy's text to sessions of AWS, which can be let go of.

======================  ======================================================================================
text                    the credentials are
======================  ======================================================================================
``env``                 this process's own, as boto3 finds them
``profile:NAME``        a profile's, of the files of AWS
``role:ARN``            a role's, taken up with this process's own (STS ``AssumeRole``)
``web-identity:ARN``    a role's, taken up with a token of OIDC; its file is the one that
                        ``AWS_WEB_IDENTITY_TOKEN_FILE`` names, or ``web-identity:ARN;token=PATH``
======================  ======================================================================================

A role is taken up for an hour at most, narrowed to one run where the run is known, and again before the hour
is over.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from strongroom.errors import AccessDeniedError, ConfigError, StoreUnavailableError
from strongroom_security import aws
from strongroom_security.roles.documents import SESSION_S
from strongroom_security.roles.site import RUN_TAG

__all__ = ["Credentials", "Ends", "Held"]

_ROLE = re.compile(r"arn:aws[a-z-]*:iam::[0-9]{12}:role/[A-Za-z0-9+=,.@_/-]{1,512}")
_PROFILE = re.compile(r"[^\s:;]{1,128}")
_TOKEN_VARIABLE: Final = "AWS_WEB_IDENTITY_TOKEN_FILE"  # noqa: S105 - the name of a variable
_TOKEN_LIMIT_BYTES: Final = 65_536
_EXPECTED: Final = "expected 'env', 'profile:NAME', 'role:ARN' or 'web-identity:ARN'"

_CONNECT_S: Final = 5.0
_READ_S: Final = 15.0
_TRIES: Final = 4

_MIN_SESSION_S: Final = 900
_MARGIN_S: Final = 900
"""boto3 fetches anew what ends within 15 minutes. A shorter session would be fetched for each request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Whose credentials.

    Attributes:
        kind: ``env``, ``profile``, ``role`` or ``web-identity``.
        name: the profile's name or the role's ARN; empty for ``env``.
        token: the file with the token; None: as the environment says.
    """

    kind: str = "env"
    name: str = ""
    token: Path | None = None

    @classmethod
    def of(cls, text: object, *, base: Path) -> Credentials:
        """What a policy's text means.

        Args:
            base: what a token's relative path is relative to.

        Raises:
            ConfigError: it means nothing.
        """
        if not isinstance(text, str):
            raise ConfigError(f"{_EXPECTED}, got {text!r:.60}")
        kind, _, rest = text.partition(":")
        if text == "env":
            return cls()
        if kind == "profile" and _PROFILE.fullmatch(rest):
            return cls(kind=kind, name=rest)
        if kind == "role" and _ROLE.fullmatch(rest):
            return cls(kind=kind, name=rest)
        if kind == "web-identity":
            arn, is_named, path = rest.partition(";token=")
            if _ROLE.fullmatch(arn) and bool(is_named) == bool(path):
                return cls(kind=kind, name=arn, token=base / path if path else None)
        raise ConfigError(f"{_EXPECTED}, got {text!r:.100}")

    @property
    def takes_up_a_role(self) -> bool:
        """Whether a session policy can narrow them."""
        return self.kind in ("role", "web-identity")

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}" if self.name else self.kind


class Ends(Protocol):
    """An end of the time in which credentials may be used; a grant is one."""

    @property
    def when(self) -> str:
        """The end, as policies of AWS spell it: ``2026-11-30T10:00:00Z``."""

    def remaining_s(self) -> float:
        """Seconds until then; 0 or less: it is over."""

    def check(self) -> None:
        """Raises `AccessDeniedError` where it is over."""


class Held:
    """A session by these credentials, until it is let go of.

    Args:
        credentials: whose.
        name: what a session of a role is called, in the logs of AWS.
        policy: narrows a session of a role; None: it is not narrowed.
        whom: who needs it, for errors.
        run: the run that a session of a role is tagged with; None: nothing says. A token brings its tags
            along.
        ends: after which nothing is fetched and nothing asked; None: it has no end.

    Raises:
        ConfigError: boto3 is not installed, or there is no such profile or token file.
    """

    def __init__(
        self,
        credentials: Credentials,
        *,
        name: str,
        policy: str | None,
        whom: str,
        run: str | None = None,
        ends: Ends | None = None,
    ) -> None:
        self.credentials: Final = credentials
        self._run = run
        self._ends = ends
        self._whom = whom
        self._name = name
        self._policy = policy
        self._lock = threading.Lock()
        self._dropped_because = ""
        if credentials.kind == "web-identity":
            self._token()  # a file that is not there is told now, and not in the middle of a save
        self._session: Any = aws.new_session(
            whom=whom,
            profile=credentials.name if credentials.kind == "profile" else None,
            fetch=self._take_up if credentials.takes_up_a_role else None,
            before_each=None if ends is None else ends.check,
        )

    @property
    def session(self) -> Any:
        """boto3's session. Of a role: it fetches its credentials when they are first needed.

        Raises:
            AccessDeniedError: it was let go of.
        """
        session = self._session
        if session is None:
            raise AccessDeniedError(f"{self._whom}: {self._dropped_because}")
        return session

    def check(self) -> None:
        """Find out whether the credentials can be had.

        Raises:
            AccessDeniedError: the service refused, or they were let go of.
            ConfigError: there are none.
            StoreUnavailableError: the service was out of reach, or throttles.
        """
        found, failure = aws.once(self._frozen, {}, whom=self._whom)
        if failure is not None:
            raise self._meaning(failure)
        if found is None:
            raise ConfigError(
                f"{self._whom}: this machine has no AWS credentials ({self.credentials}); give it a role "
                f"(instance, pod or SSO profile), or name others in [role]"
            )

    def drop(self, why: str) -> None:
        """Let go of them: nothing is asked with them any more, and none are fetched.

        Args:
            why: for people.
        """
        with self._lock:
            self._dropped_because = why
            self._session = None
            self._policy = None

    def _frozen(self) -> Any:
        credentials = self.session.get_credentials()
        return None if credentials is None else credentials.get_frozen_credentials()

    def _take_up(self) -> Mapping[str, str]:
        """Fetches a role's credentials; boto3 calls it, so what it raises reaches whoever asked a service."""
        with self._lock:
            if self._dropped_because:
                raise AccessDeniedError(f"{self._whom}: {self._dropped_because}")
        if self._ends is not None:
            self._ends.check()
        asked: dict[str, Any] = {
            "RoleArn": self.credentials.name,
            "RoleSessionName": self._name,
            "DurationSeconds": self._duration_s(),
        }
        if self._policy is not None:
            asked["Policy"] = self._policy
        sts = aws.client(
            aws.new_session(whom=self._whom),
            "sts",
            whom=self._whom,
            connect_s=_CONNECT_S,
            read_s=_READ_S,
        )
        call: Callable[..., Any]
        if self.credentials.kind == "web-identity":
            call, asked["WebIdentityToken"] = sts.assume_role_with_web_identity, self._token()
        else:
            call = sts.assume_role
            if self._run is not None:
                asked["Tags"] = [{"Key": RUN_TAG, "Value": self._run}]
        answer, failure = aws.repeatedly(call, asked, whom=self._whom, tries=_TRIES)
        if failure is not None:
            raise self._meaning(failure)
        given = answer["Credentials"]
        return {
            "access_key": given["AccessKeyId"],
            "secret_key": given["SecretAccessKey"],
            "token": given["SessionToken"],
            "expiry_time": given["Expiration"].isoformat(),
        }

    def _duration_s(self) -> int:
        """For how long a session is asked for; that it allows nothing after the end its policy says."""
        if self._ends is None:
            return SESSION_S
        return max(_MIN_SESSION_S, min(SESSION_S, int(self._ends.remaining_s()) + _MARGIN_S))

    def _token(self) -> str:
        # Read each time: who keeps it fresh puts a new one in its place.
        path = self.credentials.token or os.environ.get(_TOKEN_VARIABLE)
        if not path:
            raise ConfigError(
                f"{self._whom}: nothing says where the token is; set {_TOKEN_VARIABLE}, or write "
                f"'web-identity:ARN;token=PATH'"
            )
        try:
            with open(path, encoding="ascii") as file:
                token = file.read(_TOKEN_LIMIT_BYTES).strip()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "it is not plain text"
            raise ConfigError(f"{self._whom}: the token {path} cannot be read: {reason}") from None
        if not token:
            raise ConfigError(f"{self._whom}: the token {path} is empty")
        return token

    def _meaning(self, failure: aws.Failure) -> Exception:
        told = f"{self._whom}: the credentials {self.credentials} cannot be had: {failure.reason}"
        if failure.may_pass:
            return StoreUnavailableError(told)
        if failure.code in ("NoCredentials", "Configuration"):
            return ConfigError(told)
        return AccessDeniedError(
            f"{told}; see the role's trust policy (sts:TagSession, too, where the run is known), and "
            f"that the token or key that takes it up has not expired"
        )

    def __repr__(self) -> str:
        return f"<Held {self.credentials}>"
