"""What a checkpoint of a Lightning run holds, and Lightning's own form of it.

::

    {"model": the LightningModule, "optimizers": [its optimizers], "lightning": all else that Lightning
     puts into a checkpoint, "position": where the data stood, "rng": the random states,
     "metrics": what was measured so far, unless it is left out}

Model and optimizers are handed to the core as themselves. The rest is what `dump_checkpoint` gives, so that
``on_save_checkpoint`` hooks run in Lightning's order, see the whole dictionary and may change it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from strongroom import PerRank
from strongroom.errors import StateMismatchError
from strongroom.resume import DataPosition, RngState, described

__all__ = [
    "check_fits",
    "gather",
    "hyper_parameters",
    "in_lightnings_form",
    "not_ours",
    "restored_parts",
    "scalars",
]

_PARTS: Final = ("model", "lightning")
"""What every checkpoint of this front end holds. One of the model alone holds nothing else."""

_NEEDED_TO_RESUME: Final = ("optimizers", "position", "rng")


def gather(
    trainer: Any,
    encoded: Callable[[Mapping[str, Any]], dict[str, Any]],
    *,
    weights_only: bool = False,
    loops: Mapping[str, Any] | None = None,
    more: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """The state to save, position and random states aside, and the states of loaders that keep their own.

    Args:
        trainer: Lightning's.
        encoded: replaces what cannot be stored of Lightning's own part and the users' values in it.
        weights_only: leave out what training would go on with; of callbacks, no hook is called then.
        loops: what Lightning's loops are to be found at; None: where they are.
        more: what else belongs to "lightning".
    """
    checkpoint = {**trainer._checkpoint_connector.dump_checkpoint(weights_only), **(more or {})}
    checkpoint["loops"] = {**checkpoint["loops"], **(loops or {})}
    model_state = checkpoint.pop("state_dict")
    # References; the core names and copies the optimizers' state itself.
    checkpoint.pop("optimizer_states", None)
    loader_states = checkpoint["loops"]["fit_loop"]["state_dict"].pop("combined_loader", ())
    module = trainer.lightning_module
    # A hook that put other weights there (averaged ones, fewer of them) meant these to be saved.
    model = module if _is_same(model_state, module.state_dict()) else model_state
    checkpoint = encoded(checkpoint)
    rest = checkpoint if trainer.world_size == 1 else PerRank(checkpoint)
    state = {"model": model, "lightning": rest}
    if not weights_only:
        state["optimizers"] = list(trainer.optimizers)
    return state, tuple(loader_states)


def scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Those of the logged figures that are one number."""
    return {
        name: float(value)
        for name, value in metrics.items()
        if not isinstance(value, torch.Tensor) or value.numel() == 1
    }


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
    checkpoint = {**state["lightning"], "state_dict": state["model"]}
    if "optimizers" in state:
        checkpoint["optimizer_states"] = list(state["optimizers"])
    return checkpoint


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
    return (
        left.data_ptr() == right.data_ptr()
        and left.shape == right.shape
        and left.stride() == right.stride()
        and left.dtype == right.dtype
    )


def _shape(value: object) -> str:
    return f"{list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
