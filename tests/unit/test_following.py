"""A loader that somebody else's loop iterates: a new process goes on with exactly what was still to come."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

from strongroom.errors import ConfigError, StateMismatchError
from strongroom.resume import DataPosition, RngState
from strongroom.resume.following import FollowedLoader
from strongroom.resume.jobs import JobShape

SIZE, BATCH, EPOCHS = 14, 3, 3
BATCHES = 5


class Plain(Dataset[int]):
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> int:
        return index


class Noisy(Plain):
    """Draws while it reads, from three streams, as augmentations do."""

    def __getitem__(self, index: int) -> int:
        noise = torch.randint(10, ()).item() + 10 * random.randrange(10) + 100 * int(np.random.randint(10))
        return index + 1000 * int(noise)


class Counting(Plain):
    """Remembers how often it was read, and says so in what it gives."""

    def __init__(self) -> None:
        self.reads = 0

    def __getitem__(self, index: int) -> int:
        self.reads += 1
        return index + 1000 * self.reads

    def state_dict(self) -> dict[str, int]:
        return {"reads": self.reads}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.reads = state["reads"]


class Stream(IterableDataset[int]):
    """No length; shuffles by its own generator, another order in each epoch."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(SIZE, generator=self.generator).tolist())


class ByEpoch(Sampler[int]):
    """Its order depends on the epoch that it is told, and is told by the loop."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(SIZE, generator=torch.Generator().manual_seed(self.epoch)).tolist())


class ReadsAhead(DataLoader[Any]):
    """Asks for the next batch before it gives this one, to know which is the last, as some frameworks do."""

    is_last = False

    def __iter__(self) -> Any:
        self.is_last = False
        inner = super().__iter__()
        batch = next(inner)
        while True:
            try:
                following = next(inner)
            except StopIteration:
                self.is_last = True
                yield batch
                return
            yield batch
            batch = following


class HandsOn:
    """A loader of a class of its own, around a stock one; its iterator is a generator that reads nothing."""

    def __init__(self, inner: DataLoader[Any]) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Any:
        yield from self.inner


class LooksAhead(HandsOn):
    """As a framework puts around the user's loader: reads the next batch before it gives this one."""

    def __iter__(self) -> Any:
        batches = iter(self.inner)
        batch = next(batches)
        for following in batches:
            yield batch
            batch = following
        yield batch


def stock(data: Dataset[int] | None = None, *, kind: type = DataLoader, **options: Any) -> DataLoader[Any]:
    data = data or Plain()
    if not isinstance(data, IterableDataset) and "sampler" not in options:
        options.setdefault("shuffle", True)
    made: DataLoader[Any] = kind(data, batch_size=BATCH, **options)
    return made


LOADERS: dict[str, Callable[[], Any]] = {
    "shuffled": stock,
    "own generator": lambda: stock(generator=torch.Generator().manual_seed(5)),
    "sampler's generator": lambda: stock(
        sampler=RandomSampler(Plain(), generator=torch.Generator().manual_seed(6))
    ),
    "weighted": lambda: stock(sampler=WeightedRandomSampler([1.0] * SIZE, SIZE)),
    "noise while reading": lambda: stock(Noisy()),
    "data set with a state": lambda: stock(Counting()),
    "told the epoch": lambda: stock(sampler=ByEpoch()),
    "dealt out": lambda: stock(sampler=DistributedSampler(Plain(), num_replicas=2, rank=1)),
    "stream": lambda: stock(Stream()),
    "reads ahead": lambda: stock(kind=ReadsAhead),
    "reads ahead, noise while reading": lambda: stock(Noisy(), kind=ReadsAhead),
    "reads ahead, told the epoch": lambda: stock(sampler=ByEpoch(), kind=ReadsAhead),
    "reads ahead, stream": lambda: stock(Stream(), kind=ReadsAhead),
    "wrapped": lambda: HandsOn(stock(Noisy())),
    "wrapped, reads ahead": lambda: LooksAhead(stock(Noisy())),
}

WORKERS: dict[str, Callable[[], Any]] = {
    "workers": lambda: stock(Noisy(), num_workers=2),
    "persistent workers": lambda: stock(num_workers=2, persistent_workers=True),
    "reads ahead, workers": lambda: stock(Noisy(), kind=ReadsAhead, num_workers=1),
}


@dataclass
class Saved:
    """What a checkpoint of the run below would hold, and what came afterwards."""

    position: DataPosition
    rng: RngState
    after: list[tuple[Any, ...]]


def follow(loader: Any, **options: Any) -> FollowedLoader:
    sampler = getattr(loader, "sampler", None)
    if hasattr(sampler, "set_epoch"):
        options = {"read_epoch": lambda: sampler.epoch, "write_epoch": sampler.set_epoch, **options}
    return FollowedLoader(loader, stock=loader.inner if isinstance(loader, HandsOn) else None, **options)


