"""Optimizer state under its parameters' names.

An optimizer numbers its parameters; a checkpoint names them, so that state still finds its
parameter after a group was reordered or a model was sharded another way. A name is found by
identity in the modules of the same state, else it is the parameter's group and position.

An optimizer without state is never stepped to make it some: state that is absent is stored as
absent, and on restore what the checkpoint holds is allocated from the index. (torch's own
helper for distributed state dicts takes a hidden step, which changes training.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from strongroom import paths
from strongroom.atoms import RefusedError
from strongroom.keypath import Path
from strongroom.modules import ModuleState
from strongroom.wrappers import is_flattened_by_fsdp1

__all__ = [
    "NamedParameters",
    "OptimizerState",
    "load_named_state",
    "name_parameters",
    "named_state",
    "read_state",
    "state_target",
]


def name_parameters(modules: Iterable[tuple[Path, ModuleState]]) -> dict[int, Path]:
    """For each parameter of the given modules, by ``id``, the path it is named by: the first found."""
    names: dict[int, Path] = {}
    for path, module in modules:
        for name, parameter in zip(module.parameter_names, module.parameters, strict=True):
            if id(parameter) not in names:
                names[id(parameter)] = (*path, *paths.from_dotted(name))
    return names


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedParameters:
    """An optimizer's parameters by name, in the order in which it numbers them.

    Attributes:
        groups: each group's parameter names.
        paths: the path elements behind each name, relative to the optimizer's own ``state``.
        parameters: the parameter of each name.
    """

    groups: tuple[tuple[str, ...], ...]
    paths: Mapping[str, Path]
    parameters: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, names: Mapping[int, Path]) -> NamedParameters:
        """An optimizer's parameters by the names of the given ones.

        Raises:
            RefusedError: its state would fit no other layout of the same model.
        """
        groups = []
        by_name: dict[str, torch.Tensor] = {}
        all_paths: dict[str, Path] = {}
        for group_number, group in enumerate(optimizer.param_groups):
            group_names = []
            for position, parameter in enumerate(group["params"]):
                if is_flattened_by_fsdp1(parameter):
                    raise RefusedError(
                        "holds state of FullyShardedDataParallel's flat parameters, which fits no other "
                        "layout; use torch.distributed.fsdp.fully_shard, or store what "
                        "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict gives"
                    )
                path = names.get(id(parameter), (group_number, position))
                name = paths.spell(path)
                group_names.append(name)
                by_name[name] = parameter
                all_paths[name] = path
            groups.append(tuple(group_names))
        return cls(groups=tuple(groups), paths=all_paths, parameters=by_name)

    @property
    def numbers(self) -> dict[str, int]:
        """torch's number of each parameter: its place over all groups."""
        names = [name for group in self.groups for name in group]
        return {name: number for number, name in enumerate(names)}


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerState:
    """An optimizer's state dict with names for numbers.

    Attributes:
        groups: each group's options, ``params`` being the parameters' names.
        state: state of each parameter that has any, by name.
        other_state: state that belongs to no parameter.
        extra: what else the optimizer's ``state_dict()`` holds.
    """

    groups: list[dict[str, Any]]
    state: dict[str, Any]
    other_state: dict[Any, Any]
    extra: dict[Any, Any]

    def numbered(self, numbers: Mapping[str, int] | None = None) -> dict[str, Any]:
        """torch's form, which ``load_state_dict`` takes.

        Args:
            numbers: the number of each name; None: as the groups list them.
        """
        if numbers is None:
            names = [name for group in self.groups for name in group["params"]]
            numbers = {name: number for number, name in enumerate(names)}
        state: dict[Any, Any] = {numbers[name]: value for name, value in self.state.items()}
        state.update(self.other_state)
        # In the optimizer's own order: torch pairs a group's numbers with its parameters by position.
        groups = [
            {**group, "params": sorted(numbers[name] for name in group["params"])} for group in self.groups
        ]
        return {"state": state, "param_groups": groups, **self.extra}


def named_state(optimizer: torch.optim.Optimizer, named: NamedParameters) -> OptimizerState:
    """The optimizer's state as it is; tensors are its own, not copies."""
    names = {
        id(parameter): name
        for group, group_names in zip(optimizer.param_groups, named.groups, strict=True)
        for parameter, name in zip(group["params"], group_names, strict=True)
    }
    return read_state(optimizer, named.groups, names)


