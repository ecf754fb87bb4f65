"""A Lightning run: what its callback costs a training step, beside Lightning's own ways to save.

The same module is trained again and again, a fit for each contestant in turn: alone, with the callback and
nothing due, and saving every few steps, with ours (plain and sealed), with ``ModelCheckpoint``, and with that
and ``AsyncCheckpointIO``. Lightning is imported where it is measured: the tests of the core have none.
"""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from strongroom_bench.figure import Figure, Samples, beside, fold
from strongroom_bench.measure import Contestant, interleave
from strongroom_bench.scale import Scale
from strongroom_bench.states import drop
from strongroom_bench.stepping import (
    ALONE,
    EVERY,
    IDLE,
    NEVER,
    OURS,
    SEALED,
    Steps,
    batches,
    net,
    policy_in,
    steps_of,
    tidy,
    words,
)

__all__ = ["TALKATIVE", "measure"]

_NATIVE, _ASYNC = "ModelCheckpoint", "ModelCheckpoint + AsyncCheckpointIO"


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
    policy = policy_in(root)
    every = {"every_n_train_steps": EVERY}

    def native() -> Any:
        return callbacks.ModelCheckpoint(root / "native", save_top_k=-1, **every)

    kinds: dict[str, tuple[Callable[[], list[Any]], Callable[[], list[Any]], int]] = {
        ALONE: (list, list, 0),
        IDLE: (lambda: [ours(root / "idle", every_n_train_steps=NEVER, resume="never")], list, 0),
        OURS: (lambda: [ours(root / "ours", resume="never", **every)], list, EVERY),
        SEALED: (
            lambda: [ours(root / "sealed", resume="never", security=policy, **every)],
            list,
            EVERY,
        ),
        _NATIVE: (lambda: [native()], list, EVERY),
        _ASYNC: (lambda: [native()], lambda: [plugins.AsyncCheckpointIO()], EVERY),
    }
    module = _module(lightning, scale)

    def contestant(name: str) -> Contestant:
        make, plug, due_every = kinds[name]

        def run() -> Mapping[str, float]:
            steps = Steps(due_every)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Lightning's on small loaders
                trainer = lightning.Trainer(
                    accelerator="cpu",
                    devices=1,
                    max_steps=steps_of(scale),
                    max_epochs=1,
                    callbacks=[*make(), _clock(callbacks, steps)],
                    plugins=plug() or None,
                    logger=False,
                    enable_checkpointing=name != ALONE,
                    enable_progress_bar=False,
                    enable_model_summary=False,
                    default_root_dir=root,
                )
                trainer.fit(module, torch.utils.data.DataLoader(batches(scale), batch_size=None))
            return steps.taken()

        return Contestant(name=name, run=run, tidy=lambda: tidy(root))

    samples = interleave(
        [contestant(name) for name in kinds],
        rounds=scale.rounds,
        warm_ups=scale.warm_ups,
        flushes=scale.flushes,
    )
    drop(root)
    return _figures(samples, words(scale, module))


def _figures(samples: Mapping[str, Mapping[str, Samples]], setting: str) -> list[Figure]:
    stalls, calm, busy = (fold(samples, measure) for measure in ("stall", "step", "p95"))
    note = "medians of steps; a stall is what a step at whose end a save is due takes more than the others"
    return [
        beside(
            f"Lightning: stall of a save / {_NATIVE}'s", OURS, _NATIVE, stalls, setting=setting, note=note
        ),
        beside(f"Lightning: stall of a save / {_ASYNC}'s", OURS, _ASYNC, stalls, setting=setting),
        beside(f"Lightning: stall of a sealed save / {_NATIVE}'s", SEALED, _NATIVE, stalls, setting=setting),
        beside(
            f"Lightning: p95 of a step without a save / with {_ASYNC}",
            OURS,
            _ASYNC,
            busy,
            setting=setting,
        ),
        beside("Lightning: a step with nothing due / without a callback", IDLE, ALONE, calm, setting=setting),
    ]


def _clock(callbacks: Any, steps: Steps) -> Any:
    """A callback that times each step from its first hook to the next step's."""

    class Clock(callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_start(self, *args: Any) -> None:
            steps.tick()

    return Clock()


def _module(lightning: Any, scale: Scale) -> Any:
    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = net(scale)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss: torch.Tensor = self.net(batch).square().mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    return Module()
