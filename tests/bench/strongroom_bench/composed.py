"""A Composer run: what ours costs a training step, beside Composer's ``CheckpointSaver``.

Composer is imported where it is measured, in an environment of its own: it asks for an older torch.
"""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from strongroom_bench.figure import Figure
from strongroom_bench.measure import Contestant, interleave
from strongroom_bench.scale import Scale
from strongroom_bench.states import drop
from strongroom_bench.stepping import (
    ALONE,
    BATCH,
    EVERY,
    IDLE,
    NEVER,
    OURS,
    SEALED,
    Steps,
    figures,
    net,
    policy_in,
    steps_of,
    tidy,
    words,
)

__all__ = ["TALKATIVE", "measure"]

_NATIVE: Final = "CheckpointSaver"

TALKATIVE: Final = ("composer", "strongroom", "strongroom_composer")
"""Loggers that say at each run what a benchmark need not hear."""


def measure(scale: Scale, folder: Path) -> list[Figure]:
    """Train with each in turn, and tell the steps at whose end a save was due from the others."""
    composer: Any = importlib.import_module("composer")
    callbacks: Any = importlib.import_module("composer.callbacks")
    ours: Any = importlib.import_module("strongroom_composer").StrongroomCheckpoint
    for name in TALKATIVE:
        logging.getLogger(name).setLevel(logging.ERROR)
    root = folder / "composer"
    root.mkdir()
    policy = policy_in(root)
    every = {"save_interval": f"{EVERY}ba"}

    def native() -> list[Any]:
        return [callbacks.CheckpointSaver(folder=str(root / "native"), **every)]

    kinds: dict[str, Callable[[], list[Any]]] = {
        ALONE: list,
        IDLE: lambda: [ours(root / "ours", resume="never", save_interval=f"{NEVER}ba")],
        OURS: lambda: [ours(root / "ours", resume="never", **every)],
        SEALED: lambda: [ours(root / "ours", resume="never", security=policy, **every)],
        _NATIVE: native,
    }

    # Of a loader that has no batch size Composer knows no size of a microbatch.
    data = [torch.randn(scale.width)] * (BATCH * (steps_of(scale) + 1))

    def contestant(name: str) -> Contestant:
        def run() -> Mapping[str, float]:
            steps = Steps(0 if name in (ALONE, IDLE) else EVERY)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = _model(composer, scale)
                trainer = composer.Trainer(
                    model=model,
                    optimizers=torch.optim.AdamW(model.parameters()),
                    train_dataloader=torch.utils.data.DataLoader(data, batch_size=BATCH),
                    max_duration=f"{steps_of(scale) + 1}ba",
                    device="cpu",
                    progress_bar=False,
                    callbacks=[*kinds[name](), _clock(composer, steps)],
                )
                trainer.fit()
                trainer.close()
            return steps.taken()

        return Contestant(name=name, run=run, tidy=lambda: tidy(root))

    samples = interleave(
        [contestant(name) for name in kinds],
        rounds=scale.rounds,
        warm_ups=scale.warm_ups,
        flushes=scale.flushes,
    )
    drop(root)
    return figures("Composer", _NATIVE, samples, words(scale, net(scale)))


def _clock(composer: Any, steps: Steps) -> Any:
    class Clock(composer.Callback):  # type: ignore[misc]
        def batch_start(self, state: Any, logger: Any) -> None:
            steps.tick()

    return Clock()


def _model(composer: Any, scale: Scale) -> Any:
    class Model(composer.ComposerModel):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = net(scale)

        def forward(self, batch: torch.Tensor) -> Any:
            return self.net(batch)

        def loss(self, outputs: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
            return outputs.square().mean()

    return Model()
