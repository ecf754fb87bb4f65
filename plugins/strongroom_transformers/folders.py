"""A folder of files as a checkpoint's state, and back: every byte of every file, whatever is in it.

::

    {"folder": {"name": the folder's own, "files": names and sizes, in order}, "files": {name: its bytes}}

Files are mapped, not read: what a rank writes of them is copied when the checkpoint is staged. What is in
them is not looked at; it is their writer's affair what it will make of them again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Final

import numpy as np
import torch

from strongroom.errors import ConfigError, StateMismatchError, StoreError
from strongroom.resume.dividing import Confer

__all__ = ["FOLDER_PART", "agree_on", "listed", "put_down", "taken_up"]

FOLDER_PART: Final = "folder"
"""The key that every checkpoint of a folder has, and no other."""


def listed(folder: Path) -> list[tuple[str, int]]:
    """Names, as paths below the folder, and sizes of all files, in order.

    Raises:
        ConfigError: something there is no plain file.
    """
    found = []
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise ConfigError(f"{path} is no plain file, and cannot be sealed; put it elsewhere")
        if path.is_file():
            found.append((path.relative_to(folder).as_posix(), path.stat().st_size))
    return found


def agree_on(folder: Path, confer: Confer) -> list[tuple[str, int]]:
    """What is in a folder that every rank has finished writing into; for all ranks.

    Raises:
        ConfigError: the ranks do not see the same folder.
    """
    confer(f"whether {folder.name} is written", lambda: True)
    seen = confer(f"what {folder.name} holds", lambda: [list(one) for one in listed(folder)])
    for rank, one in enumerate(seen):
        if one != seen[0]:
            strange = sorted({name for name, _ in one} ^ {name for name, _ in seen[0]}) or ["other sizes"]
            raise ConfigError(
                f"rank {rank} and rank 0 see different files in {folder} ({', '.join(strange[:5])}); sealed "
                f"folders need an output_dir that all ranks share"
            )
    return [(str(name), int(size)) for name, size in seen[0]]


def taken_up(folder: Path, files: Sequence[tuple[str, int]], **more: Any) -> dict[str, Any]:
    """The state.

    Args:
        folder: where the files are.
        files: as `agree_on` gave them.
        more: what else is to be known of it.
    """
    return {
        FOLDER_PART: {"name": folder.name, "files": [list(one) for one in files], **more},
        "files": {name: _mapped(folder / name, size) for name, size in files},
    }


def put_down(state: Mapping[str, Any], folder: Path) -> None:
    """Write the files into a folder that is made for them, readable for nobody else.

    Raises:
        StateMismatchError: it is the state of something else, or a name leads out of the folder.
        StoreError: they could not be written.
    """
    about = state.get(FOLDER_PART)
    if not isinstance(about, Mapping) or not isinstance(about.get("files"), list | tuple):
        raise StateMismatchError("the checkpoint holds no folder; take it up with the callback that saved it")
    files = state["files"]
    for name, size in about["files"]:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts:
            raise StateMismatchError(f"the file {name!r} would lie outside of the folder; nothing is written")
        if name not in files or files[name].numel() != size:
            raise StateMismatchError(f"the checkpoint lacks bytes of the file {name!r}")
    try:
        folder.mkdir(parents=True, mode=0o700)
        for name, _ in about["files"]:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            with open(folder / name, "xb") as file:
                file.write(memoryview(files[name].contiguous().numpy()))
                file.flush()
                os.fsync(file.fileno())
    except OSError as error:
        raise StoreError(f"{folder} could not be written: {error}") from error


def _mapped(path: Path, size: int) -> torch.Tensor:
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    # Private pages: a tensor that could not be written to would be warned of, and nobody writes to it.
    return torch.from_numpy(np.memmap(path, dtype=np.uint8, mode="c", shape=(size,)))
