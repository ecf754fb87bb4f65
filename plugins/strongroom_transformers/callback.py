"""The callback."""

from __future__ import annotations

__all__ = ["StrongroomCallback"]


class StrongroomCallback:
    """To be built."""
