"""How ranks find each other: one small tensor over the job's own group, once.

The only place that uses the training job's process group, on the training thread, so that it
cannot meet a collective of the training. It works with gloo, NCCL or both.
"""

from __future__ import annotations

import os
from typing import Any, Final

import torch
import torch.distributed as dist

from strongroom.channel import Channel, open_channel
from strongroom.errors import RanksMissingError

__all__ = ["meet_over_group"]

_BYTES: Final = 4096


def meet_over_group(group: Any, rank: int, world_size: int) -> Channel:
    """Open a channel among the members of a process group; for all of them.

    Raises:
        RanksError: a member is gone, or the coordinator cannot be reached.
    """
    source = 0 if group is None else dist.get_global_rank(group, 0)
    device = _device_of(group)

    def share(data: bytes | None) -> bytes:
        told = torch.zeros(_BYTES, dtype=torch.uint8)
        if data is not None:
            told[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        told = told.to(device)
        try:
            dist.broadcast(told, source, group=group)
        except RuntimeError as error:
            raise RanksMissingError(
                f"the ranks could not meet over the job's {dist.get_backend(group)} group, which says: "
                f"{error!s:.300}",
                phase="meeting",
            ) from error
        return told.cpu().numpy().tobytes().rstrip(b"\0")

    # torchrun's and most launchers' name of the host of global rank 0.
    fixed_host = os.environ.get("MASTER_ADDR") if source == 0 else None
    return open_channel(rank, world_size, share, fixed_host=fixed_host)


def _device_of(group: Any) -> torch.device:
    """A device whose tensors the group can carry: the CPU where it can."""
    if "cpu" in dist.get_backend_config(group) or dist.get_backend(group) in ("gloo", "mpi"):
        return torch.device("cpu")
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is not None and accelerator.is_available():
        return torch.device(accelerator.current_accelerator().type, accelerator.current_device_index())
    return torch.device("cuda", torch.cuda.current_device())
