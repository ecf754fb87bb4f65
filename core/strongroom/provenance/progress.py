"""How far training had come, read from the state where it says so in a known way. Pure.

An ``epoch`` at the top of the state or in its ``extra``, and the data position of `strongroom.resume`,
which front ends store. What a program counts under other names it tells itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from strongroom.values import Node

__all__ = ["progress_in"]

_POSITION: Final = frozenset({"epoch", "batches", "epoch_start", "first_batch", "makes_workers"})
"""Members that tell a `DataPosition` from other dicts."""

_MAX_NODES: Final = 100_000
"""Looked at on the way to a position; front ends store it near the top."""


def progress_in(document: Node, own: Node) -> dict[str, Any]:
    """``epoch`` and ``cursor`` (``epoch`` and ``batches``), as far as they are there.

    Args:
        document: the state's.
        own: what the coordinator has of its own.
    """
    found: dict[str, Any] = {}
    top = dict(_pairs(document))
    for place in (top, dict(_pairs(top.get("extra")))):
        if type(place.get("epoch")) is int:
            found["epoch"] = place["epoch"]
            break
    for members in _dicts(document, own):
        if members.keys() >= _POSITION and type(members["epoch"]) is type(members["batches"]) is int:
            found["cursor"] = {"epoch": members["epoch"], "batches": members["batches"]}
            found.setdefault("epoch", members["epoch"])
            break
    return found


def _dicts(*documents: Node) -> Iterator[dict[str, Node]]:
    stack = list(documents)
    for _ in range(_MAX_NODES):
        if not stack:
            return
        node = stack.pop()
        if type(node) is list:
            stack.extend(item for item in node if type(item) in (list, dict))
        elif type(node) is dict and node.get("$") not in ("module", "optimizer", "tensor"):
            members = dict(_pairs(node))
            if members:
                yield members
            stack.append(node.get("v"))


def _pairs(node: Node) -> Iterator[tuple[str, Node]]:
    payload = node.get("v") if type(node) is dict and node.get("$") == "dict" else None
    for pair in payload if type(payload) is list else ():
        if type(pair) is list and len(pair) == 2 and type(pair[0]) is str:
            yield pair[0], pair[1]
