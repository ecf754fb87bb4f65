"""All that this front end knows of the Trainer's insides: which names it needs, and how it hooks into them.

A callback of the Trainer's is told where training stands, and cannot resume it, nor take the place of its
save. So methods are replaced on the instance, for as long as the Trainer lives, and the class is as it was.
`check_supported` proves when a Trainer is attached that every name exists; nothing is looked up for the first
time while a checkpoint is being saved.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import transformers
from transformers import Trainer, TrainerState, trainer
from transformers.trainer_callback import CallbackHandler, ExportableState, TrainerControl

from strongroom.errors import ConfigError
from strongroom.resume import Generator, generators_of

__all__ = [
    "RESUMED",
    "bare_optimizer",
    "bind",
    "call",
    "check_supported",
    "exportable_callbacks",
    "found_trainer",
    "loader_generators",
    "passing_over_is_ours",
    "sampler_seed",
    "set_sampler_seed",
    "stock_loader",
]

RESUMED: Final = "strongroom://"
"""What the Trainer is told that it resumes from, where it is we who have resumed it."""

_REPLACED: Final = (
    "train",
    "set_initial_training_values",
    "save_model",
    "_inner_training_loop",
    "_init_training_state",
    "_prepare_for_training",
    "_evaluate",
    "_run_epoch",
    "_maybe_log_save_evaluate",
    "_finalize_training",
    "_save_checkpoint",
    "_load_rng_state",
    "_load_best_model",
)
"""Methods of a Trainer that are replaced, or called from those."""

_NEEDED: Final = (
    "_load_callback_state",
    "store_flos",
    "is_world_process_zero",
    "push_to_hub",
    "_finish_current_push",
    "create_model_card",
    "init_hf_repo",
)

_ATTRIBUTES: Final = (
    "hub_model_id",
    "_train_batch_size",
    "callback_handler",
    "model_wrapped",
    "accelerator",
    "hp_search_backend",
)
"""Of a Trainer that was just made."""

_READ: Final = {
    "_init_training_state": (
        "max_steps",
        "num_update_steps_per_epoch",
        "num_train_epochs",
        "resume_from_checkpoint",
        "trial",
    ),
    "_prepare_for_training": ("max_steps", "train_dataloader", "resume_from_checkpoint"),
    "_evaluate": ("skip_scheduler",),
    "_run_epoch": ("epoch", "resume_from_checkpoint", "epochs_trained", "steps_trained_in_current_epoch"),
    "_finalize_training": ("start_time",),
    "train": ("resume_from_checkpoint", "trial"),
}
"""Parameters that are looked at."""

_LOSS: Final = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step")
"""Where a training loop counts its losses between two logs; made when it begins."""

_STATE: Final = ("global_step", "best_global_step", "best_metric", "best_model_checkpoint", "compute_steps")
"""Of a TrainerState."""


def check_supported(one: Any) -> None:
    """Prove that a Trainer has every name that is needed.

    Raises:
        ConfigError: names what is missing.
    """
    missing = [f"Trainer.{name}" for name in (*_REPLACED, *_NEEDED) if not callable(getattr(one, name, None))]
    missing += [f"Trainer().{name}" for name in _ATTRIBUTES if not hasattr(one, name)]
    for method, parameters in _READ.items():
        found = inspect.signature(getattr(Trainer, method)).parameters if hasattr(Trainer, method) else {}
        missing += [f"Trainer.{method}({name}=)" for name in parameters if name not in found]
    missing += [
        f"CallbackHandler.{name}"
        for name in ("on_epoch_begin", "on_save")
        if name not in vars(CallbackHandler)  # its base class has them all, and they call nobody
    ]
    missing += [f"TrainerState.{name}" for name in _STATE if not hasattr(TrainerState, name)]
    if not callable(getattr(trainer, "skip_first_batches", None)):
        missing.append("trainer.skip_first_batches")
    loop = getattr(Trainer, "_inner_training_loop", None)
    written = () if loop is None else loop.__code__.co_names
    missing += [f"Trainer()._inner_training_loop's {name}" for name in _LOSS if name not in written]
    if missing:
        raise ConfigError(
            f"transformers {transformers.__version__} is not supported by this release of Strongroom: it has "
            f"no {', '.join(missing)}; use an older transformers (5.24) or a newer Strongroom"
        )


def found_trainer() -> Any:
    """The Trainer that is being made right now, a few frames above the caller.

    Raises:
        ConfigError: there is none.
    """
    frame = sys._getframe(1)
    while frame is not None:
        one = frame.f_locals.get("self")
        if isinstance(one, Trainer):
            return one
        frame = frame.f_back  # type: ignore[assignment]  # the outermost has none
    raise ConfigError("no Trainer is being made here; call StrongroomCallback(root).attach(trainer)")


def bind(method: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The arguments of a call by the Trainer's names, also where a subclass's own method hands on
    ``*args, **kwargs``; to be made by `call`."""
    own = inspect.signature(method)
    found: dict[str, Any] = {}
    for name, value in own.bind(*args, **kwargs).arguments.items():
        kind = own.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            found |= value
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            found |= zip(_order(method)[len(found) :], value, strict=False)
        else:
            found[name] = value
    return found


