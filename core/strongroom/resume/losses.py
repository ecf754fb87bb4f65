"""Before a save: values without an encoding are replaced by what can be stored, and named.

For the part of a state that a framework and its users put together (hyper-parameters, states of callbacks),
where one lambda must not cost a run its checkpoints. What has an encoding is left exactly as it is. What has
none but consists of parts (a dataclass, an enum's member, a dict of a class of its own) is stored as its
parts; of the rest nothing is stored but its name. Whatever does not come back by itself is told as a `Loss`.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import re
import sys
from argparse import Namespace
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, Final, Literal

import torch

from strongroom import tree
from strongroom.dtypes import dtype_name
from strongroom.errors import StateEncodingError
from strongroom.keypath import Attribute, Path, key_path
from strongroom.registry import registration_for
from strongroom.standins import LeftOut, Simplified
from strongroom.values import DEFAULT_FACTORIES, MAX_DEPTH, Encoder

__all__ = ["Loss", "calls_a_resolver", "encodable", "qualified_name"]

_SIMPLE: Final = frozenset({type(None), bool, int, float, complex, str, bytes, bytearray})
"""What always has an encoding, by exact type."""

_TENSORS: Final = frozenset({torch.Tensor, torch.nn.Parameter})
"""By exact type: a subclass may carry more than its data."""

_CODE: Final = (FunctionType, BuiltinFunctionType, MethodType, ModuleType, functools.partial)

_NAME_LENGTH: Final = 200

_RESOLVER: Final = re.compile(r"\$\{.*:", re.DOTALL)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A value that does not come back as it was.

    Attributes:
        place: its key path.
        what: the value, in words.
        kept: what is stored of it, in words; empty: nothing is.
        remedy: how to keep all of it.
    """

    place: str
    what: str
    kept: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.place} ({self.what}): {f'kept as {self.kept}' if self.kept else 'left out'}"


def encodable(
    value: Any,
    path: Path = (),
    *,
    objects: Literal["state", "omit"] = "state",
    known: Collection[str] = (),
) -> tuple[Any, tuple[Loss, ...]]:
    """The value with stand-ins where it holds what has no encoding, and what is lost by that.

    The value itself is not changed; where nothing had to be replaced it is returned.

    Args:
        value: containers, tensors and whatever else a user keeps.
        path: where it stands, for what is told.
        objects: what becomes of modules and others with a ``state_dict()``: their state is stored, or
            nothing of them, as where they are wanted as arguments again.
        known: qualified names of classes that come back by themselves, since `strongroom.resume.rebuild`
            will be given their makers.
    """
    walk = _Walk(objects, frozenset(known))
    # Some levels are around it in the state.
    found = walk.step(value, path, depth=4)
    return found, tuple(walk.losses)


def qualified_name(kind: type) -> str:
    """A class's name, for people and for comparison."""
    return f"{kind.__module__}.{kind.__qualname__}"[:_NAME_LENGTH]


def calls_a_resolver(value: Any) -> bool:
    """Whether a plain container has text that OmegaConf would call a function for (``${oc.env:HOME}``)."""
    if isinstance(value, str):
        return _RESOLVER.search(value) is not None
    if isinstance(value, Mapping):
        return any(map(calls_a_resolver, value.keys())) or any(map(calls_a_resolver, value.values()))
    return isinstance(value, list | tuple) and any(map(calls_a_resolver, value))


