"""Typed JSON, read back: nodes to values. The mirror image of `strongroom.values`.

Strict and bounded: a node is accepted only in the one spelling that an encoder gives it, and
nothing that a file names is imported, looked up as an attribute or called. The program's own
types are rebuilt by what the program registered, and by nothing else.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final

import strongroom.standins  # noqa: F401  every reader knows them: they are the product's own
from strongroom import canonical
from strongroom.atoms import ATOM_TAGS, Atom, MalformedError, Node, UnavailableError, read_atom
from strongroom.errors import FormatError, StateMismatchError
from strongroom.keypath import Attribute, Path, Within, key_path, short
from strongroom.registry import registration_named
from strongroom.values import DEFAULT_FACTORIES, MAX_DEPTH

__all__ = ["Decoder"]


class Decoder:
    """Turns nodes back into values; accepts only what an `Encoder` gives.

    Args:
        leaves: for each tag that is not known here, what rebuilds its value from the payload
            and the path. It may call `decode` again.
    """

    def __init__(self, leaves: Mapping[str, Callable[[Node, Path], Any]] | None = None) -> None:
        self._leaves = leaves or {}
        self._path: list[Any] = []
        self._depth = 0
        self._is_within_key = False

    def decode(self, found: Node, path: Sequence[Any] = ()) -> Any:
        """The value of a node that stands at this path.

        Raises:
            FormatError: the node is not what an encoder gives.
            StateMismatchError: it is, but this program has not registered a type that it
                names, or this machine cannot build the value.
        """
        outer = self._path, self._depth, self._is_within_key
        self._path = list(path)
        try:
            return self._value(found)
        except MalformedError as malformed:
            raise FormatError(f"{key_path(self._path)}: {malformed}") from None
        except UnavailableError as unavailable:
            raise StateMismatchError(f"{key_path(self._path)}: {unavailable}") from unavailable.__cause__
        finally:
            self._path, self._depth, self._is_within_key = outer

    def _value(self, found: Node) -> Any:
        kind = type(found)
        if kind is str or found is None or kind is bool:
            return found
        if kind is int:
            if abs(found) > canonical.MAX_INTEGER:
                raise MalformedError("an integer that is not below 2^53")
            return found
        if kind is list:
            return self._container(Decoder._items, "list", found)
        if kind is not dict:
            raise MalformedError(f"a {kind.__name__} is no node")
        tag = found.get("$")
        if len(found) != 2 or type(tag) is not str or "v" not in found:
            raise MalformedError('an object that is not {"$": tag, "v": payload}')
        container = _READERS.get(tag)
        if container is not None:
            return self._container(container, tag, found["v"])
        atom = _atom_tagged(tag)
        if atom is not None:
            return read_atom(atom, found["v"])
        if tag in self._leaves and not self._is_within_key:
            return self._leaves[tag](found["v"], tuple(self._path))
        raise MalformedError(f"the unknown tag {tag[:40]!r}")

    def _container(self, read: Callable[[Decoder, list[Node]], Any], tag: str, payload: Node) -> Any:
        if type(payload) is not list:
            raise MalformedError(f"a {tag} whose payload is no list")
        if self._depth == MAX_DEPTH:
            raise MalformedError(f"more than {MAX_DEPTH} containers within each other")
        self._depth += 1
        value = read(self, payload)
        self._depth -= 1
        return value

    def _items(self, nodes: list[Node]) -> list[Any]:
        path = self._path
        values = []
        for index, found in enumerate(nodes):
            path.append(index)
            values.append(self._value(found))
            path.pop()
        return values

    def _hashed(self, found: Node, what: str) -> Any:
        outer, self._is_within_key = self._is_within_key, True
        self._path.append(Within(what))
        value = self._value(found)
        try:
            hash(value)
        except Exception as error:
            raise MalformedError(f"a {type(value).__qualname__} cannot stand there: {error}") from error
        self._path.pop()
        self._is_within_key = outer
        return value

    def _pairs(self, nodes: list[Node]) -> dict[Any, Any]:
        path = self._path
        values: dict[Any, Any] = {}
        for found in nodes:
            if type(found) is not list or len(found) != 2:
                raise MalformedError("an entry that is no pair of key and value")
            key = found[0] if type(found[0]) is str else self._hashed(found[0], "a key")
            path.append(key)
            value = self._value(found[1])
            try:
                values[key] = value
            except Exception as error:  # keys of equal hash are compared, by code of their classes
                raise MalformedError(f"keys that cannot stand in one dict: {error}") from error
            path.pop()
        if len(values) != len(nodes):
            raise MalformedError("a key that stands there twice")
        return values

    def _named(self, nodes: Node) -> dict[str, Any]:
        if type(nodes) is not list:
            raise MalformedError("attributes that are no list")
        values: dict[str, Any] = {}
        for found in nodes:
            if type(found) is not list or len(found) != 2:
                raise MalformedError("an attribute that is no pair of name and value")
            name = self._text(found[0])
            self._path.append(Attribute(name))
            values[name] = self._value(found[1])
            self._path.pop()
        if len(values) != len(nodes):
            raise MalformedError("an attribute that stands there twice")
        return values

    def _text(self, found: Node) -> str:
        text = self._value(found)
        if type(text) is not str:
            raise MalformedError(f"a name that is a {type(text).__name__}")
        return text

    def _head(self, nodes: list[Node], what: str) -> tuple[Node, list[Node]]:
        if not nodes:
            raise MalformedError(f"no {what}")
        return nodes[0], nodes[1:]

    def _elements(self, nodes: list[Node]) -> set[Any]:
        spelled = [canonical.encode(found) for found in nodes]
        if spelled != sorted(spelled):
            raise MalformedError("elements of a set that are not in the order of their bytes")
        elements = [self._hashed(found, "an element") for found in nodes]
        try:
            values = set(elements)
        except Exception as error:
            raise MalformedError(f"elements that cannot stand in one set: {error}") from error
        if len(values) != len(nodes):
            raise MalformedError("an element that stands there twice")
        return values

    def _ordered_dict(self, nodes: list[Node]) -> OrderedDict[Any, Any]:
        attributes, pairs = self._head(nodes, "attributes")
        value = OrderedDict(self._pairs(pairs))
        vars(value).update(self._named(attributes))
        return value

    def _defaultdict(self, nodes: list[Node]) -> defaultdict[Any, Any]:
        name, pairs = self._head(nodes, "default_factory")
        if name is not None and (type(name) is not str or name not in DEFAULT_FACTORIES):
            raise MalformedError(f"the unknown default_factory {name!r:.40}")
        return defaultdict(None if name is None else DEFAULT_FACTORIES[name], self._pairs(pairs))

    def _counter(self, nodes: list[Node]) -> Counter[Any]:
        value: Counter[Any] = Counter()
        dict.update(value, self._pairs(nodes))
        return value

    def _deque(self, nodes: list[Node]) -> deque[Any]:
        maxlen_node, items = self._head(nodes, "maxlen")
        maxlen = None if maxlen_node is None else self._value(maxlen_node)
        if maxlen is not None and (type(maxlen) is not int or not len(items) <= maxlen <= sys.maxsize):
            raise MalformedError(f"a deque of {len(items)} items whose maxlen is {short(maxlen)}")
        return deque(self._items(items), maxlen)

    def _namespace(self, nodes: list[Node]) -> SimpleNamespace:
        value = SimpleNamespace()
        vars(value).update(self._named(nodes))
        return value

    def _argparse_namespace(self, nodes: list[Node]) -> Namespace:
        value = Namespace()
        vars(value).update(self._named(nodes))
        return value

    def _slice(self, nodes: list[Node]) -> slice:
        if len(nodes) != 3:
            raise MalformedError("a slice without its three parts")
        return slice(*self._items(nodes))

    def _object(self, nodes: list[Node]) -> Any:
        if len(nodes) != 2:
            raise MalformedError("a registered type without its two parts")
        name = self._text(nodes[0])
        registration = registration_named(name)
        if registration is None:
            raise UnavailableError(
                f"the checkpoint holds an object of the registered type {name[:128]!r}, which this "
                f"program has not registered; call register_type or register_codec before restoring"
            )
        parts = self._value(nodes[1])
        try:
            return registration.put_together(parts)
        except UnavailableError:
            raise
        except Exception as error:
            raise UnavailableError(
                f"the registered decoding of {name!r} failed: {type(error).__name__}: {error}"
            ) from error


_READERS: Final[dict[str, Callable[[Decoder, list[Node]], Any]]] = {
    "tuple": lambda decoder, nodes: tuple(decoder._items(nodes)),
    "set": Decoder._elements,
    "frozenset": lambda decoder, nodes: frozenset(decoder._elements(nodes)),
    "dict": Decoder._pairs,
    "ordered_dict": Decoder._ordered_dict,
    "defaultdict": Decoder._defaultdict,
    "counter": Decoder._counter,
    "deque": Decoder._deque,
    "namespace": Decoder._namespace,
    "argparse_namespace": Decoder._argparse_namespace,
    "slice": Decoder._slice,
    "object": Decoder._object,
}


def _atom_tagged(tag: str) -> Atom | None:
    if tag.startswith("numpy."):
        from strongroom.arrays import ARRAY_TAGS

        return ARRAY_TAGS.get(tag)
    return ATOM_TAGS.get(tag)
