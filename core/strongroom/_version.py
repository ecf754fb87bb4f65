"""The release's version, in one place: the build reads it here, and so does the running code."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0.dev0"
