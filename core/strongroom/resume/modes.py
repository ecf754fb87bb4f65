"""How a module trains: which parameters are frozen, and which of its parts are in evaluation mode.

No ``state_dict`` tells. What a program sets once at its start comes out the same in a resumed run; what it
sets on its way, as one that unfreezes its layers epoch by epoch, does not: the hook that did it is not run
again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

__all__ = ["restore_modes", "training_modes"]


def training_modes(module: nn.Module) -> dict[str, Any]:
    """The frozen parameters, the parts in evaluation mode, and the norms that keep no statistics, by name."""
    return {
        "frozen": [name for name, one in module.named_parameters() if not one.requires_grad],
        "evaluating": [name for name, one in module.named_modules() if not one.training],
        "untracked": [name for name, one in _norms(module) if not one.track_running_stats],
    }


def restore_modes(module: nn.Module, modes: Mapping[str, Any]) -> int:
    """Put back what `training_modes` gave; the number of parameters and parts that were otherwise.

    For the module that was asked: a part that it did not have counts as one that trained.
    """
    changed = 0
    frozen, evaluating, untracked = (set(modes[name]) for name in ("frozen", "evaluating", "untracked"))
    for name, parameter in module.named_parameters():
        if parameter.requires_grad == (name in frozen):
            parameter.requires_grad_(name not in frozen)
            changed += 1
    for name, part in module.named_modules():
        if part.training == (name in evaluating):
            part.training = name not in evaluating  # this part alone, not those below it
            changed += 1
    for name, norm in _norms(module):
        if norm.track_running_stats == (name in untracked):
            norm.track_running_stats = name not in untracked
            changed += 1
    return changed


def _norms(module: nn.Module) -> list[tuple[str, Any]]:
    return [(name, one) for name, one in module.named_modules() if hasattr(one, "track_running_stats")]
