"""What the ranks of a job hold alike, and what each has of its own: found out, and marked.

A framework's state is mostly the same on every rank, and here and there it is not: a timer, a metric that was
never synchronized, a callback that counts what its own rank saw. Who wrote it did not mark it. The ranks
compare digests, and what differs is wrapped in `PerRank`, as small as it can be cut; the rest is stored once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from strongroom import canonical, paths
from strongroom.dtypes import bytes_of
from strongroom.survey import is_distributed
from strongroom.tree import MAX_COMPARED_BYTES, PerRank, capture

__all__ = ["Confer", "mark_differing"]

Confer = Callable[[str, Callable[[], Any]], Sequence[Any]]
"""`strongroom.Checkpointer.confer`."""

_DIGEST_BYTES: Final = 16


def mark_differing(name: str, gather: Callable[[], Any], confer: Confer) -> Any:
    """Gather a value on every rank, and mark what differs between them; for all ranks.

    Dictionaries are divided as long as all ranks have the same keys there; anything else that differs, and a
    dictionary whose keys do, is marked whole. Large tensors (above 64 KiB) and distributed ones are compared
    by their shapes alone: replicas may differ a little by right, and the lowest rank's are stored.

    Args:
        name: the value's key in the state, for errors.
        gather: gives this rank's value; what it raises is raised on every rank.
        confer: how the ranks talk.

    Raises:
        StateEncodingError: the value holds what has no safe encoding.
    """
    value: Any = None

    def say_digest() -> str:
        nonlocal value
        value = gather()
        return _digest(value, (name,))

    if _are_equal(confer(f"what {name} holds", say_digest)):
        return value
    return _marked(value, confer(f"where {name} differs", lambda: _outline(value, (name,))))


def _outline(value: Any, path: tuple[Any, ...]) -> Any:
    """Digests of what a value consists of, in the form of its dictionaries."""
    if type(value) is dict and value:
        return [[paths.spell((key,)), _outline(item, (*path, key))] for key, item in value.items()]
    return _digest(value, path)


def _marked(value: Any, outlines: Sequence[Any]) -> Any:
    if _are_equal(outlines):
        return value
    are_dicts = type(value) is dict and all(type(outline) is list for outline in outlines)
    if not are_dicts or not _are_equal([[spelled for spelled, _ in outline] for outline in outlines]):
        return PerRank(value)
    return {
        key: _marked(item, [outline[number][1] for outline in outlines])
        for number, (key, item) in enumerate(value.items())
    }


def _are_equal(words: Sequence[Any]) -> bool:
    return all(word == words[0] for word in words)


def _digest(value: Any, path: tuple[Any, ...]) -> str:
    """Tells a value from others, whatever it is made of; its encoding is what would be stored."""
    nested: Any = value
    for key in reversed(path):
        nested = {key: nested}
    captured = capture(nested, rank=0)
    found = hashlib.blake2b(canonical.encode(captured.document), digest_size=_DIGEST_BYTES)
    for spelled, tensor in captured.tensors.items():
        found.update(f"{spelled}:{tensor.dtype}{tuple(tensor.shape)}".encode())
        if not is_distributed(tensor) and tensor.nbytes <= MAX_COMPARED_BYTES:
            found.update(_bytes_of(tensor))
    return found.hexdigest()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return bytes_of(tensor.detach().cpu().resolve_conj().resolve_neg().contiguous())
