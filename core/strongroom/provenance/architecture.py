"""A digest of a model's architecture: names, shapes and dtypes of its tensors. Pure.

It is the same on any number of ranks and in any order, for it goes by the whole tensors of the index.
What optimizers keep, and what each rank has of its own, is no part of it: those depend on how far
training has come, and on how many train.
"""

from __future__ import annotations

import hashlib

from strongroom.index import Index
from strongroom.values import Node

__all__ = ["architecture_digest", "model_tensors"]


def architecture_digest(document: Node, index: Index) -> str | None:
    """SHA-256 over the sorted lines ``name dtype shape``; None where the state holds no model.

    Args:
        document: the state's.
        index: the checkpoint's: whole shapes.
    """
    lines = []
    for name in sorted(model_tensors(document)):
        record = index.find(name)
        if record is not None:
            lines.append(f"{name} {record.dtype} {'x'.join(map(str, record.shape))}\n")
    if not lines:
        return None
    return f"sha256:{hashlib.sha256(''.join(lines).encode('utf-8', 'surrogatepass')).hexdigest()}"


def model_tensors(document: Node) -> frozenset[str]:
    """Names of the tensors of all modules; where there is no module, as in a plain ``state_dict``, of all."""
    within: set[str] = set()
    others: set[str] = set()
    stack: list[tuple[Node, bool]] = [(document, False)]
    while stack:
        node, is_module = stack.pop()
        if type(node) is list:
            stack.extend((item, is_module) for item in node)
        if type(node) is not dict:
            continue
        tag, payload = node.get("$"), node.get("v")
        if tag == "tensor":
            if type(payload) is str:
                (within if is_module else others).add(payload)
        elif tag not in ("optimizer", "per_rank", "generator", "ndarray"):
            stack.append((payload, is_module or tag == "module"))
    return frozenset(within or others)
