"""The user's state on its way out: walked once, cut into tensors and one typed document.

The walk happens on the training thread and takes a snapshot of everything but tensor data:
after it, changing a list or a counter in the state changes nothing. Tensors are collected by
name for staging. What belongs to one rank alone (`PerRank`) goes to a document of its own.
`docs/format.md`, clauses 6 and 8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

import numpy as np
import torch

from strongroom import optim, paths
from strongroom.arrays import array_node
from strongroom.atoms import RefusedError, node
from strongroom.errors import StateEncodingError
from strongroom.keypath import Path, key_path
from strongroom.modules import ModuleReader, ModuleState, is_extra
from strongroom.optim import NamedParameters
from strongroom.recall import Block, Found, Place, Recall, Region, Walk, block_of
from strongroom.survey import Survey, is_distributed, survey
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
        fingerprint: equal for two captures exactly where the names, units, shapes, dtypes and
            placements of all tensors are, in order; cheap to compare where nothing changed.

    Two captures of one `Capturer` may share ``document``, ``aliases`` and ``units`` in part:
    they are not to be modified.
    """

    document: Node = None
    rank_document: list[Node] = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    units: dict[str, str] = field(default_factory=dict)
    fingerprint: object = None
    _comparable: list[str] = field(default_factory=list)

    @property
    def compared(self) -> dict[str, torch.Tensor]:
        """Those small tensors that must be the same on every rank, by name.

        Nothing else says whose would be stored: generators, counters, positions, and what else
        stands outside of modules and optimizers. Not floating-point ones: those are measured or
        trained, a ``state_dict()`` of a replicated model among them, and ranks' may differ a little
        by right; the lowest rank's are stored. To be asked for while ``tensors`` still holds them.
        """
        return {name: self.tensors[name] for name in self._comparable}


def capture(state: Mapping[str, Any], *, rank: int) -> Captured:
    """Walk a state.

    Args:
        state: a dict of modules, optimizers, objects with ``state_dict`` and
            ``load_state_dict``, tensors, containers and plain values.
        rank: this rank, for the names of tensors inside `PerRank`.

    Raises:
        StateEncodingError: a value has no safe encoding; names its key path.
    """
    return Capturer(rank=rank).capture(state)


class Capturer:
    """Walks the state of one rank again and again.

    It remembers names and nodes of the last walk, and takes over what they still fit: the walk
    of an unchanged state costs a fraction of the first. No tensor, module or optimizer is kept
    alive by it.

    Args:
        rank: this rank, for the names of tensors inside `PerRank`.
    """

    def __init__(self, *, rank: int) -> None:
        self._rank = rank
        self._memory = _Memory()

    def capture(self, state: Mapping[str, Any]) -> Captured:
        """Walk a state; what comes out is what `capture` gives.

        Raises:
            StateEncodingError: a value has no safe encoding; names its key path.
        """
        try:
            return _Capture(state, self._rank, self._memory).run()
        except BaseException:
            # A walk that broke off may have remembered half of what it saw.
            self._memory = _Memory()
            raise


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
    elif isinstance(value, PerRank):
        yield from find_modules(value.value, path)
    elif isinstance(value, Mapping) and _may_hold_modules(value.values()):
        for key, item in value.items():
            yield from find_modules(item, (*path, key))
    elif type(value) in (list, tuple) and _may_hold_modules(value):
        for position, item in enumerate(value):
            yield from find_modules(item, (*path, position))


