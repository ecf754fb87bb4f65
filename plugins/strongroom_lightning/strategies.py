"""Which of Lightning's strategies a run may train with, and how its model and optimizers are taken.

A strategy is judged by what it does and not by its name: whether model and optimizers are still those that
the user made, in this process, whole or as distributed tensors. Then the core takes them as they are, and
nothing is gathered for a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.distributed.tensor import DTensor

from strongroom.errors import ConfigError
from strongroom.frontend.replacing import Replace, Replacements
from strongroom_lightning.namespace import Namespace

__all__ = [
    "as_they_are",
    "check_optimizers",
    "check_strategy",
    "data_replicas",
    "keep_as_they_are",
    "restores_in_place",
    "whole_weights",
]

_DEVICES: Final = frozenset({"cpu", "cuda", "mps"})
"""Kinds of devices whose tensors and random states are known to the core."""

_OWN_WAYS: Final = (
    "optimizer_state",
    "load_optimizer_state_dict",
    "lightning_restore_optimizer",
    "restore_checkpoint_after_setup",
)
"""What a strategy overrides that keeps optimizers, or the order of a restore, in a way of its own."""

_INSTEAD: Final = {
    "FSDPStrategy": (
        "the first version of FSDP keeps parameters in flat pieces, whose optimizers' state is of no "
        "parameter; shard by fully_shard in configure_model, under strategy=ModelParallelStrategy(...)"
    ),
    "DeepSpeedStrategy": (
        "DeepSpeed's engine owns the optimizers and writes files of its own; shard by fully_shard in "
        "configure_model, under strategy=ModelParallelStrategy(...), which is ZeRO stage 3"
    ),
}


def check_strategy(trainer: Any, namespace: Namespace) -> None:
    """Refuse, at the start, a strategy under which a checkpoint would not hold all of the run.

    Raises:
        ConfigError: says which strategies are supported, and what to do instead.
    """
    strategy, kinds = trainer.strategy, namespace.strategies
    name = type(strategy).__name__
    if not isinstance(strategy, kinds.SingleDeviceStrategy | kinds.DDPStrategy | kinds.ModelParallelStrategy):
        bases = [base.__name__ for base in type(strategy).__mro__]
        why = next((told for base, told in _INSTEAD.items() if base in bases), None)
        raise ConfigError(
            f"this release supports one device, DDP (strategy='ddp' and its kin) and "
            f"ModelParallelStrategy (FSDP2 and tensor parallelism), and the Trainer's strategy is {name}"
            + (f": {why}" if why is not None else "; use one of these")
        )
    device = strategy.root_device.type
    if device not in _DEVICES:
        raise ConfigError(
            f"this release supports the devices {', '.join(sorted(_DEVICES))}, and {name} trains on "
            f"{device!r}; use an accelerator of these"
        )
    own = [one for one in _OWN_WAYS if not namespace.made(type(strategy), one)]
    if own:
        raise ConfigError(
            f"{name} overrides {', '.join(own)}, so that its optimizers are kept in a way that is not known "
            f"here; use Lightning's own strategy, or one that leaves these alone"
        )
    if strategy.handles_gradient_accumulation:
        raise ConfigError(
            f"{name} accumulates gradients by itself, so that nobody knows when a step is over; use one that "
            f"leaves that to Lightning"
        )
    if getattr(strategy, "_model_averaging_period", None) is not None:
        raise ConfigError(
            f"{name}(model_averaging_period=...) lets the ranks' weights drift apart, and a checkpoint holds "
            f"one rank's; leave it out"
        )
    if getattr(strategy, "_ddp_comm_state", None) is not None:
        rank_zero_warn(
            f"Strongroom: {name} has a communication hook with a state of its own (ddp_comm_state), which is "
            f"in no checkpoint: a resumed run may differ from an uninterrupted one"
        )


def check_optimizers(trainer: Any) -> None:
    """Refuse optimizers of whose state each rank holds a part that is no distributed tensor.

    Raises:
        ConfigError: such as ``ZeroRedundancyOptimizer``.
    """
    for optimizer in trainer.optimizers:
        if hasattr(optimizer, "consolidate_state_dict"):
            raise ConfigError(
                f"{type(optimizer).__name__} divides its state among the ranks by parameters, and would have "
                f"to gather it for every checkpoint; use the optimizer itself, or to save its memory shard "
                f"the model by fully_shard under strategy=ModelParallelStrategy(...)"
            )


def restores_in_place(strategy: Any) -> bool:
    """Whether model and optimizers are there, and sharded, before Lightning restores anything."""
    return bool(strategy.restore_checkpoint_after_setup)


def data_replicas(strategy: Any) -> int:
    """Among how many processes the training data are divided."""
    kwargs = getattr(strategy, "distributed_sampler_kwargs", None)
    return 1 if kwargs is None else int(kwargs["num_replicas"])


@contextmanager
def as_they_are(trainer: Any) -> Iterator[None]:
    """While Lightning puts a checkpoint together, let it have a sharded model and its optimizers uncopied.

    Its own way is to copy every shard to the CPU, or to gather all of them on rank 0, and to step an
    optimizer that has no state yet. Hooks see the same keys, with the shards where they are.
    """
    replacements = Replacements()
    keep_as_they_are(trainer, replacements.replace)
    try:
        yield
    finally:
        replacements.undo()


def keep_as_they_are(trainer: Any, replace: Replace) -> None:
    """As `as_they_are`, as long as what is replaced stays so."""
    strategy = trainer.strategy
    if not restores_in_place(strategy):
        return

    # Looked up when asked: the next fit may have another module.
    def weights() -> Any:
        return trainer.lightning_module.state_dict()

    def optimizer_state(optimizer: Any) -> dict[str, Any]:
        return _by_name(optimizer, trainer.lightning_module)

    replace(strategy, "lightning_module_state_dict", lambda _: weights)
    replace(strategy, "optimizer_state", lambda _: optimizer_state)


def whole_weights(trainer: Any) -> dict[str, Any]:
    """The module's state, every distributed tensor put together on the CPU of every rank; for all ranks."""
    with as_they_are(trainer):
        weights = trainer.strategy.lightning_module_state_dict()
    return {
        name: value.full_tensor().cpu() if isinstance(value, DTensor) else value
        for name, value in weights.items()
    }


def _by_name(optimizer: Any, module: Any) -> dict[str, Any]:
    """An optimizer's state by its parameters' names, as Lightning gives it for a sharded model."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    listed = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    known = [names.get(id(parameter), str(number)) for number, parameter in enumerate(listed)]
    state = optimizer.state_dict()
    return {
        **state,
        "state": {known[number]: value for number, value in state["state"].items()},
        "param_groups": [
            {**group, "params": [known[number] for number in group["params"]]}
            for group in state["param_groups"]
        ],
    }
