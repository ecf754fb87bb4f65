"""The object that a program holds."""

from __future__ import annotations

__all__ = ["Strongroom"]


class Strongroom:
    """To be built."""
