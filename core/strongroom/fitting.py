"""Whether a stored tensor fits a tensor of the caller's, and which of the caller's are one memory."""

from __future__ import annotations

from typing import Any

import torch

from strongroom import stage
from strongroom.columns import TensorRecord
from strongroom.dtypes import torch_dtype
from strongroom.survey import is_carried, is_sharded

__all__ = ["difference", "memory_of"]


def difference(target: torch.Tensor, record: TensorRecord) -> str | None:
    """Why a tensor cannot be filled with a stored one, or None where it can."""
    problem = None
    if isinstance(target, torch.nn.UninitializedParameter | torch.nn.UninitializedBuffer):
        problem = "belongs to a lazy module that was never called here; call it once before restoring"
    elif not is_carried(target):
        problem = (
            f"a tensor of the subclass {type(target).__qualname__} cannot be filled; restore what it is made "
            "of, or restore a state without it and build it from that"
        )
    elif tuple(target.shape) != record.shape or target.dtype != torch_dtype(record.dtype):
        stored = f"{str(torch_dtype(record.dtype)).removeprefix('torch.')}{list(record.shape)}"
        problem = (
            f"{str(target.dtype).removeprefix('torch.')}{list(target.shape)} here, {stored} in the checkpoint"
        )
    elif stage.local_tensor(target).is_meta:
        problem = "is on the meta device here; materialize it before restoring"
    elif not is_sharded(target) and stage.is_freed(stage.local_tensor(target)):
        problem = "its memory was freed here (its storage was resized); give it memory before restoring"
    elif _overlaps_itself(target):
        problem = "its elements share memory here (an expanded tensor?), so they cannot be filled; clone() it"
    return problem


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    if is_sharded(tensor):
        return False
    local = stage.local_tensor(tensor)
    if local.numel() == 0 or local.is_contiguous():
        return False
    reach = 0
    for stride, size in sorted(zip(local.stride(), local.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def memory_of(tensor: torch.Tensor) -> Any:
    """A key that is equal for tensors that are filled at once; None: it has no memory of its own."""
    if is_sharded(tensor):
        return None
    local = stage.local_tensor(tensor)
    if local.numel() == 0:
        return None
    return local.device, local.data_ptr(), tuple(local.shape), local.stride()
