"""A loop on Accelerate: what ours costs a training step, beside ``Accelerator.save_state``.

Accelerate is imported where it is measured: the tests of the core have none.
"""

from __future__ import annotations

import contextlib
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
    EVERY,
    IDLE,
    NEVER,
    OURS,
    SEALED,
    Steps,
    batches,
    figures,
    net,
    policy_in,
    steps_of,
    tidy,
    words,
)

__all__ = ["TALKATIVE", "measure"]

_NATIVE: Final = "save_state"

TALKATIVE: Final = ("accelerate", "strongroom", "strongroom_accelerate")
"""Loggers that say at each run what a benchmark need not hear."""


def measure(scale: Scale, folder: Path) -> list[Figure]:
    """Train with each in turn, and tell the steps at whose end a save was due from the others."""
    accelerate: Any = importlib.import_module("accelerate")
    ours: Any = importlib.import_module("strongroom_accelerate").Strongroom
    for name in TALKATIVE:
        logging.getLogger(name).setLevel(logging.ERROR)
    root = folder / "accelerate"
    root.mkdir()
    policy = policy_in(root)
    kinds: dict[str, dict[str, Any] | None] = {
        ALONE: None,
        IDLE: {"every_n_steps": NEVER},
        OURS: {"every_n_steps": EVERY},
        SEALED: {"every_n_steps": EVERY, "security": policy},
        _NATIVE: None,
    }

    def contestant(name: str) -> Contestant:
        options = kinds[name]

        def run() -> Mapping[str, float]:
            steps = Steps(0 if name in (ALONE, IDLE) else EVERY)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                accelerator = accelerate.Accelerator(cpu=True)
                run_of_ours = None
                if options is not None:
                    run_of_ours = ours(accelerator, root / "ours", resume="never", **options)
                _train(scale, accelerator, steps, run_of_ours, root / "native" if name == _NATIVE else None)
            return steps.taken()

        return Contestant(name=name, run=run, tidy=lambda: tidy(root))

    samples = interleave(
        [contestant(name) for name in kinds],
        rounds=scale.rounds,
        warm_ups=scale.warm_ups,
        flushes=scale.flushes,
    )
    drop(root)
    return figures("Accelerate", _NATIVE, samples, words(scale, net(scale)))


def _train(scale: Scale, accelerator: Any, steps: Steps, ours: Any, native: Path | None) -> None:
    model = net(scale)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = torch.utils.data.DataLoader(batches(scale), batch_size=None)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    after: Callable[[], object] = lambda: None  # noqa: E731 - what follows a step
    if ours is not None:
        ours.resume()
        after = ours.step
    with ours or contextlib.nullcontext():
        for number, batch in enumerate(loader, start=1):
            steps.tick()
            optimizer.zero_grad()
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            after()
            if native is not None and number % EVERY == 0:
                accelerator.save_state(str(native / str(number)))
            if number > steps_of(scale):
                break
