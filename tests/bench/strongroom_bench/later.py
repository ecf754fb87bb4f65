"""Figures of what this release cannot do yet: named, so that no report is silent about them."""

from __future__ import annotations

from pathlib import Path

from strongroom_bench.figure import Figure
from strongroom_bench.scale import Scale

__all__ = ["measure"]

_SEALING = "not available yet: sealing"

_WAITING = {
    "wall of a sealed, signed, audited save, blake3 / dcp.save(thread_count=2)": ("ratio", 1.10),
    "wall of a sealed, signed, audited save, sha256 / dcp.save(thread_count=2)": ("ratio", 1.60),
    "wall of a verified restore, sealed / dcp.load": ("ratio", 0.80),
    "shard bytes read for 1 % of the rows of a 16 MiB tensor, sealed": ("MiB", 2.0),
}


def measure(scale: Scale, folder: Path) -> list[Figure]:
    """Nothing is measured."""
    return [
        Figure(figure=name, value=None, unit=unit, bar=bar, note=_SEALING)
        for name, (unit, bar) in _WAITING.items()
    ]
