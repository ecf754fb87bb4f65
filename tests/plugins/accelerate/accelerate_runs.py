"""A small loop on Accelerate as a user writes it, with all that an exact resume has to bring back.

Importable by name, for ranks too.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
for folder in (str(_HERE.parent), str(_HERE)):
    if folder not in sys.path:
        sys.path.insert(0, folder)

import numpy as np  # noqa: E402 - as below
import torch  # noqa: E402 - as below
from accelerate import (  # noqa: E402 - as below
    Accelerator,
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
)
from accelerate.state import AcceleratorState, GradientState, PartialState  # noqa: E402 - as below
from accelerate.utils import DistributedType, set_seed  # noqa: E402 - the folder must be known first
from processes import FrontEndLauncher, warnings_are_errors  # noqa: E402 - as above
from samples import Numbers  # noqa: E402 - as above
from torch import nn  # noqa: E402 - as above
from torch.utils.data import DataLoader, IterableDataset  # noqa: E402 - as above
from torch.utils.data._utils import worker  # noqa: E402 - as above

from strongroom_accelerate import Strongroom  # noqa: E402 - as above

__all__ = [
    "BATCHES",
    "EPOCHS",
    "LOADERS",
    "PRELOADED",
    "BrokenOffError",
    "FrontEndLauncher",
    "Loop",
    "Numbers",
    "Outcome",
    "Progress",
    "as_rank",
    "expected_warnings",
    "in_notebook",
    "launcher_of",
    "new_accelerator",
    "terminate",
    "train",
    "train_often",
]

BATCHES, EPOCHS, BATCH_SIZE = 6, 2, 4

expected_warnings = (
    "ignore:.*multi-threaded, use of fork:DeprecationWarning",
    "ignore:DTensor random operators may not have complete support:UserWarning",
    # torchdata's loader, of torch.
    "ignore:'set_vital' is deprecated:UserWarning",
)
"""What frameworks say of small runs; every other warning is an error on a rank, as it is in a test."""


PRELOADED = (
    "accelerate",
    "accelerate.utils.fsdp_utils",
    "strongroom_accelerate.attaching",
    # Accelerate imports them when a model or a loader is prepared: seconds for each rank.
    "datasets",
    "torch._dynamo",
    "torchdata.stateful_dataloader",
)


def as_rank() -> None:
    """Prepare a rank."""
    warnings_are_errors(expected_warnings)
    # To Accelerate such a rank looks as one that a launcher has started on this host; its group exists.
    os.environ.update(
        ACCELERATE_USE_CPU="true",
        LOCAL_WORLD_SIZE=os.environ["WORLD_SIZE"],
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="1",
    )
    logging.getLogger("strongroom_accelerate").setLevel("INFO")


def launcher_of() -> FrontEndLauncher:
    """Starts ranks from a forkserver that has imported Accelerate."""
    return FrontEndLauncher(PRELOADED, as_rank)


class BrokenOffError(Exception):
    """What ends a run in the middle, in place of a kill."""


class Stream(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """A stream without a length, in an order of its own each epoch."""

    def __init__(self, size: int) -> None:
        self.numbers = Numbers(size)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        order = torch.Generator().manual_seed(self.epoch)
        for index in torch.randperm(len(self.numbers), generator=order).tolist():
            yield self.numbers[index]


class Progress:
    """A user's own counters, of each rank's own."""

    def __init__(self) -> None:
        self.epoch = 0
        self.seen = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "seen": self.seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.epoch, self.seen = state["epoch"], state["seen"]


def _stock(shares: int, **options: Any) -> Any:
    return DataLoader(Numbers(BATCH_SIZE * BATCHES * shares), batch_size=BATCH_SIZE, shuffle=True, **options)


def _workers(shares: int) -> Any:
    worker.MP_STATUS_CHECK_INTERVAL = 0.5
    return _stock(shares, num_workers=1, multiprocessing_context="fork")


def _with_generator(shares: int) -> Any:
    return _stock(shares, generator=torch.Generator().manual_seed(3))


def _stream(shares: int) -> Any:
    return DataLoader(Stream(BATCH_SIZE * BATCHES * shares), batch_size=BATCH_SIZE)


LOADERS: Mapping[str, tuple[Callable[[int], Any], Mapping[str, Any]]] = {
    "stock": (_stock, {}),
    "workers": (_workers, {}),
    "generator": (_with_generator, {}),
    "seedable": (_stock, {"use_seedable_sampler": True}),
    "stream": (_stream, {}),
    "stream per rank": (_stream, {"dispatch_batches": False}),
    "dispatched": (_stock, {"dispatch_batches": True}),
    "stateful": (_stock, {"use_stateful_dataloader": True}),
    "stateful, workers": (_workers, {"use_stateful_dataloader": True}),
}
"""Makers of the training data, and what ``DataLoaderConfiguration`` is told."""


def new_accelerator(way: str = "ddp", **options: Any) -> Accelerator:
    """As a new process would make one.

    Args:
        way: ``"ddp"``: as many processes as there are; ``"fsdp2"``: sharded, on CPUs, where Accelerate itself
            would train replicas in its place.
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, **options)
    if way == "fsdp2":
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            state_dict_type="SHARDED_STATE_DICT",
            auto_wrap_policy="size_based_wrap",
            min_num_params=1,
            cpu_ram_efficient_loading=False,
        )
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
    return accelerator


