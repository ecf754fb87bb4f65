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
from fnmatch import fnmatchcase
from typing import Any, Final

import torch

from strongroom import optim, paths, stage
from strongroom.arrays import array_in_shard, array_of
from strongroom.canonical import Json
from strongroom.decoding import Decoder
from strongroom.dtypes import torch_dtype
from strongroom.errors import FormatError, StateMismatchError
from strongroom.index import Index, TensorRecord
from strongroom.keypath import Path, key_path
from strongroom.optim import NamedParameters, OptimizerState
from strongroom.tree import find_modules, is_stateful
from strongroom.values import Node

__all__ = ["Filling", "Selection", "difference", "match"]

_MODULES, _OPTIMIZERS, _REST = range(3)
"""The order in which objects are loaded: an optimizer may look at its parameters."""

_ABSENT: Final = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which part of a checkpoint is wanted, and how strictly.

    Attributes:
        strict: whether a name that only one side has is an error. A shape or dtype that
            differs always is.
        only: patterns (``*``, ``?``, ``[...]``) of names in the caller's state; one that fits a
            container, module or optimizer stands for all that is in it. The rest stays as it is.
        rename: the caller's name or prefix -> the checkpoint's, for moved parameters.
    """

    strict: bool = True
    only: tuple[str, ...] | None = None
    rename: Mapping[str, str] = field(default_factory=dict)

    def fitting(self, name: str) -> list[str]:
        """The patterns of ``only`` that a name, or something that it lies in, fits."""
        return [
            pattern
            for pattern in self.only or ()
            if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")
        ]

    def stored_name(self, name: str) -> str:
        """What the caller's name is called in the checkpoint: by the longest prefix that fits."""
        fitting = [mine for mine in self.rename if name == mine or name.startswith(f"{mine}.")]
        if not fitting:
            return name
        mine = max(fitting, key=len)
        return self.rename[mine] + name[len(mine) :]


@dataclass(frozen=True, slots=True)
class _Load:
    """Hands one object its state, once that is decoded."""

    order: int
    decode: Callable[[], Any]
    apply: Callable[[Any], None]


