"""Random states: capturing moves nothing, restoring brings back every stream."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from strongroom.errors import StateMismatchError
from strongroom.resume import RngState, generators_of


def draws() -> list[Any]:
    """Numbers from every global stream, the ones that keep a second Gaussian back included."""
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
        torch.rand(3).tolist(),
        torch.randn(1).item(),
        torch.randperm(7).tolist(),
    ]


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


@given(number=st.integers(0, 2**32 - 1), before=st.integers(0, 5))
def test_capturing_does_not_move_any_stream(number: int, before: int) -> None:
    seed(number)
    for _ in range(before):
        draws()
    expected = draws()
    seed(number)
    for _ in range(before):
        draws()
    RngState.capture()
    assert draws() == expected


@given(number=st.integers(0, 2**32 - 1), between=st.integers(0, 5))
def test_restoring_brings_every_stream_back(number: int, between: int) -> None:
    seed(number)
    draws()
    state = RngState.capture()
    expected = draws()
    for _ in range(between):
        draws()
    assert state.restore() == ()
    assert draws() == expected


def test_a_gaussian_that_was_kept_back_is_part_of_the_state() -> None:
    seed(1)
    random.gauss(0, 1)  # makes two numbers and keeps the second
    np.random.randn()
    state = RngState.capture()
    expected = (random.gauss(0, 1), float(np.random.randn()))
    seed(2)
    state.restore()
    assert (random.gauss(0, 1), float(np.random.randn())) == expected


def test_a_state_can_be_restored_many_times_and_is_not_changed_by_later_draws() -> None:
    seed(3)
    state = RngState.capture()
    first = draws()
    for _ in range(3):
        state.restore()
        assert draws() == first


def test_the_plain_value_carries_the_whole_state() -> None:
    generators = {"a": torch.Generator().manual_seed(5), "b": np.random.default_rng(6)}
    seed(4)
    value = RngState.capture(generators).to_state()
    expected = (draws(), torch.rand(2, generator=generators["a"]).tolist(), generators["b"].random())
    again = RngState.from_state(value)
    assert again.restore(generators) == ()
    assert (draws(), torch.rand(2, generator=generators["a"]).tolist(), generators["b"].random()) == expected


def test_the_plain_value_holds_nothing_but_plain_types() -> None:
    generators = {"a": torch.Generator(), "b": np.random.default_rng(1), "c": random.Random(2)}
    allowed = (str, int, float, np.ndarray, type(None))

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            assert all(isinstance(key, str) for key in value)
            for inner in value.values():
                walk(inner)
        elif isinstance(value, tuple):
            for inner in value:
                walk(inner)
        else:
            assert type(value) in allowed, type(value)

    walk(RngState.capture(generators).to_state())


@pytest.mark.parametrize(
    "generator",
    (torch.Generator(), np.random.default_rng(1), np.random.RandomState(2), random.Random(3)),
    ids=lambda generator: type(generator).__module__ + "." + type(generator).__name__,
)
def test_a_named_generator_of_each_kind_comes_back(generator: Any) -> None:
    def number() -> float:
        if isinstance(generator, torch.Generator):
            return torch.rand((), generator=generator).item()
        return float(generator.random() if hasattr(generator, "random") else generator.rand())

    state = RngState.capture({"g": generator})
    expected = [number() for _ in range(3)]
    state.restore({"g": generator})
    assert [number() for _ in range(3)] == expected


def test_generators_that_only_one_side_has_are_told_and_not_passed_over() -> None:
    state = RngState.capture({"gone": torch.Generator()})
    notes = state.restore({"new": torch.Generator()})
    assert len(notes) == 2
    assert "gone" in notes[0]
    assert "new" in notes[1]


def test_a_generator_of_another_kind_is_refused_by_name() -> None:
    state = RngState.capture({"sampler.generator": torch.Generator()})
    with pytest.raises(StateMismatchError, match=r"sampler\.generator is a Random.*'torch'"):
        state.restore({"sampler.generator": random.Random(1)})


@pytest.mark.parametrize("value", ({}, {"python": 1}, {"python": 1, "accelerator": 3}))
def test_a_value_that_is_no_random_state_is_refused(value: dict[str, Any]) -> None:
    with pytest.raises(StateMismatchError, match="not one that this release writes"):
        RngState.from_state(value)


def test_generators_are_found_on_loader_sampler_and_dataset_and_each_once() -> None:
    class Augmented(TensorDataset):
        def __init__(self) -> None:
            super().__init__(torch.zeros(4))
            self.rng = np.random.default_rng(0)

    shared = torch.Generator()
    loader = DataLoader(Augmented(), shuffle=True, generator=shared)
    assert list(generators_of(loader)) == ["generator", "dataset.rng"]
    assert generators_of(loader)["generator"] is shared

    own = torch.Generator()
    data = TensorDataset(torch.zeros(4))
    loader = DataLoader(data, sampler=RandomSampler(data, generator=own))
    assert generators_of(loader) == {"sampler.generator": own}
    assert generators_of([1, 2, 3]) == {}


@pytest.mark.gpu
def test_restoring_brings_the_cuda_stream_back() -> None:
    torch.cuda.manual_seed_all(1)
    torch.rand(1, device="cuda")
    state = RngState.from_state(RngState.capture().to_state())
    expected = torch.rand(4, device="cuda").tolist()
    torch.rand(9, device="cuda")
    assert state.restore() == ()
    assert torch.rand(4, device="cuda").tolist() == expected
