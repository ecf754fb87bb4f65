"""Passing over batches by the sampler: the same batches follow, and none of those before is read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)

from strongroom.errors import ConfigError, StateMismatchError
from strongroom.resume import DataPosition, RngState, generators_of, reason_to_read, replay
from strongroom.resume.skipping import check_skip_mode


class Recording(Dataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index


def loader(data: Recording, kind: str, workers: int = 0) -> DataLoader[int]:
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0}
    if kind == "one by one":
        return DataLoader(data, batch_size=None, shuffle=True, **options)
    if kind == "batch sampler":
        sampler = RandomSampler(data, generator=torch.Generator().manual_seed(4))
        return DataLoader(data, batch_sampler=BatchSampler(sampler, 3, drop_last=True), **options)
    if kind == "with replacement":
        sampler = RandomSampler(data, replacement=True, num_samples=2 * len(data))
        return DataLoader(data, batch_size=3, sampler=sampler, **options)
    return DataLoader(data, batch_size=3, shuffle=kind == "shuffled", **options)


def taken(batch: Any) -> list[int]:
    """A batch and a number drawn while training on it."""
    return [*torch.as_tensor(batch).reshape(-1).tolist(), torch.randint(1000, ()).item()]


@settings(max_examples=40)
@given(
    size=st.integers(4, 25),
    data=st.data(),
    kind=st.sampled_from(["shuffled", "in order", "one by one", "batch sampler", "with replacement"]),
    drawn=st.integers(0, 2),
)
def test_the_batches_that_follow_are_the_same_and_no_other_is_read(
    size: int, data: st.DataObject, kind: str, drawn: int
) -> None:
    torch.manual_seed(size)
    original = loader(Recording(size), kind)
    generators = generators_of(original)
    stop = data.draw(st.integers(1, len(original)), label="batches")
    start, iterator = RngState.capture(generators), iter(original)
    torch.rand(drawn)
    first = RngState.capture(generators)
    for _ in range(stop):
        taken(next(iterator))
    position = DataPosition(epoch=0, batches=stop, epoch_start=start, first_batch=first)
    now = RngState.capture(generators)
    rest = [taken(batch) for batch in iterator] + [taken(batch) for batch in original]

    torch.manual_seed(999)
    samples = Recording(size)
    fresh = loader(samples, kind)
    resumed: list[Any] = []

    def make() -> Any:
        resumed.append(iter(fresh))
        return resumed[0]

    assert reason_to_read([fresh], stop) is None
    replay(position, now, make, generators=generators_of(fresh), unread=[fresh])
    assert samples.read == []
    assert [taken(batch) for batch in resumed[0]] + [taken(batch) for batch in fresh] == rest


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_workers_begin_at_the_position_and_later_epochs_at_their_start() -> None:
    torch.manual_seed(5)
    original = loader(Recording(24), "shuffled", workers=2)
    start, iterator = RngState.capture(), iter(original)
    for _ in range(5):
        taken(next(iterator))
    position, now = DataPosition(epoch=0, batches=5, epoch_start=start), RngState.capture()
    rest = [taken(batch) for batch in iterator] + [taken(batch) for batch in original]
    del iterator, original

    torch.manual_seed(6)
    fresh = loader(Recording(24), "shuffled", workers=2)
    resumed: list[Any] = []

    def make() -> Any:
        resumed.append(iter(fresh))
        return resumed[0]

    replay(position, now, make, unread=[fresh])
    assert len(fresh) == 8
    # Persistent workers keep the iterator, and with it the sampler that it was made with.
    assert [taken(batch) for batch in resumed[0]] + [taken(batch) for batch in fresh] == rest


def test_the_loader_has_its_own_sampler_again_afterwards() -> None:
    fresh = loader(Recording(9), "shuffled")
    before = fresh.batch_sampler
    start = RngState.capture()
    replay(DataPosition(epoch=0, batches=2, epoch_start=start), start, lambda: iter(fresh), unread=[fresh])
    assert fresh.batch_sampler is before


def test_data_that_end_before_the_position_are_an_error() -> None:
    fresh = loader(Recording(9), "in order")
    start = RngState.capture()
    position = DataPosition(epoch=0, batches=4, epoch_start=start)
    with pytest.raises(StateMismatchError, match=r"ended after 3 batches.*after 4"):
        replay(position, start, lambda: iter(fresh), unread=[fresh])
    assert isinstance(fresh.sampler, SequentialSampler)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(9))


class Own(DataLoader[int]):
    def __iter__(self) -> Any:
        return super().__iter__()


def test_what_has_no_sampler_to_advance_is_named() -> None:
    stock = loader(Recording(9), "shuffled")
    assert reason_to_read([stock, stock], 3) is None
    assert "begun again" in (reason_to_read([stock, stock], 4) or "")
    assert "IterableDataset" in (reason_to_read([stock, DataLoader(Stream())], 1) or "")
    assert "no torch DataLoader" in (reason_to_read([range(9)], 1) or "")
    assert "a way of its own" in (reason_to_read([Own(TensorDataset(torch.arange(9)))], 1) or "")


def test_another_mode_is_refused() -> None:
    assert check_skip_mode("sampler") == "sampler"
    with pytest.raises(ConfigError, match="skip must be one of 'read', 'sampler'; got 'guess'"):
        check_skip_mode("guess")


def test_other_data_are_told_before_anything_is_read() -> None:
    position = DataPosition(epoch=1, batches=2, epoch_start=RngState.capture(), lengths=(3, None))
    position.check_fits((3, None))
    with pytest.raises(StateMismatchError, match="batch 2 of epoch 1, of 3, an unknown number of batch"):
        position.check_fits((4, None))
    with pytest.raises(StateMismatchError, match="this run has 3 batches"):
        position.check_fits((3,))
    # Between two epochs nothing was counted.
    DataPosition(epoch=1, lengths=(3,)).check_fits((4,))
