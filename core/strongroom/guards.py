"""Whether many tensors are still of the classes, dtypes, devices, shapes and strides they were.

`torch.compile` asks this before every call, and torch has one quick call for it, which is not
public. It is used where it proves at first use that it tells apart what it must; elsewhere
each tensor is asked in turn, which takes two or three times as long and finds the same.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

import torch

__all__ = ["Guard", "guard_of"]


class Guard(Protocol):
    """What some tensors were like."""

    def holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether tensors, as many, are like them. Where it does not know, it says no."""


class _TorchGuard:
    def __init__(self, kind: Any, tensors: Sequence[torch.Tensor]) -> None:
        sizes = [list(tensor.shape) for tensor in tensors]
        strides = [list(tensor.stride()) for tensor in tensors]
        self._guards = kind(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)

    def holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        return bool(self._guards.check(*tensors))


def guard_of(tensors: Sequence[torch.Tensor]) -> Guard | None:
    """A guard, which keeps no tensor alive; None where this torch has none, or for such tensors."""
    kind = _proven()
    return None if kind is None else _built(kind, tensors)


def _built(kind: Any, tensors: Sequence[torch.Tensor]) -> Guard | None:
    try:
        guard = _TorchGuard(kind, tensors)
        return guard if guard.holds(tensors) else None
    except (RuntimeError, TypeError, SystemError, ValueError):
        return None


@lru_cache(maxsize=1)
def _proven() -> Any:
    """torch's class, where it tells apart all that a save has to tell apart."""
    try:
        kind = importlib.import_module("torch._C._dynamo.guards").TensorGuards
    except (ImportError, AttributeError):
        return None
    like = torch.zeros(2, 3, device="cpu")
    complex_like = torch.zeros(2, 3, dtype=torch.complex64, device="cpu")
    negated = complex_like.conj().imag
    unlike = [
        (like, torch.zeros(3, 2, device="cpu")),
        (like, torch.zeros(6, device="cpu")),
        (like, torch.zeros(2, 3, 1, device="cpu")),
        (like, torch.zeros(2, 3, dtype=torch.int32, device="cpu")),
        (like, torch.zeros(3, 2, device="cpu").t()),
        (like, torch.zeros(2, 3, device="meta")),
        (like, torch.nn.Parameter(torch.zeros(2, 3, device="cpu"), requires_grad=False)),
        (complex_like, complex_like.conj()),
        (complex_like.imag, negated),
    ]
    for first, other in unlike:
        # Beside another, as it is used; a tensor that stands there twice is never told to fit.
        guard = _built(kind, [torch.ones_like(like), first])
        if guard is None or guard.holds([torch.ones_like(like), other]):
            return None
        if not guard.holds([torch.ones_like(like), first.detach()]):
            return None
    return kind
