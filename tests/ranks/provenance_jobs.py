"""What ranks run in the tests of provenance; importable by name, since ranks are other processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from layout_jobs import checkpointer, refusal
from model_jobs import build

from strongroom import PerRank


def state(style: str | None) -> dict[str, Any]:
    """A model, and a tensor that each rank has of its own."""
    own = {"own": PerRank({"seen": torch.full((2,), float(dist.get_rank()))})}
    if style is None:
        return {"model": torch.nn.Linear(4, 8), **own}
    model, optimizer = build(style)
    return {"model": model, "optimizer": optimizer, **own}


def save(root: Path, step: int, version: str, style: str | None = None) -> list[int]:
    """Save; how often this rank was asked where the run comes from."""
    asked = []

    def said() -> dict[str, Any]:
        asked.append(1)
        return {"data": {"version": version}}

    with checkpointer(root, provenance=said) as opened:
        opened.save(step, state(style)).result()
    return asked


def resume(root: Path, version: str, **options: Any) -> tuple[tuple[str, str], list[str], bool]:
    """Restore; what it raised, what had changed, and whether anything of the state was changed."""
    template = state(None)
    before = template["model"].weight.clone()
    changes: list[str] = []
    # What another rank than 0 would say is not asked.
    said = {"data": {"version": version if dist.get_rank() == 0 else "another rank's"}}
    with checkpointer(root, provenance=said) as opened:

        def act() -> None:
            restored = opened.restore(template, **options)
            changes.extend(map(str, restored.changes))

        raised = refusal(act)
    return raised, changes, not torch.equal(template["model"].weight, before)
