"""What a training step costs under a front end: the clock that all families of front ends share.

A run is trained again and again, once for each contestant in turn: alone, with ours and nothing due, and
saving every few steps, with ours (plain and sealed) and by the framework's own means.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from strongroom_bench.figure import Figure, Samples, beside, fold, percentile, setting
from strongroom_bench.scale import MIB, Scale
from strongroom_bench.states import drop
from strongroom_security import SecurityPolicy
from strongroom_security.recipients.file import create_key_file

__all__ = [
    "ALONE",
    "BATCH",
    "EVERY",
    "IDLE",
    "NEVER",
    "OURS",
    "SEALED",
    "Steps",
    "batches",
    "figures",
    "net",
    "policy_in",
    "steps_of",
    "tidy",
    "words",
]

BATCH: Final = 32

EVERY: Final = 10
"""Steps from one save to the next: none is to wait for the one before. A run's first save is not counted."""

NEVER: Final = 10**9
"""Steps that no run has."""

_LEAST_S: Final = 1e-6
"""What a clock can tell apart."""

OURS, SEALED = "strongroom", "strongroom, sealed"
ALONE, IDLE = "no saves", "strongroom, nothing due"


class Steps:
    """When each step of a run began.

    Args:
        due_every: a save is due at the end of each so many; 0: of none.
    """

    def __init__(self, due_every: int) -> None:
        self._due_every = due_every
        self._at: list[float] = []

    def tick(self) -> None:
        """A step begins."""
        self._at.append(time.perf_counter())

    def taken(self) -> dict[str, float]:
        """Medians: of a step, and of what a step at whose end a save is due takes more than the others."""
        whole = [after - before for before, after in zip(self._at, self._at[1:], strict=False)]
        if not self._due_every:
            return {"step": _median(whole), "p95": percentile(whole, 95)}
        due = [value for number, value in enumerate(whole, start=1) if number % self._due_every == 0]
        other = [value for number, value in enumerate(whole, start=1) if number % self._due_every]
        # Not the first: it makes buffers, which stay.
        stall = max(_LEAST_S, _median(due[1:] or due) - _median(other))
        return {"stall": stall, "step": _median(other), "p95": percentile(other, 95)}


def steps_of(scale: Scale) -> int:
    """How many steps a run has."""
    return max(scale.steps, 3 * EVERY)


def net(scale: Scale) -> nn.Sequential:
    """What is trained."""
    layers: list[nn.Module] = []
    for _ in range(scale.layers):
        layers += [nn.Linear(scale.width, scale.width), nn.ReLU()]
    return nn.Sequential(*layers)


def batches(scale: Scale) -> Any:
    """As many batches as a run has steps, of one tensor each, and one more."""
    return [torch.randn(BATCH, scale.width)] * (steps_of(scale) + 1)


def policy_in(folder: Path) -> Any:
    """A policy that seals, for a key beside it."""
    create_key_file(folder / "kek.key")
    (folder / "strongroom.toml").write_text('[seal]\nrecipients = ["file:kek.key"]\n', encoding="utf-8")
    return SecurityPolicy.load(folder / "strongroom.toml")


def tidy(folder: Path) -> None:
    """Remove what a run left."""
    for path in folder.iterdir():
        if path.is_dir():
            drop(path)


def words(scale: Scale, module: nn.Module) -> str:
    """The setting of a row."""
    weights = sum(value.nbytes for value in module.parameters())
    return setting(
        f"{scale.layers} layers of {scale.width}, batch {BATCH}",
        f"{3 * weights / MIB:.3g} MiB of state",
        f"a save every {EVERY} of {steps_of(scale)} steps",
    )


def figures(
    framework: str, native: str, samples: Mapping[str, Mapping[str, Samples]], setting_words: str
) -> list[Figure]:
    """The rows of a framework that has one way of its own to save."""
    stalls, calm = (fold(samples, measure) for measure in ("stall", "step"))
    note = "medians of steps; a stall is what a step at whose end a save is due takes more than the others"
    return [
        beside(
            f"{framework}: stall of a save / {native}'s",
            OURS,
            native,
            stalls,
            setting=setting_words,
            note=note,
        ),
        beside(
            f"{framework}: stall of a sealed save / {native}'s", SEALED, native, stalls, setting=setting_words
        ),
        beside(
            f"{framework}: a step with nothing due / without Strongroom",
            IDLE,
            ALONE,
            calm,
            setting=setting_words,
        ),
    ]


def _median(values: Samples) -> float:
    return percentile(values, 50)
