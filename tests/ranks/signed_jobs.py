"""What ranks run in the tests of signed checkpoints; importable by name, since ranks are other processes."""

from __future__ import annotations

from pathlib import Path

from fault_jobs import Told, told
from layout_jobs import TIMEOUT_S, checkpointer
from sealed_jobs import empty_state, rank, sharded_state, unlike


def restored_step(root: Path) -> int:
    """The step that was restored, right in every value; else -1."""
    with checkpointer(root) as opened:
        restored = opened.restore(empty_state())
        assert restored is not None
        return restored.step if not unlike(restored.state, restored.step) else -1


def restore_told(root: Path) -> Told:
    with checkpointer(root) as opened:
        return told(lambda: opened.restore(empty_state()).step)


def save_under_own_policies(root: Path, first: Path, others: Path) -> Told:
    """Rank 0 has one policy, and each other rank another one."""
    with checkpointer(root, security=first if rank() == 0 else others) as opened:
        return told(lambda: opened.save(9, sharded_state(9)).result(timeout_s=TIMEOUT_S).step)
