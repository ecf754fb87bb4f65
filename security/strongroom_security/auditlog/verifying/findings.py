"""What verifying a log finds: of which kind it is, how bad that is, and where it is. Pure values.

`FindingKind`'s first values are those of `strongroom_security.auditlog.format.segments.ProblemKind`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["Finding", "FindingKind", "Gravity", "Totals"]


class Gravity(enum.Enum):
    """How bad it is."""

    TAMPERED = "tampered"
    """The log is not as it was written, or not by whom it says."""
    UNTRUSTED = "untrusted"
    """Who wrote a part of the log is vouched for by somebody who is not trusted: another's key, or one that
    was changed and that nobody named."""
    UNPROVEN = "unproven"
    """Nothing is known to be wrong, and what could be taken away or changed would not show."""
    NOTE = "note"


class FindingKind(enum.Enum):
    """What was found. The first ones are `strongroom_security.auditlog.format.segments.ProblemKind`'s."""

    MALFORMED = "malformed"
    CHANGED = "changed"
    MISSING = "missing"
    OUT_OF_ORDER = "out-of-order"
    UNCLOSED = "unclosed"
    TORN = "torn"
    FORGED_CLOSE = "forged-close"
    ELSEWHERE = "elsewhere"
    AFTER_CLOSE = "after-close"
    MISNAMED = "misnamed"
    FOREIGN_RUN = "foreign-run"

    STRAY = "stray"
    """Something that is no segment lies where writers put segments."""
    UNREADABLE = "unreadable"
    """A segment was listed, and is no more, or is too long to be one."""
    DUPLICATE = "duplicate"
    """A segment of the same writer and number stands elsewhere."""
    GAP = "gap"
    """A writer's segments before one that is there are missing."""
    BROKEN = "broken"
    """A segment does not go on where the one before it ended."""
    AFTER_LAST = "after-last"
    """A segment follows the one by which its writer ended."""

    FORGED_CERTIFICATE = "forged-certificate"
    """A certificate is not over this writer and key."""
    UNKNOWN_SIGNER = "unknown-signer"
    """A writer is vouched for by somebody who is not trusted."""
    UNCERTIFIED = "uncertified"
    """A writer is vouched for by nobody, and somebody was asked for."""
    UNVOUCHED = "unvouched"
    """Nobody was named who could vouch for writers."""

    REMOVED = "removed"
    """The tree holds a segment that is no more."""
    ALTERED = "altered"
    """The tree holds another segment of that name."""
    TREE_CONTENT = "tree-content"
    """The tree holds what is no segment, or one twice."""
    TREE_SIGNATURE = "tree-signature"
    """The tree's checkpoint is signed by nobody who should, or by too few witnesses."""
    TREE_ROOT = "tree-root"
    """The entries are not those whose root was signed."""
    TREE_REWRITTEN = "tree-rewritten"
    """The tree is no continuation of the one whose checkpoint was kept."""
    TREE_DAMAGED = "tree-damaged"
    """A part of the tree is missing, or none of its format."""
    NO_TREE = "no-tree"
    """Nothing was sequenced."""
    TREE_MISSING = "tree-missing"
    """There is no tree, and a key was named by which its checkpoint must be signed."""
    TREE_UNVOUCHED = "tree-unvouched"
    """No key was named by which the tree's checkpoint must be signed."""

    UNSEQUENCED = "unsequenced"
    """A segment is not in the tree (yet)."""
    OPEN = "open"
    """A writer has not ended: it lives, was killed, or its end was cut off."""
    SALVAGED = "salvaged"
    """A segment was closed by another process, whose word alone stands for what is in it."""


_UNPROVEN: Final = frozenset(
    [
        FindingKind.UNSEQUENCED,
        FindingKind.OPEN,
        FindingKind.NO_TREE,
        FindingKind.UNVOUCHED,
        FindingKind.TREE_UNVOUCHED,
        FindingKind.SALVAGED,
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was found, and where.

    Attributes:
        segment: its key; None: it is about the tree, or the sink.
        line: from 1; 0: it is about the segment as a whole.
        event: the id of the line, ``<writer>-<seq>``; None: it is about no line, or that is not known.
        leaf: of the tree, from 0; None: it is about none.
        is_excused: whoever asked lets it pass.
    """

    kind: FindingKind
    message: str
    segment: str | None = None
    line: int = 0
    event: str | None = None
    leaf: int | None = None
    is_excused: bool = False

    @property
    def gravity(self) -> Gravity:
        if self.kind in _UNPROVEN:
            return Gravity.UNPROVEN
        if self.kind is FindingKind.UNKNOWN_SIGNER:
            return Gravity.UNTRUSTED
        return Gravity.NOTE if self.is_excused else Gravity.TAMPERED

    def to_json(self) -> dict[str, Any]:
        return {
            "event": self.event,
            "gravity": self.gravity.value,
            "kind": self.kind.value,
            "leaf": self.leaf,
            "line": self.line,
            "message": self.message,
            "segment": self.segment,
        }

    def __str__(self) -> str:
        where = self.segment or ""
        if self.segment is not None and self.line:
            where += f", line {self.line}"
        if self.event is not None:
            where += f" (event {self.event})"
        if self.leaf is not None:
            where += f"{', ' if where else ''}leaf {self.leaf} of the tree"
        return f"{where}: {self.message}" if where else self.message


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """How much was looked at.

    Attributes:
        sequenced_segments, sequenced_events: those that the tree holds, just as they stand.
        vouched_writers: those whose key somebody trusted has certified.
        salvaged_segments, salvaged_events: those that another process closed for a writer that had died, and
            that it alone vouches for.
    """

    segments: int
    events: int
    sequenced_segments: int
    sequenced_events: int
    writers: int
    vouched_writers: int
    salvaged_segments: int = 0
    salvaged_events: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "events": self.events,
            "salvaged_events": self.salvaged_events,
            "salvaged_segments": self.salvaged_segments,
            "segments": self.segments,
            "sequenced_events": self.sequenced_events,
            "sequenced_segments": self.sequenced_segments,
            "unproven_events": self.events - self.sequenced_events,
            "unproven_segments": self.segments - self.sequenced_segments,
            "vouched_writers": self.vouched_writers,
            "writers": self.writers,
        }
