"""Floors: what remembers, outside of a root, the highest checkpoint that was verified of each run.

A signature says who made a checkpoint, not that it is the newest: whoever can write to a root can put back
the whole of yesterday's. A floor is where such a writer cannot reach: a file of this machine (`FileFloor`),
or a store of its own, a folder or a bucket's prefix, for several machines (`FolderFloor`). Both also
remember the newest list of trusted keys.

A position is (launch, step). What is lower than the highest that was seen is refused, and so is another
checkpoint at the same position: two histories were written where there should be one. What has become of a
floor that cannot be read is never guessed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from strongroom.errors import ConfigError
from strongroom.stores.open import open_store
from strongroom_security.floors.file import FileFloor
from strongroom_security.floors.folder import FolderFloor

__all__ = ["FileFloor", "FolderFloor", "open_floor"]

_KINDS: Final = ("file:PATH", "dir:PATH", "s3://BUCKET/PREFIX")


def open_floor(text: str, *, base: Path) -> FileFloor | FolderFloor:
    """The floor that a policy names: ``file:PATH``, ``dir:PATH`` or ``s3://BUCKET/PREFIX``.

    Args:
        text: as in the policy.
        base: what relative paths are relative to.

    Raises:
        ConfigError: no such kind, or what is named cannot be a floor.
    """
    kind, _, rest = text.partition(":")
    if kind == "s3" and rest.startswith("//"):
        return FolderFloor(open_store(text))
    if kind == "file" and rest:
        return FileFloor(base / rest)
    if kind == "dir" and rest:
        return FolderFloor(open_store(base / rest))
    raise ConfigError(f"{text[:100]!r} names no floor; expected one of {', '.join(_KINDS)}")
