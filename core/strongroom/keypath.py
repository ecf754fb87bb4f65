"""Where a value stands in the user's state: paths and their spelling in errors.

The names of stored tensors are another matter, and are made elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

__all__ = ["Attribute", "Path", "Within", "key_path", "short"]


@dataclass(frozen=True, slots=True)
class Attribute:
    """A step of a path that is an attribute's name, not a key or an index."""

    name: str

    def __repr__(self) -> str:
        return f".{self.name}"


@dataclass(frozen=True, slots=True)
class Within:
    """A step into what has no path of its own: a dict's key, a set's element."""

    what: str


Path = tuple[Any, ...]
"""From the root: a dict's key, a sequence's index or an `Attribute` for each step."""


def key_path(path: Iterable[Any]) -> str:
    """A path in Python's spelling: ``state['extra']['loss_fn']``."""
    return "state" + "".join(map(_step, path))


def _step(step: Any) -> str:
    if isinstance(step, Attribute):
        return f".{step.name[:80]}"
    if isinstance(step, Within):
        return f" ({step.what})"
    return f"[{short(step)}]"


def short(value: Any) -> str:
    if type(value) is int and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"  # repr refuses the longest ones
    if type(value) in {str, bytes, int, float, bool, type(None)}:
        return repr(value[:80]) if type(value) in {str, bytes} else repr(value)
    return f"a {type(value).__qualname__}"