def told(loader: Any, epoch: int) -> None:
    sampler = getattr(loader, "sampler", None)
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)


def step(batch: Any) -> tuple[Any, ...]:
    """Train: a batch, and what dropout would draw."""
    drawn = torch.randint(1000, ()).item(), random.randrange(1000), int(np.random.randint(1000))
    return (*torch.as_tensor(batch).reshape(-1).tolist(), *drawn)


def stands(followed: FollowedLoader, *, closes_epoch: bool) -> DataPosition:
    """Where it stands, for a loop that asks an epoch's iterator once more, or for one that knows its end."""
    if closes_epoch and followed.length is not None and followed.taken >= followed.length:
        followed.break_off()
    return followed.position()


def whole_run(make: Callable[[], Any], *, closes_epoch: bool, ticks: int = 1) -> list[Saved]:
    """Train to the end, and look after every step as if to save; after an epoch too, before the next one."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    loader = make()
    followed = follow(loader)
    steps: list[tuple[Any, ...]] = []
    seen: list[tuple[int, Any, Any]] = []

    def look() -> None:
        position = stands(followed, closes_epoch=closes_epoch)
        rng = RngState.capture(followed.generators())
        seen.append((len(steps), position.to_state(), rng.to_state()))

    for epoch in range(EPOCHS):
        told(loader, epoch)
        for batch in loader:
            steps.append(step(batch))
            if len(steps) % ticks == 0:
                look()
        look()
    followed.release()
    return [
        Saved(position=DataPosition.from_state(position), rng=RngState.from_state(rng), after=steps[at:])
        for at, position, rng in seen
    ]


def resumed_run(make: Callable[[], Any], saved: Saved, **options: Any) -> list[tuple[Any, ...]]:
    """What a new process trains on that was given the checkpoint."""
    torch.manual_seed(99)
    random.seed(99)
    np.random.seed(99)
    loader = make()
    followed = follow(loader, **options)
    followed.resume_from(saved.position, saved.rng)
    notes = saved.rng.restore(followed.generators())
    assert notes == ()
    steps = []
    for epoch in range(saved.position.epoch, EPOCHS):
        told(loader, epoch)
        steps += [step(batch) for batch in loader]
    followed.release()
    return steps


@pytest.mark.parametrize("closes_epoch", (True, False), ids=("closes", "asks"))
@pytest.mark.parametrize("kind", LOADERS)
def test_from_every_step_a_new_process_goes_on_exactly(kind: str, closes_epoch: bool) -> None:
    warnings.simplefilter("error")
    every = whole_run(LOADERS[kind], closes_epoch=closes_epoch)
    assert len(every[0].after) + 1 in (EPOCHS * BATCHES, EPOCHS * 3)  # every second sample, where dealt out
    for saved in every:
        assert resumed_run(LOADERS[kind], saved) == saved.after, (
            saved.position.epoch,
            saved.position.batches,
        )


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("kind", WORKERS)
def test_with_workers_too(kind: str) -> None:
    for saved in whole_run(WORKERS[kind], closes_epoch=True, ticks=4):
        assert resumed_run(WORKERS[kind], saved) == saved.after, (
            saved.position.epoch,
            saved.position.batches,
        )


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_persistent_workers_draw_otherwise_between_epochs_and_that_is_said() -> None:
    def make() -> DataLoader[Any]:
        return stock(num_workers=1, persistent_workers=True, prefetch_factor=1)

    saved = whole_run(make, closes_epoch=True, ticks=BATCHES)
    said: list[str] = []
    for one in saved:
        said.clear()
        assert resumed_run(make, one, warn=said.append) == one.after  # the order, and what training draws
        assert len(said) == (one.position.epoch > 0)
    assert "persistent workers" in said[0]


def test_a_resumed_run_can_be_resumed() -> None:
    """What a position says is the same, whether its run began or went on."""
    for kind in ("shuffled", "reads ahead, noise while reading", "data set with a state", "told the epoch"):
        make = LOADERS[kind]
        every = whole_run(make, closes_epoch=True)
        for first, second in ((1, 3), (4, BATCHES + 3), (BATCHES + 1, BATCHES + 2)):
            begun = every[first]
            torch.manual_seed(5)
            loader = make()
            followed = follow(loader)
            followed.resume_from(begun.position, begun.rng)
            begun.rng.restore(followed.generators())
            wanted = every[second]
            left = len(begun.after) - len(wanted.after)
            again: Saved | None = None
            for epoch in range(begun.position.epoch, EPOCHS):
                told(loader, epoch)
                for batch in loader:
                    step(batch)
                    left -= 1
                    if left == 0:
                        rng = RngState.capture(followed.generators())
                        position = stands(followed, closes_epoch=True)
                        again = Saved(position=position, rng=rng, after=[])
                if again is not None:
                    break
            assert again is not None
            assert again.position.epoch == wanted.position.epoch
            assert again.position.batches == wanted.position.batches
            assert resumed_run(make, again) == wanted.after, (kind, first, second)


@pytest.mark.parametrize("asks", (False, True), ids=("before its iterator", "before its first batch"))
def test_a_resumed_run_that_has_trained_nothing_stands_where_it_was_put(asks: bool) -> None:
    make = LOADERS["reads ahead, noise while reading"]
    saved = whole_run(make, closes_epoch=True)[2]
    loader = make()
    followed = follow(loader)
    followed.resume_from(saved.position, saved.rng)
    if asks:
        iter(loader)
    assert followed.taken == 3
    assert resumed_run(make, Saved(position=followed.position(), rng=saved.rng, after=[])) == saved.after


def test_a_generator_that_a_loader_makes_with_its_first_batch_is_put_back() -> None:
    class Late(Stream):
        def __init__(self) -> None:
            self.shuffling: torch.Generator | None = None

        def __iter__(self) -> Iterator[int]:
            for index in range(SIZE):
                self.shuffling = self.shuffling or torch.Generator().manual_seed(8)
                yield index + 100 * int(torch.randint(100, (), generator=self.shuffling))

    def make() -> Any:
        return stock(Late())

    saved = whole_run(make, closes_epoch=True)[1]
    loader = make()
    followed = follow(loader)
    followed.resume_from(saved.position, saved.rng)
    assert [step(batch) for epoch in range(EPOCHS) for batch in loader] == saved.after


# ------------------------------------------------------------------------------------------ by the sampler


@pytest.mark.parametrize("kind", ("shuffled", "own generator", "weighted", "told the epoch", "reads ahead"))
def test_the_sampler_alone_gives_the_same_and_reads_nothing_of_what_was_trained_on(kind: str) -> None:
    reads: list[int] = []

    class Watched(Plain):
        def __getitem__(self, index: int) -> int:
            reads.append(index)
            return index

    def make() -> Any:
        loader = LOADERS[kind]()
        vars(loader)["dataset"] = Watched()
        return loader

    for saved in whole_run(make, closes_epoch=True):
        said: list[str] = []
        reads.clear()
        options: dict[str, Any] = {"skip": "sampler", "info": said.append}
        if kind == "reads ahead":  # its class has an __iter__ of its own; the stock loader in it has not
            options["warn"] = said.append
        assert resumed_run(make, saved, **options) == saved.after
        remaining = sum(len(one) - 3 for one in saved.after)
        if kind == "reads ahead" and saved.position.batches:
            assert "cannot be had" in said[0]
        else:
            assert len(reads) == remaining
        if saved.position.batches and kind != "reads ahead":
            assert said == [
                f"back at batch {saved.position.batches} of epoch {saved.position.epoch}, by its sampler"
            ]


@pytest.mark.parametrize("kind", (HandsOn, LooksAhead))
def test_a_loader_around_a_stock_one_is_brought_back_by_that_ones_sampler(kind: Any) -> None:
    def make() -> Any:
        return kind(stock())

    for saved in whole_run(make, closes_epoch=True):
        said: list[str] = []
        assert resumed_run(make, saved, skip="sampler", info=said.append, warn=said.append) == saved.after
        assert all("by its sampler" in one for one in said)


def test_a_stream_has_no_sampler_and_is_read_again() -> None:
    saved = whole_run(LOADERS["stream"], closes_epoch=True)[1]
    said: list[str] = []
    assert resumed_run(LOADERS["stream"], saved, skip="sampler", warn=said.append) == saved.after
    assert "skip='sampler' cannot be had" in said[0]
    assert "IterableDataset" in said[0]


# ------------------------------------------------------------------------------------------ odd loops


def test_an_iterator_that_is_broken_off_ends_its_epoch() -> None:
    torch.manual_seed(2)
    loader = stock()
    followed = follow(loader)
    iterator = iter(loader)
    step(next(iterator))
    assert (followed.position().epoch, followed.taken) == (0, 1)
    again = iter(loader)
    assert followed.position().epoch == 1
    assert followed.taken == 0
    step(next(iterator))  # of the one before: nothing of the run's
    assert followed.taken == 0
    step(next(again))
    step(next(again))
    assert (followed.position().epoch, followed.position().batches) == (1, 2)
    saved = Saved(
        position=followed.position(),
        rng=RngState.capture(),
        after=[step(one) for one in again] + [step(one) for one in loader],
    )
    assert resumed_run(stock, saved) == saved.after


def test_an_iterator_asked_again_after_its_end_ends_one_epoch_only() -> None:
    loader = stock()
    followed = follow(loader)
    iterator = iter(loader)
    list(iterator)
    assert list(iterator) == []
    assert followed.position().epoch == 1


def test_two_loaders_of_one_run_stand_each_where_it_stands() -> None:
    torch.manual_seed(4)
    first, second = stock(), stock(Noisy(), kind=ReadsAhead)
    one, other = follow(first), follow(second)
    a, b = iter(first), iter(second)
    for _ in range(2):
        step(next(a))
    step(next(b))
    assert (one.taken, other.taken) == (2, 1)
    positions, rng = (one.position(), other.position()), RngState.capture()
    rest = [step(batch) for batch in b] + [step(batch) for batch in a]

    torch.manual_seed(44)
    first, second = stock(), stock(Noisy(), kind=ReadsAhead)
    for loader, position in ((first, positions[0]), (second, positions[1])):
        follow(loader).resume_from(position, rng)
    a = iter(first)
    b = iter(second)
    assert [step(batch) for batch in b] + [step(batch) for batch in a] == rest


def test_between_epochs_nothing_is_read_and_the_epoch_is_told() -> None:
    loader = stock(sampler=ByEpoch())
    followed = follow(loader)
    followed.resume_from(DataPosition(epoch=2, sampler_epoch=7), RngState.capture())
    sampler: Any = loader.sampler
    assert (followed.taken, followed.position().epoch, sampler.epoch) == (0, 2, 7)


def test_a_data_set_that_goes_on_by_itself_is_not_read_again() -> None:
    made: list[Stream] = []

    def make() -> Any:
        made.append(Stream())
        return stock(made[-1])

    saved = whole_run(make, closes_epoch=True)[1]
    loader = make()
    followed = follow(loader)
    followed.resume_from(saved.position, saved.rng, reads=False)
    saved.rng.restore(followed.generators())
    batches = list(loader)
    assert len(batches) == BATCHES  # none was passed over: that is the data set's to do
    assert followed.position().epoch == 1


# ------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize("data", ([1, 2], (1, 2), range(3), iter([1])))
def test_what_cannot_be_followed_is_refused(data: Any) -> None:
    with pytest.raises(ConfigError, match=r"nobody can see how far it was read.*give a torch DataLoader"):
        FollowedLoader(data)


def test_a_loader_is_followed_once_and_can_be_let_go() -> None:
    loader = stock()
    followed = FollowedLoader(loader)
    assert followed.is_followed
    assert isinstance(loader, DataLoader)
    assert type(loader).__name__ == "DataLoader"
    with pytest.raises(ConfigError, match="followed already"):
        FollowedLoader(loader)
    followed.release()
    followed.release()
    assert type(loader) is DataLoader
    assert not followed.is_followed
    assert vars(loader).keys() == vars(stock()).keys()
    FollowedLoader(loader).release()


def test_other_data_are_an_error_before_anything_is_trained_on() -> None:
    saved = whole_run(stock, closes_epoch=True)[2]
    loader: DataLoader[Any] = DataLoader(Plain(), batch_size=BATCH + 1, shuffle=True)
    follow(loader).resume_from(saved.position, saved.rng)
    with pytest.raises(StateMismatchError, match="after batch 3 of epoch 0, of 5 batches; this run has 4"):
        iter(loader)


def test_a_stream_that_ends_too_early_is_an_error() -> None:
    saved = whole_run(LOADERS["stream"], closes_epoch=True)[4]

    class Short(Stream):
        def __iter__(self) -> Iterator[int]:
            return iter(range(4))

    loader = stock(Short())
    follow(loader).resume_from(saved.position, saved.rng)
    with pytest.raises(StateMismatchError, match="ended after 2 batches"):
        iter(loader)


# ------------------------------------------------------------------------------------------ another job


def shape(replicas: int) -> JobShape:
    return JobShape(world_size=replicas, replicas=replicas, batch_size=BATCH)


def test_another_number_of_processes_goes_on_behind_what_all_have_taken() -> None:
    saved = whole_run(LOADERS["reads ahead, noise while reading"], closes_epoch=True)[3]
    said: list[str] = []
    followed = follow(stock(), info=said.append)
    assert followed.in_this_job(saved.position, shape(2), shape(2)) is saved.position
    moved = followed.in_this_job(saved.position, shape(2), shape(4))
    assert (moved.batches, moved.epoch, moved.lengths) == (2, 0, (BATCHES,))
    assert moved.last_batch is None  # the state before another batch than the one that is last now
    assert "divided among 2 processes, and are now among 4" in said[0]
    assert followed.in_this_job(saved.position, shape(2), shape(1), multiple_of=4).batches == 8
    between = DataPosition(epoch=1)
    assert followed.in_this_job(between, shape(2), shape(1)) is between
