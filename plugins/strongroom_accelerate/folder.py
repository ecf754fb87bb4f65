"""A folder that others write and read, kept in a checkpoint: files of an engine's own save, or of a hook's.

They are written to a private folder, become tensors of bytes of the checkpoint, sealed and signed as the rest
of it, and are wiped. On the way back they are written to such a folder, read by whoever wrote them, and
wiped. Ranks of one host share the folder; those of several do if it lies where all of them see it.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from strongroom.errors import ConfigError, FormatError
from strongroom.resume.dividing import Confer

__all__ = ["read_files", "scratch_folder", "write_files"]


@contextmanager
def scratch_folder(parent: str | None, confer: Confer, *, is_first: bool) -> Iterator[str]:
    """A new folder, the same on every rank, for as long as the block lasts; for all ranks.

    Args:
        parent: where, on a file system that all ranks see; None: among this host's temporary files.
        confer: how the ranks talk.
        is_first: whether this is the rank that makes and wipes it.
    """
    made: list[str] = []

    def make() -> str | None:
        if not is_first:
            return None
        if parent is not None:
            os.makedirs(parent, exist_ok=True)
        made.append(tempfile.mkdtemp(prefix=f"strongroom-{secrets.token_hex(4)}-", dir=parent))  # mode 0700
        return made[0]

    folder = next(word for word in confer("where the files of this save go", make) if word is not None)
    try:
        yield folder
    finally:
        for path in made:
            shutil.rmtree(path, ignore_errors=True)


def read_files(folder: str, confer: Confer) -> dict[str, torch.Tensor]:
    """Every file as a tensor of bytes, by its path in the folder; for all ranks.

    A file's memory is its pages on the disk; nothing is copied here.

    Raises:
        ConfigError: the ranks see different files.
    """
    paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    found = {path.relative_to(folder).as_posix(): path for path in paths}
    sizes = confer("which files were written", lambda: {name: p.stat().st_size for name, p in found.items()})
    if any(one != sizes[0] for one in sizes):
        raise ConfigError(
            f"the ranks do not see the same files in {folder}: they run on several hosts. Give "
            f"Strongroom(scratch=...) a folder on a file system that all of them see"
        )
    return {
        name: torch.from_file(str(found[name]), shared=False, size=size, dtype=torch.uint8)
        if size
        else torch.empty(0, dtype=torch.uint8)
        for name, size in sizes[0].items()
    }


def write_files(files: Mapping[str, Any], folder: str) -> None:
    """Write what `read_files` gave.

    Raises:
        FormatError: a name leads out of the folder.
    """
    for name, content in files.items():
        place = PurePosixPath(name)
        if place.is_absolute() or ".." in place.parts or "\\" in name or "\0" in name or not place.parts:
            raise FormatError(f"a file in the checkpoint is called {name!r}, which leads out of its folder")
        path = Path(folder, *place.parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.cpu().contiguous().numpy().data)


def with_files(
    files: Mapping[str, Any],
    parent: str | None,
    confer: Confer,
    use: Callable[[str], None],
    *,
    is_first: bool,
    writes: bool,
) -> None:
    """Let ``use`` read the files from a folder; for all ranks.

    Args:
        writes: whether this rank writes them for the others that see the folder.
    """
    with scratch_folder(parent, confer, is_first=is_first) as folder:
        if writes:
            os.makedirs(folder, exist_ok=True)  # of another host
            write_files(files, folder)
        try:
            confer("the files are written", lambda: None)
            use(folder)
            confer("the files are read", lambda: None)
        finally:
            if writes and not is_first:
                shutil.rmtree(folder, ignore_errors=True)
