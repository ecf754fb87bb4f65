"""Data position: a fresh process continues with exactly the batches that were still to come."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, RandomSampler, TensorDataset, WeightedRandomSampler

from strongroom.errors import ConfigError, StateMismatchError
from strongroom.resume import DataPosition, RngState, generators_of, replay


def loader(size: int, *, kind: str, workers: int = 0) -> DataLoader[Any]:
    data = TensorDataset(torch.arange(size))
    if kind == "global":
        return DataLoader(data, batch_size=3, shuffle=True, num_workers=workers)
    if kind == "own generator":
        return DataLoader(data, batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(11))
    if kind == "sampler generator":
        return DataLoader(
            data, batch_size=3, sampler=RandomSampler(data, generator=torch.Generator().manual_seed(7))
        )
    return DataLoader(data, batch_size=3, sampler=WeightedRandomSampler([1.0] * size, size))


def taken(batch: Any) -> list[int]:
    """A batch and a number drawn while training on it."""
    return [*batch[0].tolist(), torch.randint(1000, ()).item()]


@settings(max_examples=40)
@given(
    size=st.integers(4, 25),
    epochs_before=st.integers(0, 2),
    data=st.data(),
    kind=st.sampled_from(["global", "own generator", "sampler generator", "weighted"]),
)
def test_a_fresh_loader_continues_where_the_position_says(
    size: int, epochs_before: int, data: st.DataObject, kind: str
) -> None:
    torch.manual_seed(size)
    original = loader(size, kind=kind)
    generators = generators_of(original)
    for _ in range(epochs_before):
        for batch in original:
            taken(batch)
    stop = data.draw(st.integers(1, len(original)), label="batches")
    start = RngState.capture(generators)
    iterator = iter(original)
    for _ in range(stop):
        taken(next(iterator))
    position = DataPosition(epoch=epochs_before, batches=stop, epoch_start=start)
    saved = position.to_state(), RngState.capture(generators).to_state()
    rest = [taken(batch) for batch in iterator] + [taken(batch) for batch in original]

    torch.manual_seed(999)
    fresh = loader(size, kind=kind)
    resumed: list[Iterator[Any]] = []

    def make() -> Iterator[Any]:
        resumed.append(iter(fresh))
        return resumed[0]

    notes = replay(
        DataPosition.from_state(saved[0]),
        RngState.from_state(saved[1]),
        make,
        generators=generators_of(fresh),
    )
    assert notes == ()
    assert [taken(batch) for batch in resumed[0]] + [taken(batch) for batch in fresh] == rest


class Noisy(TensorDataset):
    """Draws while it reads, as augmentations do."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return (self.tensors[0][index] + 1000 * torch.randint(1000, ()),)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_augmentations_drawn_in_workers_come_out_the_same() -> None:
    def make_loader() -> DataLoader[Any]:
        return DataLoader(Noisy(torch.arange(24)), batch_size=3, shuffle=True, num_workers=2)

    torch.manual_seed(5)
    original = make_loader()
    start = RngState.capture()
    iterator = iter(original)
    for _ in range(3):
        taken(next(iterator))
    position, now = DataPosition(epoch=0, batches=3, epoch_start=start), RngState.capture()
    rest = [taken(batch) for batch in iterator] + [taken(batch) for batch in original]

    torch.manual_seed(6)
    fresh = make_loader()
    resumed: list[Iterator[Any]] = []

    def make() -> Iterator[Any]:
        resumed.append(iter(fresh))
        return resumed[0]

    replay(position, now, make)
    assert [taken(batch) for batch in resumed[0]] + [taken(batch) for batch in fresh] == rest


def test_numbers_drawn_between_the_iterator_and_its_first_batch_are_accounted_for() -> None:
    torch.manual_seed(5)
    original = loader(12, kind="global")
    start, iterator = RngState.capture(), iter(original)
    torch.rand(3)  # a hook draws; a loader without workers draws its order only after that
    first = RngState.capture()
    taken(next(iterator))
    position = DataPosition(epoch=0, batches=1, epoch_start=start, first_batch=first)
    saved, now = position.to_state(), RngState.capture()
    rest = [taken(batch) for batch in iterator]
    fresh = iter(loader(12, kind="global"))
    replay(DataPosition.from_state(saved), now, lambda: fresh)
    assert [taken(batch) for batch in fresh] == rest


def test_loaders_that_keep_their_own_position_are_not_read_again() -> None:
    torch.manual_seed(1)
    position = DataPosition(epoch=0, epoch_start=RngState.capture()).after(2, loader_states=({"at": 2},))
    now = RngState.capture()
    iterator = iter(["third"])
    replay(position, now, lambda: iterator)
    assert list(iterator) == ["third"]


def test_data_that_ends_too_early_is_an_error_that_says_so() -> None:
    state = RngState.capture()
    position = DataPosition(epoch=4, batches=9, epoch_start=state)
    with pytest.raises(StateMismatchError, match=r"epoch 4 ended after 5 batches.*after 9"):
        replay(position, state, lambda: iter(range(5)))


def test_a_position_inside_an_epoch_needs_the_epochs_start() -> None:
    with pytest.raises(ConfigError, match="needs the random state"):
        DataPosition(epoch=0, batches=1)
    with pytest.raises(ConfigError, match="nothing to take again"):
        replay(DataPosition(epoch=1), RngState.capture(), lambda: iter(()))
    with pytest.raises(ConfigError, match="counts from 0"):
        DataPosition(epoch=-1)


@pytest.mark.parametrize("value", ({}, {"epoch": 1}, {"epoch": None, "batches": None}))
def test_a_value_that_is_no_position_is_refused(value: dict[str, Any]) -> None:
    with pytest.raises(StateMismatchError, match="not one that this release writes"):
        DataPosition.from_state(value)
