"""What a checkpoint of a Trainer's run holds.

::

    {"model": the model, "optimizer": torch's own, "scheduler": its state, "scaler": its state or None,
     "trainer": as `strongroom_transformers.progress` has it, "sampler_seed": a rank's own,
     "position", "rng", "modes", "job": as `strongroom.frontend.Place` has them}

Model and optimizer are handed to the core as themselves, sharded where they are; what of the model is stored,
`Weights` says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from torch import nn

from strongroom import PerRank
from strongroom.errors import StateMismatchError
from strongroom.frontend import Encoding, Place
from strongroom.resume import JobShape, rebuild
from strongroom.resume.dividing import Confer, mark_differing
from strongroom_transformers import seam

__all__ = ["OWN_PART", "Weights", "WholeModel", "gathered", "job_shape", "put_back", "template"]

OWN_PART: Final = "trainer"
"""The key that every checkpoint of this front end has, and no other's."""


class Weights(Protocol):
    """Which of a model's weights a checkpoint holds, under keys of its own; all else stays as it is built."""

    def parts(self, model: nn.Module) -> dict[str, Any]:
        """What is stored, and what a restore fills in place."""

    def restored(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Look at what came back of `parts`, and at the model that was filled.

        Raises:
            StateMismatchError: they do not fit together.
        """


class WholeModel:
    """All of it, under its bare names, whatever wraps it."""

    def parts(self, model: nn.Module) -> dict[str, Any]:
        return {"model": model}

    def restored(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """It was filled in place."""


def template(trainer: Any, weights: Weights) -> dict[str, Any]:
    """What a restore fills: model and optimizer as themselves, the rest by its name."""
    return {
        **weights.parts(trainer.model),
        "optimizer": seam.bare_optimizer(trainer),
        **dict.fromkeys(("scheduler", "scaler", OWN_PART, "sampler_seed", *Place.PARTS)),
    }


def gathered(
    trainer: Any,
    weights: Weights,
    place: Place,
    sampler_seed: int | None,
    encoding: Encoding,
    own: Callable[[], dict[str, Any]],
    confer: Confer,
) -> dict[str, Any]:
    """What is saved; for all ranks.

    Args:
        own: the Trainer's own part, as `strongroom_transformers.progress.gathered` gives it.
        confer: how the ranks talk.
    """
    scaler = trainer.accelerator.scaler
    alone = trainer.args.world_size == 1
    return {
        **weights.parts(trainer.model),
        "optimizer": seam.bare_optimizer(trainer),
        "scheduler": encoding.of(trainer.lr_scheduler.state_dict(), ("scheduler",)),
        "scaler": None if scaler is None else scaler.state_dict(),
        OWN_PART: own() if alone else mark_differing(OWN_PART, own, confer),
        "sampler_seed": PerRank(sampler_seed),
        **place.to_state(),
    }


def put_back(trainer: Any, weights: Weights, state: Mapping[str, Any]) -> None:
    """What a restore cannot fill in place, of what belongs to model and optimizer.

    Raises:
        StateMismatchError: the run had a gradient scaler, and this one has none; or it is no such checkpoint.
    """
    weights.restored(trainer.model, state)
    own = trainer.lr_scheduler.state_dict()
    trainer.lr_scheduler.load_state_dict(rebuild(state["scheduler"], own, path=("scheduler",)))
    scaler = trainer.accelerator.scaler
    if (scaler is None) != (state["scaler"] is None):
        had, has = ("no", "one") if state["scaler"] is None else ("a", "none")
        raise StateMismatchError(
            f"the run had {had} gradient scaler, and this program has {has}: give it the precision that it "
            f"had (fp16=), or begin anew with resume_from_checkpoint=False"
        )
    if scaler is not None:
        scaler.load_state_dict(state["scaler"])


def job_shape(trainer: Any) -> JobShape:
    """How this job divides its data."""
    return JobShape(
        world_size=trainer.args.world_size,
        replicas=trainer.args.world_size,
        batch_size=trainer._train_batch_size,
    )
