"""The matrix of exact resume: its axes, what the ranks of a cell do, and the page that tells what came of it.

A cell is a strategy, a kind of loader, and an interruption. It trains to the interruption, starts again in
processes that know nothing of the first ones, and ends: with the losses and the weights of the run that was
never interrupted, equal as floats, or not.
"""

from __future__ import annotations

import itertools
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import multiprocess
import rank_runs
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset
from torch.utils.data._utils import worker

__all__ = ["AXES", "COMMAND", "Cell", "cover", "page", "product", "train"]

BATCHES, EPOCHS = 6, 2
COMMAND = "pytest -m matrix tests/plugins/lightning/test_matrix.py"


class Cell(NamedTuple):
    """One of each axis, by name."""

    strategy: str
    loader: str
    interruption: str


# ------------------------------------------------------------------------------------------------- strategies


class Way(NamedTuple):
    """How ranks train together: how many there are, among how many of them the data are divided."""

    ranks: int
    shares: int
    options: dict[str, Any]


def _sharded(data: int, tensor: int) -> dict[str, Any]:
    return {"strategy": partial(rank_runs.sharded, data, tensor), "module": rank_runs.ShardedNet}


STRATEGIES: dict[str, Way] = {
    "one process": Way(1, 1, {"strategy": "auto"}),
    "DDP": Way(2, 2, {"strategy": "ddp"}),
    "FSDP2": Way(2, 2, _sharded(2, 1)),
    "tensor parallel": Way(2, 1, _sharded(1, 2)),
}

# ---------------------------------------------------------------------------------------------------- loaders


def _stock(shares: int, **options: Any) -> Any:
    return DataLoader(rank_runs.Numbers(4 * BATCHES * shares), batch_size=4, shuffle=True, **options)


def _with_worker(shares: int) -> Any:
    # A rank's own way of starting processes is a forkserver, from which a worker would not see the rank die.
    worker.MP_STATUS_CHECK_INTERVAL = 0.5
    return _stock(shares, num_workers=1, multiprocessing_context="fork")


def _stateful(shares: int) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    # Its sampler would be seeded by each rank's own random stream, and ranks that split a layer, or divide
    # the data, would not agree on the order.
    own = torch.Generator().manual_seed(3)
    return StatefulDataLoader(
        rank_runs.Numbers(4 * BATCHES * shares), batch_size=4, shuffle=True, generator=own
    )


