"""A run by the Hugging Face Trainer: what ours costs a training step, beside the Trainer's own checkpoints.

transformers is imported where it is measured: the tests of the core have none.
"""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

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

_NATIVE: Final = "Trainer"

TALKATIVE: Final = ("transformers", "accelerate", "strongroom", "strongroom_transformers")
"""Loggers that say at each run what a benchmark need not hear."""


def measure(scale: Scale, folder: Path) -> list[Figure]:
    """Train with each in turn, and tell the steps at whose end a save was due from the others."""
    transformers: Any = importlib.import_module("transformers")
    ours: Any = importlib.import_module("strongroom_transformers").StrongroomCallback
    for name in TALKATIVE:
        logging.getLogger(name).setLevel(logging.ERROR)
    root = folder / "transformers"
    root.mkdir()
    policy = policy_in(root)
    # Whether it is ours, its options, and after how many steps a save is due.
    kinds: dict[str, tuple[dict[str, Any] | None, int]] = {
        ALONE: (None, NEVER),
        IDLE: ({}, NEVER),
        OURS: ({}, EVERY),
        SEALED: ({"security": policy}, EVERY),
        _NATIVE: (None, EVERY),
    }
    samples_of_data = [{"x": torch.randn(scale.width)}] * (BATCH * (steps_of(scale) + 1))

    def contestant(name: str) -> Contestant:
        options, due_every = kinds[name]

        def run() -> Mapping[str, float]:
            steps = Steps(0 if due_every == NEVER else due_every)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                arguments = transformers.TrainingArguments(
                    output_dir=str(root / "native"),
                    use_cpu=True,
                    max_steps=steps_of(scale) + 1,
                    per_device_train_batch_size=BATCH,
                    save_strategy="steps",
                    save_steps=due_every,
                    logging_strategy="no",
                    report_to="none",
                    disable_tqdm=True,
                )
                trainer = transformers.Trainer(
                    model=_model(scale),
                    args=arguments,
                    train_dataset=samples_of_data,
                    callbacks=[_clock(transformers, steps)],
                )
                trainer.remove_callback(transformers.PrinterCallback)
                if options is not None:
                    ours(root / "ours", resume="never", **options).attach(trainer)
                trainer.train()
            return steps.taken()

        return Contestant(name=name, run=run, tidy=lambda: tidy(root))

    samples = interleave(
        [contestant(name) for name in kinds],
        rounds=scale.rounds,
        warm_ups=scale.warm_ups,
        flushes=scale.flushes,
    )
    drop(root)
    return figures(_NATIVE, _NATIVE, samples, words(scale, net(scale)))


def _clock(transformers: Any, steps: Steps) -> Any:
    class Clock(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            steps.tick()

    return Clock()


def _model(scale: Scale) -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net(scale)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.net(x).square().mean()}

    return Model()