def read_state(
    optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[str]], names: Mapping[int, str]
) -> OptimizerState:
    """As `named_state`, where each parameter's name is known.

    Args:
        optimizer: whose state is read.
        groups: each group's parameter names.
        names: a parameter's name by its ``id``.
    """
    direct = _read_directly(optimizer, names) if _is_plain(optimizer) else None
    if direct is not None:
        state, other, options, extra = direct
    else:
        state, other, options, extra = _read_state_dict(
            optimizer, [name for group in groups for name in group]
        )
    return OptimizerState(
        groups=[{**group, "params": list(own)} for group, own in zip(options, groups, strict=True)],
        state=state,
        other_state=other,
        extra=extra,
    )


_Parts = tuple[dict[str, Any], dict[Any, Any], list[dict[str, Any]], dict[Any, Any]]
"""State by name, state of no parameter, groups, and what else there is."""


def _is_plain(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``state_dict()`` would do nothing but number what lies in ``state``."""
    return (
        type(optimizer).state_dict is torch.optim.Optimizer.state_dict
        and "state_dict" not in vars(optimizer)
        and not optimizer._optimizer_state_dict_pre_hooks
        and not optimizer._optimizer_state_dict_post_hooks
    )


def _read_directly(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> _Parts | None:
    keys: list[Any] = list(optimizer.state)
    values = list(optimizer.state.values())
    found: list[Any] = list(map(names.get, map(id, keys)))
    other: dict[Any, Any] = {}
    if None not in found:
        state = dict(zip(found, values, strict=True))
    else:
        for number, key in enumerate(keys):
            if found[number] is None:
                if isinstance(key, torch.Tensor) or type(key) is int:
                    return None  # of a tensor that no group has, or a number like torch's: for torch to say
                other[key] = values[number]
        state = {name: value for name, value in zip(found, values, strict=True) if name is not None}
    groups = [
        {key: item for key, item in group.items() if key != "params"} for group in optimizer.param_groups
    ]
    return state, other, groups, {}


def _read_state_dict(optimizer: torch.optim.Optimizer, names: list[str]) -> _Parts:
    state_dict = dict(optimizer.state_dict())
    state: dict[str, Any] = {}
    other: dict[Any, Any] = {}
    for key, value in state_dict.pop("state", {}).items():
        if type(key) is int and 0 <= key < len(names):
            state[names[key]] = value
        else:
            other[key] = value
    return state, other, state_dict.pop("param_groups", []), state_dict


def state_target(
    optimizer: torch.optim.Optimizer,
    parameter: torch.Tensor,
    key: Any,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Memory for a stored piece of a parameter's state: what is there if it fits, else new.

    New memory lies where the parameter lies, on its mesh, with its placements where the shapes
    are equal (else replicated), and always has the stored dtype. What has no dimension is
    a plain tensor, as torch's optimizers have it.
    """
    present = optimizer.state.get(parameter, {})
    existing = present.get(key) if isinstance(present, dict) else None
    if isinstance(existing, torch.Tensor) and tuple(existing.shape) == shape and existing.dtype == dtype:
        return existing.detach()
    if tuple(parameter.shape) == shape and shape:
        with torch.no_grad():
            return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    if shape and isinstance(parameter, DTensor):
        # Of another shape, but for the same computation, which mixes no plain tensors in.
        mesh = parameter.device_mesh
        local = torch.empty(shape, dtype=dtype, device=parameter.device)
        return DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)
    # torch keeps the step counter on the host, and moves it itself where a kernel wants it.
    device = torch.device("cpu") if key == "step" else parameter.device
    return torch.empty(shape, dtype=dtype, device=device)


def load_named_state(
    optimizer: torch.optim.Optimizer, stored: OptimizerState, named: NamedParameters
) -> None:
    """Load through the optimizer's own ``load_state_dict``, then undo its change of dtype.

    torch casts state to its parameter's dtype on load: float32 moments of a bfloat16
    parameter would come back rounded.
    """
    optimizer.load_state_dict(stored.numbered(named.numbers))
    for name, values in stored.state.items():
        loaded = optimizer.state.get(named.parameters[name])
        if isinstance(values, dict) and isinstance(loaded, dict):
            for key in values.keys() & loaded.keys():
                loaded[key] = _in_stored_dtype(values[key], loaded[key])


def _in_stored_dtype(stored: Any, loaded: Any) -> Any:
    """What was loaded, where it was loaded to, with every tensor in the dtype that it was stored in."""
    if isinstance(stored, torch.Tensor) and isinstance(loaded, torch.Tensor):
        return loaded if stored.dtype == loaded.dtype else stored.to(device=loaded.device)
    if type(stored) is dict and type(loaded) is dict and stored.keys() == loaded.keys():
        return {key: _in_stored_dtype(stored[key], item) for key, item in loaded.items()}
    if type(stored) in (list, tuple) and type(loaded) is type(stored) and len(stored) == len(loaded):
        return type(stored)(map(_in_stored_dtype, stored, loaded))
    return loaded
