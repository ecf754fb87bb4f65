"""What an index knows to be wrong with a log's segments, for early warnings: how many, and the first few."""

from __future__ import annotations

from typing import Final

from strongroom_security.auditlog.alerting.alert import Severity, Trouble
from strongroom_security.auditlog.asking.index import Index
from strongroom_security.auditlog.format.lines import parse_segment_key

__all__ = ["troubles_of"]

_KEPT: Final = 3

_OF_SEGMENTS: Final = (
    ("are damaged", "problem IS NOT NULL"),
    ("do not go on from the others of their writer", "doubt IS NOT NULL"),
    ("were changed since they were first read", "has_changed"),
    ("were removed", "is_removed"),
)
_ANOTHER: Final = (
    "SELECT h.key FROM held h JOIN segments s ON s.key = h.key WHERE s.leaves <> h.leaves "
    "AND s.problem IS NULL AND NOT s.has_changed AND NOT s.is_removed"
)
_MISSING: Final = "SELECT h.key FROM held h WHERE NOT EXISTS (SELECT 1 FROM segments s WHERE s.key = h.key)"


def troubles_of(index: Index, run: str | None) -> tuple[Trouble, ...]:
    """All kinds of trouble of which there is any.

    Args:
        run: of its segments alone; None: of all.
    """
    found = []
    for what, condition in _OF_SEGMENTS:
        # Names of ours alone; all values are bound.
        statement = f"SELECT key FROM segments WHERE {condition} AND (?1 IS NULL OR run = ?1) ORDER BY key"  # noqa: S608
        found.append(_trouble(what, [str(key) for (key,) in index.select(statement, [run])]))
    another = [str(key) for (key,) in index.select(_ANOTHER, []) if _is_of(key, run)]
    found.append(_trouble("are not those that stand in its tree", another))
    unreadable = [key for key in index.unreadable if _is_of(key, run)]
    found.append(_trouble("could not be read", unreadable, Severity.MEDIUM))
    # One that cannot be read is there.
    missing = {str(key) for (key,) in index.select(_MISSING, [])} - set(unreadable)
    found.append(_trouble("stand in its tree and are not there", [k for k in missing if _is_of(k, run)]))
    return tuple(each for each in found if each is not None)


def _is_of(key: str, run: str | None) -> bool:
    parts = parse_segment_key(key)
    return run is None or (parts is not None and parts[0] == run)


def _trouble(what: str, keys: list[str], severity: Severity = Severity.HIGH) -> Trouble | None:
    if not keys:
        return None
    return Trouble(what=what, count=len(keys), keys=tuple(sorted(keys)[:_KEPT]), severity=severity)
