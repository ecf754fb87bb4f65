"""Chance for pauses and orders, drawn from the system: never from the streams that training draws from.

Saving must not change a run, and much of it happens on other threads: one number that a retry drew there from
Python's global generator would shift every one that training draws afterwards.
"""

from __future__ import annotations

import random
from collections.abc import Callable, MutableSequence
from typing import Any, Final

__all__ = ["shuffle", "uniform"]

_SYSTEM: Final = random.SystemRandom()

uniform: Final[Callable[[float, float], float]] = _SYSTEM.uniform
"""A number between two others."""


def shuffle(values: MutableSequence[Any]) -> None:
    """Put values into an order of chance."""
    _SYSTEM.shuffle(values)
