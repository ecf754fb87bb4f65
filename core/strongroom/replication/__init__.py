"""From a first tier to others: checkpoints are copied byte for byte, verified, and committed there last.

The names are imported when first used: what only tells of copies waits for nothing that makes them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strongroom.replication.courier import Target
    from strongroom.replication.holding import held_by_notes
    from strongroom.replication.ledger import Verified
    from strongroom.replication.notes import Noted, Notes, known_targets, read_notes
    from strongroom.replication.once import Progress, Report, replicate
    from strongroom.replication.replicator import Replicator
    from strongroom.replication.upkeep import TargetState

_HOMES = {
    "Noted": "notes",
    "Notes": "notes",
    "Progress": "once",
    "Replicator": "replicator",
    "Report": "once",
    "Target": "courier",
    "TargetState": "upkeep",
    "Verified": "ledger",
    "held_by_notes": "holding",
    "known_targets": "notes",
    "read_notes": "notes",
    "replicate": "once",
}

__all__ = [
    "Noted",
    "Notes",
    "Progress",
    "Replicator",
    "Report",
    "Target",
    "TargetState",
    "Verified",
    "held_by_notes",
    "known_targets",
    "read_notes",
    "replicate",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
