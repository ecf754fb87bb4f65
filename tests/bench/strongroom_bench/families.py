"""Every family of figures, in the order of the report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from strongroom_bench import (
    accelerated,
    audit,
    composed,
    costs,
    fits,
    indexes,
    listing,
    memory,
    objects,
    parts,
    ranks,
    restoring,
    saving,
    sealed,
    signing,
    small,
    starting,
    trainers,
    training,
)
from strongroom_bench.figure import Figure
from strongroom_bench.scale import Scale

__all__ = ["FAMILIES", "NEEDS", "Family"]

Family = Callable[[Scale, Path], list[Figure]]
"""Measures in a folder of its own, on the disk that is measured."""

FAMILIES: Final[Mapping[str, Family]] = {
    "saving": saving.measure,
    "restoring": restoring.measure,
    "sealed": sealed.measure,
    "signing": signing.measure,
    "costs": costs.measure,
    "ranks": ranks.measure,
    "small": small.measure,
    "training": training.measure,
    "lightning": fits.measure,
    "accelerate": accelerated.measure,
    "transformers": trainers.measure,
    "composer": composed.measure,
    "starting": starting.measure,
    "parts": parts.measure,
    "memory": memory.measure,
    "listing": listing.measure,
    "indexes": indexes.measure,
    "s3": objects.measure,
    "audit": audit.measure,
}

NEEDS: Final[Mapping[str, str]] = {
    name: name for name in ("lightning", "accelerate", "transformers", "composer")
}
"""The package without which a family cannot be measured. Not all of them go into one environment."""
