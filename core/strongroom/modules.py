"""What a module holds, by the names of the bare module: read by its own ``state_dict()``, or the
same without it where nothing could be missed.

``state_dict()`` costs microseconds a tensor, on the training thread. `ModuleReader` remembers
how the last read of a module went, and reads the very same tensors from where they stand as
long as the module's tree, names, classes and hooks are what they were. It keeps no tensor and
no module alive.
"""

from __future__ import annotations

import operator
import sys
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Any, Final

import torch

from strongroom.atoms import RefusedError
from strongroom.wrappers import BareNames, Member, members, sharded_by_fsdp1

__all__ = ["ModuleReader", "ModuleState", "is_extra", "read_module"]

_EXTRA: Final = "_extra_state"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleState:
    """What a module's ``state_dict()`` gives, and whose names are whose.

    Attributes:
        names: bare names, in the order of ``state_dict()``.
        values: what stands under each.
        are_parameters: which of them are parameters.
        versions: versions that are not 1, by bare prefix.
        parameters: every parameter, the module's own object, in the order of the names below.
        parameter_names: the bare name of each.
        is_of_strings: whether ``state_dict()`` goes by strings at all.
        shown: ``state_dict()`` itself, where it was called.
        bare: what its names are without wrappers.
    """

    names: list[str]
    values: Sequence[Any]
    are_parameters: list[bool]
    versions: dict[str, Any]
    parameters: list[torch.nn.Parameter]
    parameter_names: list[str]
    is_of_strings: bool = True
    shown: Any = None
    bare: BareNames = field(default_factory=BareNames)


def is_extra(name: str) -> bool:
    """Whether a name of ``state_dict()`` stands for ``get_extra_state()``."""
    return name.rpartition(".")[2] == _EXTRA


def read_module(module: torch.nn.Module) -> ModuleState:
    """Read a module by its own ``state_dict()``.

    Raises:
        RefusedError: it is wrapped in a way that gives no state to store; says why.
    """
    return _read(module)[0]


def _read(module: torch.nn.Module) -> tuple[ModuleState, list[Member]]:
    problem = sharded_by_fsdp1(module)
    if problem is not None:
        raise RefusedError(problem)
    shown = module.state_dict()
    # After state_dict(): its hooks may put other parameters in place, as fully_shard's do.
    found = list(members(module))
    bare = BareNames.among(found)
    parameters = list(_parameters(found))
    parameter_names = [name for name, _ in parameters]
    is_of_strings = all(isinstance(name, str) for name in shown)
    names = [bare.key(name) for name in shown] if is_of_strings else []
    among = set(parameter_names)
    state = ModuleState(
        names=names,
        values=list(shown.values()),
        are_parameters=[name in among for name in names],
        versions=_uncommon(bare.bare_versions(getattr(shown, "_metadata", {}))),
        parameters=[parameter for _, parameter in parameters],
        parameter_names=parameter_names,
        is_of_strings=is_of_strings,
        shown=shown,
        bare=bare,
    )
    return state, found


