"""One reported figure: a ratio or a size, the bar it is held against, and what stood beside it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["Figure", "Samples", "beside", "fold", "percentile", "setting"]

Samples = Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A row of the report.

    Attributes:
        figure: what is measured, in words that stay the same from run to run.
        value: the median; None where it was not measured.
        unit: of ``value``: ``ratio``, or what is counted.
        bar: what ``value`` must not exceed; None where it is reported only.
        peers: what stood beside it, in the same run: medians, in the unit that each name ends in.
        runs: how many rounds the medians are of.
        setting: thread counts, digest and sizes.
        world_size: processes that saved together.
        note: why there is no value, or what else one must know.
        spread: lowest and highest of the rounds, by peer.
        is_sound: what else must be true for the bar to hold.
    """

    figure: str
    value: float | None
    unit: str = "ratio"
    bar: float | None = None
    peers: Mapping[str, float] = field(default_factory=dict)
    runs: int = 0
    setting: str = ""
    world_size: int = 1
    note: str = ""
    spread: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    is_sound: bool = True

    @property
    def holds(self) -> bool | None:
        """Whether the bar is met; None where there is no bar, or nothing was measured."""
        if self.value is None or self.bar is None:
            return None
        return self.is_sound and self.value <= self.bar

    def as_json(self) -> dict[str, Any]:
        """What ``--json`` writes of it."""
        return {
            "figure": self.figure,
            "value": self.value,
            "unit": self.unit,
            "bar": self.bar,
            "holds": self.holds,
            "peers": dict(self.peers),
            "runs": self.runs,
            "setting": self.setting,
            "world_size": self.world_size,
            "spread": {name: list(bounds) for name, bounds in self.spread.items()},
            "note": self.note,
        }


def beside(
    name: str,
    ours: str,
    theirs: str,
    samples: Mapping[str, Samples],
    *,
    bar: float | None = None,
    setting: str = "",
    note: str = "",
    at_most: str | None = None,
) -> Figure:
    """The ratio of two medians of one interleaved run; every contestant's seconds stand beside it.

    Args:
        ours, theirs: names in ``samples``.
        samples: seconds of each round, by contestant.
        at_most: a third contestant, whose median ours must not exceed either.
    """
    medians = {peer: statistics.median(values) for peer, values in samples.items()}
    return Figure(
        figure=name,
        value=medians[ours] / medians[theirs],
        bar=bar,
        peers={f"{peer} s": median for peer, median in medians.items()},
        runs=min(len(values) for values in samples.values()),
        setting=setting,
        note=note,
        spread={f"{peer} s": (min(values), max(values)) for peer, values in samples.items()},
        is_sound=at_most is None or medians[ours] <= medians[at_most],
    )


def fold(samples: Mapping[str, Mapping[str, Samples]], measure: str) -> dict[str, Samples]:
    """One measure of every contestant that has it."""
    return {name: taken[measure] for name, taken in samples.items() if measure in taken}


def setting(*parts: str, digest: str = "blake3") -> str:
    """The words for a row's setting, torch's threads and the digest always named."""
    return ", ".join([*parts, f"digest {digest}", f"torch threads {torch.get_num_threads()}"])


def percentile(values: Samples, percent: float) -> float:
    """The smallest value that ``percent`` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]
