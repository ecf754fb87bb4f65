"""Where a run stands, besides its weights: what a front end puts into a checkpoint to go on from there.

::

    {"position": where each loader's data stood, "rng": the random states,
     "modes": what of each model is frozen, "job": how many processes shared the data}

Each is a rank's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from strongroom.errors import StateMismatchError
from strongroom.resume.following import FollowedLoader
from strongroom.resume.jobs import JobShape
from strongroom.resume.modes import restore_modes, training_modes
from strongroom.resume.position import DataPosition
from strongroom.resume.rng import Generator, RngState
from strongroom.tree import PerRank

__all__ = ["Place", "loader_generators"]


@dataclass(frozen=True, kw_only=True)
class Place:
    """A point between two steps.

    Attributes:
        positions: of each loader, in the order in which the run has them.
        rng: all random states, the loaders' own among them, as ``loader0.sampler.generator``.
        modes: of each model, as `strongroom.resume.training_modes` gives it.
        job: how this job divides its data.
    """

    positions: tuple[DataPosition, ...]
    rng: RngState
    modes: tuple[Mapping[str, Any], ...]
    job: JobShape

    PARTS: ClassVar = ("position", "rng", "modes", "job")

    @classmethod
    def of(
        cls,
        loaders: Sequence[FollowedLoader],
        models: Sequence[nn.Module],
        job: JobShape,
        *,
        rng: RngState | None = None,
    ) -> Place:
        """Look; nothing moves.

        Args:
            loaders: the run's.
            models: the run's.
            job: the run's.
            rng: the random states, where looking at something else may have moved them since.
        """
        return cls(
            positions=tuple(one.position() for one in loaders),
            rng=RngState.capture(loader_generators(loaders)) if rng is None else rng,
            modes=tuple(map(training_modes, models)),
            job=job,
        )

    def to_state(self) -> dict[str, Any]:
        """The parts of a state that a checkpoint carries."""
        return {
            "position": PerRank([one.to_state() for one in self.positions]),
            "rng": PerRank(self.rng.to_state()),
            "modes": PerRank(list(self.modes)),
            "job": PerRank(self.job.to_state()),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Place:
        """Read what `to_state` gave, restored.

        Raises:
            StateMismatchError: a part is missing, or is something else.
        """
        missing = [part for part in cls.PARTS if state.get(part) is None]
        if missing:
            raise StateMismatchError(
                f"the checkpoint lacks {', '.join(missing)}, without which nobody knows where its run stood",
                missing=missing,
            )
        return cls(
            positions=tuple(map(DataPosition.from_state, state["position"])),
            rng=RngState.from_state(state["rng"]),
            modes=tuple(state["modes"]),
            job=JobShape.from_state(state["job"]),
        )

    def restore(
        self,
        loaders: Sequence[FollowedLoader],
        models: Sequence[nn.Module],
        job: JobShape,
        *,
        is_new_rank: bool = False,
        multiple_of: int = 1,
        reads: bool = True,
    ) -> tuple[str, ...]:
        """Let a run go on from here; its models and optimizers are filled already.

        Args:
            loaders: the run's, in the order in which it had them.
            models: the run's, likewise.
            job: this one.
            is_new_rank: there was no such rank: what is here is another one's, whose noise it must not draw.
            multiple_of: batches that make up a step.
            reads: as `strongroom.resume.following.FollowedLoader.resume_from` has it.

        Returns:
            what could not be put back, one sentence each.

        Raises:
            StateMismatchError: there are not as many loaders as there were.
        """
        if len(loaders) != len(self.positions):
            raise StateMismatchError(
                f"the run had {len(self.positions)} data loaders, and this program has {len(loaders)}; "
                f"prepare the same ones, in the same order, or begin anew with resume='never'"
            )
        for model, modes in zip(models, self.modes, strict=False):
            restore_modes(model, modes)
        rng = RngState.capture() if is_new_rank else self.rng
        notes: tuple[str, ...] = ()
        for number, (loader, position) in enumerate(zip(loaders, self.positions, strict=True)):
            own = rng.of_part(_prefix(number))
            moved = loader.in_this_job(position, self.job, job, multiple_of=multiple_of)
            loader.resume_from(moved, own, reads=reads)
            # Also where it begins inside an epoch: it may be saved again before anybody asks for an iterator.
            notes += own.restore(loader.generators())
        return (*notes, *rng.of_part("/").restore())


def loader_generators(loaders: Sequence[FollowedLoader]) -> dict[str, Generator]:
    """The generators of all loaders, by number and name."""
    return {
        f"{_prefix(number)}{name}": one
        for number, loader in enumerate(loaders)
        for name, one in loader.generators().items()
    }


def _prefix(number: int) -> str:
    return f"loader{number}."
