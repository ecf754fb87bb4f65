"""How Composer trains a `RunPlan`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "composer"))

import composer_ranks
import torch
from composer import Callback, ComposerModel, Evaluator, Trainer
from composer.loggers import LoggerDestination
from composer.utils import dist
from composer.utils.parallelism import FSDP2Config
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
    classifier,
    digest_of,
)
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from strongroom_composer import StrongroomCheckpoint

__all__ = ["FRONT_END"]

# ------------------------------------------------------------------------------------------------------- ways

_WAYS = {"one process": (1, 1), "DDP": (2, 2), "FSDP2": (2, 2), "FSDP2, full": (2, 2)}


def _parallelism(way: str) -> Any:
    if not way.startswith("FSDP2"):
        return None
    return {"fsdp": FSDP2Config(state_dict_type="full" if way.endswith("full") else "sharded")}


# ---------------------------------------------------------------------------------------------------- loaders


def _dealt_out(shares: int, batch_size: int = BATCH_SIZE, **options: Any) -> Any:
    """As Composer's users deal data out: by its own sampler."""
    data = Numbers(BATCH_SIZE * BATCHES * shares)
    if shares > 1:
        options["sampler"] = dist.get_sampler(data, shuffle=True)
    return DataLoader(data, batch_size=batch_size, shuffle=shares == 1, **options)


class OwnGroups(DistributedSampler[list[int]]):
    """A batch sampler of a user's own, of the kind that Composer asks for: a rank's own groups, shuffled by a
    count of its own iterations that it carries."""

    def __init__(self, data: Any, shares: int) -> None:
        super().__init__(data, num_replicas=shares, rank=rank() % shares)
        self.generator = torch.Generator().manual_seed(5)
        self.batch_size, self.drop_last = BATCH_SIZE, True

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[list[int]]:  # type: ignore[override]
        first = BATCHES * self.rank
        for group in torch.randperm(BATCHES, generator=self.generator).tolist():
            yield list(range(BATCH_SIZE * (first + group), BATCH_SIZE * (first + group + 1)))


def _grouped(shares: int) -> Any:
    data = Numbers(BATCH_SIZE * BATCHES * shares)
    return DataLoader(data, batch_sampler=OwnGroups(data, shares))


