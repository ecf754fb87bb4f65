"""The callback."""

from __future__ import annotations

__all__ = ["StrongroomCheckpoint"]


class StrongroomCheckpoint:
    """To be built."""
