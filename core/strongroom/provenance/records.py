"""What is known of where a checkpoint comes from, as plain JSON, for those who tell it to others. Pure.

A typed document loses nothing; what other tools read is plain. Whoever builds a `Record` has verified the
checkpoint and made its nodes plain before.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, Final

from strongroom.manifest import Commit, Manifest

__all__ = ["Record", "sha256_in", "text_in", "when"]

_SHA256: Final = re.compile(r"(?:sha256:)?([0-9a-f]{64})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One checkpoint.

    Attributes:
        root: where it lies.
        given: what the user said of it.
        collected: what was gathered; empty where nothing was.
        metrics: figures of its step.
    """

    root: str
    commit: Commit
    manifest: Manifest
    given: Mapping[str, Any]
    collected: Mapping[str, Any]
    metrics: Mapping[str, Any]
    tags: Sequence[str]
    producer: Mapping[str, str]

    def section(self, name: str) -> Mapping[str, Any]:
        """What was gathered under a name, such as ``code``; empty where it is unknown."""
        found = self.collected.get(name)
        return found if isinstance(found, Mapping) else {}

    def told(self, name: str) -> Mapping[str, Any]:
        """What the user said under a name, such as ``data``; a single value as its ``version``."""
        found = self.given.get(name)
        if isinstance(found, Mapping):
            return found
        return {} if found is None else {"version": found}

    @property
    def container(self) -> str | None:
        """SHA-256 of the container's image, as hex digits."""
        return sha256_in(self.given.get("container_digest")) or sha256_in(
            self.collected.get("container_digest")
        )

    @property
    def began_at_ms(self) -> int | None:
        """When the launch began that saved it."""
        found = self.collected.get("began_at_ms")
        return found if type(found) is int else None


def sha256_in(value: Any) -> str | None:
    """The hex digits of ``sha256:<hex>``, of an image's reference that ends so, or of the digits alone."""
    found = _SHA256.fullmatch(value.rpartition("@")[2]) if isinstance(value, str) else None
    return found[1] if found is not None else None


def text_in(value: Any) -> str | None:
    """A text that says something; None for all else, and for what could not be found out."""
    return value if isinstance(value, str) and value not in ("", "unknown") else None


def when(milliseconds: int) -> str:
    """A time as RFC 3339 spells it, in UTC."""
    moment = datetime.fromtimestamp(milliseconds / 1000, tz=timezone.utc)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{milliseconds % 1000:03d}Z"
