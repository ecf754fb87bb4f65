"""Whether two names are of one identity of AWS: ARNs of users, of roles, and of sessions of roles. Pure."""

from __future__ import annotations

import enum
import re
from functools import lru_cache
from typing import Final

__all__ = ["Likeness", "likeness", "principal"]

_SESSION: Final = re.compile(
    r"arn:(?P<partition>[a-z-]+):sts::(?P<account>[0-9]{12}):"
    r"(?P<kind>assumed-role|federated-user)/(?P<name>[^/]+)(?:/(?P<session>.+))?"
)
_NAMED: Final = re.compile(
    r"arn:(?P<partition>[a-z-]+):iam::(?P<account>[0-9]{12}):(?:(?P<kind>user|role)/(?:.*/)?(?P<name>[^/]+)|root)"
)


class Likeness(enum.IntEnum):
    """How alike two names are; more is more."""

    OTHER = 0
    """Two identities."""
    UNKNOWN = 1
    """One of them is not known."""
    PRINCIPAL = 2
    """The same role, in another session."""
    SAME = 3


@lru_cache(maxsize=4_096)
def _parts(identity: str) -> tuple[str, str | None]:
    """Who it is, and in which session."""
    session = _SESSION.fullmatch(identity)
    if session is not None:
        kind = "role" if session["kind"] == "assumed-role" else "federated-user"
        return f"{session['account']}:{kind}/{session['name']}", session["session"]
    named = _NAMED.fullmatch(identity)
    if named is not None:
        # Of a role or user in a path, its sessions and access logs tell the last part alone.
        return f"{named['account']}:" + (
            f"{named['kind']}/{named['name']}" if named["kind"] else "root"
        ), None
    return identity, None


def principal(identity: str) -> str:
    """Who is behind a session: ``ACCOUNT:role/NAME``, ``ACCOUNT:user/NAME``; anything else as it is."""
    return _parts(identity)[0]


def likeness(one: str | None, other: str | None) -> Likeness:
    """How alike two identities are."""
    if not one or not other:
        return Likeness.UNKNOWN
    if one == other:
        return Likeness.SAME
    (who, session), (whose, their_session) = _parts(one), _parts(other)
    if who != whose:
        return Likeness.OTHER
    return (
        Likeness.SAME
        if session == their_session or session is None or their_session is None
        else (Likeness.PRINCIPAL)
    )
