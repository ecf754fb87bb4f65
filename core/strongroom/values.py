"""Typed JSON: every supported Python value as nodes that canonical JSON can carry, bit for bit.
`docs/format.md`, clause 8.

This module owns the walk through containers and their tags; `strongroom.decoding` walks back.
What has no parts is spelled by `strongroom.atoms` and `strongroom.arrays`; the program's own
types are in `strongroom.registry`. Tensors, modules and the like are not known here: a callback
gets them.

Nothing is pickled, imported by name or evaluated. Types are matched exactly: a subclass might
hold what its parent's spelling does not show.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, Final

from strongroom import canonical
from strongroom.atoms import ATOMS, Atom, Node, RefusedError, int_node, node, text_node, torch_atom
from strongroom.errors import StateEncodingError
from strongroom.keypath import Attribute, Path, Within, key_path, short
from strongroom.registry import registration_for

__all__ = [
    "DEFAULT_FACTORIES",
    "LARGE",
    "MAX_DEPTH",
    "MAX_JSON_DEPTH",
    "MAX_VALUES",
    "Encoder",
    "Node",
    "node",
]

MAX_DEPTH: Final = 64
"""Containers within containers. Far above real states, far below Python's own limit."""

MAX_JSON_DEPTH: Final = 4 * MAX_DEPTH + 8
"""A container takes at most four levels of JSON, an atom fewer than eight."""

MAX_VALUES: Final = 4_000_000
"""Values in one document: what holds more belongs in a tensor. Stops shared lists from multiplying."""


LARGE: Final = 64
"""Entries of a dict that is worth looking at as a whole."""


Leaf = Callable[[Any, Path], Node | None]

Large = Callable[[Mapping[Any, Any], Path], "list[Node] | None"]


class Encoder:
    """Turns the values of one document into nodes.

    A node never shares memory with the value: what changes later is not seen.

    Args:
        leaf: asked for every value that has no spelling here, and for every NumPy array, with
            its path: a node, or None where it knows no better. It may call `encode` again.
        large: asked for every dict of at least `LARGE` entries, with its path: the pairs of its
            node, or None. It calls `count` for them, and may call `encode` again.
    """

    def __init__(self, leaf: Leaf | None = None, large: Large | None = None) -> None:
        self._leaf = leaf
        self._large = large
        self._path: list[Any] = []
        self._depth = 0
        self._values = 0
        self._is_within_key = False

    @property
    def is_full(self) -> bool:
        """Whether no container may stand in the one that is encoded now."""
        return self._depth >= MAX_DEPTH

    def encode(self, value: Any, path: Sequence[Any] = (), *, below: int = 0) -> Node:
        """The node of a value that stands at this path.

        Args:
            value: what is encoded.
            path: where it stands.
            below: containers between it and the one that is encoded now.

        Raises:
            StateEncodingError: it holds something without a safe encoding, contains itself, or
                is too deep or too large to be read back.
        """
        outer = self._path, self._depth, self._is_within_key
        self._path = list(path)
        self._depth += below
        try:
            return self._node(value)
        except RefusedError as refused:
            raise StateEncodingError(key_path(self._path), str(refused)) from refused.__cause__
        finally:
            self._path, self._depth, self._is_within_key = outer

    def _node(self, value: Any) -> Node:
        kind = type(value)
        write = _WRITERS.get(kind)
        if write is not None:
            return write(value)
        container = _CONTAINERS.get(kind)
        if container is not None:
            return self._deeper(container, value)
        if registration_for(kind) is not None:
            return self._deeper(Encoder._registered, value)
        return self._foreign(value)

    def _deeper(self, write: Callable[[Encoder, Any], Node], value: Any) -> Node:
        if self._depth == MAX_DEPTH:
            raise RefusedError(
                f"more than {MAX_DEPTH} containers within each other, or one that contains itself"
            )
        self._depth += 1
        found = write(self, value)
        self._depth -= 1
        return found

    def _foreign(self, value: Any) -> Node:
        atom = _foreign_atom(type(value))
        if atom is not None and atom.tag != "numpy.array":
            return node(atom.tag, atom.write(value))
        if self._leaf is not None and not self._is_within_key:
            found = self._leaf(value, tuple(self._path))
            if found is not None:
                return found
        if atom is not None:
            return node(atom.tag, atom.write(value))
        if self._is_within_key:
            raise RefusedError(
                f"a {type(value).__qualname__} cannot be stored as a key or an element of a set"
            )
        raise RefusedError(_advice(value))

    def count(self, more: int) -> None:
        """Note that the document holds so many values more."""
        self._values += more
        if self._values > MAX_VALUES:
            raise RefusedError(
                f"more than {MAX_VALUES} values in one state (a container that is referred to twice "
                f"counts twice); keep large data in tensors or NumPy arrays"
            )

    def _nodes(self, values: Sequence[Any]) -> list[Node]:
        self.count(len(values))
        path = self._path
        nodes = []
        for index, item in enumerate(values):
            path.append(index)
            nodes.append(self._node(item))
            path.pop()
        return nodes

    def _pairs(self, mapping: Mapping[Any, Any]) -> list[Node]:
        path = self._path
        if self._large is not None and len(mapping) >= LARGE and not self._is_within_key:
            found = self._large(mapping, tuple(path))
            if found is not None:
                return found
        self.count(2 * len(mapping))
        pairs = []
        for key, item in list(mapping.items()):
            key_node = key if type(key) is str and key.isascii() else self._hashed(key, "a key")
            path.append(key)
            pairs.append([key_node, self._node(item)])
            path.pop()
        return pairs

    def _named(self, attributes: Mapping[str, Any]) -> list[Node]:
        self.count(len(attributes))
        pairs = []
        for name, item in list(attributes.items()):
            if type(name) is not str:
                raise RefusedError(f"an attribute that is named by {short(name)}, not by a string")
            self._path.append(Attribute(name))
            pairs.append([text_node(name), self._node(item)])
            self._path.pop()
        return pairs

    def _hashed(self, value: Any, what: str) -> Node:
        outer, self._is_within_key = self._is_within_key, True
        self._path.append(Within(f"{what}, {short(value)}"))
        found = self._node(value)
        self._path.pop()
        self._is_within_key = outer
        return found

    def _list(self, value: list[Any]) -> Node:
        return self._nodes(value)

    def _tuple(self, value: tuple[Any, ...]) -> Node:
        return node("tuple", self._nodes(value))

    def _set(self, value: set[Any] | frozenset[Any]) -> Node:
        self.count(len(value))
        # A set's own order differs from process to process.
        elements = sorted((self._hashed(item, "an element") for item in value), key=canonical.encode)
        return node(type(value).__name__, elements)

    def _dict(self, value: dict[Any, Any]) -> Node:
        return node("dict", self._pairs(value))

    def _counter(self, value: Counter[Any]) -> Node:
        if vars(value):
            raise RefusedError(
                f"a Counter with attributes of its own: {', '.join(map(str, vars(value)))[:80]}"
            )
        return node("counter", self._pairs(value))

    def _ordered_dict(self, value: OrderedDict[Any, Any]) -> Node:
        # A module's state_dict() carries its versions in an attribute.
        return node("ordered_dict", [self._named(vars(value)), *self._pairs(value)])

    def _defaultdict(self, value: defaultdict[Any, Any]) -> Node:
        factory = value.default_factory
        if factory is not None and DEFAULT_FACTORIES.get(getattr(factory, "__name__", "")) is not factory:
            raise RefusedError(
                f"a defaultdict whose default_factory is {factory!r:.80}; only None and "
                f"{', '.join(DEFAULT_FACTORIES)} are stored: make it a dict"
            )
        name = None if factory is None else factory.__name__
        return node("defaultdict", [name, *self._pairs(value)])

    def _deque(self, value: deque[Any]) -> Node:
        maxlen = None if value.maxlen is None else int_node(value.maxlen)
        return node("deque", [maxlen, *self._nodes(value)])

    def _namespace(self, value: SimpleNamespace | Namespace) -> Node:
        return node(_NAMESPACES[type(value)], self._named(vars(value)))

    def _slice(self, value: slice) -> Node:
        return node("slice", self._nodes((value.start, value.stop, value.step)))

    def _registered(self, value: Any) -> Node:
        registration = registration_for(type(value))
        if registration is None:
            raise RefusedError(_advice(value))
        try:
            parts = registration.take_apart(value)
        except RefusedError:
            raise
        except Exception as error:
            raise RefusedError(
                f"the registered encoding of {registration.name!r} failed: {type(error).__name__}: {error}"
            ) from error
        self.count(1)
        found = self._deeper(Encoder._fields, parts) if registration.has_fields else self._node(parts)
        return node("object", [registration.name, found])

    def _fields(self, value: dict[str, Any]) -> Node:
        return node("dict", self._named(value))


