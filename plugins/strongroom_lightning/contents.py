"""What a checkpoint of a Lightning run holds, and Lightning's own form of it.

::

    {"model": the LightningModule, "optimizers": [its optimizers], "lightning": all else that Lightning
     puts into a checkpoint, "position": where the data stood, "rng": the random states,
     "metrics": what was measured so far, unless it is left out, "modes": what is frozen,
     "job": how many processes shared the data}

Model and optimizers are handed to the core as themselves. The rest is what `dump_checkpoint` gives, so that
``on_save_checkpoint`` hooks run in Lightning's order, see the whole dictionary and may change it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from strongroom import Checkpointer, PerRank
from strongroom.errors import StateEncodingError, StateMismatchError
from strongroom.restore import Restored
from strongroom.resume import DataPosition, JobShape, RngState, described
from strongroom.resume.dividing import Confer, mark_differing
from strongroom.tree import capture
from strongroom_lightning import seam
from strongroom_lightning.namespace import Namespace
from strongroom_lightning.strategies import as_they_are, data_replicas, restores_in_place

__all__ = [
    "check_fits",
    "check_storable",
    "gather",
    "hyper_parameters",
    "in_lightnings_form",
    "job_shape",
    "not_ours",
    "parts",
    "restore",
    "restored_parts",
    "scalars",
    "template",
]

_PARTS: Final = ("model", "lightning")
"""What every checkpoint of this front end holds. One of the model alone holds nothing else."""

_OF_A_RESUME: Final = ("optimizers", "position", "rng", "metrics", "modes", "job")
"""What a checkpoint that can be resumed from holds besides; all of it, so that a template can ask for it."""

_NEEDED_TO_RESUME: Final = ("optimizers", "position", "rng")


def gather(
    trainer: Any,
    encoded: Callable[[Mapping[str, Any]], dict[str, Any]],
    confer: Confer,
    *,
    weights_only: bool = False,
    loops: Mapping[str, Any] | None = None,
    more: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """The state to save, and the states of loaders that keep their own; for all ranks.

    What a resume needs besides stands at None, for whoever knows it. What of Lightning's own part differs
    between ranks is marked, and each gets its own back.

    Args:
        trainer: Lightning's.
        encoded: replaces what cannot be stored of Lightning's own part and the users' values in it.
        confer: how the ranks talk.
        weights_only: leave out what training would go on with; of callbacks, no hook is called then.
        loops: what Lightning's loops are to be found at; None: where they are.
        more: what else belongs to "lightning".
    """
    model_state: Mapping[str, Any] = {}
    loader_states: tuple[Any, ...] = ()

    def rest() -> dict[str, Any]:
        nonlocal model_state, loader_states
        with as_they_are(trainer):
            dumped = trainer._checkpoint_connector.dump_checkpoint(weights_only)
        checkpoint = {**dumped, **(more or {})}
        checkpoint["loops"] = {**checkpoint["loops"], **(loops or {})}
        model_state = checkpoint.pop("state_dict")
        # References; the core names and copies the optimizers' state itself.
        checkpoint.pop("optimizer_states", None)
        loader_states = tuple(checkpoint["loops"]["fit_loop"]["state_dict"].pop("combined_loader", ()))
        return encoded(checkpoint)

    lightning = rest() if trainer.world_size == 1 else mark_differing("lightning", rest, confer)
    return parts(trainer, model_state, lightning, weights_only=weights_only), loader_states


def parts(
    trainer: Any, model_state: Mapping[str, Any], lightning: Any, *, weights_only: bool
) -> dict[str, Any]:
    """The state to save of what Lightning has put together; what else a resume needs stands at None.

    Args:
        model_state: what it holds of the model, after all hooks.
        lightning: the rest, without the optimizers, as it is to be stored.
        weights_only: leave out what training would go on with.
    """
    module = trainer.lightning_module
    # A hook that put other weights there (averaged ones, fewer of them) meant these to be saved.
    model = module if _is_same(model_state, module.state_dict()) else model_state
    state = {"model": model, "lightning": lightning}
    if not weights_only:
        state |= dict.fromkeys(_OF_A_RESUME)
        state["optimizers"] = list(trainer.optimizers)
        state["job"] = PerRank(job_shape(trainer).to_state())
    return state


def check_storable(trainer: Any, namespace: Namespace, *, weights_only: bool) -> None:
    """Look at the model and the optimizers before the first step: nothing of them can be left out of a save.

    Where a hook may still take out of the state what cannot be stored, that is a warning.

    Raises:
        StateEncodingError: something of them has no safe encoding.
    """
    module = trainer.lightning_module
    if any(map(is_lazy, (*module.parameters(), *module.buffers()))):
        return  # the first step gives them their shapes
    state: dict[str, Any] = {"model": module}
    if not weights_only:
        state["optimizers"] = list(trainer.optimizers)
    try:
        capture(state, rank=trainer.global_rank)
    except StateEncodingError as error:
        if not seam.has_save_hooks(trainer, namespace):
            raise
        rank_zero_warn(
            f"Strongroom: {error}. Unless an on_save_checkpoint hook takes it out of the checkpoint, the "
            f"first save will fail"
        )


def template(trainer: Any, *, resumes: bool) -> dict[str, Any]:
    """What a restore in place fills: the module and the optimizers as themselves, the rest by its name."""
    state: dict[str, Any] = {"model": trainer.lightning_module, "lightning": None}
    if resumes:
        state |= dict.fromkeys(_OF_A_RESUME)
        state["optimizers"] = list(trainer.optimizers)
    return state


def restore(
    trainer: Any, checkpointer: Checkpointer, step: int | None = None, *, resumes: bool, accept_older: bool
) -> Restored | None:
    """Restore on every rank: into model and optimizers where they are sharded already, else whole.

    A rank that there was not when it was saved is given what rank 0 had.
    """
    if not restores_in_place(trainer.strategy):
        return checkpointer.restore(step=step, accept_older=accept_older, stand_in=0)
    return checkpointer.restore(
        template(trainer, resumes=resumes),
        step=step,
        strict=trainer.lightning_module.strict_loading,
        only=None if resumes else _PARTS,
        accept_older=accept_older,
        stand_in=0,
    )


def job_shape(trainer: Any) -> JobShape:
    """How this job divides its data, as far as its loaders say."""
    combined = trainer.fit_loop._combined_loader
    loaders = combined.flattened if combined is not None else ()
    sizes = {getattr(loader, "batch_size", None) for loader in loaders}
    return JobShape(
        world_size=trainer.world_size,
        replicas=data_replicas(trainer.strategy),
        batch_size=sizes.pop() if len(sizes) == 1 else None,
    )


def scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Those of the logged figures that are one number."""
    found = {}
    for name, value in metrics.items():
        if not isinstance(value, torch.Tensor) or value.numel() == 1:
            # Hooks may write into the Trainer's dictionary what `self.log` would refuse, such as a text.
            with contextlib.suppress(TypeError, ValueError):
                found[name] = float(value)
    return found


