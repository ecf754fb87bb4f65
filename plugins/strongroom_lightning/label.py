"""``filename``: a name for each checkpoint, made of what was measured on it, and kept with it as a tag.

A checkpoint's folder is named by its step; what `ModelCheckpoint` calls a file is for people here.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from strongroom.errors import ConfigError

__all__ = ["Label"]

_COUNTED: Final = ("epoch", "step")

_DEFAULT: Final = "{epoch}-{step}"

_UNKNOWN: Final = "?"

_LONGEST: Final = 1000
"""Characters: a label is for people, and part of every checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """A pattern such as ``"{epoch:02d}-{val_loss:.2f}"``.

    Attributes:
        pattern: names of metrics in braces, each with a format as Python has them, or without.
        inserts_names: whether ``{val_loss:.2f}`` becomes ``val_loss=0.31`` or only ``0.31``.

    Raises:
        ConfigError: the pattern could fail once there are values to put into it.
    """

    pattern: str
    inserts_names: bool

    @classmethod
    def of(cls, filename: str | None, *, inserts_names: bool) -> Label:
        return cls(pattern=filename or _DEFAULT, inserts_names=inserts_names)

    def __post_init__(self) -> None:
        try:
            if any(not name for name in self.names):
                raise ValueError("a pair of braces holds no metric's name")
            if any(
                re.search("[0-9]{4}", spec or "") for *_, spec, _ in string.Formatter().parse(self.pattern)
            ):
                # Before it is tried: a width of a billion makes a gigabyte.
                raise ValueError("a width or precision has more than three digits")
            filled = self.fill(dict.fromkeys(self.names, 0.5) | {"epoch": 0, "step": 0})
            if len(filled) > _LONGEST:
                raise ValueError(f"it makes labels of {len(filled)} characters; {_LONGEST} are allowed")
        except (ValueError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"filename={self.pattern!r} is no pattern: {error}; expected names of metrics in braces, "
                "such as '{epoch:02d}-{val_loss:.2f}'; epoch and step are whole numbers, all else is a float"
            ) from error

    @property
    def names(self) -> list[str]:
        """The metrics that it asks for."""
        return [name for _, name, _, _ in string.Formatter().parse(self.pattern) if name is not None]

    def fill(self, metrics: Mapping[str, float]) -> str:
        """The label; a metric that is not known yet stands in it as ``?``."""
        parts = []
        for text, name, spec, conversion in string.Formatter().parse(self.pattern):
            parts.append(text)
            if name is None:
                continue
            if conversion is not None or "{" in (spec or ""):
                raise ValueError("a conversion, or braces within braces")
            if self.inserts_names:
                parts.append(f"{name}=")
            parts.append(_shown(name, metrics.get(name), spec or ""))
        return "".join(parts)


def _shown(name: str, value: float | None, spec: str) -> str:
    if value is None:
        return _UNKNOWN
    return format(int(value) if name in _COUNTED else float(value), spec)
