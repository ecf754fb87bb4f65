"""A Lightning run: what its callback costs a training step, beside Lightning's own ways to save.

The same module is trained again and again, a fit for each contestant in turn: alone, with the callback and
nothing due, and saving every few steps, with ours (plain and sealed), with ``ModelCheckpoint``, and with that
and ``AsyncCheckpointIO``. Lightning is imported where it is measured: the tests of the core have none.
"""

from __future__ import annotations

import importlib
import logging
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from strongroom_bench.figure import Figure, Samples, beside, fold, percentile, setting
from strongroom_bench.measure import Contestant, interleave
from strongroom_bench.scale import MIB, Scale
from strongroom_bench.states import drop
from strongroom_security import SecurityPolicy
from strongroom_security.recipients.file import create_key_file

__all__ = ["TALKATIVE", "measure"]

_BATCH: Final = 32
_EVERY: Final = 10
"""Steps from one save to the next: none is to wait for the one before. A fit's first save is not counted."""

_LEAST_S: Final = 1e-6
"""What a clock can tell apart."""

_OURS, _SEALED = "strongroom", "strongroom, sealed"
_NATIVE, _ASYNC = "ModelCheckpoint", "ModelCheckpoint + AsyncCheckpointIO"
_ALONE, _IDLE = "no callback", "strongroom, nothing due"


TALKATIVE: Final = ("lightning.pytorch", "lightning.fabric", "strongroom")
"""Loggers that say at each fit what a benchmark need not hear."""


def measure(scale: Scale, folder: Path) -> list[Figure]:
    """Train with each in turn, and tell the steps at whose end a save was due from the others."""
    lightning: Any = importlib.import_module("lightning")
    callbacks: Any = importlib.import_module("lightning.pytorch.callbacks")
    plugins: Any = importlib.import_module("lightning.pytorch.plugins")
    ours: Any = importlib.import_module("strongroom_lightning").StrongroomCheckpoint
    for name in TALKATIVE:
        logging.getLogger(name).setLevel(logging.ERROR)
    root = folder / "fits"
    root.mkdir()
    create_key_file(root / "kek.key")
    (root / "strongroom.toml").write_text('[seal]\nrecipients = ["file:kek.key"]\n', encoding="utf-8")
    policy = SecurityPolicy.load(root / "strongroom.toml")
    every = {"every_n_train_steps": _EVERY}

    def native() -> Any:
        return callbacks.ModelCheckpoint(root / "native", save_top_k=-1, **every)

    kinds: dict[str, tuple[Callable[[], list[Any]], Callable[[], list[Any]], int]] = {
        _ALONE: (list, list, 0),
        _IDLE: (lambda: [ours(root / "idle", every_n_train_steps=10**9, resume="never")], list, 0),
        _OURS: (lambda: [ours(root / "ours", resume="never", **every)], list, _EVERY),
        _SEALED: (
            lambda: [ours(root / "sealed", resume="never", security=policy, **every)],
            list,
            _EVERY,
        ),
        _NATIVE: (lambda: [native()], list, _EVERY),
        _ASYNC: (lambda: [native()], lambda: [plugins.AsyncCheckpointIO()], _EVERY),
    }
    module = _module(lightning, scale)
    steps = max(scale.steps, 3 * _EVERY)

    def contestant(name: str) -> Contestant:
        make, plug, due_every = kinds[name]

        def run() -> Mapping[str, float]:
            clock = _clock(callbacks, due_every)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Lightning's on small loaders
                trainer = lightning.Trainer(
                    accelerator="cpu",
                    devices=1,
                    max_steps=steps,
                    max_epochs=1,
                    callbacks=[*make(), clock],
                    plugins=plug() or None,
                    logger=False,
                    enable_checkpointing=name != _ALONE,
                    enable_progress_bar=False,
                    enable_model_summary=False,
                    default_root_dir=root,
                )
                trainer.fit(module, _batches(scale, steps))
            return clock.taken()

        def tidy() -> None:
            for path in root.iterdir():
                if path.is_dir():
                    drop(path)

        return Contestant(name=name, run=run, tidy=tidy)

    samples = interleave(
        [contestant(name) for name in kinds],
        rounds=scale.rounds,
        warm_ups=scale.warm_ups,
        flushes=scale.flushes,
    )
    drop(root)
    weights = sum(value.nbytes for value in module.parameters())
    words = setting(
        f"{scale.layers} layers of {scale.width}, batch {_BATCH}",
        f"{3 * weights / MIB:.3g} MiB of state",
        f"a save every {_EVERY} of {steps} steps",
    )
    return _figures(samples, words)


def _figures(samples: Mapping[str, Mapping[str, Samples]], words: str) -> list[Figure]:
    stalls, calm, busy = (fold(samples, measure) for measure in ("stall", "step", "p95"))
    note = "medians of steps; a stall is what a step at whose end a save is due takes more than the others"
    return [
        beside(f"Lightning: stall of a save / {_NATIVE}'s", _OURS, _NATIVE, stalls, setting=words, note=note),
        beside(f"Lightning: stall of a save / {_ASYNC}'s", _OURS, _ASYNC, stalls, setting=words),
        beside(f"Lightning: stall of a sealed save / {_NATIVE}'s", _SEALED, _NATIVE, stalls, setting=words),
        beside(
            f"Lightning: p95 of a step without a save / with {_ASYNC}",
            _OURS,
            _ASYNC,
            busy,
            setting=words,
        ),
        beside("Lightning: a step with nothing due / without a callback", _IDLE, _ALONE, calm, setting=words),
    ]


def _clock(callbacks: Any, due_every: int) -> Any:
    """A callback that times each step from its first hook to the next step's."""

    class Clock(callbacks.Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.at: list[float] = []

        def on_train_batch_start(self, *args: Any) -> None:
            self.at.append(time.perf_counter())

        def taken(self) -> dict[str, float]:
            whole = [after - before for before, after in zip(self.at, self.at[1:], strict=False)]
            if not due_every:
                return {"step": _median(whole), "p95": percentile(whole, 95)}
            due = [value for number, value in enumerate(whole, start=1) if number % due_every == 0]
            other = [value for number, value in enumerate(whole, start=1) if number % due_every]
            # Not the first: it makes buffers, which stay.
            stall = max(_LEAST_S, _median(due[1:] or due) - _median(other))
            return {"stall": stall, "step": _median(other), "p95": percentile(other, 95)}

    return Clock()


def _median(values: Samples) -> float:
    return percentile(values, 50)


def _module(lightning: Any, scale: Scale) -> Any:
    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            layers: list[nn.Module] = []
            for _ in range(scale.layers):
                layers += [nn.Linear(scale.width, scale.width), nn.ReLU()]
            self.net = nn.Sequential(*layers)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss: torch.Tensor = self.net(batch).square().mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    return Module()


def _batches(scale: Scale, steps: int) -> Any:
    batch = torch.randn(_BATCH, scale.width)
    return torch.utils.data.DataLoader([batch] * (steps + 1), batch_size=None)
