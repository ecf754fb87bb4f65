"""Restores of a large state, verified, beside a stock load that verifies nothing."""

from __future__ import annotations

from pathlib import Path

import torch.distributed.checkpoint as dcp

from strongroom import Checkpointer
from strongroom.workers import reading_workers
from strongroom_bench.figure import Figure, beside, fold, setting
from strongroom_bench.measure import interleave
from strongroom_bench.scale import Scale
from strongroom_bench.states import (
    Tensors,
    drop,
    empty_like,
    large_state,
    restore,
    small_state,
    stock_load,
)

__all__ = ["measure"]

_CACHE = "into tensors that are there, page cache warm for both"


def measure(scale: Scale, folder: Path) -> list[Figure]:
    """Time restores of the large state, and of many small tensors."""
    threads = f"{reading_workers()} reading threads"
    return [
        _compare(
            "wall of a verified restore / dcp.load",
            large_state(scale),
            scale,
            folder / "restores",
            setting(scale.state_words, threads, _CACHE),
            bar=0.60,
        ),
        _compare(
            "wall of a verified restore of many small tensors / dcp.load",
            small_state(scale),
            scale,
            folder / "small-restores",
            setting(f"{scale.small_tensors} tensors of 1 KiB", threads, _CACHE),
            bar=None,
        ),
    ]


def _compare(
    name: str, state: Tensors, scale: Scale, folder: Path, words: str, *, bar: float | None
) -> Figure:
    ours, stock = folder / "strongroom", folder / "dcp"
    with Checkpointer(ours) as checkpointer:
        checkpointer.save(1, {"model": state}).result()
    dcp.save(state, storage_writer=dcp.FileSystemWriter(stock, thread_count=2))
    samples = interleave(
        [
            restore(ours, empty_like(state)),
            stock_load(stock, empty_like(state)),
        ],
        rounds=scale.rounds,
        warm_ups=scale.warm_ups,
        flushes=scale.flushes,
    )
    drop(folder)
    return beside(name, "strongroom", "dcp.load", fold(samples, "wall"), bar=bar, setting=words)