def _parameters(found: list[Member]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for member in found:
        for name, parameter in member.module._parameters.items():
            if parameter is not None:
                yield f"{member.bare}{name}", parameter


def _uncommon(versions: dict[str, Any]) -> dict[str, Any]:
    """Versions tell a later release of a module how to read an older state; 1 goes without saying."""
    return {prefix: dict(metadata) for prefix, metadata in versions.items() if metadata != {"version": 1}}


class ModuleReader:
    """Reads modules again and again."""

    def __init__(self) -> None:
        # By id(): a module may define what equality it likes.
        self._last: dict[int, _Remembered] = {}

    def read(self, module: torch.nn.Module) -> ModuleState:
        """What `read_module` gives, but for ``shown``; tensors may be the module's own, not detached.

        Raises:
            RefusedError: as `read_module`.
        """
        remembered = self._last.get(id(module))
        if remembered is not None:
            state = remembered.read(module)
            if state is not None:
                return state
        state, found = _read(module)
        learnt = _Remembered.of(state, found)
        self._last = {number: last for number, last in self._last.items() if last.modules[0]() is not None}
        self._last.pop(id(module), None)
        if learnt is None:
            return state
        self._last[id(module)] = learnt
        # The same as what comes next time, the module's own tensors.
        return learnt.read(module) or state


@dataclass(frozen=True, slots=True, kw_only=True)
class _Remembered:
    """How a module was read, in lists of one entry a module (a parameter, a buffer) that compare fast.

    Attributes:
        modules: every module at every place, in the order of ``state_dict()``.
        classes: of each.
        versions: of each class.
        children: for each child of each module in turn, which of ``modules`` it is; -1: None.
        keys: names and their numbers: of children, of parameters, of buffers.
        transient: the names of buffers that are not stored, for each module; None where all are.
        kinds: the class of each parameter and buffer, None included.
        order: which of parameters and buffers ``state_dict()`` gives, in its order.
        state: what was read, less its tensors.
    """

    modules: list[weakref.ref[torch.nn.Module]]
    classes: list[type]
    versions: dict[type, Any]
    children: tuple[int, ...]
    keys: tuple[list[Any], ...]
    transient: list[set[str]] | None
    kinds: list[type]
    order: tuple[int, ...]
    named: tuple[int, ...]
    state: ModuleState

    @classmethod
    def of(cls, state: ModuleState, found: list[Member]) -> _Remembered | None:
        """None where the module must be asked every time."""
        modules = [member.module for member in found]
        if not state.is_of_strings or not all(map(_has_dicts, modules)):
            return None
        attributes = [module.__dict__ for module in modules]
        classes = list(map(type, modules))
        if not _is_plain(set(classes), attributes):
            return None
        places = {id(module): number for number, module in enumerate(modules)}
        tree = _Tree(attributes)
        held = [*tree.parameters, *tree.buffers]
        order, names, flags = _order(found, len(tree.parameters))
        values = [held[number] for number in order]
        # Believed only where it gives what state_dict() just gave.
        if (
            names != state.names
            or flags != state.are_parameters
            or not all(map(_is_view, values, state.values))
        ):
            return None
        named = tuple(number for number, parameter in enumerate(tree.parameters) if parameter is not None)
        return cls(
            modules=[weakref.ref(module) for module in modules],
            classes=classes,
            versions={kind: _version_of(kind) for kind in set(classes)},
            children=tuple(-1 if child is None else places[id(child)] for child in tree.children),
            keys=tree.keys,
            transient=_transient(attributes, copied=True),
            kinds=list(map(type, held)),
            order=order,
            named=named,
            state=ModuleState(
                names=state.names,
                values=(),
                are_parameters=state.are_parameters,
                versions=state.versions,
                parameters=[],
                parameter_names=state.parameter_names,
                bare=state.bare,
            ),
        )

    def read(self, module: torch.nn.Module) -> ModuleState | None:
        """The module's state now; None where anything is not as it was."""
        modules: list[Any] = [reference() for reference in self.modules]
        if modules[0] is not module or any(map(operator.is_, modules, repeat(None))):
            return None
        attributes = [module.__dict__ for module in modules]
        if list(map(type, modules)) != self.classes or not _is_plain(set(self.versions), attributes):
            return None
        if any(_version_of(kind) != version for kind, version in self.versions.items()):
            return None
        tree = _Tree(attributes)
        expected = map([*modules, None].__getitem__, self.children)
        if tree.keys != self.keys or not all(map(operator.is_, tree.children, expected)):
            return None
        held: list[Any] = [*tree.parameters, *tree.buffers]
        if list(map(type, held)) != self.kinds or _transient(attributes) != self.transient:
            return None
        state = self.state
        return ModuleState(
            names=state.names,
            values=list(map(held.__getitem__, self.order)),
            are_parameters=state.are_parameters,
            versions=state.versions,
            parameters=list(map(held.__getitem__, self.named)),
            parameter_names=state.parameter_names,
            bare=state.bare,
        )


class _Tree:
    """A module's children, parameters and buffers, of all modules in turn."""

    def __init__(self, attributes: list[dict[str, Any]]) -> None:
        children, self.children = _flat("_modules", attributes)
        parameters, self.parameters = _flat("_parameters", attributes)
        buffers, self.buffers = _flat("_buffers", attributes)
        self.keys = (*children, *parameters, *buffers)


def _flat(name: str, attributes: list[dict[str, Any]]) -> tuple[tuple[list[Any], list[int]], list[Any]]:
    """The keys, their numbers, and the values of one dict of each module."""
    dicts = list(map(operator.itemgetter(name), attributes))
    keys = list(chain.from_iterable(dicts)), list(map(len, dicts))
    return keys, list(chain.from_iterable(map(dict.values, dicts)))


def _version_of(kind: Any) -> Any:
    return kind._version


def _transient(attributes: list[dict[str, Any]], *, copied: bool = False) -> list[set[str]] | None:
    name = "_non_persistent_buffers_set"
    if not any(map(operator.itemgetter(name), attributes)):
        return None
    return [set(own[name]) if copied else own[name] for own in attributes]


def _order(found: list[Member], parameters: int) -> tuple[tuple[int, ...], list[str], list[bool]]:
    """Which of a tree's parameters, then buffers, ``state_dict()`` gives, and under which bare names."""
    order, names, flags = [], [], []
    at_parameter, at_buffer = 0, parameters
    for member in found:
        module = member.module
        for name, parameter in module._parameters.items():
            if parameter is not None:
                order.append(at_parameter)
                names.append(f"{member.bare}{name}")
                flags.append(True)
            at_parameter += 1
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                order.append(at_buffer)
                names.append(f"{member.bare}{name}")
                flags.append(False)
            at_buffer += 1
    return tuple(order), names, flags


_OWN: Final = ("state_dict", "_save_to_state_dict", "get_extra_state")
"""What a class may do its own way."""

_HOOKS: Final = ("_state_dict_hooks", "_state_dict_pre_hooks")


def _is_plain(classes: set[type], attributes: list[dict[str, Any]]) -> bool:
    """Whether modules are read as torch reads one without hooks, overrides and extra state.

    Args:
        classes: of all of them.
        attributes: each one's own.
    """
    base = torch.nn.Module
    for cls in classes:
        if any(getattr(cls, name) is not getattr(base, name) for name in _OWN):
            return False
    if any(any(map(operator.itemgetter(name), attributes)) for name in _HOOKS):
        return False
    return not any(any(map(dict.__contains__, attributes, repeat(name))) for name in (*_OWN, "_version"))


def _has_dicts(module: torch.nn.Module) -> bool:
    """Not so in a scripted module."""
    own = vars(module)
    dicts = (own.get(name) for name in ("_modules", "_parameters", "_buffers", *_HOOKS))
    return all(isinstance(held, dict) for held in dicts) and "_non_persistent_buffers_set" in own


_PLAIN_TENSORS: Final = (torch.Tensor, torch.nn.Parameter)


def _is_view(tensor: Any, shown: Any) -> bool:
    """Whether one tensor is the other, detached."""
    if type(tensor) not in _PLAIN_TENSORS or type(shown) is not torch.Tensor:
        return _is_distributed_view(tensor, shown)
    try:
        if tensor.shape != shown.shape or tensor.dtype != shown.dtype:
            return False
        return bool(tensor.data_ptr() == shown.data_ptr())
    except RuntimeError:
        return False  # a sparse one, for example, has no address


def _is_distributed_view(tensor: Any, shown: Any) -> bool:
    home = sys.modules.get("torch.distributed.tensor")
    kind = getattr(home, "DTensor", None)
    if kind is None or type(tensor) is not kind or type(shown) is not kind:
        return False
    with torch.no_grad():
        return tensor.placements == shown.placements and _is_view(tensor.to_local(), shown.to_local())
