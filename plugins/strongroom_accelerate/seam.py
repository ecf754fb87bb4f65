"""All that this front end knows of Accelerate's insides: which names it needs, and what it makes of them.

Accelerate keeps what it has prepared in lists without a public name, and its loaders read one batch ahead.
`check_supported` proves at the start that every name exists; nothing is looked up for the first time while a
checkpoint is being saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

import accelerate
import torch
from accelerate import data_loader
from accelerate.utils import DistributedType

from strongroom.errors import ConfigError
from strongroom.resume import Generator, JobShape, RngState, generators_of

__all__ = [
    "active_loader",
    "bare_optimizers",
    "bare_schedulers",
    "begin_when_asked",
    "check_supported",
    "has_engine",
    "is_at_end",
    "job_shape",
    "known_of_run",
    "loader_generators",
    "names_by_itself",
    "seed_of",
    "set_seed",
    "stock_loader",
]

_OLDEST: Final = (1, 15)
"""The oldest Accelerate against which the tests of this front end pass."""

_NEEDED: Final = {
    "": (
        "_custom_objects",
        "_dataloaders",
        "_load_model_state_pre_hook",
        "_models",
        "_optimizers",
        "_save_model_state_pre_hook",
        "_schedulers",
        "distributed_type",
        "end_training",
        "free_memory",
        "gradient_accumulation_steps",
        "is_fsdp2",
        "join_uneven_inputs",
        "load_state",
        "log",
        "multi_device",
        "prepare_data_loader",
        "optimizer_step_was_skipped",
        "prepare_optimizer",
        "project_configuration",
        "save",
        "save_model",
        "save_state",
        "scaler",
        "skip_first_batches",
        "step",
        "sync_gradients",
        "trackers",
    ),
    "gradient_state": ("active_dataloader",),
    "project_configuration": ("automatic_checkpoint_naming", "iteration", "project_dir", "total_limit"),
}

_OF_LOADERS: Final = {
    "DataLoaderShard": ("end_of_dataloader", "set_epoch"),
    "DataLoaderDispatcher": ("end_of_dataloader", "set_epoch"),
    "SeedableRandomSampler": ("set_epoch",),
    "BatchSamplerShard": (),
    "IterableDatasetShard": (),
}
"""Of `accelerate.data_loader`: classes, and what each must have."""

_ENGINES: Final = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


def check_supported(accelerator: Any) -> None:
    """Refuse, at the start, an Accelerator with which saving or resuming could not work.

    Raises:
        ConfigError: no Accelerator, an unsupported version, or a way of training that is not supported.
    """
    if not isinstance(accelerator, accelerate.Accelerator):
        raise ConfigError(
            f"Strongroom takes the run's accelerate.Accelerator first, and then its root; got "
            f"{type(accelerator).__name__}"
        )
    version = accelerate.__version__
    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST:
        raise ConfigError(
            f"Accelerate {version} is too old for Strongroom; use {'.'.join(map(str, _OLDEST))} or newer"
        )
    missing = [
        f"{path}.{name}".lstrip(".")
        for path, names in _NEEDED.items()
        for name in names
        if not _has(getattr(accelerator, path, None) if path else accelerator, name)
    ]
    for kind, names in _OF_LOADERS.items():
        owner = getattr(data_loader, kind, None)
        missing += [kind] if owner is None else [f"{kind}.{name}" for name in names if not _has(owner, name)]
    if missing:
        raise ConfigError(
            f"Accelerate {version} is not supported by this release of Strongroom: expected "
            f"{', '.join(missing)} of it, and found no such name; use an older Accelerate or a "
            f"newer Strongroom"
        )
    if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise ConfigError(
            "this Accelerator shards by FSDP1, which Strongroom does not support: its shards have no names "
            "that another job could read. Use FullyShardedDataParallelPlugin(fsdp_version=2), or "
            "`fsdp_version: 2` in the file that `accelerate config` writes"
        )
    if accelerator.distributed_type == DistributedType.XLA:
        raise ConfigError(
            "this Accelerator trains through XLA, whose loaders and devices Strongroom does not support; "
            "train on CPUs or GPUs, or save with Accelerate's own save_state, without Strongroom"
        )


def _has(owner: object, name: str) -> bool:
    # A property may be on the class and refuse to be read: it exists all the same.
    return name in getattr(owner, "__dict__", {}) or hasattr(type(owner), name) or hasattr(owner, name)


def has_engine(accelerator: Any) -> bool:
    """Whether an engine (DeepSpeed, Megatron-LM) has model and optimizer, and saves them in its own way."""
    return accelerator.distributed_type in _ENGINES


def bare_optimizers(accelerator: Any) -> list[torch.optim.Optimizer]:
    """torch's own, whatever Accelerate has put around each."""
    return [getattr(one, "optimizer", one) for one in accelerator._optimizers]


