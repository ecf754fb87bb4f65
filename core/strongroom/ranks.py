"""Who takes part in a save or restore, and what they tell each other.

This release saves from one process. Everything that later has to be agreed between ranks goes
through the calls here, so that the save and restore paths already read as they will for many:
`gather` brings one value of every rank to the coordinator, `broadcast` takes one back.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from strongroom.errors import ConfigError

__all__ = ["Ranks"]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process among the processes of its job.

    Attributes:
        rank: this process, from 0.
        world_size: how many there are.
    """

    rank: int
    world_size: int

    @classmethod
    def of_this_process(cls, environment: Mapping[str, str] = os.environ) -> Ranks:
        """Who this process is, by torch.distributed if it is running, else by ``WORLD_SIZE``.

        Raises:
            ConfigError: the job has several processes, which this release does not save from.
        """
        world_size = _initialized_world_size()
        if world_size is None:
            text = environment.get("WORLD_SIZE", "1")
            world_size = int(text) if text.isdecimal() else 1
        if world_size > 1:
            raise ConfigError(
                f"this job has {world_size} processes; this release of Strongroom saves from one. Use "
                f"StrongroomWriter under torch.distributed.checkpoint.save for a sharded save"
            )
        return cls(rank=0, world_size=1)

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank decides, writes the manifest and commits."""
        return self.rank == 0

    def gather(self, value: _T) -> list[_T]:
        """Every rank's value, in rank order, on the coordinator."""
        return [value]

    def broadcast(self, value: _T) -> _T:
        """The coordinator's value, on every rank."""
        return value


def _initialized_world_size() -> int | None:
    # A process that never imported torch.distributed cannot be part of a group.
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return int(distributed.get_world_size())
