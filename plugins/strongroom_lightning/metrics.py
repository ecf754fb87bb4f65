"""What was measured so far: the means that are still being formed, and what monitors see.

Lightning begins both anew where a run resumes. Then an epoch's mean would be that of the rest of the epoch,
and a scheduler, an early stopping or a ranking that goes by it would decide otherwise than in the run that
was never interrupted; one that goes by a metric of the last validation would not find it at all.

Like `strongroom_lightning.seam` this module knows names that are Lightning's own: those of its results.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torchmetrics import Metric, MetricCollection
from torchmetrics.wrappers import Running

__all__ = ["capture", "known", "restore"]

_SEEN: Final = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
"""The logger connector's dictionaries behind ``trainer.callback_metrics`` and its like."""

_META: Final = (
    "fx",
    "name",
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "enable_graph",
    "add_dataloader_idx",
    "dataloader_idx",
    "metric_attribute",
)
"""What ``self.log`` was told, besides how to reduce and across which processes."""


def capture(trainer: Any) -> dict[str, Any]:
    """What was measured so far, as plain values and tensors; nothing is computed or synchronized for it."""
    connector = trainer._logger_connector
    return {
        "seen": {name: dict(getattr(connector, name)) for name in _SEEN},
        "is_first_batch": connector._first_loop_iter,
        "results": {
            key: _result_state(result)
            for key, result in trainer.fit_loop.epoch_loop._results.items()
            if not result.has_reset
        },
        "modules": {
            name: {"updates": metric._update_count, "seen": _seen(metric), "states": states}
            for name, metric, states in _metrics_of(trainer.lightning_module)
            if metric._update_count or _seen(metric)
        },
    }


def restore(trainer: Any, saved: Mapping[str, Any], *, inside_epoch: bool) -> tuple[str, ...]:
    """Put it back, once Lightning has set everything up.

    Returns:
        What could not be put back, one sentence each.
    """
    connector, module = trainer._logger_connector, trainer.lightning_module
    device = trainer.strategy.root_device
    for name, values in saved["seen"].items():
        getattr(connector, name).update(_moved(values, device))
    notes = []
    own = {name: metric for name, metric in module.named_modules() if isinstance(metric, Metric)}
    for name, state in saved["modules"].items():
        metric = own.get(name)
        if metric is None or not state["states"].keys() <= metric._defaults.keys():
            notes.append(f"the checkpoint holds the state of a metric {name}, which this module lacks")
            continue
        for key, value in state["states"].items():
            setattr(metric, key, _moved(value, device))
        metric._update_count, metric._computed = state["updates"], None
        if isinstance(metric, Running):
            metric._num_vals_seen = state["seen"]
    if inside_epoch:
        connector._first_loop_iter = saved["is_first_batch"]
        results = trainer.fit_loop.epoch_loop._results
        for key, state in saved["results"].items():
            attribute = state["meta"]["metric_attribute"]
            if not state["is_tensor"] and attribute not in own:
                continue  # told above
            results[key] = _result_of(trainer, results, state, own.get(attribute))
    return tuple(notes)


def known(trainer: Any) -> Mapping[str, Any]:
    """What callbacks were shown last; no mean is formed for it, as ``trainer.callback_metrics`` would."""
    shown: Mapping[str, Any] = trainer._logger_connector._callback_metrics
    return shown


def _seen(metric: Metric) -> int:
    """How many values went through a metric over a window, which counts them by itself."""
    return int(metric._num_vals_seen) if isinstance(metric, Running) else 0


def _metrics_of(module: torch.nn.Module) -> Iterator[tuple[str, Metric, dict[str, Any]]]:
    """The module's metrics with their states, by name."""
    leaders: dict[int, Metric] = {}
    for collection in module.modules():
        # Of metrics that share their state a collection keeps one up to date, and tells the others later.
        if isinstance(collection, MetricCollection) and collection._groups_checked:
            for names in collection.compute_groups.values():
                first = collection._modules[names[0]]
                leaders.update({id(collection._modules[name]): first for name in names})
    for name, metric in module.named_modules():
        if isinstance(metric, Metric):
            source = leaders.get(id(metric), metric)
            yield name, metric, {key: _copied(getattr(source, key)) for key in metric._defaults}


def _result_state(result: Any) -> dict[str, Any]:
    meta = result.meta
    state = {
        "is_tensor": result.is_tensor,
        "meta": {name: getattr(meta, name) for name in _META},
        "reduce": meta.reduce_fx.__name__,
        "sync": meta.sync.should,
        "rank_zero_only": meta.sync.rank_zero_only,
        "last": result._forward_cache if isinstance(result._forward_cache, torch.Tensor) else None,
        "updates": result._update_count,
    }
    if result.is_tensor:
        state["value"] = result.value
        if meta.is_mean_reduction:
            state["weight"] = result.cumulated_batch_size
    return state


def _result_of(trainer: Any, results: Any, state: Mapping[str, Any], metric: Metric | None) -> Any:
    """A result as ``self.log`` would have made it, with what had been logged."""
    lightnings = sys.modules[type(results).__module__]
    meta = lightnings._Metadata(reduce_fx=state["reduce"], **state["meta"])
    meta.sync = lightnings._Sync(
        _should=state["sync"], fn=trainer.strategy.reduce, rank_zero_only=state["rank_zero_only"]
    )
    device = trainer.strategy.root_device
    result = lightnings._ResultMetric(meta, state["is_tensor"])
    if state["is_tensor"]:
        result.value = _moved(state["value"], device)
        if meta.is_mean_reduction:
            result.cumulated_batch_size = _moved(state["weight"], device)
    else:
        result.value = metric
    result._forward_cache = _moved(state["last"], device)
    result._update_count = state["updates"]
    return result.to(device)


def _copied(value: Any) -> Any:
    return list(value) if isinstance(value, list) else value


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Mapping):
        return {key: _moved(one, device) for key, one in value.items()}
    if isinstance(value, list):
        return [_moved(one, device) for one in value]
    return value.to(device) if isinstance(value, torch.Tensor) else value
