"""What a caller's template holds: whether it is to be walked, and what stands where in it.

A template is a state that is there already, and is to be filled. What fills it, and whether
that fits, is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from strongroom.keypath import Path
from strongroom.tree import PerRank, is_stateful

__all__ = ["holds_fillable", "value_at"]


def holds_fillable(value: Any) -> bool:
    """Whether something in a value is filled in place, so that its containers are walked."""
    if isinstance(value, PerRank):
        return holds_fillable(value.value)
    if isinstance(value, torch.nn.Module | torch.optim.Optimizer | torch.Tensor | torch.Generator):
        return True
    if is_stateful(value):
        return True
    if isinstance(value, Mapping):
        return any(holds_fillable(item) for item in value.values())
    return type(value) in (list, tuple) and any(holds_fillable(item) for item in value)


def value_at(template: Any, path: Path) -> Any:
    """What a template holds at a path; None where it holds nothing."""
    value = template
    for number, step in enumerate(path):
        if isinstance(value, PerRank):
            value = value.value
        if isinstance(value, torch.nn.Module):
            # Its extra state; a module's names are dotted.
            return value.state_dict().get(".".join(map(str, path[number:])))
        if is_stateful(value):
            value = value.state_dict()
        is_there = (
            type(step) is int and step < len(value)
            if isinstance(value, list | tuple)
            else isinstance(value, Mapping) and step in value
        )
        if not is_there:
            return None
        value = value[step]
    return value.value if isinstance(value, PerRank) else value