def bare_schedulers(accelerator: Any) -> list[Any]:
    """The schedulers that no engine has, without what Accelerate has put around each."""
    if accelerator.distributed_type == DistributedType.MEGATRON_LM:
        return []
    found = accelerator._schedulers
    if has_engine(accelerator):
        # DeepSpeed's own are part of what its engine saves.
        found = [one for one in found if type(one).__name__ != "DeepSpeedSchedulerWrapper"]
    return [getattr(one, "scheduler", one) for one in found]


def active_loader(accelerator: Any) -> Any:
    """The prepared loader that is being iterated; None: none is, or a loader that was not prepared."""
    return accelerator.gradient_state.active_dataloader


def is_at_end(loader: Any) -> bool:
    """Whether the batch that a prepared loader gave last is its epoch's last one."""
    return bool(loader.end_of_dataloader)


def names_by_itself(accelerator: Any) -> bool:
    """Whether `save_state` finds its folders' names, as ``ProjectConfiguration`` says."""
    return bool(accelerator.project_configuration.automatic_checkpoint_naming)


# ----------------------------------------------------------------------------------------------- its loaders


def stock_loader(loader: Any) -> Any:
    """torch's loader inside of a prepared one."""
    return getattr(loader, "base_dataloader", loader)


def loader_generators(loader: Any) -> Mapping[str, Generator]:
    """What a prepared loader draws from, but for what seeds itself anew each epoch."""
    found = generators_of(stock_loader(loader))
    seeded = getattr(_seeded(loader), "generator", None)
    return {name: one for name, one in found.items() if one is not seeded}


def seed_of(loader: Any) -> int | None:
    """From which an order is drawn that depends on this and the epoch's number alone; None: it does not."""
    sampler = _seeded(loader)
    return None if sampler is None else int(sampler.initial_seed)


def set_seed(loader: Any, seed: int | None) -> None:
    """Put back what `seed_of` gave."""
    sampler = _seeded(loader)
    if sampler is not None and seed is not None:
        sampler.initial_seed = seed


def _seeded(loader: Any) -> Any:
    sampler = None
    with suppress(AttributeError):
        sampler = data_loader.get_sampler(loader)
    return sampler if isinstance(sampler, data_loader.SeedableRandomSampler) else None


def begin_when_asked(loader: Any, *, is_first_epoch: bool) -> bool:
    """Let a loader that keeps its own place make its first iterator when it is asked for it, as others do.

    Accelerate asks such a loader for its place when it prepares it, which makes the iterator of the first
    epoch then and there, from a random state that nobody has noted. What is drawn for that iterator of the
    global streams is put back, as they are not drawn from then in a run that has made it ahead.

    Returns:
        whether an iterator was made ahead, and is let go of.
    """
    stock = stock_loader(loader)
    if not hasattr(stock, "_initial_iter_for_state_dict"):
        return False
    was_made = bool(stock._initial_iter_for_state_dict)
    if was_made:
        stock._iterator, stock._initial_iter_for_state_dict = None, False
    vars(stock).pop("__iter__", None)
    if is_first_epoch:

        def first() -> Any:
            del vars(stock)["__iter__"]
            before = RngState.capture()
            made = type(stock).__iter__(stock)
            before.restore()
            return made

        vars(stock)["__iter__"] = first  # a DataLoader refuses to be assigned some names
    return was_made


def job_shape(accelerator: Any) -> JobShape:
    """How this job divides its data, as far as its loaders say."""
    replicas = _replicas(accelerator)
    sizes = set()
    for loader in accelerator._dataloaders:
        size = None
        with suppress(AttributeError, TypeError, KeyError):
            size = int(loader.total_batch_size) // replicas or None
        sizes.add(size)
    return JobShape(
        world_size=accelerator.num_processes,
        replicas=replicas,
        batch_size=sizes.pop() if len(sizes) == 1 else None,
    )


def _replicas(accelerator: Any) -> int:
    """Among how many processes an epoch is divided: those that share a model's layers read the same."""
    mesh: Any = getattr(accelerator, "torch_device_mesh", None)
    names = (getattr(mesh, "mesh_dim_names", None) or ()) if mesh is not None else ()
    if not {"tp", "cp", "sp"} & set(names):
        return int(accelerator.num_processes)
    found = 1
    for name in ("dp_replicate", "dp_shard"):
        if name in names:
            found *= int(mesh[name].size())
    return found


def known_of_run(accelerator: Any) -> dict[str, Any]:
    """What Accelerate knows of where a run comes from, as provenance."""
    found: dict[str, Any] = {
        "accelerate": accelerate.__version__,
        "distributed_type": str(accelerator.distributed_type.value),
        "gradient_accumulation_steps": int(accelerator.gradient_accumulation_steps),
    }
    with suppress(AttributeError, KeyError):  # an engine's plugin is asked, and may know of none
        found["mixed_precision"] = str(accelerator.mixed_precision)
    return {"framework": found}
