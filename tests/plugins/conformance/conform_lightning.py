"""How Lightning trains a `RunPlan`."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "lightning"))

import lightning
import lightning_ranks
import rank_runs
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.utilities import CombinedLoader
from processes import rank, world_size
from run_plans import (
    BATCH_SIZE,
    BATCHES,
    EPOCHS,
    INTERRUPTIONS,
    LOADERS,
    FrontEnd,
    Interruption,
    Numbers,
    RunPlan,
    RunResult,
    digest_of,
)
from torch.utils.data import DataLoader, Sampler, TensorDataset

from strongroom_lightning import StrongroomCheckpoint

__all__ = ["FRONT_END"]

# ------------------------------------------------------------------------------------------------------- ways


def _sharded(data: int, tensor: int) -> dict[str, Any]:
    return {"strategy": partial(rank_runs.sharded, data, tensor), "module": rank_runs.ShardedNet}


_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "one process": {"strategy": lambda: "auto"},
    "DDP": {"strategy": lambda: "ddp"},
    "FSDP2": _sharded(2, 1),
    "tensor parallel": _sharded(1, 2),
}

_WAYS = {"one process": (1, 1), "DDP": (2, 2), "FSDP2": (2, 2), "tensor parallel": (2, 1)}

# ---------------------------------------------------------------------------------------------------- loaders


class OwnGroups(Sampler[list[int]]):
    """A batch sampler of a user's own: a rank's own groups, shuffled by the epoch that it is told."""

    def __init__(self, seed: int) -> None:
        self.seed, self.epoch, self.sampler = seed, 0, self

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(100 * self.epoch + self.seed)
        for group in torch.randperm(BATCHES, generator=generator).tolist():
            yield list(range(BATCH_SIZE * group, BATCH_SIZE * (group + 1)))


def _grouped(shares: int) -> Any:
    return DataLoader(Numbers(BATCH_SIZE * BATCHES), batch_sampler=OwnGroups(rank() % shares))


def _several(shares: int) -> Any:
    quiet = TensorDataset(torch.zeros(8 * shares, 6), torch.arange(8 * shares) % 3)
    # Shorter, and so begun again in the middle of the other one.
    shorter = DataLoader(quiet, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(1))
    return CombinedLoader([LOADERS["`DataLoader`"](shares), shorter], "max_size_cycle")


_LOADERS: Mapping[str, Callable[[int], Any]] = {
    **LOADERS,
    # Lightning would make a batch sampler anew, of a sampler that it has chosen; this one it leaves alone.
    "custom batch sampler": _grouped,
    "several loaders": _several,
}


class Paired(Callback):
    """Several loaders give several batches: the second moves the first, so that both decide."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        original = pl_module.training_step

        def training_step(batch: Any, batch_idx: int) -> torch.Tensor:
            (x, y), (_, more) = batch
            return original((x + more.float().mean(), y), batch_idx)

        pl_module.training_step = training_step


# --------------------------------------------------------------------------------------------- what it trains


class Interrupt(Callback):
    """Does to this process what the plan says, if it is this rank's turn."""

    def __init__(self, plan: Interruption) -> None:
        self.plan = plan

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if self.plan.strikes(trainer.fit_loop.total_batch_idx, trainer.global_rank, trainer.world_size):
            self.plan.act()

    def on_validation_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.sanity_checking:
            return
        done = trainer.fit_loop.total_batch_idx + 1
        if self.plan.strikes(done, trainer.global_rank, trainer.world_size, in_validation=True):
            self.plan.act()


class Told(Logger):
    """A logger that keeps the names of the figures that it is told."""

    name, version = "told", 0

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.names.update(metrics)


def prepare() -> None:
    lightning_ranks.as_lightning_rank()
    warnings.filterwarnings("ignore", message="It is recommended to use .self.log")  # of a group of one
    warnings.filterwarnings("ignore", message="'set_vital' is deprecated")  # torchdata 0.11 with torch 2.13


def train(plan: RunPlan) -> RunResult:
    settings = {"module": rank_runs.RankNet, **_SETTINGS[plan.way]}
    # The order of a distributed sampler goes by this seed, as does the model's beginning.
    lightning.seed_everything(7, verbose=False)
    net = settings["module"]()
    torch.manual_seed(1000 * plan.draw_from + rank())
    told = Told()
    callbacks: list[Callback] = []
    if plan.root is not None:
        callbacks.append(
            StrongroomCheckpoint(plan.root, every_n_train_steps=plan.every_n_steps, **plan.options)
        )
    if plan.loader == "several loaders":
        callbacks.append(Paired())
    if plan.interruption is not None:
        callbacks.append(Interrupt(INTERRUPTIONS[plan.interruption]))
    _, shares = _WAYS[plan.way]
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=world_size(),
        strategy=settings["strategy"](),
        max_epochs=EPOCHS,
        accumulate_grad_batches=plan.accumulate,
        val_check_interval=2 * plan.accumulate,
        use_distributed_sampler=plan.loader != "custom batch sampler",
        callbacks=callbacks,
        logger=told,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=plan.root is not None,
    )
    validation = DataLoader(Numbers(BATCH_SIZE * world_size()), batch_size=BATCH_SIZE)
    trainer.fit(net, _LOADERS[plan.loader](shares), validation if plan.validates else None)
    return RunResult(
        losses=net.losses,
        weights=digest_of(net),
        step=trainer.global_step,
        lr=float(trainer.optimizers[0].param_groups[0]["lr"]),
        figures=sorted(told.names),
    )


def unsupported() -> None:
    """As a Lightning that has renamed a method which nothing but a resume inside an epoch calls."""
    del _FitLoop._load_combined_loader_states


FRONT_END = FrontEnd(
    name="Lightning",
    package="lightning",
    preloaded=(
        "torch.distributed.tensor.parallel",
        "torchmetrics",
        "lightning.pytorch",
        "strongroom_lightning",
    ),
    prepare=prepare,
    ways=_WAYS,
    train=train,
    loaders=tuple(_LOADERS),
    unsupported=unsupported,
)
