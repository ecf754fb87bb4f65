"""The stall of a save of very many small tensors, where what counts is the cost of each."""

from __future__ import annotations

from pathlib import Path

from strongroom_bench.figure import Figure, beside, fold, setting
from strongroom_bench.measure import interleave
from strongroom_bench.scale import Scale
from strongroom_bench.states import Saver, async_save, foreach_copy, small_state

__all__ = ["measure"]


def measure(scale: Scale, folder: Path) -> list[Figure]:
    """Time saves of many small tensors."""
    state = small_state(scale)
    saver = Saver(folder / "small", {"model": state})
    samples = interleave(
        [
            saver.contestant(),
            foreach_copy(state),
            async_save(folder, state, threads=2),
        ],
        rounds=scale.rounds,
        warm_ups=scale.warm_ups,
        flushes=scale.flushes,
    )
    saver.checkpointer.close()
    words = setting(f"{scale.small_tensors} tensors of 1 KiB")
    return [
        beside(
            "stall of many small tensors / _foreach_copy_",
            "strongroom",
            "_foreach_copy_",
            fold(samples, "stall"),
            bar=1.25,
            setting=words,
        ),
        beside(
            "wall of a save of many small tensors / dcp.async_save(thread_count=2)",
            "strongroom",
            "dcp.async_save(thread_count=2)",
            fold(samples, "wall"),
            setting=words,
        ),
    ]