def _atom_writer(atom: Atom) -> Callable[[Any], Node]:
    tag, write = atom.tag, atom.write
    return lambda value: {"$": tag, "v": write(value)}


def _itself(value: Any) -> Node:
    return value


_WRITERS: Final[dict[type, Callable[[Any], Node]]] = {
    type(None): _itself,
    bool: _itself,
    int: int_node,
    str: text_node,
    **{cls: _atom_writer(atom) for cls, atom in ATOMS.items()},
}

_CONTAINERS: Final[dict[type, Callable[[Encoder, Any], Node]]] = {
    list: Encoder._list,
    tuple: Encoder._tuple,
    set: Encoder._set,
    frozenset: Encoder._set,
    dict: Encoder._dict,
    OrderedDict: Encoder._ordered_dict,
    defaultdict: Encoder._defaultdict,
    Counter: Encoder._counter,
    deque: Encoder._deque,
    SimpleNamespace: Encoder._namespace,
    Namespace: Encoder._namespace,
    slice: Encoder._slice,
}

_NAMESPACES: Final = {SimpleNamespace: "namespace", Namespace: "argparse_namespace"}

DEFAULT_FACTORIES: Final[dict[str, Any]] = {
    cls.__name__: cls
    for cls in (
        bool, int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset, dict,
        OrderedDict, Counter, deque,
    )
}  # fmt: skip


def _foreign_atom(cls: type) -> Atom | None:
    """The atom of a NumPy or torch type; neither is imported, since who has its value did that."""
    if "numpy" in sys.modules:
        import numpy as np

        if issubclass(cls, (np.generic, np.ndarray)):
            from strongroom.arrays import array_atom

            return array_atom(cls)
    return torch_atom(cls)


def _advice(value: Any) -> str:
    cls = type(value)
    name = cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
    if isinstance(value, FunctionType | BuiltinFunctionType | MethodType | ModuleType | type):
        return (
            f"code has no place in a checkpoint, and this is a {name}; move it out of the state, "
            f"or store a name that your program looks up"
        )
    own = next((base for base in cls.__mro__[1:] if base in _WRITERS or base in _CONTAINERS), None)
    if own is None or hasattr(cls, "_fields"):
        advice = "use register_type (enums, dataclasses, named tuples) or register_codec, or leave it out"
    else:
        advice = f"convert it to {own.__name__}, which it extends, or use register_type or register_codec"
    return f"a {name} has no safe encoding; {advice}"
