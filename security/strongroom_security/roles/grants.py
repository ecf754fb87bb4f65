"""A grant: by which two people let somebody take up a role for one run, for a reason and for some hours.

It is a DSSE envelope whose payload is canonical JSON, with a signature of each approver. Who may approve the
policy names, outside of the grant; a grant that names its own approvers would be worth nothing.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Final

from strongroom import canonical
from strongroom.auditing import NO_AUDIT, Action, Activity, Auditor
from strongroom.canonical import MAX_INTEGER, Bounds
from strongroom.digest import Digest, sha256_of
from strongroom.errors import AccessDeniedError, ConfigError, FormatError, UnsupportedFormatError
from strongroom.manifest import check_run_id
from strongroom_security.dsse import pae
from strongroom_security.envelopes import SharedEnvelope
from strongroom_security.publickeys import PublicKey
from strongroom_security.roles.definitions import definition
from strongroom_security.strictjson import members_of, text_of

if TYPE_CHECKING:
    from strongroom_security.signers.base import Signer

__all__ = [
    "APPROVERS_NEEDED",
    "FORMAT",
    "MAX_HOURS",
    "PAYLOAD_TYPE",
    "Grant",
    "GrantUse",
    "HeldGrant",
    "approve",
    "read_grant",
    "signed_by",
    "unapproved",
]

_LOG: Final = logging.getLogger("strongroom")

PAYLOAD_TYPE: Final = "application/vnd.strongroom.grant+json"
FORMAT: Final = "0.1"

MAX_HOURS: Final = 24
APPROVERS_NEEDED: Final = 2

_MAX_SIGNATURES: Final = 16
_MAX_WORDS: Final = 1000
_HOUR_MS: Final = 3_600_000
_BOUNDS: Final = Bounds(length_bytes=65_536, depth=4, items=200)
_NONCE = re.compile(r"[0-9a-f]{32}")
_KEY_ID = re.compile(r"[0-9a-f]{64}")
_WITHIN_S: Final = 30.0


_ENVELOPE: Final = SharedEnvelope(
    noun="a grant", payload_type=PAYLOAD_TYPE, max_signatures=_MAX_SIGNATURES, bounds=_BOUNDS
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """What is granted.

    Attributes:
        role: that may be taken up.
        run: for which run.
        who: who takes it up, for people.
        reason: for people.
        not_before_ms: from when, milliseconds since the epoch.
        not_after_ms: until when, at most `MAX_HOURS` hours later.
        nonce: 32 hex digits: no two grants are the same.

    Raises:
        FormatError: a value is out of bounds.
    """

    role: str
    run: str
    who: str
    reason: str
    not_before_ms: int
    not_after_ms: int
    nonce: str

    def __post_init__(self) -> None:
        try:
            if not definition(self.role).needs_grant:
                raise FormatError(f"a grant is for a role that needs one, and {self.role} needs none")
        except ConfigError as error:
            raise FormatError(str(error)) from None
        check_run_id(self.run)
        for member, text in (("who", self.who), ("reason", self.reason)):
            if not 1 <= len(text) <= _MAX_WORDS or not text.isprintable() or not text.strip():
                raise FormatError(
                    f"a grant's {member} has 1 to {_MAX_WORDS} printable characters, found {text[:60]!r}"
                )
        for member, at_ms in (("not_before_ms", self.not_before_ms), ("not_after_ms", self.not_after_ms)):
            if type(at_ms) is not int or not 0 <= at_ms <= MAX_INTEGER:
                raise FormatError(f"a grant's {member} is milliseconds since 1970, found {at_ms!r:.40}")
        lasts_ms = self.not_after_ms - self.not_before_ms
        if not 0 < lasts_ms <= MAX_HOURS * _HOUR_MS:
            raise FormatError(
                f"a grant holds for at most {MAX_HOURS} hours, and this one for {lasts_ms / _HOUR_MS:g}"
            )
        if not _NONCE.fullmatch(self.nonce):
            raise FormatError(f"a grant's nonce is 32 lower-case hex digits, found {self.nonce[:60]!r}")

    def encode(self) -> bytes:
        """What approvers sign."""
        return canonical.encode(
            {
                "format": FORMAT,
                "nonce": self.nonce,
                "not_after_ms": self.not_after_ms,
                "not_before_ms": self.not_before_ms,
                "reason": self.reason,
                "role": self.role,
                "run": self.run,
                "who": self.who,
            }
        )

    @classmethod
    def decode(cls, data: bytes, what: str) -> Grant:
        """Read what `encode` writes.

        Raises:
            FormatError, UnsupportedFormatError: it is malformed, or of another format.
        """
        value = canonical.decode(data, what, _BOUNDS)
        if isinstance(value, dict) and value.get("format") != FORMAT:
            raise UnsupportedFormatError(
                f"{what} is of format {value.get('format')!r:.20}; this release reads {FORMAT}"
            )
        texts = ("role", "run", "who", "reason", "nonce")
        times = ("not_before_ms", "not_after_ms")
        members = members_of(value, what, required=("format", *texts, *times))
        said = {name: text_of(members[name], f"the {name} of {what}") for name in texts}
        return cls(**said, not_before_ms=members["not_before_ms"], not_after_ms=members["not_after_ms"])

    @property
    def digest(self) -> Digest:
        """SHA-256 of what approvers sign: names the grant."""
        return sha256_of(self.encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantUse:
    """That a grant was used, for whoever records it.

    Attributes:
        grant: which.
        approvers: ids of the keys whose signatures hold.
        at_ms: when it was first used here, milliseconds since the epoch.
    """

    grant: Grant
    approvers: tuple[str, ...]
    at_ms: int


def unapproved(grant: Grant) -> bytes:
    """A grant's file before anybody approved it."""
    return _ENVELOPE.close(grant.encode(), {})