class Keeping(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """A stream that is told how far it was read, and goes on from there, as MosaicML's are.

    Which samples an epoch has is a function of its number; each has noise, from the stream that training
    draws from.
    """

    def __init__(self, shares: int) -> None:
        self.shares, self.epoch, self.begin_at = shares, 0, 0

    def __len__(self) -> int:
        return BATCH_SIZE * BATCHES

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        assert from_beginning
        is_inside = num_samples > 0
        return {"epoch": self.epoch - is_inside, "sample_in_epoch": num_samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.begin_at = state["epoch"], state["sample_in_epoch"] // self.shares

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        order = torch.Generator().manual_seed(100 * self.epoch + rank() % self.shares)
        begin_at, self.begin_at = self.begin_at, 0
        self.epoch += 1
        for index in torch.randperm(len(self), generator=order).tolist()[begin_at:]:
            yield torch.full((6,), index / 10) + 0.1 * torch.randn(6), torch.tensor(index % 3)


def _keeping(shares: int) -> Any:
    return DataLoader(Keeping(shares), batch_size=BATCH_SIZE)


_LOADERS: Mapping[str, Callable[[int], Any]] = {
    "`DataLoader`": _dealt_out,
    "`DataLoader`, a worker": lambda shares: _dealt_out(
        shares, num_workers=1, multiprocessing_context="fork"
    ),
    "custom batch sampler": _grouped,
    "`IterableDataset`": LOADERS["`IterableDataset`"],
    "data set with its own place": _keeping,
}

# --------------------------------------------------------------------------------------------- what it trains


class Net(ComposerModel):  # type: ignore[misc]
    """`classifier`, sharded as its ways ask."""

    def __init__(self) -> None:
        super().__init__()
        self.net = classifier()
        self.net[0]._fsdp_wrap = self.net[3]._fsdp_wrap = True

    def forward(self, batch: Any) -> torch.Tensor:
        return self.net(batch[0])

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, batch[1])


class Losses(Callback):  # type: ignore[misc]
    """Those of every batch; where several make up a step, Composer calls them microbatches."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def after_loss(self, state: Any, logger: Any) -> None:
        self.found.append(float(state.loss))


class Interrupt(Callback):  # type: ignore[misc]
    """Does to this process what the plan says, if it is this rank's turn."""

    def __init__(self, plan: Interruption) -> None:
        self.plan = plan

    def batch_start(self, state: Any, logger: Any) -> None:
        if self.plan.strikes(int(state.timestamp.batch), rank(), world_size()):
            self.plan.act()

    def eval_batch_start(self, state: Any, logger: Any) -> None:
        if self.plan.strikes(int(state.timestamp.batch), rank(), world_size(), in_validation=True):
            self.plan.act()


class Told(LoggerDestination):  # type: ignore[misc]
    """A logger that keeps the names of the figures that it is told."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.names.update(metrics)


def train(plan: RunPlan) -> RunResult:
    torch.manual_seed(7)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses, told = Losses(), Told()
    callbacks: list[Any] = [losses]
    if plan.root is not None:
        callbacks.append(
            StrongroomCheckpoint(plan.root, save_interval=f"{plan.every_n_steps}ba", **plan.options)
        )
    if plan.interruption is not None:
        callbacks.append(Interrupt(INTERRUPTIONS[plan.interruption]))
    _, shares = _WAYS[plan.way]
    if plan.accumulate == 1:
        loader = _LOADERS[plan.loader](shares)
    else:
        loader = _dealt_out(shares, BATCH_SIZE * plan.accumulate)
    # An epoch of a stream is as long as it is: how many there will be, nobody knows.
    is_counted = plan.loader != "`IterableDataset`"
    validation = DataLoader(Numbers(BATCH_SIZE), batch_size=BATCH_SIZE)
    if shares > 1:
        data = Numbers(BATCH_SIZE * shares)
        validation = DataLoader(data, batch_size=BATCH_SIZE, sampler=dist.get_sampler(data))
    trainer = Trainer(
        model=net,
        optimizers=optimizer,
        schedulers=torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7),
        step_schedulers_every_batch=True,
        train_dataloader=loader,
        device_train_microbatch_size=BATCH_SIZE,
        eval_dataloader=Evaluator(label="eval", dataloader=validation) if plan.validates else None,
        eval_interval="2ba" if plan.validates else 1,
        max_duration=f"{EPOCHS}ep" if is_counted else f"{EPOCHS * BATCHES // plan.accumulate}ba",
        parallelism_config=_parallelism(plan.way),
        callbacks=callbacks,
        loggers=[told],
        # Composer begins every fit from the same random streams; what is drawn before is where a run stands.
        seed=7,
        device="cpu",
        progress_bar=False,
        auto_log_hparams=False,
    )
    torch.manual_seed(1000 * plan.draw_from + rank())
    trainer.fit()
    trainer.close()
    return RunResult(
        losses=losses.found,
        weights=digest_of(trainer.state.model),
        step=int(trainer.state.timestamp.batch),
        lr=float(optimizer.param_groups[0]["lr"]),
        figures=sorted(told.names),
    )


def unsupported() -> None:
    """As a Composer that has renamed a method which nothing but a fit that is broken off needs."""
    del Trainer._train_loop


FRONT_END = FrontEnd(
    name="Composer",
    package="composer",
    preloaded=composer_ranks.PRELOADED,
    prepare=composer_ranks.as_composer_rank,
    ways=_WAYS,
    train=train,
    loaders=tuple(_LOADERS),
    unsupported=unsupported,
)
