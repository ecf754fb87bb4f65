"""Several ranks under Lightning: each gets back what it had, and the run ends as the uninterrupted one."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import rank_runs
from multiprocess import LightningLauncher

MID_EPOCH, EPOCHS_LAST_STEP, SECOND_EPOCH = 4, 6, 9
"""Batches done when the run breaks off, of 2 epochs of 6."""


def ends_like(resumed: list[dict[str, Any]], reference: list[dict[str, Any]], done: int) -> None:
    """On every rank: the losses from where it broke off, and all weights, equal as floats."""
    for rank, (one, expected) in enumerate(zip(resumed, reference, strict=True)):
        assert one["losses"] == expected["losses"][done:], rank
        assert one["weights"] == expected["weights"], rank
        assert (one["step"], one["lr"]) == (expected["step"], expected["lr"])


WAYS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "fsdp2": {"strategy": partial(rank_runs.sharded, 2, 1), "module": rank_runs.ShardedNet},
    "tensor parallel": {"strategy": partial(rank_runs.sharded, 1, 2), "module": rank_runs.ShardedNet},
}
FINE_STEPS = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "validate": True}


@pytest.fixture(scope="module")
def reference(launcher: LightningLauncher) -> Any:
    """The uninterrupted run without our callback, once for all tests that ask for it."""
    known: dict[str, list[dict[str, Any]]] = {}

    def run(way: str, ranks: int = 2, **settings: Any) -> list[dict[str, Any]]:
        key = repr((way, ranks, sorted(settings.items())))
        if key not in known:
            known[key] = launcher.run(rank_runs.train, None, ranks=ranks, **WAYS[way], **settings)
        return known[key]

    return run


@pytest.mark.parametrize(
    ("way", "done", "settings"),
    (
        ("ddp", MID_EPOCH, {}),
        ("ddp", EPOCHS_LAST_STEP, {}),
        ("ddp", SECOND_EPOCH + 1, FINE_STEPS),
        ("fsdp2", SECOND_EPOCH, {}),
        ("fsdp2", EPOCHS_LAST_STEP, {}),
        ("fsdp2", MID_EPOCH, FINE_STEPS),
        ("tensor parallel", MID_EPOCH, {}),
    ),
)
def test_a_run_of_ranks_broken_off_anywhere_ends_as_the_uninterrupted_one(
    launcher: LightningLauncher, reference: Any, tmp_path: Path, way: str, done: int, settings: dict[str, Any]
) -> None:
    expected = reference(way, **settings)
    if way != "tensor parallel":  # whose ranks train on the same samples
        assert expected[0]["losses"] != expected[1]["losses"]
    broken = launcher.run(rank_runs.train, tmp_path / "run", until=done, ranks=2, **WAYS[way], **settings)
    assert all(one["stopped"] for one in broken)
    resumed = launcher.run(rank_runs.train, tmp_path / "run", draw_from=99, ranks=2, **WAYS[way], **settings)
    ends_like(resumed, expected, done)
