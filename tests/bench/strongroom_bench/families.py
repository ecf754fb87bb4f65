"""Every family of figures, in the order of the report."""

from __future__ import annotations

import importlib.util
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

__all__ = ["FAMILIES", "NEEDS", "Family", "can_be_measured"]

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


def can_be_measured(family: str) -> bool:
    """Whether what a family needs is installed here."""
    spec = importlib.util.find_spec(NEEDS[family]) if family in NEEDS else None
    # A folder of that name somewhere on the path would do for a package, and has no code.
    return family not in NEEDS or (spec is not None and spec.origin is not None)
