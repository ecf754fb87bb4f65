"""What a policy's sections share: an error that knows where it belongs, and the checks of plain values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from strongroom.config import check_seconds
from strongroom.errors import ConfigError

__all__ = ["TIMEOUT_S", "WrongMemberError", "flag", "seconds", "texts"]

TIMEOUT_S: Final = 30.0
"""A call to a key service takes milliseconds; the rest is for repeated tries."""

_LONGEST_S: Final = 3600.0


class WrongMemberError(ConfigError):
    """A member of a section that cannot work; who reads the file adds the line on which it stands.

    Attributes:
        section, member: where it is in the policy.
        element: the text within the member's value that is wrong, if it is one of several.
    """

    def __init__(self, section: str, member: str, problem: str, *, element: str | None = None) -> None:
        super().__init__(f"[{section}] {member}: {problem}")
        self.section = section
        self.member = member
        self.element = element


def texts(section: str, member: str, value: object) -> list[Any]:
    """The elements of a list, of which the kind is still to be looked at."""
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise WrongMemberError(section, member, f"expected a list of texts, got {value!r:.60}")
    return list(value)


def flag(section: str, member: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise WrongMemberError(section, member, f"expected true or false, got {value!r:.60}")
    return value


def seconds(section: str, member: str, value: object) -> float:
    try:
        return check_seconds("it", value, at_most=_LONGEST_S)
    except ConfigError as error:
        raise WrongMemberError(section, member, str(error)) from None
