"""Where in its data a run stands that goes on with another number of processes. Pure.

Samplers that divide an epoch among processes deal its order out: one sample to each in turn. So what all of
them have taken together after some batches is the order's beginning, and another number of processes goes on
right behind it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from strongroom.errors import ConfigError, StateMismatchError

__all__ = ["JobShape", "batches_behind"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobShape:
    """How a job divides its data.

    Attributes:
        world_size: its processes.
        replicas: among how many of them an epoch is divided: fewer where some share a model.
        batch_size: samples that each takes at once; None where nobody knows.
    """

    world_size: int
    replicas: int
    batch_size: int | None

    def __post_init__(self) -> None:
        if self.world_size < 1 or self.replicas < 1 or (self.batch_size or 1) < 1:
            raise ConfigError(f"a job has processes, and batches have samples; got {self}")

    def to_state(self) -> dict[str, Any]:
        """A value of plain numbers, as a checkpoint carries it."""
        return {"world_size": self.world_size, "replicas": self.replicas, "batch_size": self.batch_size}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> JobShape:
        """Read what `to_state` gave.

        Raises:
            StateMismatchError: the value is something else.
        """
        try:
            return cls(
                world_size=state["world_size"], replicas=state["replicas"], batch_size=state["batch_size"]
            )
        except (KeyError, TypeError, ConfigError) as error:
            raise StateMismatchError(
                f"the job in the checkpoint is not one that this release writes ({error!r}); read it with "
                f"the release that wrote it"
            ) from error


def batches_behind(batches: int, before: JobShape, now: JobShape, *, multiple_of: int = 1) -> tuple[int, int]:
    """How many batches each process of this job is to leave out, since the one before has trained on them.

    Where it does not come out even, fewer are left out, so that no sample is missed; but one multiple at
    least, so that the epoch stays one that has begun.

    Args:
        batches: taken by each process of the job before.
        multiple_of: batches that make up a step, where gradients are accumulated.

    Returns:
        the batches, and how many samples are trained on a second time; less than 0: how many are missed.
    """
    if before.batch_size is None or now.batch_size is None:
        taken, at_once = batches * before.replicas, now.replicas
    else:
        taken, at_once = batches * before.replicas * before.batch_size, now.replicas * now.batch_size
    left_out = max(taken // at_once // multiple_of, 1) * multiple_of
    return left_out, taken - left_out * at_once
