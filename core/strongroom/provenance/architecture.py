"""A digest of a model's architecture: names, shapes and dtypes of its tensors. Pure.

It is the same on any number of ranks and in any order, for it goes by the whole tensors of the index.
What optimizers keep, and what each rank has of its own, is no part of it: those depend on how far
training has come, and on how many train.
"""

from __future__ import annotations

import hashlib

import numpy as np

from strongroom.dtypes import DTYPE_CODES
from strongroom.index import Index
from strongroom.values import Node

__all__ = ["Architecture", "architecture_digest", "model_tensors"]


class Architecture:
    """The digest of the state that was saved last: as a rule, that of the next one too.

    To work it out anew takes half a second for 100,000 tensors, which training would share.
    """

    def __init__(self) -> None:
        self._plan: object = None
        self._key = b""
        self._digest: str | None = None

    def digest(self, plan: object, document: Node, index: Index) -> str | None:
        """As `architecture_digest`.

        Args:
            plan: the same object for as long as the state holds the same tensors in the same places.
        """
        columns = index.columns
        key = hashlib.sha256("\0".join(columns.names).encode("utf-8", "surrogatepass"))
        for numbers in (columns.dtypes, columns.dimensions, columns.shape):
            key.update(numbers.tobytes())
        key.update(repr(index.aliases).encode())
        if self._plan is not plan or self._key != key.digest():
            self._digest = architecture_digest(document, index)
            self._plan, self._key = plan, key.digest()
        return self._digest


def architecture_digest(document: Node, index: Index) -> str | None:
    """SHA-256 over the sorted lines ``name dtype shape``; None where the state holds no model.

    Args:
        document: the state's.
        index: the checkpoint's: whole shapes.
    """
    # By columns: a record for each of very many tensors takes time and stays in memory.
    columns = index.columns
    places = {name: place for place, name in enumerate(columns.names)}
    ends = np.cumsum(columns.dimensions).tolist()
    shape, dtypes = columns.shape.tolist(), columns.dtypes.tolist()
    lines = []
    for name in sorted(model_tensors(document)):
        place = places.get(index.aliases.get(name, name))
        if place is not None:
            sizes = shape[ends[place - 1] if place else 0 : ends[place]]
            lines.append(f"{name} {DTYPE_CODES[dtypes[place]]} {'x'.join(map(str, sizes))}\n")
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
