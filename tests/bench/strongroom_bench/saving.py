"""Saves of a large state: the stall of training, and the time until the checkpoint stands."""

from __future__ import annotations

from pathlib import Path

from strongroom.workers import writing_workers
from strongroom_bench.figure import Figure, beside, fold, setting
from strongroom_bench.measure import interleave
from strongroom_bench.scale import Scale
from strongroom_bench.states import (
    Saver,
    async_save,
    copy_once,
    kept_stager,
    large_state,
    raw_write,
    safetensors_save,
    stock_save,
    torch_save,
)

__all__ = ["measure"]


def measure(scale: Scale, folder: Path) -> list[Figure]:
    """Time saves of the large state beside every stock way to save it, and beside one copy of it."""
    state = large_state(scale)
    saver = Saver(folder / "saves", {"model": state})
    with_sha256 = Saver(folder / "saves-sha256", {"model": state}, digest="sha256")
    stager = kept_stager()
    samples = interleave(
        [
            saver.contestant(),
            stock_save(folder, state, threads=2),
            stock_save(folder, state, threads=1),
            copy_once(state),
            async_save(folder, state, threads=2),
            *([] if stager is None else [async_save(folder, state, threads=2, stager=stager)]),
            async_save(folder, state, threads=1),
            with_sha256.contestant("strongroom, sha256"),
            torch_save(folder, state),
            safetensors_save(folder, state),
            raw_write(folder, state),
        ],
        rounds=scale.rounds,
        warm_ups=scale.warm_ups,
        flushes=scale.flushes,
    )
    if stager is not None:
        stager.close()
    for each in (saver, with_sha256):
        each.checkpointer.close()
    words = f"{scale.state_words}, {writing_workers()} writing threads"
    walls = fold(samples, "wall")
    return [
        beside(
            "stall of save / one copy_ of the state",
            "strongroom",
            "copy_",
            fold(samples, "stall"),
            bar=1.15,
            setting=setting(words),
            note="must not exceed the stall of plain dcp.async_save either",
            at_most="dcp.async_save(thread_count=2)",
        ),
        beside(
            "wall of a committed, checksummed save / dcp.save(thread_count=2)",
            "strongroom",
            "dcp.save(thread_count=2)",
            walls,
            bar=1.00,
            setting=setting(words, "fsync on, staging included"),
        ),
        beside(
            "wall of the same save with sha256 / dcp.save(thread_count=2)",
            "strongroom, sha256",
            "dcp.save(thread_count=2)",
            walls,
            setting=setting(words, "fsync on, staging included", digest="sha256"),
        ),
    ]