class _Walk:
    def __init__(self, objects: Literal["state", "omit"], known: frozenset[str]) -> None:
        self.losses: list[Loss] = []
        self._objects = objects
        self._known = known
        self._open: set[int] = set()

    def step(self, value: Any, path: Path, depth: int) -> Any:
        kind = type(value)
        if kind in _SIMPLE or _is_ordinary(value):
            return value
        if depth > MAX_DEPTH - 4 or id(value) in self._open:
            # A shared container is walked twice, one that contains itself would be for ever.
            return self._left_out(value, path, "which contains itself, or is nested too deep")
        self._open.add(id(value))
        try:
            container = _CONTAINERS.get(kind)
            if container is not None:
                return container(self, value, path, depth + 1)
            if registration_for(kind) is not None:
                return value if _has_encoding(value) else self._left_out(value, path)
            return self._of_users_code(value, path, depth)
        finally:
            self._open.discard(id(value))

    # ------------------------------------------------------------------------------- containers

    def _dict(self, value: dict[Any, Any], path: Path, depth: int) -> Any:
        found = self._items(value.items(), path, depth)
        return value if _is_same(found, value) else found

    def _items(self, items: Iterable[tuple[Any, Any]], path: Path, depth: int) -> dict[Any, Any]:
        found = {}
        for key, item in list(items):
            if type(key) is not str and not _is_key(key):
                self._tell((*path, key), f"the key is a {qualified_name(type(key))}")
                continue
            is_plain = type(item) in _SIMPLE or _is_ordinary(item)
            found[key] = item if is_plain else self.step(item, (*path, key), depth)
        return found

    def _ordered_dict(self, value: OrderedDict[Any, Any], path: Path, depth: int) -> Any:
        found = self._items(value.items(), path, depth)
        attributes = self._attributes(vars(value), path, depth)
        if _is_same(found, value) and _is_same(attributes, vars(value)):
            return value
        ordered = OrderedDict(found)
        vars(ordered).update(attributes)
        return ordered

    def _defaultdict(self, value: defaultdict[Any, Any], path: Path, depth: int) -> Any:
        factory = value.default_factory
        found = self._items(value.items(), path, depth)
        if factory is not None and DEFAULT_FACTORIES.get(getattr(factory, "__name__", "")) is not factory:
            return self._simplified(value, found, path, "a dict")
        return value if _is_same(found, value) else defaultdict(factory, found)

    def _sequence(self, value: Any, path: Path, depth: int) -> Any:
        found = [self.step(item, (*path, index), depth) for index, item in enumerate(value)]
        if all(new is old for new, old in zip(found, value, strict=True)):
            return value
        return deque(found, value.maxlen) if isinstance(value, deque) else type(value)(found)

    def _namespace(self, value: SimpleNamespace | Namespace, path: Path, depth: int) -> Any:
        found = self._attributes(vars(value), path, depth)
        return value if _is_same(found, vars(value)) else type(value)(**found)

    def _attributes(self, attributes: Mapping[str, Any], path: Path, depth: int) -> dict[str, Any]:
        return {
            name: self.step(item, (*path, Attribute(name)), depth) for name, item in list(attributes.items())
        }

    def _per_rank(self, value: tree.PerRank, path: Path, depth: int) -> Any:
        found = self.step(value.value, path, depth)
        return value if found is value.value else tree.PerRank(found)

    # ---------------------------------------------------------------- what is none of the core's types

    def _of_users_code(self, value: Any, path: Path, depth: int) -> Any:
        """What looking at it runs code of the user's: whatever that raises, no save ends by it."""
        before = len(self.losses)
        try:
            return self._foreign(value, path, depth)
        except Exception as error:  # noqa: BLE001 - any code's; told
            del self.losses[before:]
            return self._left_out(value, path, f"which raised {type(error).__name__} when it was looked at")

    def _foreign(self, value: Any, path: Path, depth: int) -> Any:
        if isinstance(value, (type, *_CODE)):
            return self._left_out(value, path)
        if isinstance(value, torch.Tensor):
            return value if _has_encoding(value) else self._odd_tensor(value, path)
        configuration = _plain_configuration(value)
        if configuration is not None:
            # Its text is stored as it stands: what it refers to may be a secret of another machine.
            runs = calls_a_resolver(configuration)
            kept = "a plain container, as it has ${...:...} that would call a function" if runs else ""
            return self._parts(value, configuration, path, depth, kept)
        if isinstance(value, torch.nn.Module | torch.optim.Optimizer) or tree.is_stateful(value):
            if self._objects == "omit":
                return self._left_out(value, path)
            return self._parts(value, value.state_dict(), path, depth, "its state_dict()")
        if _has_encoding(value):
            return value
        parts = _parts_of(value)
        if parts is None:
            return self._left_out(value, path)
        found, kept = parts
        return self._parts(value, found, path, depth, kept)

    def _parts(self, value: Any, parts: Any, path: Path, depth: int, kept: str) -> Any:
        return self._simplified(value, self.step(parts, path, depth + 2), path, kept)

    def _simplified(self, value: Any, parts: Any, path: Path, kept: str) -> Simplified:
        kind = qualified_name(type(value))
        if kept and kind not in self._known:
            self._tell(path, f"a {kind}", kept, f"strongroom.register_type or register_codec for {kind}")
        return Simplified(kind=kind, value=parts)

    def _odd_tensor(self, value: torch.Tensor, path: Path) -> LeftOut:
        name = qualified_name(type(value))
        what = f"a {name} of {value.layout} and {value.dtype} on {value.device}"
        self._tell(path, what, "", "tensors in their dense form, or of a type that safetensors has")
        return LeftOut(kind="object", name=name)

    def _left_out(self, value: Any, path: Path, why: str = "") -> LeftOut:
        code: Any = value.func if isinstance(value, functools.partial) else value
        if isinstance(code, type):
            kind, name, remedy = "class", qualified_name(code), ""
        elif inspect.isroutine(code):
            module = getattr(code, "__module__", None)
            own = str(getattr(code, "__qualname__", type(code).__name__))
            kind, name, remedy = "function", (f"{module}.{own}" if module else own)[:_NAME_LENGTH], ""
        else:
            kind, name = "object", qualified_name(type(value))
            is_code = isinstance(value, torch.nn.Module | torch.optim.Optimizer | ModuleType)
            remedy = "" if is_code else f"strongroom.register_codec for {name}"
        words = f"{'an' if kind == 'object' else 'a'} {kind}, {name}"
        self._tell(path, f"{words}, {why}" if why else words, "", remedy)
        return LeftOut(kind=kind, name=name)

    def _tell(self, path: Path, what: str, kept: str = "", remedy: str = "") -> None:
        self.losses.append(Loss(place=key_path(path), what=what, kept=kept, remedy=remedy))


