"""The user's state on its way out: walked once, cut into tensors and one typed document.

The walk happens on the training thread and takes a snapshot of everything but tensor data:
after it, changing a list or a counter in the state changes nothing. Tensors are collected by
name for staging. What belongs to one rank alone (`PerRank`) goes to a document of its own.
`docs/format.md`, clauses 6 and 8.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch

from strongroom import optim, paths, stage
from strongroom.arrays import array_node
from strongroom.atoms import node
from strongroom.errors import StateEncodingError
from strongroom.keypath import Path, key_path
from strongroom.optim import NamedParameters
from strongroom.values import MAX_DEPTH, Encoder, Node

__all__ = ["MAX_COMPARED_BYTES", "Captured", "Capturer", "PerRank", "capture", "find_modules", "is_stateful"]

MAX_COMPARED_BYTES: Final = 64 << 10
"""Tensors up to here are worth hashing on every rank, to see that all ranks hold the same."""


@dataclass(frozen=True, slots=True)
class PerRank:
    """Marks a value that differs by rank: each rank stores its own, and gets its own back."""

    value: Any


@dataclass(slots=True, kw_only=True)
class Captured:
    """A state at one moment, tensor data aside.

    Attributes:
        document: the typed document of what all ranks share, structure included.
        rank_document: pairs of a name and a node, for this rank's own values.
        tensors: every distinct tensor by name, in the order of the walk.
        aliases: further names of the same memory: alias -> name.
        units: the unit of each tensor: what lies in one unit must come from one rank, since
            parts from several ranks would be a state that no rank had.
        compared: those small tensors that must be the same on every rank, because nothing else
            says whose would be stored: generators, arrays, tensors that stand by themselves.
        fingerprint: equal for two captures exactly where the names, shapes, dtypes and
            placements of all tensors are, in order; cheap to compare where nothing changed.

    Two captures of one `Capturer` may share ``document``, ``aliases`` and ``units`` in part:
    they are not to be modified.
    """

    document: Node = None
    rank_document: list[Node] = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    units: dict[str, str] = field(default_factory=dict)
    compared: dict[str, torch.Tensor] = field(default_factory=dict)
    fingerprint: object = None


def capture(state: Mapping[str, Any], *, rank: int) -> Captured:
    """Walk a state.

    Args:
        state: a dict of modules, optimizers, objects with ``state_dict`` and
            ``load_state_dict``, tensors, containers and plain values.
        rank: this rank, for the names of tensors inside `PerRank`.

    Raises:
        StateEncodingError: a value has no safe encoding; names its key path.
    """
    return _Capture(state, rank).run()


class Capturer:
    """Walks the state of one rank again and again.

    Args:
        rank: this rank, for the names of tensors inside `PerRank`.
    """

    def __init__(self, *, rank: int) -> None:
        self._rank = rank

    def capture(self, state: Mapping[str, Any]) -> Captured:
        """Walk a state; what comes out is what `capture` gives.

        Raises:
            StateEncodingError: a value has no safe encoding; names its key path.
        """
        return capture(state, rank=self._rank)


def is_stateful(value: Any) -> bool:
    """Whether a value is saved by ``state_dict()`` and restored by ``load_state_dict()``."""
    if isinstance(value, type):
        return False  # a class has the methods, and no state
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def find_modules(value: Any, path: Path = ()) -> Iterator[tuple[Path, torch.nn.Module]]:
    """The modules that stand in a state's plain containers, with their paths.

    Raises:
        StateEncodingError: the containers are nested too deep, or one contains itself.
    """
    if len(path) > MAX_DEPTH:
        raise StateEncodingError(
            key_path(path[:8]),
            f"more than {MAX_DEPTH} containers within each other, or one that contains itself",
        )
    if isinstance(value, torch.nn.Module):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from find_modules(item, (*path, key))
    elif type(value) in (list, tuple):
        for position, item in enumerate(value):
            yield from find_modules(item, (*path, position))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Region:
    """A part of the state whose tensors belong together.

    Attributes:
        unit: what a tensor in it belongs to.
        is_compared: whether every rank must hold the same.
        is_own: whether it is this rank's alone.
    """

    unit: str
    is_compared: bool = False
    is_own: bool = False


class _Capture:
    def __init__(self, state: Mapping[str, Any], rank: int) -> None:
        self._state = state
        self._rank = rank
        self._parameters = optim.name_parameters(find_modules(state))
        self._captured = Captured()
        self._by_memory: dict[Any, str] = {}
        self._encoder = Encoder(self._leaf)
        self._region: _Region | None = None

    def run(self) -> Captured:
        if not isinstance(self._state, Mapping):
            raise StateEncodingError(
                "state", f"is a {type(self._state).__name__}; expected a dict such as {{'model': model}}"
            )
        self._captured.document = self._encoder.encode(dict(self._state), ())
        self._captured.fingerprint = tuple(
            (name, tensor.shape, tensor.dtype, str(getattr(tensor, "placements", "")))
            for name, tensor in self._captured.tensors.items()
        )
        return self._captured

    @contextmanager
    def _within(self, region: _Region) -> Iterator[None]:
        """What is found meanwhile lies in a region, unless that is all within one rank's own."""
        outer = self._region
        if not (outer is not None and outer.is_own):
            self._region = region
        try:
            yield
        finally:
            self._region = outer

    def _leaf(self, value: Any, path: Path) -> Node | None:
        """The node of what the typed document has no form of its own for, or None."""
        if isinstance(value, torch.Tensor):
            return node("tensor", self._tensor(value, path))
        if isinstance(value, np.ndarray):
            return array_node(value, lambda tensor: self._tensor(tensor, path))
        if isinstance(value, PerRank):
            return self._per_rank(value, path)
        if isinstance(value, torch.nn.Module):
            return self._module(value, path)
        if isinstance(value, torch.optim.Optimizer):
            return self._optimizer(value, path)
        if isinstance(value, torch.Generator):
            return node("generator", [str(value.device), self._tensor(value.get_state(), path)])
        if is_stateful(value):
            return node("stateful", self._encoder.encode(value.state_dict(), path))
        return None

    def _module(self, module: torch.nn.Module, path: Path) -> Node:
        state_dict = module.state_dict()
        if not all(isinstance(name, str) for name in state_dict):
            raise StateEncodingError(key_path(path), "its state_dict() does not go by names (strings)")
        # Versions tell a later release of a module how to read an older state; 1 goes without saying.
        versions = {
            prefix: dict(metadata)
            for prefix, metadata in getattr(state_dict, "_metadata", {}).items()
            if metadata != {"version": 1}
        }
        parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        buffers = f"{paths.spell(path)}=buffers"
        nodes: list[Node] = []
        with self._within(_Region(unit=buffers, is_compared=True)):
            nodes.append(self._encoder.encode(versions, path))
        for name, value in state_dict.items():
            own_path = (*path, *paths.from_dotted(name))
            region = _Region(
                unit=paths.spell(own_path) if name in parameters else buffers,
                is_compared=_is_extra(name),
            )
            with self._within(region):
                nodes.append([name, self._encoder.encode(value, own_path)])
        return node("module", nodes)

    def _optimizer(self, optimizer: torch.optim.Optimizer, path: Path) -> Node:
        named = NamedParameters.of(optimizer, self._parameters)
        state = optim.named_state(optimizer, named)
        encode = self._encoder.encode
        pairs: list[Node] = []
        for name, value in state.state.items():
            own_path = (*path, "state", *named.paths[name])
            with self._within(_Region(unit=paths.spell(own_path))):
                pairs.append([name, encode(value, own_path)])
        with self._within(_Region(unit=paths.spell(path[:1]))):
            groups = encode(state.groups, (*path, "param_groups"))
            other = encode(state.other_state, (*path, "state"))
            return node("optimizer", [groups, pairs, other, encode(state.extra, path)])

    def _per_rank(self, value: PerRank, path: Path) -> Node:
        own_path = (*path, f"rank{self._rank}")
        name = paths.spell(path)
        with self._within(_Region(unit=paths.spell(own_path), is_own=True)):
            self._captured.rank_document.append([name, self._encoder.encode(value.value, own_path)])
        return node("per_rank", name)

    def _tensor(self, tensor: torch.Tensor, path: Path) -> str:
        """Take a tensor up under its path's name; return the name under which its memory is stored."""
        stage.check_tensor(tensor, key_path(path))
        name = paths.spell(path)
        if name in self._captured.tensors or name in self._captured.aliases:
            raise StateEncodingError(key_path(path), f"its name {name!r} stands for another tensor too")
        memory = _memory_of(tensor)
        first = self._by_memory.setdefault(memory, name) if memory is not None else name
        if first != name:
            self._captured.aliases[name] = first
            return name
        # Held here for as long as the walk lasts, so that no address is used twice.
        self._captured.tensors[name] = tensor
        region = self._region or _Region(unit=paths.spell(path[:1]), is_compared=True)
        self._captured.units[name] = region.unit
        if region.is_compared and tensor.nbytes <= MAX_COMPARED_BYTES and not hasattr(tensor, "placements"):
            self._captured.compared[name] = tensor
        return name


def _is_extra(name: str) -> bool:
    """Whether a module's ``state_dict()`` holds its ``get_extra_state()`` under this name."""
    return name.rpartition(".")[2] == "_extra_state"


def _memory_of(tensor: torch.Tensor) -> Any:
    """A key that two tensors share exactly when they are the same view of the same memory."""
    local = stage.local_tensor(tensor)
    if local.numel() == 0:
        return None
    return (
        local.device,
        local.data_ptr(),
        local.dtype,
        tuple(local.shape),
        local.stride(),
        local.is_conj(),
        local.is_neg(),
        tuple(tensor.shape),
        str(getattr(tensor, "placements", "")),
    )
