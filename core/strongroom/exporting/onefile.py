"""Weights in memory as one safetensors file: whole or not at all, and on stable storage.

For a training process that hands its model over by itself, without a checkpoint. What a checkpoint holds is
exported by `strongroom.exporting.export`, shard by shard, verified, and signed if wanted.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from strongroom.errors import ConfigError, StoreError

__all__ = ["write_weights"]


def write_weights(path: str | os.PathLike[str], tensors: Mapping[str, Any]) -> None:
    """Write tensors to ``path``, in place of a file that is there.

    Tensors that are the same memory are written once: the metadata say which name each further one has, as
    ``safetensors.torch.save_model`` has it, so that ``load_model`` ties them again.

    Raises:
        ConfigError: ``path`` is a folder or a URI, or a value is no tensor.
        StoreError: it could not be written; what was there is still there.
    """
    where = os.fspath(path)
    if "://" in where or os.path.isdir(where):
        raise ConfigError(f"{where} cannot be a safetensors file: name a file of this machine's")
    others = [name for name, tensor in tensors.items() if not isinstance(tensor, torch.Tensor)]
    if others:
        raise ConfigError(
            f"{where} cannot hold {', '.join(others[:5])}: a safetensors file holds tensors alone; save a "
            f"checkpoint instead, or let these be no part of the state_dict"
        )
    kept: dict[tuple[object, ...], str] = {}
    tied: dict[str, str] = {}
    written: dict[str, torch.Tensor] = {}
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        memory = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and memory in kept:
            tied[name] = kept[memory]
            continue
        kept[memory] = name
        # A copy of its own: of tensors that overlap otherwise, safetensors would take none.
        written[name] = tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
    folder = os.path.dirname(os.path.abspath(where))
    temporary = os.path.join(folder, f".{os.path.basename(where)}.{secrets.token_hex(8)}")
    try:
        os.makedirs(folder, exist_ok=True)
        try:
            save_file(written, temporary, metadata={"format": "pt", **tied})
            _fsync(temporary)
            os.replace(temporary, where)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        _fsync(folder)  # the name is not durable without it
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise StoreError(f"{where} could not be written: {reason}") from error


def _fsync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
