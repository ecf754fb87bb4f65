"""A checkpoint on its way in: the caller's template held against the stored document.

`match` decides, before anything is written, which stored tensor fills which memory, and what
does not fit. The result then says what to load once every byte was verified, and builds the
state that the caller gets: modules, optimizers, objects with ``load_state_dict``, tensors and
generators are filled in place and stand in it as themselves; containers that hold such things
are walked; any other value only names its key and is replaced by the checkpoint's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from strongroom import optim, paths
from strongroom.atoms import RefusedError
from strongroom.dtypes import torch_dtype
from strongroom.errors import FormatError, StateMismatchError, StrongroomError
from strongroom.fitting import difference, memory_of
from strongroom.forms import mapping_pairs, optimizer_parts, payload_of
from strongroom.index import Index, TensorRecord
from strongroom.keypath import Path, key_path
from strongroom.modules import ModuleState, is_extra, read_module
from strongroom.optim import NamedParameters, OptimizerState
from strongroom.overlaps import overlapping, put_together
from strongroom.rebuild import Rebuilder, set_generator
from strongroom.selection import Selection
from strongroom.template import holds_fillable, value_at
from strongroom.tree import PerRank, find_modules, is_stateful
from strongroom.values import Node

__all__ = ["Filling", "match"]

_MODULES, _OPTIMIZERS, _REST = range(3)
"""The order in which objects are loaded: an optimizer may look at its parameters."""

_ABSENT: Final = object()

_SCHEDULERS_OPTIONS: Final = frozenset(
    {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}
)
"""What torch's learning-rate schedulers add to an optimizer's groups."""


@dataclass(frozen=True, slots=True)
class _Load:
    """Hands one object its state, once that is decoded."""

    order: int
    path: Path
    decode: Callable[[], Any]
    apply: Callable[[Any], None]

    def run(self, value: Any) -> None:
        try:
            self.apply(value)
        except StrongroomError:
            raise
        except Exception as error:
            raise StateMismatchError(
                f"{key_path(self.path)} refuses the state that was saved: {type(error).__name__}: {error}"
            ) from error


@dataclass(slots=True, kw_only=True)
class Filling:
    """What a restore of one checkpoint into one template will do.

    Attributes:
        targets: memory to fill, by the caller's name for it.
        records: the stored tensor that fills each.
        in_place: names of targets that are the caller's own memory and stay in use.
        replaceable: names of targets in an optimizer's state, which a load replaces whole.
        missing_per_rank: names of values that each rank has its own of, and of which the
            checkpoint holds none for this rank. The caller's stay, or None stands for them.
    """

    targets: dict[str, torch.Tensor] = field(default_factory=dict)
    records: dict[str, TensorRecord] = field(default_factory=dict)
    in_place: set[str] = field(default_factory=set)
    replaceable: set[str] = field(default_factory=set)
    missing_per_rank: list[str] = field(default_factory=list)
    _apart: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    _loads: list[_Load] = field(default_factory=list)
    _build: Callable[[], Any] = lambda: None
    _decoded: list[tuple[_Load, Any]] = field(default_factory=list)
    _state: Any = None

    def decode(self) -> Any:
        """Build the caller's state and all that is to be loaded; every target must be filled.

        Nothing is loaded: a document that turns out malformed has not reached any
        ``load_state_dict``.

        Raises:
            StateError: a value cannot be built; or, as `StateMismatchError`, tensors that share memory
                cannot all be filled.
            FormatError: a document is not what it should be.
        """
        clashing = put_together(self._apart)
        if clashing:
            raise StateMismatchError(
                f"{', '.join(clashing[:20])}: your tensors share some of their memory, and the checkpoint "
                "holds different values for what they share; give each memory of its own",
                different=clashing,
            )
        with _bounded_depth():
            self._state = self._build()
            ordered = sorted(self._loads, key=lambda load: load.order)
            self._decoded = [(load, load.decode()) for load in ordered]
        return self._state

    def set_apart(self) -> None:
        """Have the caller's tensors that share some of their memory filled one by one, elsewhere."""
        for name in sorted(overlapping(self.targets, self.in_place)):
            target = self.targets[name]
            value = torch.empty_like(target, memory_format=torch.contiguous_format)
            self._apart[name] = target, value
            self.targets[name] = value

    def load(self) -> Any:
        """Load what was decoded: modules, optimizers, the rest. Returns the caller's state.

        Raises:
            StateError: an object refuses its state.
        """
        for load, value in self._decoded:
            load.run(value)
        return self._state

    def finish(self) -> Any:
        """`decode`, then `load`."""
        self.decode()
        return self.load()


