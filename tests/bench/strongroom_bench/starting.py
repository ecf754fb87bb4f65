"""From the start of a process to a verified resume, beside a process that only reads the bytes."""

from __future__ import annotations

from pathlib import Path

from strongroom import Checkpointer
from strongroom_bench.children import run
from strongroom_bench.figure import Figure, beside, fold, setting
from strongroom_bench.measure import Contestant, interleave, seconds
from strongroom_bench.scale import Scale
from strongroom_bench.states import drop, large_state

__all__ = ["measure"]


def measure(scale: Scale, folder: Path) -> list[Figure]:
    """Start processes that resume, and processes that import torch and read the same bytes."""
    root, raw = folder / "starting", folder / "starting-raw"
    state = large_state(scale)
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, {"model": state}).result()
    with raw.open("wb") as file:
        for tensor in state.values():
            file.write(tensor.numpy().data)
    del state
    samples = interleave(
        [
            Contestant(
                name="verified resume",
                run=lambda: {"wall": seconds(lambda: run("resume", str(root), str(scale.tensors)))},
            ),
            Contestant(
                name="import torch + raw read",
                run=lambda: {"wall": seconds(lambda: run("raw", str(raw), str(scale.tensors)))},
            ),
        ],
        rounds=scale.rounds,
        warm_ups=scale.warm_ups,
        flushes=scale.flushes,
    )
    drop(root)
    raw.unlink()
    return [
        beside(
            "process start to verified resume / import torch plus raw read",
            "verified resume",
            "import torch + raw read",
            fold(samples, "wall"),
            setting=setting(scale.state_words, "page cache warm for both, ends of processes included"),
        )
    ]