@dataclass(slots=True, kw_only=True)
class Filling:
    """What a restore of one checkpoint into one template will do.

    Attributes:
        targets: memory to fill, by the caller's name for it.
        records: the stored tensor that fills each.
        in_place: names of targets that are the caller's own memory and stay in use.
        replaceable: names of targets in an optimizer's state, which a load replaces whole.
    """

    targets: dict[str, torch.Tensor] = field(default_factory=dict)
    records: dict[str, TensorRecord] = field(default_factory=dict)
    in_place: set[str] = field(default_factory=set)
    replaceable: set[str] = field(default_factory=set)
    _loads: list[_Load] = field(default_factory=list)
    _build: Callable[[], Any] = lambda: None

    def finish(self) -> Any:
        """Load objects, in order, and build the caller's state; every target must be filled.

        Raises:
            StateError: a value cannot be built, or an object refuses its state.
            FormatError: a document is not what it should be.
        """
        # Everything is decoded before anything is loaded: a document that turns out malformed
        # must not have reached any load_state_dict.
        with _bounded_depth():
            state = self._build()
            decoded = [(load, load.decode()) for load in sorted(self._loads, key=lambda load: load.order)]
        for load, value in decoded:
            load.apply(value)
        return state


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
    with _bounded_depth():
        matcher.filling._build = matcher.visit({} if template is None else template, document, ())
    matcher.check()
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
        self._rank_values = rank_values
        self._index = index
        self._selection = selection
        self._parameters = optim.name_parameters(find_modules(template))
        self._missing: list[str] = []
        self._unexpected: list[str] = []
        self._different: list[str] = []
        self._unused_patterns = set(selection.only or ())
        self._memory: dict[Any, TensorRecord] = {}
        self._own: dict[str, torch.Tensor] = {}
        self._decoder = Decoder(
            {
                "tensor": self._decode_tensor,
                "ndarray": self._decode_array,
                "generator": self._decode_generator,
                "module": self._decode_module,
                "optimizer": self._decode_optimizer,
                "stateful": self._decode_stateful,
                "per_rank": self._decode_per_rank,
            }
        )

    # ------------------------------------------------------------------------------- the walk

    def visit(self, template: Any, found: Node, path: Path) -> Build:
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
        if type(template) in (list, tuple) and _holds_fillable(template):
            return self._visit_sequence(template, found, path)
        return self._visit_plain(template, found, path)

    def _is_walked(self, template: Mapping[Any, Any], path: Path) -> bool:
        if not path or not template:
            return bool(template)
        is_part_wanted = self._selection.only is not None and not self._wants(paths.spell(path))
        return is_part_wanted or _holds_fillable(template)

    def _visit_mapping(self, template: Mapping[Any, Any], found: Node, path: Path) -> Build:
        stored = self._mapping_nodes(found, path)
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
        return lambda: {key: build() for key, build in builds.items()}

    def _visit_sequence(self, template: Any, found: Node, path: Path) -> Build:
        nodes = _payload(found, "tuple") if type(template) is tuple else found
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
        self._allocate(found, path)
        return lambda: self._decoder.decode(found, path)

    def _visit_tensor(self, template: torch.Tensor, found: Node, path: Path) -> Build:
        name = paths.spell(path)
        if not self._wants(name):
            return lambda: template
        stored = _payload(found, "tensor")
        if stored is None:
            return self._differs(template, path, "is a tensor here and something else in the checkpoint")
        self._fill(name, template, stored, path)
        return lambda: template

    def _visit_generator(self, template: torch.Generator, found: Node, path: Path) -> Build:
        if not self._wants(paths.spell(path)):
            return lambda: template
        payload = _payload(found, "generator")
        if payload is None:
            return self._differs(
                template, path, "is a torch.Generator here and something else in the checkpoint"
            )
        self._allocate(found, path)
        self._later(
            _REST,
            lambda: self._generator_state(payload, path),
            lambda state: _set_generator(template, state),
        )
        return lambda: template

    def _visit_stateful(self, template: Any, found: Node, path: Path) -> Build:
        payload = _payload(found, "stateful")
        node = found if payload is None else payload
        if self._wants(paths.spell(path)):
            self._allocate(node, path)
            self._later(_REST, lambda: self._decoder.decode(node, path), template.load_state_dict)
        return lambda: template

    def _visit_module(self, module: torch.nn.Module, found: Node, path: Path) -> Build:
        stored, versions = self._module_nodes(found, path)
        if stored is None:
            return self._differs(module, path, "is a module here and something else in the checkpoint")
        state_dict = module.state_dict()
        plain: dict[str, Node] = {}
        loaded: dict[str, Any] = {}
        for key, value in state_dict.items():
            own_path = (*path, *paths.from_dotted(key))
            name = paths.spell(own_path)
            stored_key = self._stored_key(stored, key, path, paths.from_dotted)
            node = stored.pop(stored_key, _ABSENT)
            if not self._wants(name):
                continue
            if node is _ABSENT:
                self._missing.append(name)
            elif isinstance(value, torch.Tensor) and not key.endswith("_extra_state"):
                stored_name = _payload(node, "tensor")
                if stored_name is None:
                    self._different.append(f"{name} is a tensor here and something else in the checkpoint")
                elif self._fill(name, value, stored_name, own_path):
                    loaded[key] = value
            else:
                self._allocate(node, own_path)
                plain[key] = node
        if not self._selection.rename and self._selection.only is None:
            self._unexpected.extend(paths.spell((*path, *paths.from_dotted(key))) for key in stored)

        def decode() -> dict[str, Any]:
            decoded = {
                key: self._decoder.decode(node, (*path, *paths.from_dotted(key)))
                for key, node in plain.items()
            }
            return {**loaded, **decoded}

        self._later(
            _MODULES, decode, lambda full: _load_module(module, full, state_dict, versions, key_path(path))
        )
        return lambda: module

    def _visit_optimizer(self, optimizer: torch.optim.Optimizer, found: Node, path: Path) -> Build:
        if not self._wants(paths.spell(path)):
            return lambda: optimizer
        payload = _payload(found, "optimizer")
        if payload is None:
            return self._visit_optimizer_of_plain_values(optimizer, found, path)
        groups_node, state_pairs, other_node, extra_node = _four(payload, path)
        named = NamedParameters.of(optimizer, self._parameters)
        stored_names = {self._selection.stored_name(name): name for name in named.parameters}
        groups = self._decode_groups(groups_node, path)
        self._match_groups(groups, stored_names, named, path)
        for node in (other_node, extra_node):
            self._allocate(node, path)
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
            read = self._decoder.decode
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

        self._later(_OPTIMIZERS, decode, lambda state: optim.load_named_state(optimizer, state, named))
        return lambda: optimizer

    def _visit_optimizer_of_plain_values(
        self, optimizer: torch.optim.Optimizer, found: Node, path: Path
    ) -> Build:
        """A state dict that was saved as a value: torch's own form, which the optimizer takes."""
        nodes = self._mapping_nodes(found, path) or {}
        if "state" not in nodes or "param_groups" not in nodes:
            return self._differs(optimizer, path, "is an optimizer here and something else in the checkpoint")
        groups = self._decode_groups(nodes["param_groups"], path)
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

    def _place_state(
        self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor, node: Node, path: Path
    ) -> None:
        """Choose where each tensor of a parameter's state comes to lie."""
        for key_node, value in _mapping_pairs(node) or []:
            stored = _payload(value, "tensor")
            record = self._index.find(stored) if isinstance(stored, str) else None
            if record is not None and isinstance(key_node, str) and record.name not in self._own:
                target = optim.state_target(
                    optimizer, parameter, key_node, record.shape, torch_dtype(record.dtype)
                )
                name = paths.spell((*path, key_node))
                self._own[record.name] = target
                self._plan(name, target, record)
                self.filling.replaceable.add(name)
        self._allocate(node, path)

    # -------------------------------------------------------------------------- single tensors

    def _fill(self, name: str, target: torch.Tensor, stored: Any, path: Path) -> bool:
        """Plan to fill the caller's tensor; say whether it will be."""
        if not self._wants(name):
            return False
        record = self._record(stored, path)
        local = target.detach()
        problem = difference(local, record)
        if problem is not None:
            self._different.append(f"{name}: {problem}")
            return False
        memory = _memory_of(local)
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

    def _record(self, stored: Any, path: Path) -> TensorRecord:
        record = self._index.find(stored) if isinstance(stored, str) else None
        if record is None:
            raise FormatError(f"{key_path(path)}: the index does not hold the tensor {stored!r:.80}")
        return record

    def _allocate(self, node: Node, path: Path) -> None:
        """Plan to fill new memory for every tensor that a node refers to."""
        for stored in self._references(node):
            record = self._record(stored, path)
            if record.name not in self._own:
                self._own[record.name] = torch.empty(record.shape, dtype=torch_dtype(record.dtype))
                # "=" starts no name of the caller's: it is escaped there.
                self._plan(f"={record.name}", self._own[record.name], record)

    def _references(self, node: Node) -> list[Any]:
        found = []
        stack = [node]
        seen: set[str] = set()
        while stack:
            item = stack.pop()
            if type(item) is list:
                stack.extend(item)
            elif type(item) is dict:
                tag, payload = item.get("$"), item.get("v")
                if tag == "tensor":
                    found.append(payload)
                elif tag in ("ndarray", "generator") and type(payload) is list and len(payload) == 2:
                    found.append(payload[0] if tag == "ndarray" else payload[1])
                elif tag == "per_rank":
                    # Each once: a hostile document could let two of them refer to each other.
                    if isinstance(payload, str) and payload not in seen:
                        seen.add(payload)
                        stack.append(self._rank_values.get(payload))
                else:
                    stack.append(payload)
        return found

    # -------------------------------------------------------------------- decoding without a place

    def _decode_tensor(self, payload: Node, path: Path) -> torch.Tensor:
        return self._own[self._record(payload, path).name]

    def _decode_array(self, payload: Node, path: Path) -> Any:
        name, dtype = array_in_shard(payload)
        return array_of(self._decode_tensor(name, path), dtype)

    def _decode_generator(self, payload: Node, path: Path) -> torch.Generator:
        state = self._generator_state(payload, path)
        device = payload[0]
        try:
            generator = torch.Generator(device)
        except RuntimeError as error:
            raise StateMismatchError(
                f"{key_path(path)}: a torch.Generator of {device!r:.40}, which this machine cannot make: "
                f"{error}"
            ) from None
        _set_generator(generator, state)
        return generator

    def _generator_state(self, payload: Node, path: Path) -> torch.Tensor:
        if type(payload) is not list or len(payload) != 2 or type(payload[0]) is not str:
            raise FormatError(f"{key_path(path)}: a generator without its two parts")
        return self._decode_tensor(payload[1], path)

    def _decode_module(self, payload: Node, path: Path) -> dict[str, Any]:
        stored, _ = self._module_nodes({"$": "module", "v": payload}, path)
        return {
            name: self._decoder.decode(node, (*path, *paths.from_dotted(name)))
            for name, node in (stored or {}).items()
        }

    def _decode_optimizer(self, payload: Node, path: Path) -> dict[str, Any]:
        groups_node, state_pairs, other_node, extra_node = _four(payload, path)
        decode = self._decoder.decode
        state = OptimizerState(
            groups=self._decode_groups(groups_node, path),
            state={pair[0]: decode(pair[1], (*path, "state", pair[0])) for pair in state_pairs},
            other_state=decode(other_node, path),
            extra=decode(extra_node, path),
        )
        try:
            return state.numbered()
        except (KeyError, TypeError) as error:
            raise FormatError(f"{key_path(path)}: state of a parameter that no group has ({error})") from None

    def _decode_stateful(self, payload: Node, path: Path) -> Any:
        return self._decoder.decode(payload, path)

    def _decode_per_rank(self, payload: Node, path: Path) -> Any:
        if type(payload) is not str or payload not in self._rank_values:
            raise FormatError(f"{key_path(path)}: the checkpoint holds no value of this rank")
        return self._decoder.decode(self._rank_values[payload], path)

    def _decode_groups(self, node: Node, path: Path) -> list[dict[str, Any]]:
        self._allocate(node, path)
        groups = self._decoder.decode(node, (*path, "param_groups"))
        is_sound = isinstance(groups, list) and all(
            isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups
        )
        if not is_sound:
            raise FormatError(f"{key_path(path)}: parameter groups that are no list of dicts with 'params'")
        return list(groups)

    # ------------------------------------------------------------------------ documents' forms

    def _mapping_nodes(self, found: Node, path: Path) -> dict[Any, Node] | None:
        if _payload(found, "module") is not None:
            # A module's tensors may go to a dict of them, as its state_dict() is one.
            return dict(self._module_nodes(found, path)[0] or {})
        pairs = _mapping_pairs(found)
        if pairs is None:
            return None
        nodes: dict[Any, Node] = {}
        for key_node, value in pairs:
            nodes[self._decoder.decode(key_node, path)] = value
        return nodes

    def _module_nodes(
        self, found: Node, path: Path
    ) -> tuple[dict[str, Node] | None, Mapping[str, Any] | None]:
        """A module's values by name, and its parts' versions; None for what is not there."""
        payload = _payload(found, "module")
        if payload is None:
            # A state_dict() that was saved as plain values serves as well.
            nodes = self._mapping_nodes(found, path)
            if nodes is None or not all(isinstance(key, str) for key in nodes):
                return None, None
            return nodes, self._plain_versions(found, path)
        if type(payload) is not list or not payload or not all(map(_is_named_pair, payload[1:])):
            raise FormatError(f"{key_path(path)}: a module that is no list of versions and named values")
        versions = self._decoder.decode(payload[0], path)
        if not isinstance(versions, dict):
            raise FormatError(f"{key_path(path)}: a module whose versions are no dict")
        return dict(payload[1:]), versions

    def _plain_versions(self, found: Node, path: Path) -> Mapping[str, Any] | None:
        """The versions that torch's ``state_dict()`` carries in an attribute, where they were kept."""
        payload = _payload(found, "ordered_dict")
        attributes = payload[0] if type(payload) is list and payload else None
        for pair in attributes if type(attributes) is list else ():
            if _is_named_pair(pair) and pair[0] == "_metadata":
                versions = self._decoder.decode(pair[1], path)
                return versions if isinstance(versions, Mapping) else None
        return None

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
        # The container itself may have been renamed, too.
        above = f"{self._selection.stored_name(paths.spell(path))}." if path else ""
        return next((other for other in keys if f"{above}{paths.spell(split(other))}" == wanted), key)

    # ---------------------------------------------------------------------------------- verdict

    def _later(self, order: int, decode: Callable[[], Any], apply: Callable[[Any], None]) -> None:
        self.filling._loads.append(_Load(order, decode, apply))

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


