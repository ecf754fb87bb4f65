"""Writes the golden checkpoint beside this file: ``python tests/golden/make.py``.

Until the format is 1.0 it is made anew whenever the format changes, and `docs/format.md` says
so; from then on goldens are only added. Time and random digits are fixed, so that the bytes
show every change of the format.
"""

from __future__ import annotations

import collections
import datetime as dt
import itertools
import math
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from strongroom import Checkpointer, PerRank
from strongroom.config import Clock

HERE = pathlib.Path(__file__).parent
GOLDEN = HERE / "0.1"


class Model(torch.nn.Module):
    """Two tied parameters, a buffer, a module with a version of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(3, 2)
        self.norm = torch.nn.BatchNorm1d(2)
        self.head = torch.nn.Linear(2, 3, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.zeros(2, dtype=torch.bfloat16))


def state(step: int) -> dict[str, Any]:
    """The state at a step: the same on every machine."""
    model = Model()
    with torch.no_grad():
        for number, value in enumerate(model.state_dict().values()):
            value.copy_(torch.arange(value.numel()).reshape(value.shape) + number + step)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    first = next(model.parameters())
    first.grad = torch.ones_like(first)
    optimizer.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "rank": PerRank({"seed": step}),
        "extra": {
            "big": 2**70,
            "bits": [math.inf, -math.inf, -0.0, 0.1, math.nan],
            "bytes": b"\x00\xff",
            "counter": collections.Counter("aab"),
            "date": dt.datetime(2026, 11, 29, 12, tzinfo=dt.timezone.utc),
            "dtype": torch.float8_e4m3fn,
            "empty": {},
            ("a", 1): {1: "int", "1": "text", None: None},
            "numpy": np.arange(6, dtype=">i4").reshape(2, 3),
            "path": pathlib.PurePosixPath("a/b"),
            "queue": collections.deque([1, 2], maxlen=4),
            "set": {3, 1, 2},
            "text": "grün \ud800",
            "tuple": (1, (torch.tensor(2.5), ())),
        },
    }


def write(root: pathlib.Path) -> None:
    """Two checkpoints of one launch, and one of a second launch that goes on from the first."""
    milliseconds = itertools.count(1_790_000_000_000)
    clock = Clock(now_ns=lambda: next(milliseconds) * 1_000_000, monotonic=lambda: 0.0)
    digits = itertools.count(1)

    def draw(size_bytes: int) -> str:
        return f"{next(digits):0{2 * size_bytes}x}"

    with checkpointer(root, clock, draw) as first:
        first.save(1, state(1), metrics={"loss": 0.5}, provenance={"commit": "abc"}, tags=["golden"])
        first.save(2, state(2))
    with checkpointer(root, clock, draw, digest="sha256") as second:
        second.restore(step=1)
        second.save(3, state(3))


def checkpointer(
    root: pathlib.Path, clock: Clock, draw: Callable[[int], str], digest: str = "blake3"
) -> Checkpointer:
    # What is gathered is of the machine and the day.
    return Checkpointer(root, digest=digest, clock=clock, draw=draw, collect_provenance=False)


if __name__ == "__main__":
    shutil.rmtree(GOLDEN, ignore_errors=True)
    write(GOLDEN)
