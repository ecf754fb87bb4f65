"""What ranks run in the tests of tiers; importable by name, since ranks are other processes."""

from __future__ import annotations

from pathlib import Path

from layout_jobs import TIMEOUT_S, checkpointer
from sealed_jobs import empty_state, sharded_state, unlike


def save_replicated(root: Path, tier: Path, steps: list[int]) -> list[str]:
    """Save, and wait on every rank until each checkpoint stands on both tiers."""
    found = []
    with checkpointer(root, replicate_to=[tier]) as opened:
        for step in steps:
            checkpoint = opened.save(step, sharded_state(step)).replicated(TIMEOUT_S)
            found.append(checkpoint.manifest_digest)
            assert (tier / checkpoint.folder / "COMMIT").is_file()
    return found


def restored_over_tiers(root: Path, tier: Path) -> tuple[int, int]:
    """The step that was restored, and how many checkpoints were skipped; -1 where a value is wrong."""
    with checkpointer(root, replicate_to=[tier]) as opened:
        restored = opened.restore(empty_state())
        assert restored is not None
        step = restored.step if not unlike(restored.state, restored.step) else -1
        return step, len(restored.skipped)