def call(method: Any, given: Mapping[str, Any]) -> Any:
    """Make a call whose arguments `bind` has named."""
    kinds = {one.kind for one in inspect.signature(method).parameters.values()}
    if inspect.Parameter.VAR_POSITIONAL not in kinds or inspect.Parameter.VAR_KEYWORD in kinds:
        return method(**given)
    first = list(itertools.takewhile(lambda name: name in given, _order(method)))
    return method(
        *(given[name] for name in first),
        **{name: value for name, value in given.items() if name not in first},
    )


def _order(method: Any) -> list[str]:
    """The Trainer's own parameters, where a subclass may have others."""
    return list(inspect.signature(getattr(Trainer, method.__name__)).parameters)[1:]


@contextmanager
def passing_over_is_ours(loader: Any) -> Iterator[None]:
    """For a time this loader stays as it is where the Trainer would make one that leaves batches out.

    The Trainer reads ahead in the epoch from which it resumes, and draws differently while it does.
    """
    theirs = trainer.skip_first_batches

    def skip_first_batches(dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        return dataloader if dataloader is loader else theirs(dataloader, *args, **kwargs)

    trainer.skip_first_batches = skip_first_batches
    try:
        yield
    finally:
        trainer.skip_first_batches = theirs


def bare_optimizer(one: Any) -> Any:
    """torch's own, without what Accelerate puts around it."""
    return getattr(one.optimizer, "optimizer", one.optimizer)


def exportable_callbacks(one: Any, *, control: bool) -> list[Any]:
    """The callbacks that say what their state is, in the order in which they are called."""
    known = [*one.callback_handler.callbacks, *([one.control] if control else [])]
    return [
        callback
        for callback in known
        if isinstance(callback, ExportableState) and (control or not isinstance(callback, TrainerControl))
    ]


# --------------------------------------------------------------------------------------- Accelerate's loaders


def stock_loader(loader: Any) -> Any:
    """The torch loader inside of Accelerate's."""
    return getattr(loader, "base_dataloader", loader)


def loader_generators(loader: Any) -> dict[str, Generator]:
    """What a loader draws from, but for the generator that is seeded anew in each epoch."""
    found = {**generators_of(loader), **generators_of(stock_loader(loader))}
    seeded = getattr(_seeded_sampler(loader), "generator", None)
    distinct: dict[str, Generator] = {}
    for name, one in found.items():
        if one is not seeded and not any(one is known for known in distinct.values()):
            distinct[name] = one
    return distinct


def sampler_seed(loader: Any) -> int | None:
    """What Accelerate's sampler adds the epoch to: a loader of another process may have another one."""
    seed = getattr(_seeded_sampler(loader), "initial_seed", None)
    return seed if isinstance(seed, int) else None


def set_sampler_seed(loader: Any, seed: int | None) -> None:
    sampler = _seeded_sampler(loader)
    if seed is not None and sampler is not None:
        sampler.initial_seed = seed


def _seeded_sampler(loader: Any) -> Any:
    for way in ("batch_sampler.batch_sampler.sampler", "batch_sampler.sampler", "sampler"):
        found = stock_loader(loader)
        for name in way.split("."):
            found = getattr(found, name, None)
        if hasattr(found, "initial_seed"):
            return found
    return None
