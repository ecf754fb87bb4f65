"""How a loop on Accelerate trains a `RunPlan`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "accelerate"))

import accelerate_runs
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.tracking import GeneralTracker
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
    Stream,
    classifier,
    digest_of,
)
from torch import nn
from torch.utils.data import DataLoader

from strongroom_accelerate import Strongroom

__all__ = ["FRONT_END"]

_WAYS = {"one process": (1, 1), "DDP": (2, 2), "FSDP2": (2, 2)}


class Shared(Stream):
    """A stream for all ranks: the main process reads it, and deals its batches out."""

    def __init__(self, shares: int) -> None:
        super().__init__(0)
        self.size = BATCH_SIZE * BATCHES * shares

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for index in torch.randperm(self.size, generator=self.generator).tolist():
            yield torch.randn(6, generator=self.generator), torch.tensor(index % 3)


def _streamed(shares: int) -> Any:
    return DataLoader(Shared(shares), batch_size=BATCH_SIZE)


_LOADERS: Mapping[str, tuple[Callable[[int], Any], Mapping[str, Any]]] = {
    "`DataLoader`": (LOADERS["`DataLoader`"], {}),
    "`DataLoader`, a worker": (LOADERS["`DataLoader`, a worker"], {}),
    "custom batch sampler": (LOADERS["custom batch sampler"], {}),
    "`StatefulDataLoader`": (LOADERS["`StatefulDataLoader`"], {"use_stateful_dataloader": True}),
    "`IterableDataset`": (_streamed, {}),
    "seedable sampler": (LOADERS["`DataLoader`"], {"use_seedable_sampler": True}),
    "dispatched batches": (LOADERS["`DataLoader`"], {"dispatch_batches": True}),
}
"""Makers of the training data, and what ``DataLoaderConfiguration`` is told."""


class Told(GeneralTracker):  # type: ignore[misc]
    """A tracker that keeps the names of the figures that it is told."""

    name = "told"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    @property
    def tracker(self) -> Any:
        return None

    def store_init_configuration(self, values: Any) -> None:
        pass

    def log(self, values: Any, step: int | None = None, **options: Any) -> None:
        self.names.update(values)


def train(plan: RunPlan) -> RunResult:
    make, configuration = _LOADERS[plan.loader]
    told = Told()
    accelerator = accelerate_runs.new_accelerator(
        "fsdp2" if plan.way == "FSDP2" else "ddp",
        gradient_accumulation_steps=plan.accumulate,
        dataloader_config=DataLoaderConfiguration(**configuration),
        log_with=[told],
    )
    accelerator.init_trackers("run")
    strongroom = None
    if plan.root is not None:
        strongroom = Strongroom(accelerator, plan.root, every_n_steps=plan.every_n_steps, **plan.options)
    torch.manual_seed(7)
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
    data = make(_WAYS[plan.way][1])
    validation = DataLoader(Numbers(BATCH_SIZE * world_size()), batch_size=BATCH_SIZE)
    model, optimizer, data, validation, scheduler = accelerator.prepare(
        model, optimizer, data, validation, scheduler
    )
    torch.manual_seed(1000 * plan.draw_from + rank())
    losses: list[float] = []
    steps = 0
    interruption = None if plan.interruption is None else INTERRUPTIONS[plan.interruption]
    if strongroom is not None:
        strongroom.resume()
        steps = strongroom.steps_done
    with strongroom if strongroom is not None else nullcontext():
        for _ in range(EPOCHS) if strongroom is None else strongroom.epochs(EPOCHS):
            for x, y in data:
                _strike(interruption, steps * plan.accumulate + len(losses) % plan.accumulate)
                with accelerator.accumulate(model):
                    loss = nn.functional.cross_entropy(model(x), y)
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                losses.append(loss.item())
                steps += accelerator.sync_gradients
                if plan.validates and accelerator.sync_gradients and steps % 2 == 0:
                    _validate(model, validation, interruption, steps * plan.accumulate)
                if strongroom is not None:
                    strongroom.step()
    return RunResult(
        losses=losses,
        weights=digest_of(model),
        step=steps,
        lr=float(optimizer.param_groups[0]["lr"]),
        figures=sorted(told.names),
    )


def _strike(interruption: Interruption | None, batch: int, *, in_validation: bool = False) -> None:
    if interruption is not None and interruption.strikes(
        batch, rank(), world_size(), in_validation=in_validation
    ):
        interruption.act()


def _validate(model: nn.Module, data: Any, interruption: Interruption | None, batch: int) -> None:
    model.eval()
    with torch.no_grad():
        for x, _ in data:
            _strike(interruption, batch, in_validation=True)
            model(x)
    model.train()


def unsupported() -> None:
    """As an Accelerate that has renamed a method which nothing but the making of loaders needs."""
    del Accelerator.prepare_data_loader


FRONT_END = FrontEnd(
    name="Accelerate",
    package="accelerate",
    preloaded=accelerate_runs.PRELOADED,
    prepare=accelerate_runs.as_rank,
    ways=_WAYS,
    train=train,
    loaders=tuple(_LOADERS),
    unsupported=unsupported,
)
