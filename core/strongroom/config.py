"""Options as values, each checked once when built; and where a policy file comes in."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, runtime_checkable

from strongroom.auditing import Auditor
from strongroom.digest import DIGEST_ALGORITHMS, DigestAlgorithm
from strongroom.errors import ConfigError
from strongroom.roles import Role
from strongroom.sealing import Sealing
from strongroom.signing import Guard, Signing

__all__ = [
    "POLICY_VARIABLE",
    "SYSTEM_CLOCK",
    "Clock",
    "OnFailure",
    "Policy",
    "RaiseAtOnce",
    "Tolerate",
    "check_count",
    "check_digest",
    "check_keep",
    "check_seconds",
    "choose_digest",
    "load_policy",
]

POLICY_VARIABLE: Final = "STRONGROOM_CONFIG"
"""Names a policy file for every `Checkpointer` that is given none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RaiseAtOnce:
    """A failed background save raises at the next ``save``, ``wait`` or ``close``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerate:
    """Up to ``consecutive`` failed saves in a row are logged and counted; one more raises."""

    consecutive: int

    def __post_init__(self) -> None:
        if type(self.consecutive) is not int or self.consecutive < 1:
            raise ConfigError(
                f"Tolerate.consecutive must be a whole number of at least 1, got {self.consecutive!r}"
            )


OnFailure = RaiseAtOnce | Tolerate


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """The time: ``now_ns`` since the epoch, which may jump, and ``monotonic`` seconds, which cannot."""

    now_ns: Callable[[], int]
    monotonic: Callable[[], float]

    def now_ms(self) -> int:
        # Before 1970 there is no spelling for it; a clock that is that wrong is not worth a crash.
        return max(0, self.now_ns() // 1_000_000)


SYSTEM_CLOCK: Final = Clock(now_ns=time.time_ns, monotonic=time.monotonic)


@runtime_checkable
class Policy(Protocol):
    """What the core asks of a security policy; `strongroom_security.SecurityPolicy` is one."""

    @property
    def digest(self) -> DigestAlgorithm | None:
        """The digest of checkpoint files; None: no opinion."""

    @property
    def sealing(self) -> Sealing | None:
        """How files are sealed; None: they are not."""

    @property
    def signing(self) -> Signing | None:
        """Who signs checkpoints; None: nobody."""

    @property
    def guard(self) -> Guard:
        """What reading is held to."""

    @property
    def role(self) -> Role | None:
        """What this process may do to a root, and by whose credentials; None: whatever the server lets it."""

    @property
    def auditor(self) -> Auditor:
        """Keeps the record of who touched what; `strongroom.auditing.NO_AUDIT`: nobody does."""


def load_policy(security: Any, environment: Mapping[str, str] = os.environ) -> Policy | None:
    """The policy for a checkpointer: given, a file's path, or by ``STRONGROOM_CONFIG``.

    The only place where the core reaches for the security package, and by its name alone
    (`docs/adr/0007-policy-entry-point.md`).

    Raises:
        ConfigError: a policy is asked for and cannot be had: a run that was meant to be
            protected never goes on without.
    """
    if isinstance(security, Policy):
        return security
    source = security if security is not None else environment.get(POLICY_VARIABLE)
    if source is None:
        return None
    if security is None and not source.strip():
        # As a job's template leaves it whose own variable has no value: protection was meant.
        raise ConfigError(
            f"{POLICY_VARIABLE} is set, and names no file; unset it to run without a policy, or set it "
            f"to the policy's path"
        )
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(
            f"security must be a SecurityPolicy or the path of its file, got a {type(source).__name__}"
        )
    try:
        package = importlib.import_module("strongroom_security")
    except ImportError as error:
        raise ConfigError(
            f"the policy {os.fspath(source)!r} needs the package strongroom_security, which cannot be "
            f"imported ({error}); install the whole of strongroom"
        ) from error
    policy: Policy = package.SecurityPolicy.load(source)
    return policy


def choose_digest(digest: str | None, policy: Policy | None) -> DigestAlgorithm:
    """The digest that was asked for, else the policy's, else ``"blake3"``; ``"sha256"`` for what is signed.

    Tools for signatures know SHA-256, and so can check every file by themselves.
    """
    is_signed = policy is not None and policy.signing is not None
    usual = "sha256" if is_signed else "blake3"
    return check_digest(digest or (policy.digest if policy else None) or usual)


def check_digest(digest: str) -> DigestAlgorithm:
    """Return a digest's name if there is such a one."""
    for algorithm in DIGEST_ALGORITHMS:
        if digest == algorithm:
            return algorithm
    raise ConfigError(f"digest must be one of {', '.join(DIGEST_ALGORITHMS)}, got {digest!r}")


def check_keep(keep: Any) -> None:
    """Raise ConfigError where ``keep`` is neither a retention policy nor None."""
    if keep is not None and not callable(getattr(keep, "keep", None)):
        raise ConfigError(f"keep must be a retention policy such as KeepLast(count=3), got {keep!r}")


def check_seconds(name: str, value: Any, *, at_most: float = float("inf")) -> float:
    """Return a positive, finite number of seconds."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < float("inf") or value > at_most:
        bound = "" if at_most == float("inf") else f" of at most {at_most:g}"
        raise ConfigError(f"{name} must be a positive number of seconds{bound}, got {value!r}")
    return float(value)


def check_count(name: str, value: Any) -> int:
    """Return a whole number that is not negative."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigError(f"{name} must be a whole number of 0 or more, got {value!r}")
    return value
