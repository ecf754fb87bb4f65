"""One run, in no framework's terms: what every front end is asked to train, break off, and go on with.

A front end's module here (``conform_composer.py``, ...) says how its framework trains a `RunPlan`, and what
came of it as a `RunResult`; the rest of this folder asks all of them the same.
"""

from __future__ import annotations

import hashlib
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

_HERE = Path(__file__).parent
for folder in (str(_HERE.parent), str(_HERE)):
    if folder not in sys.path:
        sys.path.insert(0, folder)

import torch  # noqa: E402 - as below
from processes import die, rank  # noqa: E402 - the folder must be known first
from samples import Numbers  # noqa: E402 - as above
from torch import nn  # noqa: E402 - as above
from torch.utils.data import DataLoader, IterableDataset, Sampler  # noqa: E402 - as above
from torch.utils.data._utils import worker  # noqa: E402 - as above

__all__ = [
    "BATCHES",
    "BATCH_SIZE",
    "EPOCHS",
    "INTERRUPTIONS",
    "LOADERS",
    "FrontEnd",
    "Interruption",
    "Numbers",
    "RunPlan",
    "RunResult",
    "classifier",
    "digest_of",
    "whole",
]

BATCHES, EPOCHS, BATCH_SIZE = 6, 2, 4


# ----------------------------------------------------------------------------------------------- the question


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """What one process of a run does; the same on every rank, and sent to each.

    The run has `EPOCHS` epochs of `BATCHES` batches of `BATCH_SIZE` samples on each rank; `classifier` with
    AdamW (lr 1e-2) and ``StepLR(3, 0.7)`` by step, seeded with 7; after the model was made, rank r's global
    streams are seeded with ``1000 * draw_from + r``. The loss is the cross entropy of `classifier`.

    Attributes:
        root: the run's; None: trained without Strongroom, as the framework does it.
        way: how ranks train together, of the front end's `FrontEnd.ways`.
        loader: of `LOADERS`.
        interruption: of `INTERRUPTIONS`; None: to the end.
        draw_from: where the random streams stand; one that resumes draws from somewhere else.
        validates: whether validation, which draws, runs every two steps.
        every_n_steps: when our front end saves.
        accumulate: batches of a step.
        options: further options of the front end, of `strongroom.frontend.RunOptions`.
    """

    root: Path | None
    way: str = "one process"
    loader: str = "`DataLoader`"
    interruption: str | None = None
    draw_from: int = 7
    validates: bool = True
    every_n_steps: int = 1
    accumulate: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What came of it on one rank; plain, since it crosses processes.

    Attributes:
        losses: of each batch that was trained on, in order.
        weights: `digest_of` the model's, put together where they are sharded.
        step: optimizer steps since the run's very beginning.
        lr: of the optimizer at the end.
        figures: the names of the figures, such as ``strongroom/stall_s``, that a logger (tracker, callback)
            of the framework's own kind was told in this run; on rank 0.
    """

    losses: list[float]
    weights: str
    step: int
    lr: float
    figures: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class FrontEnd:
    """How one framework is asked.

    Attributes:
        name: for people.
        package: what must be importable for it to be asked here.
        preloaded: what a process that ranks are forked from imports.
        prepare: runs first on each rank; module-level.
        ways: how ranks can train together: name -> (how many ranks, among how many the data are divided).
        train: trains a plan on this rank; module-level.
        loaders: those that the framework can train with: of `LOADERS`, and of its own.
        unsupported: makes of the framework, in this process, a version that the front end cannot work with:
            it takes away a name that its seam needs; module-level.
        rules: of cells (way, loader, interruption; ``"*"`` for any) that follow a documented rule in place
            of being equal: the rule's words.
    """

    name: str
    package: str
    preloaded: tuple[str, ...]
    prepare: Callable[[], None] | None
    ways: Mapping[str, tuple[int, int]]
    train: Callable[[RunPlan], RunResult]
    loaders: tuple[str, ...]
    unsupported: Callable[[], None] | None = None
    rules: Mapping[tuple[str, str, str], str] = field(default_factory=dict)


# -------------------------------------------------------------------------------------------- model and data


def classifier(width: int = 8) -> nn.Sequential:
    """Dropout, so that every draw counts; shard its parts 0 and 3, and itself."""
    return nn.Sequential(nn.Linear(6, width), nn.Dropout(0.3), nn.ReLU(), nn.Linear(width, 3))


def whole(module: nn.Module) -> dict[str, torch.Tensor]:
    """Every tensor of a module on the CPU, put together where it is distributed; for all ranks."""
    found = {}
    for name, value in module.state_dict().items():
        full = value.full_tensor() if hasattr(value, "full_tensor") else value
        found[name.removeprefix("module.")] = full.detach().cpu()
    return found


def digest_of(module: nn.Module) -> str:
    """Equal for equal weights, to the last bit."""
    found = hashlib.sha256()
    for name, value in sorted(whole(module).items()):
        found.update(f"{name}{tuple(value.shape)}".encode())
        found.update(value.contiguous().numpy().tobytes())
    return found.hexdigest()


class Stream(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """A stream without a length, a rank's own, shuffled from a generator that it carries."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for index in torch.randperm(BATCH_SIZE * BATCHES, generator=self.generator).tolist():
            yield torch.randn(6, generator=self.generator), torch.tensor(index % 3)


