"""Under a policy that seals, nothing else of the run writes its state in the clear."""

from __future__ import annotations

from typing import Any

from strongroom_composer.arguments import Arguments

__all__ = ["guard"]


def guard(trainer: Any, arguments: Arguments) -> None:
    """Tell what else in the Trainer writes state, and see to it."""
