"""What ranks do in the tests: module-level functions, since a rank finds them by name."""

from __future__ import annotations

import logging
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from composer import Callback
from composer.utils import dist
from composer.utils.parallelism import FSDP2Config
from composer_runs import Drawing, Noise, Outcome, train
from processes import die, rank

from strongroom import Checkpointer
from strongroom.errors import StrongroomError
from strongroom.stores.local import LocalStore

__all__ = [
    "EVERYTHING",
    "a_disk_fails_on_one_rank",
    "as_told",
    "asked_for_fsdp2_by_a_key",
    "broken_and_resumed",
    "every_fourth_but_8",
    "killed",
    "killed_before_loading",
    "plain",
    "preempted",
    "resumed_elsewhere",
    "settings_of",
    "step_lr",
    "terminate",
    "trained",
    "trained_on_a_slow_store",
]

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


def asked_for_fsdp2_by_a_key(root: Path) -> dict[str, Any]:
    """What is said to who gives a ``parallelism_config`` with a key that Composer passes over."""
    said: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logger = logging.getLogger("composer.strongroom")
    logger.addHandler(Kept())
    logger.setLevel(logging.WARNING)
    outcome = train(root, until=1, parallelism_config={"fsdp2": FSDP2Config()})
    return {"is_sharded": outcome.trainer.state.fsdp_enabled, "said": "\n".join(said)}


def killed_before_loading(root: Path) -> None:
    """A start on which rank 1 is gone before the checkpoint is chosen."""

    class Gone(Callback):
        def before_load(self, state: Any, logger: Any) -> None:
            if rank() == 1:
                die()

    train(root, callbacks=(Gone,), checkpoint={"save_interval": "1ba", "timeout_s": 2.0})


def trained_on_a_slow_store(root: Path) -> dict[str, Any]:
    """A run whose store takes nothing of the save of step 4 before step 9 is over, on any rank."""
    let_go = threading.Event()
    original = LocalStore.open_writer

    def open_writer(store: LocalStore, key: str, **options: Any) -> Any:
        assert let_go.wait(60), "training waited for the store, and the store for training"
        return original(store, key, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStore, "open_writer", open_writer)
        on = Strike(9, let_go.set, on=rank())
        return plain(train(root, callbacks=(lambda: on,), checkpoint={"save_interval": every_fourth_but_8}))


def every_fourth_but_8(state: Any, event: Any) -> bool:
    """Whether to save."""
    return int(state.timestamp.batch) in (4, 12)


def a_disk_fails_on_one_rank(root: Path) -> str:
    """A run on whose second rank the disk is full from the fourth step on; the error that ends each rank."""
    full = threading.Event()
    original = LocalStore.open_writer

    def open_writer(store: LocalStore, key: str, **options: Any) -> Any:
        if full.is_set() and rank() == 1:
            raise OSError(28, "No space left on device", key)
        return original(store, key, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStore, "open_writer", open_writer)
        try:
            train(root, callbacks=(lambda: Strike(4, full.set),))
        except StrongroomError as error:
            return str(error)
    return "no error"