def _may_hold_modules(values: Iterable[Any]) -> bool:
    # Mostly a state has many tensors in one place, and its modules in another.
    return not all(issubclass(kind, torch.Tensor | int | float | str) for kind in set(map(type, values)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Named:
    """An optimizer's parameters by name, and the parameters that decided it, by ``id``."""

    modules: list[tuple[Path, list[str], list[int]]]
    group_ids: list[list[int]]
    groups: list[list[str]]
    paths: dict[str, Path]
    names: dict[int, str]


@dataclass(slots=True)
class _Memory:
    """What is kept from one walk to the next."""

    recall: Recall = field(default_factory=Recall)
    reader: ModuleReader = field(default_factory=ModuleReader)
    optimizers: dict[str, _Named] = field(default_factory=dict)
    survey: Survey | None = None
    facts: tuple[Any, ...] = ()
    fingerprint: object = None
    units: dict[str, str] = field(default_factory=dict)
    comparable: list[str] = field(default_factory=list)

    def note(self, captured: Captured, found: Found, seen: Survey) -> None:
        """Complete a capture; what the last one had equal is shared with it."""
        facts = (found.names, seen.shapes, seen.dtypes, seen.placements, found.regions, captured.aliases)
        is_same = facts == self.facts
        # Kept in any case: the next comparison is fast where these are the same objects.
        self.facts, self.survey = facts, seen
        if not is_same:
            kept = [number for number, name in enumerate(found.names) if name not in captured.aliases]
            of_kept = set(kept)
            self.units = {found.names[number]: found.regions[number].unit for number in kept}
            self.fingerprint = (
                tuple(captured.tensors),
                tuple(self.units.values()),
                tuple(seen.shapes[number] for number in kept),
                tuple(seen.dtypes[number] for number in kept),
                tuple(placed for placed in seen.placements if placed[0] in of_kept),
            )
            self.comparable = [
                found.names[number]
                for number in kept
                if found.regions[number].is_compared
                and not is_distributed(found.tensors[number])
                and found.tensors[number].nbytes <= MAX_COMPARED_BYTES
                and not seen.dtypes[number].is_floating_point
                and not seen.dtypes[number].is_complex
            ]
        captured.fingerprint, captured.units = self.fingerprint, self.units
        captured._comparable = self.comparable


class _Capture:
    def __init__(self, state: Mapping[str, Any], rank: int, memory: _Memory) -> None:
        self._state = state
        self._rank = rank
        self._memory = memory
        self._captured = Captured()
        self._found = Found()
        self._encoder = Encoder(self._leaf, self._large)
        self._walk = Walk(self._encoder, self._found, self._tensor_node, self._in_region)
        self._region: Region | None = None
        self._top_regions: dict[Any, Region] = {}
        self._modules: dict[int, ModuleState] = {}
        self._parameters: list[tuple[Path, ModuleState, list[int]]] = []

    def run(self) -> Captured:
        if not isinstance(self._state, Mapping):
            raise StateEncodingError(
                "state", f"is a {type(self._state).__name__}; expected a dict such as {{'model': model}}"
            )
        self._memory.recall.start()
        # Before any optimizer: a module's hooks may put other parameters in place when it is read.
        for path, module in find_modules(self._state):
            read = self._read(module, path)
            self._parameters.append((path, read, list(map(id, read.parameters))))
        self._captured.document = self._encoder.encode(dict(self._state), ())
        self._settle()
        return self._captured

    # ----------------------------------------------------------------------------------- leaves

    def _leaf(self, value: Any, path: Path) -> Node | None:
        """The node of what the typed document has no form of its own for, or None."""
        if isinstance(value, torch.Tensor):
            return self._tensor_node(value, path)
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

    def _large(self, mapping: Mapping[Any, Any], path: Path) -> list[Node] | None:
        """The pairs of a dict that is worth remembering."""
        if self._encoder.is_full:
            return None
        block = block_of(list(mapping), list(mapping.values()))
        if block is None:
            return None
        return self._pairs("dict", block, path, lambda number: ((*path, block.keys[number]), None))

    def _pairs(self, kind: str, block: Block, path: Path, place: Place) -> list[Node]:
        where = kind, paths.spell(path)
        return self._memory.recall.pairs(where, block, self._region, place, self._walk)

    def _read(self, module: torch.nn.Module, path: Path) -> ModuleState:
        read = self._modules.get(id(module))
        if read is None:
            try:
                read = self._modules[id(module)] = self._memory.reader.read(module)
            except RefusedError as refused:
                raise StateEncodingError(key_path(path), str(refused)) from None
            if not read.is_of_strings:
                raise StateEncodingError(key_path(path), "its state_dict() does not go by names (strings)")
        return read

    def _module(self, module: torch.nn.Module, path: Path) -> Node:
        read = self._read(module, path)
        buffers = f"{paths.spell(path)}=buffers"

        def place(number: int) -> tuple[Path, Region]:
            name = read.names[number]
            own_path = (*path, *paths.from_dotted(name))
            if read.are_parameters[number]:
                return own_path, Region(unit=paths.spell(own_path))
            return own_path, Region(unit=buffers, is_compared=is_extra(name))

        versions = self._encoder.encode(read.versions, path)
        # By its names alone, even where all values are dicts: their keys are no part of a tensor's name.
        values = list(read.values)
        block = Block(
            keys=read.names, values=values, kinds=list(map(type, values)), flags=read.are_parameters
        )
        return node("module", [versions, *self._pairs("module", block, path, place)])

    def _optimizer(self, optimizer: torch.optim.Optimizer, path: Path) -> Node:
        named = self._named(optimizer, path)
        state = optim.read_state(optimizer, named.groups, named.names)
        encode = self._encoder.encode
        names = list(state.state)

        def place(number: int) -> tuple[Path, Region]:
            own_path = (*path, "state", *named.paths[names[number]])
            return own_path, Region(unit=paths.spell(own_path))

        pairs: list[Node] = []
        if names:
            values = list(state.state.values())
            block = None if self._encoder.is_full else block_of(names, values)
            block = block or Block(keys=names, values=values, kinds=list(map(type, values)))
            pairs = self._pairs("optimizer", block, path, place)
        with self._within(Region(unit=paths.spell(path[:1]))):
            groups = []
            for number, (group, own) in enumerate(zip(state.groups, named.groups, strict=True)):
                options = {key: value for key, value in group.items() if key != "params"}
                found = encode(options, (*path, "param_groups", number), below=1)
                self._encoder.count(len(own))
                groups.append(node("dict", [*found["v"], ["params", list(own)]]))
            other = encode(state.other_state, (*path, "state"))
            return node("optimizer", [groups, pairs, other, encode(state.extra, path)])

    def _named(self, optimizer: torch.optim.Optimizer, path: Path) -> _Named:
        """The optimizer's parameters by name, as they were last time where all parameters are the same."""
        group_ids = [list(map(id, group["params"])) for group in optimizer.param_groups]
        modules = [(where, read.parameter_names, ids) for where, read, ids in self._parameters]
        where = paths.spell(path)
        last = self._memory.optimizers.get(where)
        if last is None or last.group_ids != group_ids or last.modules != modules:
            known = optim.name_parameters([(at, read) for at, read, _ in self._parameters])
            try:
                named = NamedParameters.of(optimizer, known)
            except RefusedError as refused:
                raise StateEncodingError(key_path(path), str(refused)) from None
            flat = [name for group in named.groups for name in group]
            last = _Named(
                modules=modules,
                group_ids=group_ids,
                groups=[list(group) for group in named.groups],
                paths=dict(named.paths),
                names=dict(zip(chain.from_iterable(group_ids), flat, strict=True)),
            )
            self._memory.optimizers[where] = last
        return last

    def _per_rank(self, value: PerRank, path: Path) -> Node:
        own_path = (*path, f"rank{self._rank}")
        name = paths.spell(path)
        with self._within(Region(unit=paths.spell(own_path), is_own=True)):
            self._captured.rank_document.append([name, self._encoder.encode(value.value, own_path)])
        return node("per_rank", name)

    # ---------------------------------------------------------------------------------- tensors

    @contextmanager
    def _within(self, region: Region) -> Iterator[None]:
        """What is found meanwhile lies in a region, unless that is all within one rank's own."""
        outer = self._region
        if not (outer is not None and outer.is_own):
            self._region = region
        try:
            yield
        finally:
            self._region = outer

    def _in_region(self, region: Region | None, encode: Callable[[], Node]) -> Node:
        if region is None:
            return encode()
        with self._within(region):
            return encode()

    def _tensor_node(self, tensor: torch.Tensor, path: Path) -> Node:
        return node("tensor", self._tensor(tensor, path))

    def _tensor(self, tensor: torch.Tensor, path: Path) -> str:
        """Take a tensor up under its path's name."""
        name = paths.spell(path)
        found = self._found
        found.names.append(name)
        # Held from here on for as long as the walk lasts, so that no address is used twice.
        found.tensors.append(tensor)
        found.paths.append(path)
        found.regions.append(self._region or self._top_region(path))
        return name

    def _top_region(self, path: Path) -> Region:
        unit = paths.spell(path[:1])
        if unit not in self._top_regions:
            self._top_regions[unit] = Region(unit=unit, is_compared=True)
        return self._top_regions[unit]

    def _settle(self) -> None:
        """Check all tensors, and find those that are one memory."""
        found, captured = self._found, self._captured
        seen = survey(found.tensors, found.paths, self._memory.survey)
        for position, *_ in seen.placements:
            if found.regions[position].is_own:
                raise StateEncodingError(
                    key_path(found.paths[position]),
                    "a distributed tensor lies on several ranks, and is none's own: leave it out of PerRank",
                )
        captured.tensors = dict(zip(found.names, found.tensors, strict=True))
        if len(captured.tensors) != len(found.names):
            self._refuse_double_names()
        aliases: dict[str, str] = {}
        for group in seen.shared:
            # What one rank has of its own must not be the only name of what all ranks share.
            for is_own in (False, True):
                names = [found.names[n] for n in group if found.regions[n].is_own == is_own]
                aliases.update(dict.fromkeys(names[1:], names[0]) if names else {})
        # In the order of the walk, not of the first of each group.
        captured.aliases = {name: aliases[name] for name in found.names if name in aliases} if aliases else {}
        for alias in captured.aliases:
            del captured.tensors[alias]
        self._memory.note(captured, found, seen)

    def _refuse_double_names(self) -> None:
        seen = set()
        for name, path in zip(self._found.names, self._found.paths, strict=True):
            if name in seen:
                raise StateEncodingError(key_path(path), f"its name {name!r} stands for another tensor too")
            seen.add(name)
