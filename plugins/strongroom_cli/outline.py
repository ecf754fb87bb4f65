"""A typed document (`docs/format.md`, clause 8) as an outline for people, and as plain JSON.

Nothing is decoded: what a checkpoint holds is described, never built. The outline is cut where
it would be long; `plain` loses nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from strongroom.canonical import Json
from strongroom_cli import words

__all__ = ["Line", "outline", "plain"]

_MAX_DEPTH: Final = 6
_MAX_ITEMS: Final = 16
"""Items of one container that are listed."""
_MAX_CHARS: Final = 72

_MAPPINGS: Final = {
    "dict": "dict",
    "ordered_dict": "OrderedDict",
    "defaultdict": "defaultdict",
    "counter": "Counter",
}
_SEQUENCES: Final = {
    "tuple": "tuple",
    "set": "set",
    "frozenset": "frozenset",
    "deque": "deque",
    "slice": "slice",
}
_NAMESPACES: Final = {"namespace": "SimpleNamespace", "argparse_namespace": "argparse.Namespace"}
_HEADED: Final = frozenset({"ordered_dict", "defaultdict", "deque"})
"""Their payload begins with something that is no item."""

_FINITE: Final = re.compile(r"-?[0-9]+\.?[0-9]*(e[+-]?[0-9]{1,3})?")
"""Python's ``repr`` of a finite float."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of an outline: how deep it stands, the item's name, and what it is."""

    depth: int
    label: str
    value: str


def outline(node: Json, describe_tensor: Callable[[str], str]) -> Iterator[Line]:
    """The lines of a document's outline, outermost items first.

    Args:
        node: the document; of a container only the items are listed.
        describe_tensor: what to say of a stored tensor, by name.
    """
    yield from _Outline(describe_tensor).children(node, 0)


class _Outline:
    def __init__(self, describe_tensor: Callable[[str], str]) -> None:
        self._describe_tensor = describe_tensor

    def children(self, node: Json, depth: int) -> Iterator[Line]:
        items = list(_items(node))
        if depth >= _MAX_DEPTH and items:
            yield Line(depth, "...", "")
            return
        for label, item in items[:_MAX_ITEMS]:
            short = self._inline(item)
            yield Line(depth, label, self._word(item) if short is None else short)
            if short is None:
                yield from self.children(item, depth + 1)
        if len(items) > _MAX_ITEMS:
            yield Line(depth, f"... {len(items) - _MAX_ITEMS:,} more", "")

    def _inline(self, node: Json) -> str | None:
        """The whole value on one line, or None where it has items to be listed."""
        items = list(_items(node))
        if not items:
            return self._word(node)
        tag = _tag(node)
        if tag is not None and tag not in _SEQUENCES:
            return None
        if len(items) > _MAX_ITEMS or any(_has_items(item) for _, item in items):
            return None
        inner = ", ".join(self._word(item) for _, item in items)
        text = f"[{inner}]" if tag is None else f"({inner})" if tag == "tuple" else f"{tag}({inner})"
        return text if len(text) <= _MAX_CHARS else None

    def _word(self, node: Json) -> str:
        """What a node is, its items left out."""
        if type(node) is list:
            return f"list of {len(node):,}"
        if type(node) is not dict:
            return words.shortened(repr(node), _MAX_CHARS)
        tag, payload = node.get("$"), node.get("v")
        number = sum(1 for _ in _items(node))
        if tag in _MAPPINGS:
            return f"{_MAPPINGS[tag]} of {number:,}"
        if tag in _SEQUENCES:
            return f"{_SEQUENCES[tag]} of {number:,}"
        if tag in _NAMESPACES:
            return _NAMESPACES[tag]
        return words.shortened(self._tagged(str(tag), payload), _MAX_CHARS)

    def _tagged(self, tag: str, payload: Json) -> str:
        if tag == "tensor":
            return f"tensor {self._describe_tensor(_text(payload))}"
        if tag in ("ndarray", "generator") and type(payload) is list and len(payload) == 2:
            if tag == "generator":
                return f"torch.Generator of {_text(payload[0])}"
            return f"ndarray {_text(payload[1])} in {self._describe_tensor(_text(payload[0]))}"
        if tag == "module" and type(payload) is list:
            return f"module of {words.count(len(payload) - 1, 'entry').replace('entrys', 'entries')}"
        if tag == "optimizer" and type(payload) is list and len(payload) == 4:
            groups = payload[0] if type(payload[0]) is list else []
            states = payload[1] if type(payload[1]) is list else []
            parameters = words.count(len(states), "parameter")
            return f"optimizer of {words.count(len(groups), 'group')}, state of {parameters}"
        if tag == "stateful":
            return "object with a state_dict"
        if tag == "per_rank":
            return "each rank's own"
        if tag == "object" and type(payload) is list and payload:
            return f"registered type {_text(payload[0])}"
        if tag in ("bytes", "bytearray") and type(payload) is str:
            return f"{tag} of {words.count(len(payload) * 3 // 4 - payload[-2:].count('='), 'byte')}"
        if tag == "float" and type(payload) is str:
            return payload.partition(":")[0]
        return f"{tag} {_text(payload)}"


def _tag(node: Json) -> str | None:
    """A node's tag; None for what has none, or is no node."""
    tag = node.get("$") if type(node) is dict and "v" in node else None
    return tag if type(tag) is str else None


