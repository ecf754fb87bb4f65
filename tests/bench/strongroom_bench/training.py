"""A small training loop: how long its steps take without, and during, saves in the background."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from strongroom import Checkpointer
from strongroom_bench.figure import Figure, percentile, setting
from strongroom_bench.scale import MIB, Scale
from strongroom_bench.states import done, drop

__all__ = ["measure"]

_BATCH = 32
_PERCENTS = (50, 95, 99)

Begin = Callable[[int], Any]


class _Loop:
    """A model of some layers under AdamW, stepped with the same batch again and again."""

    def __init__(self, scale: Scale) -> None:
        layers: list[nn.Module] = []
        for _ in range(scale.layers):
            layers += [nn.Linear(scale.width, scale.width), nn.ReLU()]
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self._batch = torch.randn(_BATCH, scale.width)
        self._number = 0
        self.step()

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.model(self._batch).square().mean().backward()
        self.optimizer.step()

    @property
    def state_bytes(self) -> int:
        """Weights and both moments."""
        return 3 * sum(weight.nbytes for weight in self.model.parameters())

    def segment(self, steps: int, begin: Begin | None) -> tuple[list[float], list[float]]:
        """Seconds of the steps, and of the stalls between them.

        With ``begin``, a save is begun whenever none is under way, and only steps during one count.
        """
        taken, stalls = [], []
        under_way: Any = None
        for _ in range(steps):
            if begin is not None and (under_way is None or _is_done(under_way)):
                self._number += 1
                began = time.perf_counter()
                under_way = begin(self._number)
                stalls.append(time.perf_counter() - began)
            counts = begin is None or not _is_done(under_way)
            began = time.perf_counter()
            self.step()
            if counts:
                taken.append(time.perf_counter() - began)
        if under_way is not None:
            # A handle has `result` as a future has.
            done(under_way)
        return taken, stalls


def _is_done(under_way: Any) -> bool:
    return bool(getattr(under_way, "upload_completion", under_way).done())


def measure(scale: Scale, folder: Path) -> list[Figure]:
    """Run segments of the loop in turn: without saves, with ours, with stock ``dcp.async_save``."""
    loop = _Loop(scale)
    root, stock = folder / "training", folder / "training-dcp"
    checkpointer = Checkpointer(root)

    def ours(step: int) -> Any:
        return checkpointer.save(step, {"model": loop.model, "optimizer": loop.optimizer})

    def theirs(step: int) -> Any:
        state = {"model": loop.model.state_dict(), "optimizer": loop.optimizer.state_dict()}
        return dcp.async_save(state, storage_writer=dcp.FileSystemWriter(stock / str(step), thread_count=2))

    kinds: dict[str, Begin | None] = {"no save": None, "strongroom": ours, "dcp.async_save": theirs}
    steps: dict[str, list[float]] = defaultdict(list)
    stalls: dict[str, list[float]] = defaultdict(list)
    for number in range(-scale.warm_ups, scale.rounds):
        for kind, begin in kinds.items():
            taken, waited = loop.segment(scale.steps, begin)
            if number >= 0:
                steps[kind] += taken
                stalls[kind] += waited
            checkpointer.wait()
            for found in root.glob("step-*"):
                drop(found)
            drop(stock)
    checkpointer.close()

    # A save that is over within a step leaves none to count.
    known = {kind: taken for kind, taken in steps.items() if taken}
    peers = {
        f"{kind} p{percent} s": percentile(taken, percent)
        for kind, taken in known.items()
        for percent in _PERCENTS
    }
    peers |= {f"{kind} stall s": statistics.median(waits) for kind, waits in stalls.items() if waits}
    words = setting(
        f"{len(loop.model) // 2} layers of {scale.width}, batch {_BATCH}",
        f"{loop.state_bytes / MIB:.3g} MiB of state",
        "saves back to back, thread_count=2 there",
    )
    name = "p95 of a step's time while a save runs / without"
    if len(known) < len(kinds):
        return [Figure(figure=name, value=None, peers=peers, runs=scale.rounds, setting=words)]
    calm, busy, stock_busy = (percentile(steps[kind], 95) for kind in kinds)
    counted = ", ".join(f"{len(taken)} with {kind}" for kind, taken in steps.items())
    return [
        Figure(
            figure=name,
            value=busy / calm,
            bar=stock_busy / calm,
            peers=peers,
            runs=scale.rounds,
            setting=words,
            note=f"the bar is stock dcp.async_save's in this run; steps counted: {counted}",
        )
    ]
