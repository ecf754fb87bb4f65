"""Methods of one instance, replaced for a time: how a front end comes to its framework's inner places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

__all__ = ["Method", "Replace", "Replacements", "replace_for_good"]

Method = Callable[..., Any]

Replace = Callable[[object, str, Callable[[Method], Method]], None]
"""Replaces a method of one instance: of whom, which, and what makes the new one of the old."""


class Replacements:
    """Methods that were replaced on instances, and how to put them back."""

    def __init__(self) -> None:
        self._undo: list[tuple[object, str, Any]] = []

    def replace(self, owner: object, name: str, make: Callable[[Method], Method]) -> None:
        """Let ``owner.name`` be what ``make`` returns for the method that was there."""
        self._undo.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, make(getattr(owner, name)))

    def undo(self) -> None:
        """Put every method back, the latest first; harmless when repeated."""
        while self._undo:
            owner, name, before = self._undo.pop()
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)


_ABSENT: Final = object()


def replace_for_good(owner: object, name: str, make: Callable[[Method], Method]) -> None:
    """Let ``owner.name`` be what ``make`` returns for the method that was there, while the owner lives."""
    setattr(owner, name, make(getattr(owner, name)))