def hyper_parameters(trainer: Any) -> dict[str, Any]:
    """For records: what the module and the datamodule have saved (``save_hyperparameters()``), together."""
    found: dict[str, Any] = {}
    for owner in (trainer.datamodule, trainer.lightning_module):
        if owner is not None:
            found.update(described(owner.hparams))
    return found


def restored_parts(
    state: Mapping[str, Any], step: int, root: str, *, resumes: bool
) -> tuple[dict[str, Any], DataPosition | None, RngState | None, Mapping[str, Any] | None]:
    """Take a restored state apart: the checkpoint in Lightning's form, the position, the random states, and
    what was measured so far, where it is there.

    Position and random states are None where the checkpoint holds the model alone, the position also where it
    was saved by hand while a step was under way.

    Args:
        resumes: whether training is to go on from it.

    Raises:
        StateMismatchError: another front end or a program of its own wrote it; or training would go on from
            the model alone.
    """
    if any(part not in state for part in _PARTS):
        raise not_ours(root, step, state)
    missing = [part for part in _NEEDED_TO_RESUME if part not in state]
    if missing and resumes:
        raise StateMismatchError(
            f"step {step} of {root} holds the model alone, as save_weights_only=True leaves it: there is "
            f"no state of the optimizers to train on with. Load its weights (load_from_checkpoint, or "
            f"ckpt_path= in validate, test and predict), or begin anew by another dirpath or resume='never'",
            missing=missing,
        )
    position = state.get("position")
    rng = state.get("rng")
    return (
        in_lightnings_form(state),
        None if position is None else DataPosition.from_state(position),
        None if rng is None else RngState.from_state(rng),
        state.get("metrics"),
    )


