"""How a state's document spells what is more than a plain value: taking nodes apart, no more.

`docs/format.md`, clause 8. What the parts mean is the business of whoever takes them.
"""

from __future__ import annotations

from typing import Any

from strongroom.canonical import Json
from strongroom.errors import FormatError
from strongroom.keypath import Path, key_path
from strongroom.values import Node

__all__ = ["is_named_pair", "mapping_pairs", "optimizer_parts", "payload_of"]


def payload_of(node: Node, tag: str) -> Any:
    """A tagged node's payload, or None where it has another tag."""
    if type(node) is dict and node.get("$") == tag:
        return node.get("v")
    return None


def optimizer_parts(payload: Node, path: Path) -> tuple[Node, list[Any], Node, Node]:
    if type(payload) is not list or len(payload) != 4 or type(payload[1]) is not list:
        raise FormatError(f"{key_path(path)}: an optimizer without its four parts")
    if not all(map(is_named_pair, payload[1])):
        raise FormatError(f"{key_path(path)}: an optimizer's state that is not named")
    return payload[0], payload[1], payload[2], payload[3]


def is_named_pair(pair: Json) -> bool:
    return type(pair) is list and len(pair) == 2 and type(pair[0]) is str


def mapping_pairs(node: Node) -> list[Any] | None:
    """A stored dict's pairs of key and value, whatever kind of dict it was; None: it is none."""
    if type(node) is not dict or type(node.get("v")) is not list:
        return None
    tag, payload = node.get("$"), node["v"]
    if tag in ("ordered_dict", "defaultdict"):
        payload = payload[1:]
    elif tag not in ("dict", "counter"):
        return None
    return payload if all(type(pair) is list and len(pair) == 2 for pair in payload) else None