@dataclass(kw_only=True)
class Outcome:
    """What a run left behind; plain, since it crosses processes."""

    losses: list[float]
    weights: dict[str, np.ndarray]
    lr: float
    steps: int
    progress: dict[str, Any]
    has_resumed: bool = False
    notes: list[Any] = field(default_factory=list)

    def ends_like(self, reference: Outcome) -> None:
        """Losses to the last batch, weights, counters: equal as floats."""
        assert len(self.losses) <= len(reference.losses)
        assert self.losses == reference.losses[len(reference.losses) - len(self.losses) :]
        assert self.weights.keys() == reference.weights.keys()
        for name, value in self.weights.items():
            assert np.array_equal(value, reference.weights[name]), name
        assert self.lr == reference.lr
        assert self.steps == reference.steps
        assert self.progress == reference.progress


def classifier() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 3))


def whole(module: nn.Module) -> dict[str, np.ndarray]:
    """Every tensor, put together where it is distributed; as arrays, whose memory crosses processes."""
    found = {}
    for name, value in module.state_dict().items():
        full = value.full_tensor() if hasattr(value, "full_tensor") else value
        found[name.removeprefix("module.")] = full.detach().cpu().numpy().copy()
    return found


def train(
    root: Path | None,
    *,
    until: int | None = None,
    act: Callable[[], None] | None = None,
    on: Sequence[int] | None = None,
    seed: int = 7,
    way: str = "ddp",
    loader: str = "stock",
    accumulate: int = 1,
    validates: bool = True,
    by_epochs: bool = False,
    in_context: bool = True,
    strongroom: Mapping[str, Any] | None = None,
    accelerator: Mapping[str, Any] | None = None,
    before: Callable[[Any, Any], None] | None = None,
    pace_s: float = 0.0,
) -> Outcome:
    """Train a fresh model, as a new process would.

    Args:
        root: where to save; None trains without us.
        until: end the run before this batch, counted over the whole run.
        act: how; None: by an exception.
        on: on which ranks; None: on all.
        seed: where the random streams stand after the model was made.
        by_epochs: the loop goes by ``epochs()``, and not by a counter of its own.
        in_context: the loop stands in a ``with`` block.
        strongroom: arguments of `Strongroom`; it saves at every step unless told otherwise.
        before: is called with the Accelerator and the Strongroom before the loop.
        pace_s: how long a batch takes at least.
    """
    make, configuration = LOADERS[loader]
    made = new_accelerator(
        way,
        gradient_accumulation_steps=accumulate,
        dataloader_config=DataLoaderConfiguration(**configuration),
        **(accelerator or {}),
    )
    run = (
        Strongroom(made, root, **({"every_n_steps": 1} if strongroom is None else strongroom))
        if root is not None
        else None
    )
    progress = Progress()
    made.register_for_checkpointing(progress)
    set_seed(7)
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
    set_seed(seed)
    data, validation = make(made.num_processes), DataLoader(Numbers(8), batch_size=4)
    torch.manual_seed(100 * seed + made.process_index)
    model, optimizer, data, validation, scheduler = made.prepare(
        model, optimizer, data, validation, scheduler
    )
    losses: list[float] = []
    has_resumed = run is not None and run.resume()
    if before is not None:
        before(made, run)
    steps = 0
    strikes = made.process_index in (range(made.num_processes) if on is None else on)

    def epochs() -> Iterator[int]:
        if by_epochs and run is not None:
            yield from run.epochs(EPOCHS)
            return
        while progress.epoch < EPOCHS:
            yield progress.epoch

    done = progress.epoch * BATCHES if not has_resumed or run is None else _batches(run, accumulate)
    with run if run is not None and in_context else nullcontext():
        for epoch in epochs():
            for x, y in data:
                time.sleep(pace_s)
                if done == until and strikes:
                    if act is None:
                        raise BrokenOffError
                    act()
                with made.accumulate(model):
                    loss = nn.functional.cross_entropy(model(x), y)
                    made.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                steps += made.sync_gradients
                losses.append(loss.item())
                done += 1
                progress.seen += float(x.sum())
                if validates and done % 3 == 0:
                    # A loop that Accelerate does not see the end of would count as the one being accumulated.
                    _validate(model, validation, breaks_off=accumulate == 1)
                if run is not None:
                    run.step()
            progress.epoch = epoch + 1
        if run is not None:
            steps = run.steps_done
        weights = whole(model)
    return Outcome(
        losses=losses,
        weights=weights,
        lr=float(optimizer.param_groups[0]["lr"]),
        steps=steps,
        progress={**progress.state_dict()},
        has_resumed=has_resumed,
    )


