"""How ranks find each other: one small tensor over the job's own group, once.

The only place that uses the training job's process group, on the training thread, so that it
cannot meet a collective of the training. It works with gloo, NCCL or both.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from strongroom.channel import Channel, open_channel
from strongroom.errors import ConfigError, RanksMissingError

__all__ = ["meet_over_group"]

_BYTES: Final = 4096


def meet_over_group(group: Any, rank: int, world_size: int, within_s: float) -> Channel:
    """Open a channel among the members of a process group; for all of them.

    Args:
        within_s: how long to wait for the members, where the group can be asked for so little: gloo
            can; NCCL waits as long as the group's own timeout says.

    Raises:
        RanksError: a member is gone, or the coordinator cannot be reached.
        ConfigError: the group was destroyed.
    """
    try:
        source = 0 if group is None else dist.get_global_rank(group, 0)
        device = _device_of(group)
        backend = dist.get_backend(group)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"the ranks cannot meet: torch.distributed or the process_group was destroyed ({error!s:.200}); "
            "destroy it after the Checkpointer is closed"
        ) from error

    def share(data: bytes | None) -> bytes:
        told = torch.zeros(_BYTES, dtype=torch.uint8)
        if data is not None:
            told[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        told = told.to(device)
        try:
            work = dist.broadcast(told, source, group=group, async_op=True)
            if work is not None:
                # With a bound of its own NCCL would take the whole group down.
                work.wait(timedelta(seconds=within_s)) if device.type == "cpu" else work.wait()
        except RuntimeError as error:
            raise RanksMissingError(
                f"the ranks could not meet within {within_s:g} s over the job's {backend} group: one has "
                f"ended, is stopped or was not called, or the group is broken. It says: {error!s:.300}",
                phase="meeting",
            ) from error
        return told.cpu().numpy().tobytes().rstrip(b"\0")

    # torchrun's and most launchers' name of the host of global rank 0.
    host = os.environ.get("MASTER_ADDR")
    return open_channel(rank, world_size, share, fixed_host=host if source == 0 else None, route_to=host)


def _device_of(group: Any) -> torch.device:
    """A device whose tensors the group can carry: the CPU where it can."""
    if "cpu" in dist.get_backend_config(group) or dist.get_backend(group) in ("gloo", "mpi"):
        return torch.device("cpu")
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is not None and accelerator.is_available():
        return torch.device(accelerator.current_accelerator().type, accelerator.current_device_index())
    return torch.device("cuda", torch.cuda.current_device())