def approve(data: bytes, what: str, signer: Signer, *, within_s: float = _WITHIN_S) -> bytes:
    """A grant's file with one approver's signature more.

    Raises:
        FormatError, UnsupportedFormatError: it is malformed, or of another format.
        KeyServiceError, NoKeyError: who keeps the key was not reached in time, or refused.
    """
    from strongroom_security.signers.base import sign_checked

    payload, signatures = _ENVELOPE.open(data, what)
    Grant.decode(payload, what)
    signature = sign_checked(signer, pae(PAYLOAD_TYPE, payload), within_s=within_s)
    return _ENVELOPE.close(payload, {**signatures, signer.public_key.id: signature})


def read_grant(data: bytes, what: str, approvers: Sequence[PublicKey] = ()) -> tuple[Grant, tuple[str, ...]]:
    """A grant, and which of these approvers' signatures it has.

    Raises:
        FormatError, UnsupportedFormatError: it is malformed, or of another format.
    """
    payload, signatures = _ENVELOPE.open(data, what)
    message = pae(PAYLOAD_TYPE, payload)
    good = {key.id for key in approvers if key.id in signatures and key.verify(message, signatures[key.id])}
    return Grant.decode(payload, what), tuple(sorted(good))


def signed_by(data: bytes, what: str) -> tuple[str, ...]:
    """Ids of the keys whose signatures a grant's file claims to have; none is verified.

    Raises:
        FormatError: it is malformed.
    """
    return tuple(sorted(_ENVELOPE.open(data, what)[1]))


