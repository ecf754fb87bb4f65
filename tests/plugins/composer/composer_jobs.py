"""What ranks do in the tests: module-level functions, since a rank finds them by name."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from composer import Callback
from composer.utils import dist
from composer.utils.parallelism import FSDP2Config
from composer_runs import Drawing, Noise, Outcome, train
from processes import die, rank

__all__ = ["EVERYTHING", "as_told", "plain", "preempted", "resumed_elsewhere", "trained"]

EVERYTHING: dict[str, Any] = {"validate": True, "callbacks": (Drawing,), "algorithms": (Noise,)}


def step_lr(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)


def settings_of(way: str) -> dict[str, Any]:
    if not way.startswith("FSDP2"):
        return {}
    return {"parallelism_config": {"fsdp": FSDP2Config(state_dict_type=way.removeprefix("FSDP2 "))}}


def plain(outcome: Outcome) -> dict[str, Any]:
    """As much of an outcome as crosses processes."""
    return {
        "losses": outcome.losses,
        "measured": outcome.measured,
        "weights": {name: value.tolist() for name, value in outcome.weights.items()},
        "lr": outcome.learning_rate,
        "mean": float(outcome.average.mean),
        "batch": int(outcome.trainer.state.timestamp.batch),
    }


def trained(root: Path | None, way: str, **options: Any) -> dict[str, Any]:
    """The small run, with everything in it."""
    return plain(train(root, scheduler=step_lr, **{**EVERYTHING, **settings_of(way), **options}))


def broken_and_resumed(folder: Path, way: str, points: list[int]) -> dict[str, Any]:
    """The uninterrupted run, and what came of those that were broken off and taken up again."""
    found = {"whole": trained(None, way)}
    for done in points:
        root = folder / f"{done}"
        trained(root, way, until=done, checkpoint={"save_interval": f"{done}ba"})
        found[done] = trained(root, way, seed=1000, checkpoint={"save_interval": "1ep"})
    return found


class Strike(Callback):
    """Does something on one rank, before a batch."""

    def __init__(self, batch: int, act: Any, on: int = 1) -> None:
        self.batch, self.act, self.on = batch, act, on

    def batch_start(self, state: Any, logger: Any) -> None:
        if int(state.timestamp.batch) == self.batch and rank() == self.on:
            self.act()


def killed(root: Path, way: str, batch: int) -> None:
    """A run one of whose ranks is killed."""
    strike = Strike(batch, die)
    trained(root, way, callbacks=(Drawing, lambda: strike))


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def preempted(root: Path, way: str, batch: int, checkpoint: dict[str, Any]) -> Any:
    """A run one of whose ranks is told to stop; how it ended."""
    strike = Strike(batch, terminate)
    try:
        trained(root, way, callbacks=(Drawing, lambda: strike), checkpoint=checkpoint, max_duration="60ep")
    except SystemExit as left:
        return left.code, str(left)
    return None


def as_told(root: Path, steps: tuple[int, ...]) -> list[int]:
    """A function that says on rank 0 alone when to save."""

    def interval(state: Any, event: Any) -> bool:
        return rank() == 0 and int(state.timestamp.batch) in steps

    outcome = train(root, checkpoint={"save_interval": interval})
    from strongroom import Checkpointer

    with Checkpointer(str(root)) as checkpointer:
        assert outcome.checkpoint is not None
        return sorted(one.step for one in checkpointer.checkpoints())


def resumed_elsewhere(root: Path) -> dict[str, Any]:
    """What two ranks saved, taken up by this job, of another size: what was filled, before it trains on."""
    seen: dict[str, Any] = {}

    class Look(Callback):
        def after_load(self, state: Any, logger: Any) -> None:
            seen["weights"] = {
                name: (value.full_tensor() if hasattr(value, "full_tensor") else value).tolist()
                for name, value in state.model.state_dict().items()
            }
            seen["moments"] = sum(
                float((one.full_tensor() if hasattr(one, "full_tensor") else one).double().sum())
                for state in state.optimizers[0].state.values()
                for one in (state["exp_avg"],)
            )
            seen["batch"] = int(state.timestamp.batch)

    outcome = plain(train(root, callbacks=(Look,), checkpoint={"save_interval": "1ep"}))
    return {**seen, "outcome": outcome, "ranks": dist.get_world_size()}
