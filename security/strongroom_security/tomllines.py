"""Where something stands in a TOML file: its parser tells what it read, and not where."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["line_of"]

_MAX_LINES: Final = 1000
"""Of one statement; a longer one is not looked through, since that takes the square of its lines."""


def line_of(text: str, at: Sequence[str], element: str | None = None) -> int | None:
    """The number of the line, from 1, at which a member's statement begins; None: not found.

    Args:
        text: a whole document that was parsed.
        at: the names that lead to the member: a section, a member of it.
        element: a text within the member's value: then the line on which it stands, if there is one.
    """
    header: tuple[str, ...] = ()
    for number, statement, parsed in _statements(text):
        if statement.lstrip().startswith("["):
            header = _names(parsed)
            if at and header[: len(at)] == tuple(at):  # or a part of it, by which it is there as well
                return number
        elif _holds(_within(header, parsed), at):
            return number + _offset(statement, element)
    return None


def _statements(text: str) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Each header or assignment by itself: the line that it begins on, and what it comes to alone."""
    begun = ""
    first = lines = 0
    # Not by splitlines(), which knows ends of lines that TOML does not.
    for number, line in enumerate(text.split("\n"), start=1):
        if not begun:
            first, lines = number, 0
        begun += f"{line}\n"
        lines += 1
        try:
            parsed = tomllib.loads(begun)
        except tomllib.TOMLDecodeError:
            if lines == _MAX_LINES:
                return
            continue  # it goes on: an array, or a text of several lines
        if parsed:
            yield first, begun, parsed
        begun = ""


def _names(parsed: dict[str, Any]) -> tuple[str, ...]:
    names: list[str] = []
    value: Any = parsed
    while isinstance(value, dict) and value:
        name, value = next(iter(value.items()))
        names.append(name)
    return tuple(names)


def _within(header: Sequence[str], parsed: dict[str, Any]) -> dict[str, Any]:
    for name in reversed(header):
        parsed = {name: parsed}
    return parsed


def _holds(value: Any, at: Sequence[str]) -> bool:
    for name in at:
        if not isinstance(value, dict) or name not in value:
            return False
        value = value[name]
    return bool(at)


def _offset(statement: str, element: str | None) -> int:
    if element is None:
        return 0
    return next((number for number, line in enumerate(statement.split("\n")) if element in line), 0)
