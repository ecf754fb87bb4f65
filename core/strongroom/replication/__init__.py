"""From a first tier to others: checkpoints are copied byte for byte, verified, and committed there last."""

from __future__ import annotations

from strongroom.replication.courier import Target
from strongroom.replication.ledger import Verified, known_targets
from strongroom.replication.once import Progress, Report, replicate
from strongroom.replication.replicator import Replicator
from strongroom.replication.upkeep import TargetState

__all__ = [
    "Progress",
    "Replicator",
    "Report",
    "Target",
    "TargetState",
    "Verified",
    "known_targets",
    "replicate",
]
