"""What must stay on a first tier since it is nowhere else, as far as the tier's own notes tell. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from strongroom.catalog import History
from strongroom.layout import CheckpointName
from strongroom.replication.notes import Notes

__all__ = ["held_by_notes"]


def held_by_notes(history: History, notes: Notes) -> Mapping[CheckpointName, str]:
    """Which checkpoints stand on none of the tiers that a job copies a root to, and why they are to stay.

    Copies made by hand count for nothing here, and notes of other roots neither. Notes that cannot be read
    hold everything: what they told may have been a tier that has nothing yet.

    Args:
        history: the root.
        notes: what `read_notes` tells of it; where no tier is noted, nothing is held back.
    """
    if notes.unreadable:
        return dict.fromkeys(
            history.commits,
            f"it may be on no other tier: the notes in {', '.join(notes.unreadable)} are damaged",
        )
    if not notes.tiers:
        return {}
    return {
        name: f"it is verified on no other tier yet, of {', '.join(sorted(notes.tiers))}"
        for name, commit in history.commits.items()
        if not any(
            name in tier.verified and tier.verified[name].is_of(commit) for tier in notes.tiers.values()
        )
    }
