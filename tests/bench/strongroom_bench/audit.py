"""What the audit log costs whoever writes it (`audit_writing`), and whoever reads it (`audit_reading`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from strongroom_bench import audit_reading, audit_writing
from strongroom_bench.figure import Figure
from strongroom_bench.scale import Scale

__all__ = ["measure"]

_PARTS: Final[tuple[Callable[[Scale, Path], list[Figure]], ...]] = (
    audit_writing.measure,
    audit_reading.measure,
)


def measure(scale: Scale, folder: Path) -> list[Figure]:
    """Every part, one after the other."""
    return [figure for part in _PARTS for figure in part(scale, folder)]
