"""Which part of a checkpoint a restore wants, and under which names. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

__all__ = ["Selection"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which part of a checkpoint is wanted, and how strictly.

    Attributes:
        strict: whether a name that only one side has is an error. A shape or dtype that
            differs always is.
        only: patterns (``*``, ``?``, ``[...]``) of names in the caller's state; one that fits a
            container, module or optimizer stands for all that is in it. The rest stays as it is.
        rename: the caller's name or prefix -> the checkpoint's, for moved parameters.
        stand_in: the rank whose own values a rank is given that stored none; None: nobody's.
    """

    strict: bool = True
    only: tuple[str, ...] | None = None
    rename: Mapping[str, str] = field(default_factory=dict)
    stand_in: int | None = None

    def fitting(self, name: str) -> list[str]:
        """The patterns of ``only`` that a name, or something that it lies in, fits."""
        return [
            pattern
            for pattern in self.only or ()
            if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")
        ]

    def stored_name(self, name: str) -> str:
        """What the caller's name is called in the checkpoint: by the longest prefix that fits."""
        fitting = [mine for mine in self.rename if name == mine or name.startswith(f"{mine}.")]
        if not fitting:
            return name
        mine = max(fitting, key=len)
        return self.rename[mine] + name[len(mine) :]