_CONTAINERS: Final[Mapping[type, Callable[[_Walk, Any, Path, int], Any]]] = {
    dict: _Walk._dict,
    OrderedDict: _Walk._ordered_dict,
    defaultdict: _Walk._defaultdict,
    list: _Walk._sequence,
    tuple: _Walk._sequence,
    deque: _Walk._sequence,
    SimpleNamespace: _Walk._namespace,
    Namespace: _Walk._namespace,
    tree.PerRank: _Walk._per_rank,
}


def _is_same(found: Mapping[Any, Any], value: Mapping[Any, Any]) -> bool:
    return len(found) == len(value) and all(item is value[key] for key, item in found.items())


def _is_ordinary(value: Any) -> bool:
    """Whether it is a tensor of a kind that is always carried; of many tensors, this is asked of each."""
    return (
        type(value) in _TENSORS
        and value.layout is torch.strided
        and not value.is_meta
        and not value.is_nested
        and dtype_name(value.dtype) is not None
    )


def _is_key(key: Any) -> bool:
    try:
        Encoder().encode({key: None})
    except StateEncodingError:
        return False
    return True


def _has_encoding(value: Any) -> bool:
    try:
        if isinstance(value, Mapping):
            Encoder().encode(value)  # nothing of it is looked at, whose methods may do anything
        else:
            tree.capture({"value": value}, rank=0)
    except StateEncodingError:
        return False
    return True


def _plain_configuration(value: Any) -> Any:
    """An OmegaConf container as plain ones; None for all else. Who has such a value has imported it."""
    omegaconf: Any = sys.modules.get("omegaconf")
    if omegaconf is None or not isinstance(value, omegaconf.DictConfig | omegaconf.ListConfig):
        return None
    return omegaconf.OmegaConf.to_container(value, resolve=False)


def _parts_of(value: Any) -> tuple[Any, str] | None:
    """What a value consists of, as plain values, and words for it."""
    kind = type(value)
    if isinstance(value, enum.Flag):
        return int(value.value), "its number"
    if isinstance(value, enum.Enum):
        return value.name, "its name"
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: getattr(value, name) for name in names if hasattr(value, name)}, "a dict of its fields"
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return dict(zip(kind._fields, value, strict=True)), "a dict of its fields"
    for base, plain in _BASES:
        if isinstance(value, base) and kind is not base:
            return plain(value), f"a {base.__name__}"
    if isinstance(value, SimpleNamespace | Namespace):
        return dict(vars(value)), "a dict of its attributes"
    if isinstance(value, Mapping):
        try:
            return dict(value.items()), "a dict"
        except (TypeError, ValueError, LookupError, AttributeError, RuntimeError):
            return None
    return None


# By the base's own methods: the class's may do anything.
_BASES: Final[tuple[tuple[type, Callable[[Any], Any]], ...]] = (
    (dict, lambda value: dict(dict.items(value))),
    (list, lambda value: list(list.__iter__(value))),
    (tuple, lambda value: tuple(tuple.__iter__(value))),
    (set, lambda value: set(set.__iter__(value))),
    (frozenset, lambda value: frozenset(frozenset.__iter__(value))),
    (str, str.__str__),
    (int, int.__int__),
    (float, float.__float__),
    (bytes, lambda value: bytes(memoryview(value))),
)
