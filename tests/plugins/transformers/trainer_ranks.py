"""What a rank of a Trainer's job does, for tests: module-level functions."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import trained
import transformers
from processes import die, rank, warnings_are_errors
from transformers import TrainerCallback

__all__ = ["as_trainer_rank", "train"]


def as_trainer_rank() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    # Accelerate asks for it, although the group is there already.
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    transformers.logging.set_verbosity_warning()
    warnings_are_errors(())


class Struck(TrainerCallback):
    """Something happens to one rank, before the step after so many."""

    def __init__(self, what: str, step: int, on: int) -> None:
        self.what, self.step, self.on = what, step, on

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step != self.step or rank() != self.on:
            return
        if self.what == "kill":
            die()
        elif self.what == "stop":
            os.kill(os.getpid(), signal.SIGTERM)
        elif self.what == "fail":
            raise trained.BrokenOffError("this rank alone")


class Paced(TrainerCallback):
    """Ranks that are told to stop take some time to agree where."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        import time

        time.sleep(0.1)


def train(
    folder: Path,
    root: Path | None,
    struck: tuple[str, int, int] | None = None,
    seed: int = 7,
    **settings: Any,
) -> dict[str, Any]:
    """Train on this rank: its losses, its weights, and how it ended."""
    callbacks: list[Any] = []
    if struck is not None:
        callbacks = [Struck(*struck), Paced()]
    size = trained.BATCHES * trained.BATCH_SIZE * 2  # for two; fewer or more have a longer or shorter epoch
    outcome = trained.build(
        folder / f"{rank()}",
        root=root,
        callbacks=callbacks,
        data=trained.Numbers(size),
        seed=1000 * seed + rank(),
        data_seed=7,
        **settings,
    )
    status: Any = None
    error = None
    try:
        outcome.result = outcome.trainer.train()
    except SystemExit as left:
        status = left.code
    except Exception as raised:  # noqa: BLE001 - told to the test
        error = f"{type(raised).__name__}: {raised}"
    weights = hashlib.sha256()
    for value in outcome.model.state_dict().values():
        weights.update(value.contiguous().numpy().tobytes())
    return {
        "losses": outcome.losses,
        "weights": weights.hexdigest(),
        "step": outcome.step,
        "history": outcome.history,
        "seen": outcome.drawing.seen,
        "status": status,
        "error": error,
        "next": torch.rand(()).item(),
    }