def _holds_fillable(value: Any) -> bool:
    if isinstance(value, torch.nn.Module | torch.optim.Optimizer | torch.Tensor | torch.Generator):
        return True
    if is_stateful(value):
        return True
    if isinstance(value, Mapping):
        return any(_holds_fillable(item) for item in value.values())
    return type(value) in (list, tuple) and any(_holds_fillable(item) for item in value)


def difference(target: torch.Tensor, record: TensorRecord) -> str | None:
    problem = None
    if tuple(target.shape) != record.shape or target.dtype != torch_dtype(record.dtype):
        stored = f"{str(torch_dtype(record.dtype)).removeprefix('torch.')}{list(record.shape)}"
        problem = (
            f"{str(target.dtype).removeprefix('torch.')}{list(target.shape)} here, {stored} in the checkpoint"
        )
    elif target.is_meta:
        problem = "is on the meta device here; materialize it before restoring"
    elif _overlaps_itself(target):
        problem = "its elements share memory here (an expanded tensor?), so they cannot be filled; clone() it"
    return problem


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    local = stage.local_tensor(tensor)
    if local.numel() == 0 or local.is_contiguous():
        return False
    reach = 0
    for stride, size in sorted(zip(local.stride(), local.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def _memory_of(tensor: torch.Tensor) -> Any:
    local = stage.local_tensor(tensor)
    if local.numel() == 0:
        return None
    return local.device, local.data_ptr(), tuple(local.shape), local.stride()


def _set_generator(generator: torch.Generator, state: torch.Tensor) -> None:
    try:
        generator.set_state(state)
    except RuntimeError as error:
        raise FormatError(f"the state of a torch.Generator is not one: {error}") from None


def _load_module(
    module: torch.nn.Module,
    loaded: dict[str, Any],
    state_dict: Any,
    versions: Mapping[str, Any] | None,
    where: str,
) -> None:
    """Hand a module its state, its hooks and extra state included; its tensors are filled already."""
    full: Any = OrderedDict((name, loaded[name]) for name in state_dict if name in loaded)
    if versions is not None:
        prefixes = getattr(state_dict, "_metadata", {})
        full._metadata = {**{prefix: {"version": 1} for prefix in prefixes}, **versions}
    try:
        module.load_state_dict(full, strict=len(loaded) == len(state_dict))
    except RuntimeError as error:
        raise StateMismatchError(f"{where}: the module refuses its state: {error}") from error


def _payload(node: Node, tag: str) -> Any:
    """A tagged node's payload, or None where it has another tag."""
    if type(node) is dict and node.get("$") == tag:
        return node.get("v")
    return None


def _four(payload: Node, path: Path) -> tuple[Node, list[Any], Node, Node]:
    if type(payload) is not list or len(payload) != 4 or type(payload[1]) is not list:
        raise FormatError(f"{key_path(path)}: an optimizer without its four parts")
    if not all(map(_is_named_pair, payload[1])):
        raise FormatError(f"{key_path(path)}: an optimizer's state that is not named")
    return payload[0], payload[1], payload[2], payload[3]


def _is_named_pair(pair: Json) -> bool:
    return type(pair) is list and len(pair) == 2 and type(pair[0]) is str


def _mapping_pairs(node: Node) -> list[Any] | None:
    """A stored dict's pairs of key and value, whatever kind of dict it was; None: it is none."""
    if type(node) is not dict or type(node.get("v")) is not list:
        return None
    tag, payload = node.get("$"), node["v"]
    if tag in ("ordered_dict", "defaultdict"):
        payload = payload[1:]
    elif tag not in ("dict", "counter"):
        return None
    return payload if all(type(pair) is list and len(pair) == 2 for pair in payload) else None
