"""The mixin."""

from __future__ import annotations

__all__ = ["StrongroomTrainerMixin"]


class StrongroomTrainerMixin:
    """To be built."""
