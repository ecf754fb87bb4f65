"""What data sets remember: the state of those that have ``state_dict`` and ``load_state_dict`` of their own.

A data set that counts its epochs, or goes on where it was left, is not what it was when an iterator was made
from it. Read again, it must first be put back to that. With workers it is the workers' copies that move on;
the one in the training process stays as it is, and putting it back changes nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

__all__ = ["dataset_states", "load_dataset_states"]


def dataset_states(loaders: Sequence[object]) -> tuple[Any, ...]:
    """The state of each loader's data set; None for one that has none."""
    found = [_stateful(loader) for loader in loaders]
    return tuple(None if one is None else one.state_dict() for one in found)


def load_dataset_states(loaders: Sequence[object], states: Sequence[Any]) -> None:
    """Put back what `dataset_states` gave."""
    for loader, state in zip(loaders, states, strict=False):
        dataset = _stateful(loader)
        if dataset is not None and state is not None:
            dataset.load_state_dict(state)


def _stateful(loader: object) -> Any:
    dataset: Any = getattr(loader, "dataset", None)
    if not callable(getattr(dataset, "load_state_dict", None)):
        return None
    try:
        # Some libraries' data sets want to be told how far they were read; their loaders do that.
        inspect.signature(dataset.state_dict).bind()
    except (AttributeError, TypeError, ValueError):
        return None
    return dataset
