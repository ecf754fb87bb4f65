"""What must stay on a first tier since it is nowhere else, as far as the tier's own notes tell. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from strongroom.catalog import History
from strongroom.layout import CheckpointName
from strongroom.replication.ledger import Verified

__all__ = ["held_by_notes"]


def held_by_notes(
    history: History, targets: Mapping[str, Mapping[CheckpointName, Verified]]
) -> Mapping[CheckpointName, str]:
    """Which checkpoints stand on none of the tiers that a root is copied to, and why they are to stay.

    Args:
        history: the root.
        targets: what `known_targets` tells of it; empty: it is copied nowhere, and holds nothing back.
    """
    if not targets:
        return {}
    return {
        name: f"it is verified on no other tier yet, of {', '.join(sorted(targets))}"
        for name, commit in history.commits.items()
        if not any(name in verified and verified[name].is_of(commit) for verified in targets.values())
    }
