"""How ranks find each other: one small tensor over the job's own group, once.

The only place that uses the training job's process group, on the training thread, so that it
cannot meet a collective of the training. It works with gloo, NCCL or both. Over gloo the tensor
goes to each rank by itself: who is missing then keeps nobody from meeting, and is named later.
"""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from strongroom.channel import Channel, open_channel
from strongroom.errors import ConfigError, RanksMissingError

__all__ = ["meet_over_group"]

_BYTES: Final = 4096
_TAG: Final = 0x5352
_SENT: Final[list[Any]] = []
"""What was sent, and may still be on its way: it goes out when the other comes to take it."""


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

    by_itself = "cpu:gloo" in dist.get_backend_config(group)

    def share(data: bytes | None) -> bytes:
        told = torch.zeros(_BYTES, dtype=torch.uint8)
        if data is not None:
            told[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        try:
            if by_itself:
                _send_or_receive(group, rank, world_size, told, within_s)
            else:
                told = told.to(device)
                # With a bound of its own NCCL would take the whole group down.
                dist.broadcast(told, source, group=group)
        except RuntimeError as error:
            who = "rank 0" if by_itself else "a rank"
            raise RanksMissingError(
                f"the ranks could not meet within {within_s:g} s over the job's {backend} group: {who} has "
                f"ended, is stopped or was not called, or the group is broken. It says: {error!s:.300}",
                ranks=(0,) if by_itself else (),
                phase="meeting",
            ) from error
        return told.cpu().numpy().tobytes().rstrip(b"\0")

    # torchrun's and most launchers' name of the host of global rank 0.
    host = os.environ.get("MASTER_ADDR")
    return open_channel(
        rank,
        world_size,
        share,
        fixed_host=host if source == 0 else None,
        route_to=host,
        within_s=within_s,
    )


def _send_or_receive(group: Any, rank: int, world_size: int, told: torch.Tensor, within_s: float) -> None:
    def number_of(member: int) -> int:
        return member if group is None else dist.get_global_rank(group, member)

    if rank != 0:
        work = dist.irecv(told, number_of(0), group=group, tag=_TAG)
        if work is not None:
            work.wait(timedelta(seconds=within_s))
        return
    _SENT[:] = [(tensor, work) for tensor, work in _SENT if not work.is_completed()]
    for member in range(1, world_size):
        # Who is dead is missed, and named, by the first agreement.
        with contextlib.suppress(RuntimeError):
            _SENT.append((told, dist.isend(told, number_of(member), group=group, tag=_TAG)))


def _device_of(group: Any) -> torch.device:
    """A device whose tensors the group can carry: the CPU where it can."""
    if "cpu" in dist.get_backend_config(group) or dist.get_backend(group) in ("gloo", "mpi"):
        return torch.device("cpu")
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is not None and accelerator.is_available():
        return torch.device(accelerator.current_accelerator().type, accelerator.current_device_index())
    return torch.device("cuda", torch.cuda.current_device())
