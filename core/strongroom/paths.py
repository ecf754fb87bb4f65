"""How a place in the user's state is spelled as a tensor's name. (For people: `strongroom.keypath`.)

A name is the path's elements joined by dots, so that a module's parameters keep the names
that users know. A text element is written as it is, with every character that has a meaning
here escaped as ``%XX``; every other key (an index, an int, a tuple) stands in brackets.
Different paths have different names. `docs/format.md`, clause 6.
"""

from __future__ import annotations

from typing import Any, Final

from strongroom.keypath import Attribute, Path

__all__ = ["Path", "from_dotted", "spell"]

_SPECIAL: Final = frozenset("%.[]@=")
_RESERVED: Final = "__metadata__"


def spell(path: Path) -> str:
    """The name of a tensor at a path."""
    name = ".".join(_element(key) for key in path)
    # safetensors keeps this one name for itself: a shard with such a tensor could not be read.
    return f"%5F{name[1:]}" if name == _RESERVED else name


def from_dotted(name: str) -> Path:
    """A module's own name for a parameter, as path elements: ``layers.0.weight`` has three."""
    return tuple(name.split("."))


def _element(key: Any) -> str:
    if isinstance(key, Attribute):
        key = key.name
    if type(key) is str and key:
        if key.isascii() and (key.isidentifier() or key.isdigit()):
            return key  # most are; what follows is slow, and names are spelled while training waits
        return "".join(_escape(char) if char in _SPECIAL or not char.isprintable() else char for char in key)
    # Text in brackets is told from other keys by its quotes, so that 1 and "1" differ.
    return "[" + "".join(_escape(char) if char in _SPECIAL else char for char in repr(key)) + "]"


def _escape(char: str) -> str:
    return "".join(f"%{byte:02X}" for byte in char.encode("utf-8", "surrogatepass"))