class Stream(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """A stream without a length, a rank's own, shuffled from a generator that it carries."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for index in torch.randperm(4 * BATCHES, generator=self.generator).tolist():
            yield torch.randn(6, generator=self.generator), torch.tensor(index % 3)


class Groups(Sampler[list[int]]):
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
            yield list(range(4 * group, 4 * group + 4))


def _several(shares: int) -> Any:
    quiet = TensorDataset(torch.zeros(8 * shares, 6), torch.arange(8 * shares) % 3)
    # Shorter, and so begun again in the middle of the other one.
    shorter = DataLoader(quiet, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(1))
    return CombinedLoader([_stock(shares), shorter], "max_size_cycle")


LOADERS: dict[str, Callable[[int], Any]] = {
    "`DataLoader`": _stock,
    "`DataLoader`, a worker": _with_worker,
    "`StatefulDataLoader`": _stateful,
    "`IterableDataset`": lambda shares: DataLoader(
        Stream(multiprocess.rank() % shares), batch_size=4, num_workers=0
    ),
    "custom batch sampler": lambda shares: DataLoader(
        rank_runs.Numbers(4 * BATCHES), batch_sampler=Groups(multiprocess.rank() % shares)
    ),
    "several loaders": _several,
}

# ---------------------------------------------------------------------------------------------- interruptions


def _kill() -> None:
    multiprocess.die()


def _terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _raise() -> None:
    raise RuntimeError("the GPU fell off the bus")


class Interruption(NamedTuple):
    """What ends the run: what is done, before which batch, on which rank (the last, or all), and where."""

    act: Callable[[], None]
    batch: int
    everywhere: bool = False
    in_validation: bool = False

    @property
    def kills(self) -> bool:
        return self.act is _kill


INTERRUPTIONS: dict[str, Interruption] = {
    "SIGKILL in mid-epoch": Interruption(_kill, BATCHES + 3),
    "SIGTERM on one rank": Interruption(_terminate, BATCHES + 2),
    "exception on one rank": Interruption(_raise, BATCHES - 2),
    "after an epoch's last batch": Interruption(_kill, BATCHES, everywhere=True),
    "SIGKILL in validation": Interruption(_kill, 4, in_validation=True),
}


class Interrupt(Callback):
    """Does to this process what the cell says, if it is this rank's turn."""

    def __init__(self, plan: Interruption) -> None:
        self.plan = plan

    def _act(self, trainer: Any) -> None:
        if self.plan.everywhere or trainer.global_rank == trainer.world_size - 1:
            self.plan.act()

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if not self.plan.in_validation and trainer.fit_loop.total_batch_idx == self.plan.batch:
            self._act(trainer)

    def on_validation_batch_start(self, trainer: Any, *args: Any) -> None:
        if self.plan.in_validation and trainer.global_step == self.plan.batch:
            self._act(trainer)


AXES = {
    "strategy": tuple(STRATEGIES),
    "loader": tuple(LOADERS),
    "interruption": tuple(INTERRUPTIONS),
}

# ------------------------------------------------------------------------------------------- what a rank does


_EXPECTED = (
    "It is recommended to use .self.log",  # of one process in a group of one
    "'set_vital' is deprecated",  # torchdata 0.11 with torch 2.13
)


class Paired(Callback):
    """Several loaders give several batches: the second moves the first, so that both decide."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        original = pl_module.training_step

        def training_step(batch: Any, batch_idx: int) -> torch.Tensor:
            (x, y), (_, more) = batch
            return original((x + more.float().mean(), y), batch_idx)

        pl_module.training_step = training_step


def train(root: Path | None, strategy: str, loader: str, interruption: str | None = None) -> dict[str, Any]:
    """Train on this rank, up to the interruption or to the end; what `rank_runs.train` returns."""
    way = STRATEGIES[strategy]
    for said in _EXPECTED:
        warnings.filterwarnings("ignore", message=said)
    callbacks: list[Callable[[], Callback]] = []
    if loader == "several loaders":
        callbacks.append(Paired)
    if interruption is not None:
        callbacks.append(lambda: Interrupt(INTERRUPTIONS[interruption]))
    return rank_runs.train(
        root,
        # Whoever goes on stands elsewhere in every random stream.
        draw_from=7 if root is None or interruption is not None else 99,
        loader=lambda: LOADERS[loader](way.shares),
        batches=BATCHES,
        max_epochs=EPOCHS,
        validate=True,
        val_check_interval=2,
        use_distributed_sampler=loader != "custom batch sampler",
        callbacks=callbacks,
        checkpoint={"every_n_train_steps": 1},
        **way.options,
    )


# ----------------------------------------------------------------------------------------- cells and the page


def product() -> list[Cell]:
    """Every cell."""
    return [Cell(*values) for values in itertools.product(*AXES.values())]


def cover() -> list[Cell]:
    """Few cells, among them every pair of values of two axes: the cell with most pairs that are still
    missing first.
    """
    missing = {pair for cell in product() for pair in _pairs(cell)}
    chosen = []
    while missing:
        best = max(product(), key=lambda cell: len(missing.intersection(_pairs(cell))))
        missing.difference_update(_pairs(best))
        chosen.append(best)
    return sorted(chosen)


def _pairs(cell: Cell) -> set[tuple[tuple[str, str], ...]]:
    return set(itertools.combinations(zip(AXES, cell, strict=True), 2))


def page(results: dict[Cell, str]) -> str:
    """The page that shows what each cell came to."""
    lines = [
        "# What was resumed, and how it came out",
        "",
        (
            "Each cell of these tables was run: trained to the interruption, started again in processes that "
            "know nothing of the first ones, and compared with the run that was never interrupted. **equal** "
            "means that every loss from there on and every weight at the end are the same floating-point "
            "numbers, on every rank, and that no more than the save under way was lost."
        ),
        "",
        (
            f"The runs have {EPOCHS} epochs of {BATCHES} batches, dropout, noise drawn while reading, AdamW, "
            f"a scheduler by step, validation every two batches, and a checkpoint at every step. Several "
            f"ranks are processes over gloo on CPUs."
        ),
        "",
    ]
    for strategy in AXES["strategy"]:
        lines += [
            f"## {strategy[0].upper()}{strategy[1:]}",
            "",
            f"| | {' | '.join(AXES['interruption'])} |",
            f"| --- |{' --- |' * len(AXES['interruption'])}",
        ]
        lines += [
            f"| {loader} | "
            + " | ".join(results[Cell(strategy, loader, way)] for way in AXES["interruption"])
            + " |"
            for loader in AXES["loader"]
        ]
        lines.append("")
    lines += [
        (
            "The tests of every change run a part of these cells, in which every pair of a strategy and a "
            "loader, of a loader and an interruption, and of a strategy and an interruption occurs. This "
            f"page is written by the run of all of them: `{COMMAND}`."
        ),
        "",
    ]
    return "\n".join(lines)
