"""Whose signatures a checkpoint needs. Pure: it is told whose signatures hold, and says what is missing.

How a signature is verified, and whether a key is still trusted, is `strongroom_security.trust`'s. A key is a
`PublicKey` or an `Authority`, of which any key with a certificate counts; keys are told apart by their ids.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

from strongroom.errors import ConfigError

if TYPE_CHECKING:
    from strongroom_security.certificates import Authority
    from strongroom_security.publickeys import PublicKey

    Key = PublicKey | Authority

__all__ = ["AllOf", "AnyOf", "RequireSigner", "Requirement", "Threshold", "UnsafeAllowUnsigned"]

_LOG: Final = logging.getLogger("strongroom")

_MAX_KEYS: Final = 1000
"""Of one requirement. Each may cost a reader one request to the store."""

_SHOWN: Final = 8
"""Ids that a sentence names; whoever needs more looks at the policy."""


@runtime_checkable
class Requirement(Protocol):
    """Says when the signatures that hold are enough."""

    @property
    def keys(self) -> tuple[Key, ...]:
        """Every key that can count, each once."""

    def problem(self, signers: Collection[str]) -> str | None:
        """What is missing, in words that name key ids; None where nothing is.

        Args:
            signers: ids of the keys of which a signature holds.
        """


@dataclass(frozen=True, slots=True, init=False, repr=False)
class RequireSigner:
    """Any one of some keys.

    Raises:
        ConfigError: no key is given, or something that is none.
    """

    keys: tuple[Key, ...]

    def __init__(self, keys: Iterable[Key]) -> None:
        object.__setattr__(self, "keys", _checked("RequireSigner", keys))

    def problem(self, signers: Collection[str]) -> str | None:
        if any(key.id in signers for key in self.keys):
            return None
        if len(self.keys) == 1:
            return f"a signature by {self.keys[0].id} is needed"
        return f"a signature by one of {_listed(self.keys)} is needed"

    def __repr__(self) -> str:
        return f"RequireSigner({_briefly(self.keys)})"


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Threshold:
    """At least ``n`` different ones of some keys. However often one key signs, it counts once.

    Raises:
        ConfigError: ``n`` is below 1, or above the number of different keys.
    """

    n: int
    keys: tuple[Key, ...]

    def __init__(self, n: int, keys: Iterable[Key]) -> None:
        found = _checked("Threshold", keys)
        if type(n) is not int or not 1 <= n <= len(found):
            raise ConfigError(
                f"Threshold needs n from 1 to the number of its different keys, {len(found)}, got {n!r:.40}"
            )
        object.__setattr__(self, "n", n)
        object.__setattr__(self, "keys", found)

    def problem(self, signers: Collection[str]) -> str | None:
        there = [key for key in self.keys if key.id in signers]
        if len(there) >= self.n:
            return None
        others = [key for key in self.keys if key.id not in signers]
        return (
            f"signatures by {self.n} of {len(self.keys)} keys are needed, and {len(there)} found; missing: "
            f"{_listed(others)}"
        )

    def __repr__(self) -> str:
        return f"Threshold({self.n}, {_briefly(self.keys)})"


@dataclass(frozen=True, slots=True, init=False, repr=False)
class AnyOf:
    """At least one of some requirements is met.

    Raises:
        ConfigError: none is given, or `UnsafeAllowUnsigned` is among them.
    """

    requirements: tuple[Requirement, ...]

    def __init__(self, *requirements: Requirement) -> None:
        object.__setattr__(self, "requirements", _checked_parts("AnyOf", requirements))

    @property
    def keys(self) -> tuple[Key, ...]:
        return _distinct(key for part in self.requirements for key in part.keys)

    def problem(self, signers: Collection[str]) -> str | None:
        problems = [part.problem(signers) for part in self.requirements]
        missing = [problem for problem in problems if problem is not None]
        return None if len(missing) < len(problems) else _joined(" or ", missing)

    def __repr__(self) -> str:
        return f"AnyOf({', '.join(map(repr, self.requirements))})"


@dataclass(frozen=True, slots=True, init=False, repr=False)
class AllOf:
    """Each of some requirements is met; one signature may count for several.

    Raises:
        ConfigError: none is given, or `UnsafeAllowUnsigned` is among them.
    """

    requirements: tuple[Requirement, ...]

    def __init__(self, *requirements: Requirement) -> None:
        object.__setattr__(self, "requirements", _checked_parts("AllOf", requirements))

    @property
    def keys(self) -> tuple[Key, ...]:
        return _distinct(key for part in self.requirements for key in part.keys)

    def problem(self, signers: Collection[str]) -> str | None:
        problems = [part.problem(signers) for part in self.requirements]
        missing = [problem for problem in problems if problem is not None]
        return _joined(" and ", missing) if missing else None

    def __repr__(self) -> str:
        return f"AllOf({', '.join(map(repr, self.requirements))})"


@dataclass(frozen=True, slots=True, init=False, repr=False)
class UnsafeAllowUnsigned:
    """Lets pass what nobody has signed, with a warning each; what is signed must meet a requirement.

    Whoever can write to the storage can take a signature away: this is for the days in which a run changes
    over to signatures, and protects against nothing.

    Raises:
        ConfigError: the requirement is none, or another `UnsafeAllowUnsigned`.
    """

    requirement: Requirement

    def __init__(self, requirement: Requirement) -> None:
        (found,) = _checked_parts("UnsafeAllowUnsigned", (requirement,))
        object.__setattr__(self, "requirement", found)
        _LOG.warning(
            "UNSAFE: checkpoints that nobody has signed are accepted. Whoever can write to the storage can "
            "take signatures away, so this protects against nothing: end it once everything is signed"
        )

    @property
    def keys(self) -> tuple[Key, ...]:
        return self.requirement.keys

    def problem(self, signers: Collection[str]) -> str | None:
        """As the requirement's. Whether there is any signature at all is its caller's to find out."""
        return self.requirement.problem(signers)

    def __repr__(self) -> str:
        return f"UnsafeAllowUnsigned({self.requirement!r})"


def _checked(what: str, keys: object) -> tuple[Key, ...]:
    found: list[Any] = []
    if not isinstance(keys, str | bytes) and isinstance(keys, Iterable):
        found.extend(keys)
    if not found:
        raise ConfigError(f"{what} needs at least one key, as in {what}([key]); got {keys!r:.60}")
    for key in found:
        if not isinstance(getattr(key, "id", None), str):
            raise ConfigError(f"{what} takes public keys and certificate authorities, got {key!r:.60}")
    return _bounded(what, _distinct(found))


def _checked_parts(what: str, parts: Sequence[Requirement]) -> tuple[Requirement, ...]:
    if not parts:
        raise ConfigError(f"{what} needs at least one requirement: with none, anything would pass or nothing")
    for part in parts:
        if isinstance(part, UnsafeAllowUnsigned):
            raise ConfigError(
                f"UnsafeAllowUnsigned stands inside {what}, where nobody sees it; it may be outermost only"
            )
        if not isinstance(part, Requirement):
            raise ConfigError(f"{what} takes requirements, as RequireSigner([key]); got {part!r:.60}")
    _bounded(what, _distinct(key for part in parts for key in part.keys))
    return tuple(parts)


def _bounded(what: str, keys: tuple[Key, ...]) -> tuple[Key, ...]:
    if len(keys) > _MAX_KEYS:
        raise ConfigError(f"{what} names {len(keys)} keys; at most {_MAX_KEYS} are taken")
    return keys


def _distinct(keys: Iterable[Key]) -> tuple[Key, ...]:
    by_id: dict[str, Key] = {}
    for key in keys:
        by_id.setdefault(key.id, key)
    return tuple(by_id.values())


def _listed(keys: Sequence[Key]) -> str:
    ids = ", ".join(key.id for key in keys[:_SHOWN])
    return ids if len(keys) <= _SHOWN else f"{ids} and {len(keys) - _SHOWN} more"


def _joined(word: str, problems: Sequence[str]) -> str:
    return problems[0] if len(problems) == 1 else word.join(f"({problem})" for problem in problems)


def _briefly(keys: Sequence[Key]) -> str:
    ids = [key.id[:12] for key in keys[:3]]
    more = [f"... {len(keys) - 3} more"] if len(keys) > 3 else []
    return f"[{', '.join(ids + more)}]"
