"""``strongroom://`` as a protocol of fsspec, by which Lightning opens whatever it is to read.

fsspec finds it by this distribution's entry point, so a program needs to import nothing of Strongroom for
``Model.load_from_checkpoint("strongroom://runs/a#step=1200")``. A checkpoint is read and verified whole, and
served as the file that ``torch.load`` expects: made in memory, in this process, of tensors and plain values.
"""

from __future__ import annotations

import io
from typing import Any

import torch
from fsspec import AbstractFileSystem  # type: ignore[import-untyped]

from strongroom.errors import ConfigError
from strongroom_lightning.encoding import in_programs_values
from strongroom_lightning.loading import read
from strongroom_lightning.uri import SCHEME, CheckpointUri

__all__ = ["StrongroomFileSystem"]


class StrongroomFileSystem(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Read-only: each checkpoint is one file, called ``ROOT`` (the newest) or ``ROOT#step=N``."""

    protocol = "strongroom"
    root_marker = ""

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        return str(path).removeprefix(SCHEME)

    def _open(self, path: str, mode: str = "rb", *args: Any, **kwargs: Any) -> io.BytesIO:
        if mode != "rb":
            raise ConfigError(
                f"{SCHEME}{path} cannot be opened for writing: StrongroomCheckpoint saves "
                f"checkpoints, and so does trainer.save_checkpoint where the Trainer has one"
            )
        checkpoint = in_programs_values(read(_uri(path)), None)
        file = io.BytesIO()
        torch.save(checkpoint, file)  # noqa: TID251 - into memory, for torch.load in this process
        file.seek(0)
        return file

    def exists(self, path: str, **kwargs: Any) -> bool:
        """Whether there is a name to open: what is there is found out, in words, when it is opened."""
        return True

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        return {"name": self._strip_protocol(path), "size": None, "type": "file"}

    def isdir(self, path: str) -> bool:
        return False

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        info = self.info(path)
        return [info] if detail else [info["name"]]


def _uri(path: str) -> CheckpointUri:
    uri = CheckpointUri.parse(path if path.startswith(SCHEME) else SCHEME + path)
    if uri is None:
        raise ConfigError(f"{path!r} is no name of a checkpoint")
    return uri
