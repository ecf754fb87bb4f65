"""What was measured: the states of Composer's metrics, and the figures that callbacks are shown.

Composer leaves them out unless ``save_metrics=True``, and refuses that for sharded models; a callback that
goes by the last evaluation would not find it. Each rank's are its own until they are computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

__all__ = ["capture", "restore", "scalars"]

_SHOWN: Final = ("train_metric_values", "eval_metric_values", "total_loss_dict")


def capture(state: Any) -> dict[str, Any]:
    """The states of all metrics, by evaluator and name; nothing is computed or synchronized for it."""
    return {
        "train": _states(state.train_metrics or {}),
        "eval": {label: _states(metrics) for label, metrics in state.eval_metrics.items()},
        "shown": {name: dict(getattr(state, name)) for name in _SHOWN},
    }


def restore(state: Any, saved: Mapping[str, Any]) -> tuple[str, ...]:
    """Put it back.

    Returns:
        what could not be put back, one sentence each.
    """
    notes = _load(state, state.train_metrics or {}, saved["train"], "train")
    for label, metrics in saved["eval"].items():
        notes += _load(state, state.eval_metrics.get(label, {}), metrics, label)
    for name in _SHOWN:
        getattr(state, name).update(saved["shown"][name])
    return notes


def scalars(state: Any) -> dict[str, float]:
    """The figures of this moment, for whoever lists the run."""
    found: dict[str, float] = {}
    for name in _SHOWN:
        for key, value in getattr(state, name).items():
            if isinstance(value, torch.Tensor) and value.numel() != 1:
                continue
            try:
                found[str(key)] = float(value)
            except (TypeError, ValueError, RuntimeError):
                continue
    return found


def _states(metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: {
            "updates": metric._update_count,
            "states": {key: _copied(getattr(metric, key)) for key in metric._defaults},
            "computed": metric._computed,
        }
        for name, metric in metrics.items()
        if metric._update_count
    }


def _load(state: Any, own: Mapping[str, Any], saved: Mapping[str, Any], label: str) -> tuple[str, ...]:
    notes: tuple[str, ...] = ()
    for name, found in saved.items():
        metric = own.get(name)
        if metric is None or not found["states"].keys() <= metric._defaults.keys():
            notes += (f"the checkpoint holds the state of a metric {name} ({label}), which this model lacks",)
            continue
        for key, value in found["states"].items():
            setattr(metric, key, _moved(value, metric.device))
        metric._update_count, metric._computed = found["updates"], _moved(found["computed"], metric.device)
    return notes


def _copied(value: Any) -> Any:
    return list(value) if isinstance(value, list) else value


def _moved(value: Any, device: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _moved(one, device) for key, one in value.items()}
    if isinstance(value, list):
        return [_moved(one, device) for one in value]
    return value.to(device) if isinstance(value, torch.Tensor) else value
