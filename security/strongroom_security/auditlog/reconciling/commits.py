"""A root's commits, held against the log: each should be on record as begun, and as committed. Pure."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from strongroom_security.auditlog.reconciling.operations import Operations

__all__ = ["CommitFinding", "CommitStanding", "Committed", "judge_commits"]


class CommitStanding(enum.Enum):
    """What the log knows of a commit."""

    UNRECORDED = "unrecorded"
    """Nothing: it was made by something that keeps no record, or before its record could leave."""
    OBSERVED = "observed"
    """A later launch found it, and its own writer's word is not on record."""
    UNSTARTED = "unstarted"
    """That it was committed, and not that it had begun."""
    EARLIER = "earlier"
    """Nothing, and it is older than all that the log holds of this run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A commit as the root has it.

    Attributes:
        folder: the checkpoint's.
        time: by its writer's clock, in ms since the epoch; anybody may have written anything there.
    """

    folder: str
    step: int
    launch: int
    time: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitFinding:
    """A commit of which the log does not say all."""

    commit: Committed
    standing: CommitStanding


def judge_commits(
    commits: Iterable[Committed],
    operations: Operations,
    *,
    since_ms: int | None,
    until_ms: int,
    has_others: bool = False,
) -> list[CommitFinding]:
    """What is to be told of a root's commits, the oldest first.

    Args:
        since_ms: commits before are passed over.
        until_ms: so are those after: their record may be on its way.
        has_others: whether the log holds events of this run that count for nothing. Then no commit is older
            than all that the log holds because nothing counts.
    """
    found = []
    for commit in sorted(commits, key=lambda each: (each.time, each.folder)):
        if commit.time > until_ms or (since_ms is not None and commit.time < since_ms):
            continue
        standing = _standing(commit, operations, has_others=has_others)
        if standing is not None:
            found.append(CommitFinding(commit=commit, standing=standing))
    return found


def _standing(commit: Committed, operations: Operations, *, has_others: bool) -> CommitStanding | None:
    if operations.is_committed(commit.folder):
        return None if operations.is_started(commit.folder) else CommitStanding.UNSTARTED
    if operations.is_observed(commit.folder):
        return CommitStanding.OBSERVED
    if operations.is_started(commit.folder):
        # Begun, and its process died before its word that it was done: what a later launch will tell.
        return CommitStanding.OBSERVED
    is_earlier = not has_others if operations.first is None else commit.time < operations.first
    return CommitStanding.EARLIER if is_earlier else CommitStanding.UNRECORDED