def match(
    template: Any,
    document: Node,
    rank_values: Mapping[str, Node],
    index: Index,
    selection: Selection,
) -> Filling:
    """Hold a template against a checkpoint.

    Args:
        template: the caller's state; None or an empty dict: everything comes back anew.
        document: the checkpoint's typed document.
        rank_values: this rank's own values, by name.
        index: the checkpoint's tensors.
        selection: which part is wanted.

    Raises:
        StateMismatchError: they do not fit; lists everything that is missing, unexpected or
            different. Nothing was written.
        FormatError: the document is not what it should be.
    """
    matcher = _Matcher(template, rank_values, index, selection)
    if payload_of(document, "dict") is None:
        raise FormatError("the state's document is no dict")
    with _bounded_depth():
        matcher.filling._build = matcher.visit({} if template is None else template, document, ())
    matcher.check()
    matcher.filling.set_apart()
    return matcher.filling


@contextmanager
def _bounded_depth() -> Iterator[None]:
    """A document nested deeper than any save writes is malformed, and no reason to crash."""
    try:
        yield
    except RecursionError:
        raise FormatError("the state's document nests deeper than any that is saved") from None


Build = Callable[[], Any]


class _Matcher:
    def __init__(
        self, template: Any, rank_values: Mapping[str, Node], index: Index, selection: Selection
    ) -> None:
        self.filling = Filling()
        self._index = index
        self._selection = selection
        self._modules: dict[int, ModuleState] = {}
        # Before any optimizer: a module's hooks may put other parameters in place when it is read.
        self._parameters = optim.name_parameters(
            [(path, self._read(module, path)) for path, module in find_modules(template)]
        )
        self._missing: list[str] = []
        self._unexpected: list[str] = []
        self._different: list[str] = []
        self._unused_patterns = set(selection.only or ())
        self._memory: dict[Any, TensorRecord] = {}
        self._template = template
        self._rank_values = rank_values
        self._stored = Rebuilder(index, rank_values, self._plan, self._lacks)

    # ------------------------------------------------------------------------------- the walk

    def visit(self, template: Any, found: Node, path: Path) -> Build:
        if isinstance(template, PerRank):
            # The value comes back bare, so that a state is used like one that marks nothing.
            return self.visit(template.value, found, path)
        name = payload_of(found, "per_rank")
        if name is not None:
            return self._visit_own(template, name, path)
        if isinstance(template, torch.nn.Module):
            return self._visit_module(template, found, path)
        if isinstance(template, torch.optim.Optimizer):
            return self._visit_optimizer(template, found, path)
        if isinstance(template, torch.Tensor):
            return self._visit_tensor(template, found, path)
        if isinstance(template, torch.Generator):
            return self._visit_generator(template, found, path)
        if is_stateful(template):
            return self._visit_stateful(template, found, path)
        if isinstance(template, Mapping) and self._is_walked(template, path):
            return self._visit_mapping(template, found, path)
        if type(template) in (list, tuple) and holds_fillable(template):
            return self._visit_sequence(template, found, path)
        return self._visit_plain(template, found, path)

    def _visit_own(self, template: Any, name: Any, path: Path) -> Build:
        """Something of which this rank stored its own, if it did."""
        if not isinstance(name, str):
            raise FormatError(f"{key_path(path)}: a value of one rank without a name")
        if name in self._rank_values:
            return self.visit(template, self._rank_values[name], path)
        if self._wants(paths.spell(path)):
            self._note_missing(name)
        return lambda: template

    def _is_walked(self, template: Mapping[Any, Any], path: Path) -> bool:
        if not path or not template:
            return bool(template)
        is_part_wanted = self._selection.only is not None and not self._wants(paths.spell(path))
        return is_part_wanted or holds_fillable(template)

    def _visit_mapping(self, template: Mapping[Any, Any], found: Node, path: Path) -> Build:
        stored = self._stored.mapping_nodes(found, path)
        if stored is None:
            return self._differs(template, path, "is a dict here and something else in the checkpoint")
        builds: dict[Any, Build] = {}
        for key, value in template.items():
            own_path = (*path, key)
            stored_key = self._stored_key(stored, key, path, lambda element: (element,))
            if stored_key in stored:
                builds[key] = self.visit(value, stored.pop(stored_key), own_path)
            else:
                self._miss(own_path)
                builds[key] = lambda value=value: value  # type: ignore[misc]
        if not self._selection.rename and self._selection.only is None:
            self._unexpected.extend(paths.spell((*path, key)) for key in stored)
        make = OrderedDict if isinstance(template, OrderedDict) else dict
        return lambda: make((key, build()) for key, build in builds.items())

    def _visit_sequence(self, template: Any, found: Node, path: Path) -> Build:
        nodes = payload_of(found, "tuple") if type(template) is tuple else found
        if type(nodes) is not list or len(nodes) != len(template):
            kind = type(template).__name__
            return self._differs(
                template, path, f"is a {kind} of {len(template)} here and not in the checkpoint"
            )
        builds = [
            self.visit(value, stored, (*path, number))
            for number, (value, stored) in enumerate(zip(template, nodes, strict=True))
        ]
        make = type(template)
        return lambda: make(build() for build in builds)

    def _visit_plain(self, template: Any, found: Node, path: Path) -> Build:
        if path and not self._wants(paths.spell(path)):
            return lambda: template
        self._stored.allocate(found, path)
        return lambda: self._stored.decode(found, path)

    def _visit_tensor(self, template: torch.Tensor, found: Node, path: Path) -> Build:
        name = paths.spell(path)
        if not self._wants(name):
            return lambda: template
        stored = payload_of(found, "tensor")
        if stored is None:
            return self._differs(template, path, "is a tensor here and something else in the checkpoint")
        self._fill(name, template, stored, path)
        return lambda: template

    def _visit_generator(self, template: torch.Generator, found: Node, path: Path) -> Build:
        if not self._wants(paths.spell(path)):
            return lambda: template
        payload = payload_of(found, "generator")
        if payload is None:
            return self._differs(
                template, path, "is a torch.Generator here and something else in the checkpoint"
            )
        self._stored.allocate(found, path)

        def decode() -> torch.Tensor:
            state = self._stored.generator_state(payload, path)
            # Held against a generator of its own, so that a malformed one is found before anything is loaded.
            set_generator(torch.Generator(template.device), state)
            return state

        self._later(_REST, path, decode, lambda state: set_generator(template, state))
        return lambda: template

    def _visit_stateful(self, template: Any, found: Node, path: Path) -> Build:
        payload = payload_of(found, "stateful")
        node = found if payload is None else payload
        if self._wants(paths.spell(path)):
            self._stored.allocate(node, path)
            self._later(_REST, path, lambda: self._stored.decode(node, path), template.load_state_dict)
        return lambda: template

    def _read(self, module: torch.nn.Module, path: Path) -> ModuleState:
        """A module's names and tensors, once for all places where it stands."""
        if id(module) not in self._modules:
            try:
                self._modules[id(module)] = read_module(module)
            except RefusedError as refused:
                raise StateMismatchError(f"{key_path(path)} {refused}") from None
        return self._modules[id(module)]

    def _visit_module(self, module: torch.nn.Module, found: Node, path: Path) -> Build:
        stored, versions = self._stored.module_nodes(found, path)
        if stored is None:
            return self._differs(module, path, "is a module here and something else in the checkpoint")
        read = self._read(module, path)
        plain: dict[str, Node] = {}
        loaded: dict[str, Any] = {}
        for key, value in zip(read.names, read.values, strict=True):
            own_path = (*path, *paths.from_dotted(key))
            name = paths.spell(own_path)
            stored_key = self._stored_key(stored, key, path, paths.from_dotted)
            node = stored.pop(stored_key, _ABSENT)
            if not self._wants(name):
                continue
            if node is _ABSENT:
                self._missing.append(name)
            elif isinstance(value, torch.Tensor) and not is_extra(key):
                stored_name = payload_of(node, "tensor")
                if stored_name is None:
                    self._different.append(f"{name} is a tensor here and something else in the checkpoint")
                elif self._fill(name, value, stored_name, own_path):
                    loaded[key] = value
            else:
                self._stored.allocate(node, own_path)
                plain[key] = node
        if not self._selection.rename and self._selection.only is None:
            self._unexpected.extend(paths.spell((*path, *paths.from_dotted(key))) for key in stored)

        def decode() -> dict[str, Any]:
            decoded = {
                key: self._stored.decode(node, (*path, *paths.from_dotted(key)))
                for key, node in plain.items()
            }
            return {**loaded, **decoded}

        self._later(_MODULES, path, decode, lambda full: _load_module(module, full, read, versions))
        return lambda: module

    def _visit_optimizer(self, optimizer: torch.optim.Optimizer, found: Node, path: Path) -> Build:
        if not self._wants(paths.spell(path)):
            return lambda: optimizer
        payload = payload_of(found, "optimizer")
        if payload is None:
            return self._visit_optimizer_of_plain_values(optimizer, found, path)
        groups_node, state_pairs, other_node, extra_node = optimizer_parts(payload, path)
        try:
            named = NamedParameters.of(optimizer, self._parameters)
        except RefusedError as refused:
            raise StateMismatchError(f"{key_path(path)} {refused}") from None
        stored_names = {self._selection.stored_name(name): name for name in named.parameters}
        groups = self._stored.named_groups(groups_node, path)
        self._match_groups(groups, stored_names, named, path)
        self._match_options(optimizer, groups, path)
        for node in (other_node, extra_node):
            self._stored.allocate(node, path)
        nodes: dict[str, Node] = {}
        for pair in state_pairs:
            name = stored_names.get(pair[0])
            if name is None:
                self._unexpected.append(f"{paths.spell((*path, 'state'))}.{pair[0]}")
                continue
            nodes[name] = pair[1]
            self._place_state(
                optimizer, named.parameters[name], pair[1], (*path, "state", *named.paths[name])
            )

        def decode() -> OptimizerState:
            read = self._stored.decode
            return OptimizerState(
                groups=[
                    {**group, "params": list(names)}
                    for group, names in zip(read(groups_node, path), named.groups, strict=True)
                ],
                state={
                    name: read(node, (*path, "state", *named.paths[name])) for name, node in nodes.items()
                },
                other_state=read(other_node, path),
                extra=read(extra_node, path),
            )

        self._later(_OPTIMIZERS, path, decode, lambda state: optim.load_named_state(optimizer, state, named))
        return lambda: optimizer

    def _visit_optimizer_of_plain_values(
        self, optimizer: torch.optim.Optimizer, found: Node, path: Path
    ) -> Build:
        """A state dict that was saved as a value: torch's own form, which the optimizer takes."""
        nodes = self._stored.mapping_nodes(found, path) or {}
        if "state" not in nodes or "param_groups" not in nodes:
            return self._differs(optimizer, path, "is an optimizer here and something else in the checkpoint")
        groups = self._stored.groups(nodes["param_groups"], path)
        here = [len(group["params"]) for group in optimizer.param_groups]
        stored = [len(group["params"]) for group in groups]
        if here != stored:
            return self._differs(
                optimizer, path, f"has groups of {here} parameters here and of {stored} in the checkpoint"
            )
        return self._visit_stateful(optimizer, found, path)

    def _match_groups(
        self,
        groups: list[dict[str, Any]],
        stored_names: Mapping[str, str],
        named: NamedParameters,
        path: Path,
    ) -> None:
        name = paths.spell(path)
        if len(groups) != len(named.groups):
            self._different.append(
                f"{name} has {len(named.groups)} parameter groups here and {len(groups)} in the checkpoint"
            )
            return
        mine = [set(group) for group in named.groups]
        theirs = [{stored_names.get(stored, stored) for stored in group["params"]} for group in groups]
        if mine != theirs and all(group in theirs for group in mine):
            # Put in order silently they would no longer fit a scheduler's list of learning rates.
            self._different.append(f"{name} has its parameter groups in another order than in the checkpoint")
            return
        for number, (here, stored) in enumerate(zip(mine, theirs, strict=True)):
            if here != stored:
                first = min(here ^ stored)
                self._different.append(
                    f"{name}: parameter group {number} holds other parameters here than in the "
                    f"checkpoint ({first})"
                )

    def _match_options(
        self, optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], path: Path
    ) -> None:
        """Tell an optimizer of another kind by its options: each side has some that the other lacks.

        Options on one side alone are a release's or a scheduler's.
        """
        here = {option for group in optimizer.param_groups for option in group}
        stored = {option for group in groups for option in group}
        mine, theirs = set(optimizer.defaults) - stored, stored - here - _SCHEDULERS_OPTIONS
        if mine and theirs and groups:
            self._different.append(
                f"{paths.spell(path)} is a {type(optimizer).__name__} with {', '.join(sorted(mine))} here, "
                f"and has {', '.join(sorted(map(str, theirs)))} in the checkpoint: another optimizer's"
            )

    def _place_state(
        self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor, node: Node, path: Path
    ) -> None:
        """Choose where each tensor of a parameter's state comes to lie."""
        for key_node, value in mapping_pairs(node) or []:
            stored = payload_of(value, "tensor")
            record = self._index.find(stored) if isinstance(stored, str) else None
            if record is not None and isinstance(key_node, str) and record.name not in self._stored.own:
                target = optim.state_target(
                    optimizer, parameter, key_node, record.shape, torch_dtype(record.dtype)
                )
                name = paths.spell((*path, key_node))
                self._stored.own[record.name] = target
                self._plan(name, target, record)
                self.filling.replaceable.add(name)
        self._stored.allocate(node, path)

    # -------------------------------------------------------------------------- single tensors

    def _fill(self, name: str, target: torch.Tensor, stored: Any, path: Path) -> bool:
        """Plan to fill the caller's tensor; say whether it will be."""
        if not self._wants(name):
            return False
        record = self._stored.record(stored, path)
        problem = difference(target, record)
        if problem is not None:
            self._different.append(f"{name}: {problem}")
            return False
        local = target.detach()
        memory = memory_of(local)
        other = self._memory.setdefault(memory, record) if memory is not None else record
        if other is not record:
            self._different.append(
                f"{name} shares its memory with another tensor here, and the checkpoint holds the two apart "
                f"({record.name} and {other.name})"
            )
            return False
        self.filling.in_place.add(name)
        self._plan(name, local, record)
        return True

    def _plan(self, name: str, target: torch.Tensor, record: TensorRecord) -> None:
        self.filling.targets[name] = target.detach()
        self.filling.records[name] = record

    def _stored_key(self, keys: Iterable[Any], key: Any, path: Path, split: Callable[[Any], Path]) -> Any:
        """What the checkpoint calls ``key`` of the container at ``path``, by the rename map.

        Args:
            keys: the checkpoint's keys there.
            split: a key to the path elements that it stands for.
        """
        name = paths.spell((*path, *split(key)))
        wanted = self._selection.stored_name(name)
        if wanted == name:
            return key
        # The container itself may have been renamed, too; or only what lies in it has moved.
        here = paths.spell(path)
        above = {f"{self._selection.stored_name(here)}.", f"{here}."} if path else {""}
        for other in keys:
            spelled = paths.spell(split(other))
            if any(f"{prefix}{spelled}" == wanted for prefix in above):
                return other
        return key

    # ---------------------------------------------------------------------- one rank's own values

    def _note_missing(self, name: str) -> None:
        if name not in self.filling.missing_per_rank:
            self.filling.missing_per_rank.append(name)

    def _lacks(self, name: str, path: Path) -> Any:
        """What stands for a value of which this rank stored none: the caller's, or None."""
        self._note_missing(name)
        return value_at(self._template, path)

    # ---------------------------------------------------------------------------------- verdict

    def _later(self, order: int, path: Path, decode: Callable[[], Any], apply: Callable[[Any], None]) -> None:
        self.filling._loads.append(_Load(order, path, decode, apply))

    def _wants(self, name: str) -> bool:
        if self._selection.only is None:
            return True
        fitting = self._selection.fitting(name)
        self._unused_patterns.difference_update(fitting)
        return bool(fitting)

    def _miss(self, path: Path) -> None:
        if self._wants(paths.spell(path)):
            self._missing.append(paths.spell(path))

    def _differs(self, template: Any, path: Path, problem: str) -> Build:
        self._different.append(f"{paths.spell(path) or 'the state'} {problem}")
        return lambda: template

    def check(self) -> None:
        is_relaxed = not self._selection.strict
        nowhere = [f"anything that fits only={pattern!r}" for pattern in sorted(self._unused_patterns)]
        missing = () if is_relaxed else (*self._missing, *nowhere)
        unexpected = () if is_relaxed else tuple(self._unexpected)
        if not (missing or unexpected or self._different):
            return
        parts = [
            *_listed("missing", missing),
            *_listed("in the checkpoint and not in your state", unexpected),
            *_listed("different", self._different),
        ]
        raise StateMismatchError(
            f"the checkpoint does not fit your state: {'; '.join(parts)}. strict=False ignores names "
            "that only one side has, only= restores a part, rename= maps moved names",
            missing=missing,
            unexpected=unexpected,
            different=self._different,
        )


def _listed(what: str, names: Any) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    return [f"{what}: {', '.join(list(names)[:20])}{more}"]


def _load_module(
    module: torch.nn.Module, loaded: dict[str, Any], read: ModuleState, versions: Mapping[str, Any] | None
) -> None:
    """Hand a module its state, its hooks and extra state included; its tensors are filled already.

    It gets its own names, with those of what wraps it.
    """
    full: Any = OrderedDict(
        (own, loaded[name]) for own, name in zip(read.shown, read.names, strict=True) if name in loaded
    )
    if versions is not None:
        full._metadata = read.bare.own_versions(list(getattr(read.shown, "_metadata", {})), dict(versions))
    module.load_state_dict(full, strict=len(loaded) == len(read.names))