def _text(payload: Json) -> str:
    return payload if type(payload) is str else repr(payload)


def _has_items(node: Json) -> bool:
    return next(_items(node), None) is not None


def _items(node: Json) -> Iterator[tuple[str, Json]]:
    """The named parts of a container; nothing for all else. A malformed one has none."""
    if type(node) is list:
        yield from ((f"[{number}]", item) for number, item in enumerate(node))
        return
    tag = _tag(node)
    payload = node.get("v") if tag is not None else None
    if tag == "stateful":
        yield from _items(payload)
    if type(payload) is not list or tag is None:
        return
    if tag == "object" and len(payload) == 2:
        yield from _items(payload[1])
    elif tag == "module":
        # Its tensors have a table of their own.
        yield from ((name, item) for name, item in _pairs(payload[1:]) if _tag(item) != "tensor")
    elif tag == "optimizer" and len(payload) == 4 and type(payload[0]) is list:
        for number, group in enumerate(payload[0]):
            for name, item in _items(group):
                if name != "params":
                    yield (name if len(payload[0]) == 1 else f"group {number} {name}"), item
    elif tag in _MAPPINGS or tag in _NAMESPACES:
        yield from _pairs(payload[1:] if tag in _HEADED else payload)
    elif tag in _SEQUENCES:
        rest = payload[1:] if tag in _HEADED else payload
        yield from ((f"[{number}]", item) for number, item in enumerate(rest))


def _pairs(payload: list[Json]) -> Iterator[tuple[str, Json]]:
    for pair in payload:
        if type(pair) is list and len(pair) == 2:
            yield (pair[0] if type(pair[0]) is str else _key(pair[0])), pair[1]


def _key(node: Json) -> str:
    """A key that is no text, in brackets as it would be indexed. One level deep, whatever it holds."""
    items = node.get("v") if _tag(node) == "tuple" else None
    if type(items) is list and not any(type(item) in (list, dict) for item in items):
        return f"[{words.shortened(repr(tuple(items)), _MAX_CHARS)}]"
    if _tag(node) == "float" and type(node["v"]) is str:
        return f"[{words.shortened(node['v'], _MAX_CHARS)}]"
    return f"[{words.shortened(repr(node), _MAX_CHARS)}]"


def plain(node: Json) -> Any:
    """A document's values as JSON has them, where it has them.

    A dict whose keys are all texts is an object, a list or tuple an array, a finite float a
    number. Anything else stays the node that it is (``{"$": tag, "v": payload}``), so nothing
    is lost; a plain dict that has just these two members stays a node too, so that the two
    cannot be mistaken for one another.
    """
    if type(node) is list:
        return [plain(item) for item in node]
    tag = _tag(node)
    if tag is None:
        return node
    payload = node["v"]
    if tag == "tuple" and type(payload) is list:
        return [plain(item) for item in payload]
    if tag == "float" and type(payload) is str and _FINITE.fullmatch(payload):
        return float(payload)
    if tag == "dict" and type(payload) is list:
        is_object = all(type(pair) is list and len(pair) == 2 and type(pair[0]) is str for pair in payload)
        if is_object and {pair[0] for pair in payload} != {"$", "v"}:
            return {pair[0]: plain(pair[1]) for pair in payload}
    return node
