"""Policies by what they say and not by how they are spelled: statement by statement, in any order, whatever
their ids. Pure.
"""

from __future__ import annotations

import json
from typing import Any

__all__ = ["differences", "listed", "principal_of", "statements_of"]

Json = Any


def differences(value: Json, expected: Json) -> tuple[list[str], list[str]]:
    """Ids of the statements that a policy lacks, and what it allows that it should not.

    What it denies besides does no harm.
    """
    wanted = {_normal(each): str(each.get("Sid", "a statement")) for each in statements_of(expected)}
    standing = {_normal(each): each for each in statements_of(value)}
    missing = [sid for normal, sid in wanted.items() if normal not in standing]
    besides = [
        str(each.get("Sid") or listed(each.get("Action", each.get("NotAction"))))
        for normal, each in standing.items()
        if normal not in wanted and each.get("Effect") == "Allow"
    ]
    return missing, besides


def statements_of(value: Json) -> list[Json]:
    """A policy's statements, however many it has."""
    statements = (value or {}).get("Statement") or []
    return [statements] if isinstance(statements, dict) else list(statements)


def _normal(statement: Json) -> str:
    """One spelling for everything that means the same."""
    said = {name: each for name, each in statement.items() if name != "Sid"}
    for name in ("Action", "NotAction", "Resource", "NotResource"):
        if name in said:
            said[name] = sorted(listed(said[name]))
    for name in ("Action", "NotAction"):
        if name in said:
            said[name] = [each.lower() for each in said[name]]
    for name in ("Principal", "NotPrincipal"):
        if name in said:
            said[name] = principal_of(said[name])
    if "Condition" in said:
        said["Condition"] = {
            operator: {key.lower(): sorted(map(_spelled, listed(each))) for key, each in keys.items()}
            for operator, keys in said["Condition"].items()
        }
    return json.dumps(said, sort_keys=True)


def principal_of(principal: Json) -> dict[str, list[str]]:
    """Who is meant, by kind: ``*`` alone is of the kind ``AWS``."""
    named = {"AWS": principal} if isinstance(principal, str) else (principal or {})
    return {kind: sorted(listed(each)) for kind, each in named.items()}


def listed(value: Json) -> list[Any]:
    """One value, or several, as a list."""
    return list(value) if isinstance(value, list) else [value]


def _spelled(value: Json) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
