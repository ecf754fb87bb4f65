"""How a checkpoint stands in its run, in one word; and the fields that every command tells of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

from strongroom.catalog import Catalog, History
from strongroom.errors import CheckpointNotFoundError
from strongroom.layout import CheckpointName
from strongroom.signing import NO_GUARD, Guard
from strongroom.stores.base import Store

__all__ = ["STYLES", "WORDS", "Standing", "Status", "read_history", "run_of", "standings"]

Status = Literal["newest", "line", "superseded", "damaged", "uncommitted"]

WORDS: Final[dict[Status, str]] = {
    "newest": "newest",
    "line": "on the line",
    "superseded": "superseded",
    "damaged": "damaged",
    "uncommitted": "uncommitted",
}
STYLES: Final[dict[Status, str]] = {
    "newest": "bold green",
    "line": "",
    "superseded": "dim",
    "damaged": "bold red",
    "uncommitted": "dim yellow",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A checkpoint's place in its run; None where a damaged or absent commit does not tell.

    Attributes:
        reason: why it is damaged.
    """

    name: CheckpointName
    status: Status
    size_bytes: int | None
    committed_at_ms: int | None
    manifest_digest: str | None
    reason: str | None

    def to_json(self) -> dict[str, Any]:
        return {
            "attempt": self.name.attempt,
            "committed_at_ms": self.committed_at_ms,
            "folder": self.name.folder,
            "launch": self.name.launch,
            "manifest_digest": self.manifest_digest,
            "reason": self.reason,
            "size_bytes": self.size_bytes,
            "status": self.status,
            "step": self.name.step,
        }


def read_history(store: Store, guard: Guard = NO_GUARD) -> History:
    """The root's history.

    Args:
        guard: what the policy demands: launch records without the signatures it wants count for nothing.

    Raises:
        CheckpointNotFoundError: there is no run at all.
    """
    history = Catalog(store, guard.trust).history()
    if history.run is None and not history.has_commits and not history.uncommitted:
        raise CheckpointNotFoundError(f"there is no run in {store.uri}: no run.json and no checkpoint")
    return history


def run_of(history: History) -> str | None:
    """The run's id; None where its record is lost."""
    return history.run.run if history.run is not None else None


def standings(history: History) -> list[Standing]:
    """Every committed checkpoint in the order of the line, then what was never committed."""
    newest = next((name for name in history.line.newest_first if name in history.commits), None)
    on_line = set(history.line.newest_first)
    found = []
    for name in history.line.ranked:
        commit = history.commits.get(name)
        status: Status = "newest" if name == newest else "line" if name in on_line else "superseded"
        found.append(
            Standing(
                name=name,
                status=status if commit is not None else "damaged",
                size_bytes=commit.size_bytes if commit is not None else None,
                committed_at_ms=commit.committed_at_ms if commit is not None else None,
                manifest_digest=str(commit.manifest) if commit is not None else None,
                reason=history.damaged.get(name),
            )
        )
    found.extend(
        Standing(
            name=name,
            status="uncommitted",
            size_bytes=None,
            committed_at_ms=None,
            manifest_digest=None,
            reason=None,
        )
        for name in sorted(history.uncommitted, reverse=True)
    )
    return found