class Groups(Sampler[list[int]]):
    """A batch sampler of a user's own, shuffled by a count of its own iterations that it carries.

    Args:
        size: how many batches there are, of all ranks.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.generator = torch.Generator().manual_seed(5)
        self.batch_size, self.drop_last = BATCH_SIZE, True

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[list[int]]:
        for group in torch.randperm(self.size, generator=self.generator).tolist():
            yield list(range(BATCH_SIZE * group, BATCH_SIZE * (group + 1)))


def _stock(shares: int, **options: Any) -> Any:
    return DataLoader(Numbers(BATCH_SIZE * BATCHES * shares), batch_size=BATCH_SIZE, shuffle=True, **options)


def _with_worker(shares: int) -> Any:
    # A rank's own way of starting processes is a forkserver, from which a worker would not see the rank die.
    worker.MP_STATUS_CHECK_INTERVAL = 0.5
    return _stock(shares, num_workers=1, multiprocessing_context="fork")


def _grouped(shares: int) -> Any:
    return DataLoader(Numbers(BATCH_SIZE * BATCHES * shares), batch_sampler=Groups(BATCHES * shares))


def _stateful(shares: int) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    # Its sampler would be seeded by each rank's own random stream, and ranks that divide the data would not
    # agree on the order.
    own = torch.Generator().manual_seed(3)
    data = Numbers(BATCH_SIZE * BATCHES * shares)
    return StatefulDataLoader(data, batch_size=BATCH_SIZE, shuffle=True, generator=own)


def _streamed(shares: int) -> Any:
    return DataLoader(Stream(rank() % shares), batch_size=BATCH_SIZE)


LOADERS: Final[Mapping[str, Callable[[int], Any]]] = {
    "`DataLoader`": _stock,
    "`DataLoader`, a worker": _with_worker,
    "custom batch sampler": _grouped,
    "`StatefulDataLoader`": _stateful,
    "`IterableDataset`": _streamed,
}
"""Makers of the training loader, for so many processes that share the data. Frameworks deal them out in their
own ways; what they cannot deal out is no part of their `FrontEnd.loaders`, or is made otherwise there.
The stream of an `IterableDataset` is each rank's own already."""


# ---------------------------------------------------------------------------------------------- interruptions


def _terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _raise() -> None:
    raise RuntimeError("the GPU fell off the bus")


def _fill() -> None:
    """As on a disk that is full: from now on this process can make no file longer."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))


class Interruption(NamedTuple):
    """What ends the run: what is done, before which batch, on the last rank or on all, and where.

    Batches are counted from 0 over the whole run.

    Attributes:
        pace_s: how long a rank takes for each batch from there on, at least: ranks that are told to stop take
            half a second to agree where.
        is_of_matrix: whether it is a value of the matrix' axis.
    """

    act: Callable[[], None]
    batch: int
    everywhere: bool = False
    in_validation: bool = False
    pace_s: float = 0.0
    is_of_matrix: bool = True

    @property
    def kills(self) -> bool:
        return self.act is die

    def strikes(self, batch: int, rank: int, world_size: int, *, in_validation: bool = False) -> bool:
        """Whether this is the moment, on this rank; then ``act`` is called.

        To be asked before every batch of training, and before every one of validation; there ``batch`` is
        how many were trained on.
        """
        if batch > self.batch and not in_validation:
            time.sleep(self.pace_s)
        is_ranks = self.everywhere or rank == world_size - 1
        return is_ranks and batch == self.batch and in_validation == self.in_validation


INTERRUPTIONS: Final[Mapping[str, Interruption]] = {
    "SIGKILL in mid-epoch": Interruption(die, BATCHES + 3),
    "SIGTERM on one rank": Interruption(_terminate, BATCHES + 1, pace_s=0.2),
    "exception on one rank": Interruption(_raise, BATCHES - 2),
    "after an epoch's last batch": Interruption(die, BATCHES, everywhere=True),
    "SIGKILL in validation": Interruption(die, 4, in_validation=True),
    "full disk": Interruption(_fill, BATCHES - 2, everywhere=True, pace_s=0.1, is_of_matrix=False),
}