class HeldGrant:
    """A policy's grant: its signatures were verified, and its time is looked at with each use.

    Args:
        path: its file.
        approvers: keys of those who may approve; two at least.
        role, run: what it has to be for; of the run None: whichever it names.
        now_ms: the time, milliseconds since the epoch.

    Raises:
        ConfigError: it cannot be read, is malformed, is for something else, has too few approvers, or its
            time is over or has not begun.

    Attributes:
        use: that it was used; None: not yet.
        auditor: has to have accepted that it is used, before it is.
    """

    def __init__(
        self,
        path: Path,
        approvers: Sequence[PublicKey],
        *,
        role: str,
        run: str | None,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self._now_ms = now_ms
        self._path = path
        if len({key.id for key in approvers}) < APPROVERS_NEEDED:
            raise ConfigError(f"name the keys of {APPROVERS_NEEDED} approvers at least, each another one")
        try:
            with open(path, "rb") as file:
                data = file.read(_BOUNDS.length_bytes + 1)
        except (OSError, ValueError) as error:  # ValueError: a name with a zero character
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"the grant {path} cannot be read: {reason}") from error
        try:
            self.grant, self.approvers = read_grant(data, f"the grant {path}", approvers)
        except (FormatError, UnsupportedFormatError) as error:
            raise ConfigError(str(error)) from None
        if len(self.approvers) < APPROVERS_NEEDED:
            raise ConfigError(
                f"the grant {path} has {len(self.approvers)} of {APPROVERS_NEEDED} approvers' signatures; "
                f"have it signed by 'strongroom roles approve {path} --key KEY'"
            )
        if self.grant.role != role or run not in (None, self.grant.run):
            raise ConfigError(
                f"the grant {path} is for {self.grant.role} on run {self.grant.run}, and the policy has "
                f"{role} on run {run}"
            )
        if (problem := self._problem()) is not None:
            raise ConfigError(problem)
        self.use: GrantUse | None = None
        self.auditor: Auditor = NO_AUDIT
        self._process_id: int | None = None
        self._is_end_told = False

    def check(self) -> None:
        """Let the role be used now, and tell that it is: on record and as a warning, once a process.

        Raises:
            AccessDeniedError: the grant's time is over.
            AuditError: it could not be put on record first, and the role is not used.
        """
        if (problem := self._problem()) is not None:
            error = AccessDeniedError(problem)
            if not self._is_end_told:
                self._is_end_told = True
                self._activity().fail(error)
            raise error
        if self._process_id != os.getpid():
            with self._activity() as activity:
                activity.intend(self.grant.run, None)
            self._process_id = os.getpid()
        if self.use is None:
            self.use = GrantUse(grant=self.grant, approvers=self.approvers, at_ms=self._now_ms())
            _tell(self.use)

    def _activity(self) -> Activity:
        return Activity(
            self.auditor,
            Action.BREAK_GLASS,
            run=self.grant.run,
            details={
                "approvers": ",".join(self.approvers),
                "grant": str(self.grant.digest),
                "not_after_ms": self.grant.not_after_ms,
                "role": self.grant.role,
                "who": self.grant.who,
                "why": self.grant.reason,
            },
        )

    @property
    def when(self) -> str:
        """Until when it holds, as policies of AWS spell it."""
        return _when(self.grant.not_after_ms)

    def remaining_s(self) -> float:
        """For how many seconds it still holds; 0 or less: its time is over."""
        return (self.grant.not_after_ms - self._now_ms()) / 1000

    def _problem(self) -> str | None:
        at_ms = self._now_ms()
        if at_ms < self.grant.not_before_ms:
            return f"the grant {self._path} holds from {_when(self.grant.not_before_ms)} on"
        if at_ms >= self.grant.not_after_ms:
            return f"the grant {self._path} held until {_when(self.grant.not_after_ms)}; ask for another one"
        return None


_TOLD: Final[set[Digest]] = set()


def _tell(use: GrantUse) -> None:
    if use.grant.digest in _TOLD:
        return
    _TOLD.add(use.grant.digest)
    _LOG.warning(
        "break-glass: %s uses the role %s on run %s until %s, because: %s (grant %s, approved by %s)",
        use.grant.who,
        use.grant.role,
        use.grant.run,
        _when(use.grant.not_after_ms),
        use.grant.reason,
        use.grant.digest,
        ", ".join(key_id[:16] for key_id in use.approvers),
    )


def _when(at_ms: int) -> str:
    try:
        return f"{datetime.fromtimestamp(at_ms // 1000, timezone.utc):%Y-%m-%dT%H:%M:%SZ}"
    except (ValueError, OverflowError, OSError):
        return f"{at_ms} ms since 1970"
