"""Where a platform wants its runs to lie: below which root, and on which further tiers. Pure."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from strongroom.errors import ConfigError

__all__ = ["Placed", "Placement"]

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """One run's places: its root, and the tiers behind it."""

    root: str
    replicate_to: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Below what the runs of a platform lie: roots and URIs, to each of which a run's name is added.

    Attributes:
        root: the first tier; None: what the program says, as it says it.
        replicate_to: the tiers behind it, the fastest first.
        base: the folder that relative paths are relative to.

    Raises:
        ConfigError: a value of another type, or nothing is said.
    """

    root: str | None = None
    replicate_to: Sequence[str] = ()
    base: str | os.PathLike[str] = "."

    def __post_init__(self) -> None:
        # Both come from a file that anybody may have written.
        root: object = self.root
        replicate_to: object = self.replicate_to
        if root is not None and not (isinstance(root, str) and root):
            raise ConfigError(f"root must be a path or a URI, got {self.root!r:.60}")
        if not isinstance(replicate_to, list | tuple) or not all(
            isinstance(one, str) and one for one in replicate_to
        ):
            raise ConfigError(f"replicate_to must be a list of paths and URIs, got {self.replicate_to!r:.60}")
        if self.root is None and not self.replicate_to:
            raise ConfigError('it says nothing; name where runs lie: root = "s3://bucket/runs"')

    def place(self, run: str) -> Placed:
        """A run's places.

        Args:
            run: its name: what a program calls its root, relative to the platform's. An absolute path or a
                URI stays as it is where there are no further tiers.

        Raises:
            ConfigError: it has no name below these roots.
        """
        is_whole = os.path.isabs(run) or _SCHEME.match(run) is not None
        name = os.path.normpath(run)
        if self.replicate_to and (is_whole or name.split(os.sep)[0] in {os.curdir, os.pardir}):
            raise ConfigError(
                f"{run!r} has no name that could be added to {', '.join(self.replicate_to)}, where this "
                f"configuration replicates runs to; give the run's root as a relative path, such as 'runs/a'"
            )
        root = run if is_whole or self.root is None else self._below(self.root, name)
        return Placed(root=root, replicate_to=tuple(self._below(one, name) for one in self.replicate_to))

    def _below(self, place: str, name: str) -> str:
        if _SCHEME.match(place):
            return f"{place.rstrip('/')}/{name.replace(os.sep, '/')}"
        return os.path.join(os.fspath(self.base), place, name)