def not_ours(
    root: str, step: int | None = None, state: Mapping[str, Any] | None = None
) -> StateMismatchError:
    """The error for a checkpoint that another front end or a program of its own wrote."""
    what = f"what {root} holds" if step is None else f"step {step} of {root}"
    holds = "" if state is None else f" (it holds {', '.join(map(repr, state))})"
    return StateMismatchError(
        f"{what} was not written by StrongroomCheckpoint{holds}; name one that was, or, for a run of its "
        f"own, use another dirpath, or resume='never' to begin anew here",
        missing=[part for part in _PARTS if part not in (state or ())],
    )


def in_lightnings_form(state: Mapping[str, Any]) -> dict[str, Any]:
    """The dictionary that Lightning's ``load_checkpoint`` returns."""
    checkpoint = {**state["lightning"], "state_dict": _as_state(state["model"])}
    if "optimizers" in state:
        checkpoint["optimizer_states"] = list(map(_as_state, state["optimizers"]))
    return checkpoint


def _as_state(value: Any) -> Any:
    """What was filled in place, as hooks look at it."""
    return value.state_dict() if isinstance(value, torch.nn.Module | torch.optim.Optimizer) else value


def check_fits(
    saved: Mapping[str, Any], own: Mapping[str, Any], problem: str, cause: Exception
) -> StateMismatchError:
    """The error for weights that could not be loaded, with every name and shape that differs."""
    different = [
        f"{name}: {_shape(value)} in the checkpoint, {_shape(own[name])} in the model"
        for name, value in saved.items()
        if name in own and _shape(value) != _shape(own[name])
    ]
    missing = [name for name in own if name not in saved]
    unexpected = [name for name in saved if name not in own]
    listed = [
        *(f"not in the checkpoint: {name}" for name in missing),
        *(f"not in the model: {name}" for name in unexpected),
        *different,
    ]
    details = "; ".join(listed) or str(cause)
    return StateMismatchError(
        f"{problem} ({details}); restore that run's code and settings, or begin anew with resume='never'",
        missing=missing,
        unexpected=unexpected,
        different=different,
    )


def _is_same(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    return left.keys() == right.keys() and all(_is_same_memory(left[name], right[name]) for name in right)


def _is_same_memory(left: object, right: object) -> bool:
    if not isinstance(left, torch.Tensor) or not isinstance(right, torch.Tensor):
        return type(left) is type(right)
    if isinstance(left, DTensor) and isinstance(right, DTensor):
        left, right = left.to_local(), right.to_local()
    if left.layout is not torch.strided or is_lazy(left) or is_lazy(right):
        return type(left) is type(right)  # no memory to compare: the core says what it thinks of such a one
    return (
        left.data_ptr() == right.data_ptr()
        and left.shape == right.shape
        and left.stride() == right.stride()
        and left.dtype == right.dtype
    )


def _shape(value: object) -> str:
    return f"{list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