def terminate() -> None:
    """As a job manager tells a process to stop."""
    os.kill(os.getpid(), signal.SIGTERM)


def train_often(plans: Sequence[Mapping[str, Any]]) -> list[Outcome | None]:
    """One run after the other; None for one that was broken off."""
    found: list[Outcome | None] = []
    for plan in plans:
        try:
            found.append(train(**plan))
        except BrokenOffError:
            found.append(None)
    return found


def _batches(run: Strongroom, accumulate: int) -> int:
    """Batches that were trained on before the resume."""
    whole_epochs, rest = divmod(run.steps_done, -(-BATCHES // accumulate))
    return whole_epochs * BATCHES + rest * accumulate


def _validate(model: nn.Module, data: Any, *, breaks_off: bool) -> None:
    """Reading draws noise, from the stream that training draws from."""
    model.eval()
    with torch.no_grad():
        for x, _ in data:
            model(x)
            if breaks_off:
                break
    model.train()


class Loop:
    """A run in the hands of a test, batch by batch.

    Args:
        root: where to save; None trains without us.
        accelerator: arguments of the Accelerator.
        before_prepare: is called with the Accelerator, before anything is prepared.
        options: arguments of `Strongroom`.
    """

    def __init__(
        self,
        root: Path | str | None,
        *,
        accelerator: Mapping[str, Any] | None = None,
        before_prepare: Callable[[Any], None] = lambda _: None,
        seed: int = 7,
        **options: Any,
    ) -> None:
        self.accelerator = new_accelerator(**(accelerator or {}))
        before_prepare(self.accelerator)
        self.run: Any = Strongroom(self.accelerator, root, **options) if root is not None else None
        torch.manual_seed(7)
        model = classifier()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        data = DataLoader(Numbers(BATCH_SIZE * BATCHES), batch_size=BATCH_SIZE, shuffle=True)
        torch.manual_seed(seed)
        self.model, self.optimizer, self.data = self.accelerator.prepare(model, optimizer, data)
        self.losses: list[float] = []
        self._iterator: Iterator[Any] | None = None

    def train(self, batches: int, *, steps: bool = True, every: int = 1) -> None:
        """Train on so many batches more.

        Args:
            every: the script itself accumulates the gradients of so many batches.
            steps: whether the script calls ``step()``.
        """
        while batches:
            self._iterator = iter(self.data) if self._iterator is None else self._iterator
            batch = next(self._iterator, None)
            if batch is None:
                self._iterator = None
                continue
            loss = nn.functional.cross_entropy(self.model(batch[0]), batch[1])
            self.accelerator.backward(loss)
            self.losses.append(loss.item())
            if len(self.losses) % every == 0:
                self.optimizer.step()
                self.optimizer.zero_grad()
            batches -= 1
            if steps and self.run is not None:
                self.run.step()

    def ask(self) -> None:
        """Ask the loader for an iterator."""
        self._iterator = iter(self.data)

    def begin_anew(self) -> None:
        """Ask the loader for a new iterator, as after ``load_state``."""
        self._iterator = None

    @property
    def weights(self) -> list[float]:
        return [float(one.detach().double().sum()) for one in self.model.parameters()]


def in_notebook(root: str) -> None:
    """What a notebook's function trains."""
    loop = Loop(root, every_n_steps=2)
    loop.train(4)
    loop.run.close()
