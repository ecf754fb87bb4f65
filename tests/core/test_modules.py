"""Modules through a checkpoint: buffers, extra state, versions, hooks, and state dicts saved as values."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from strongroom import StateEncodingError, StateMismatchError
from strongroom.stores.memory import MemoryStore


def equal_modules(one: nn.Module, two: nn.Module) -> bool:
    mine, theirs = one.state_dict(), two.state_dict()
    return list(mine) == list(theirs) and all(
        torch.equal(value, theirs[name]) if isinstance(value, torch.Tensor) else value == theirs[name]
        for name, value in mine.items()
    )


def net() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.LazyLinear(3))


def trained_net() -> nn.Sequential:
    model = net()
    model(torch.randn(4, 1, 5, 5))
    return model


def test_a_module_is_filled_in_place_with_its_buffers(there_and_back: Any) -> None:
    saved, fresh = trained_net(), trained_net()
    memory = {name: tensor.data_ptr() for name, tensor in fresh.state_dict().items()}
    state = there_and_back({"model": saved}, {"model": fresh})
    assert state["model"] is fresh
    assert equal_modules(fresh, saved)
    assert {name: tensor.data_ptr() for name, tensor in fresh.state_dict().items()} == memory


def test_without_a_template_a_module_comes_back_as_named_tensors_on_the_cpu(there_and_back: Any) -> None:
    saved = trained_net()
    state = there_and_back({"model": saved})["model"]
    assert list(state) == list(saved.state_dict())
    fresh = trained_net()
    fresh.load_state_dict(state)
    assert equal_modules(fresh, saved)


def test_parameters_stay_parameters_and_keep_their_gradients_and_flags(round_trip: Any) -> None:
    saved, fresh = nn.Linear(2, 3), nn.Linear(2, 3)
    fresh.bias.requires_grad_(False)
    fresh(torch.ones(1, 2)).sum().backward()
    weight, gradient = fresh.weight, fresh.weight.grad
    round_trip({"model": saved}, {"model": fresh})
    assert fresh.weight is weight
    assert fresh.weight.grad is gradient
    assert fresh.weight.requires_grad
    assert not fresh.bias.requires_grad


def test_a_buffer_that_is_not_persistent_is_left_alone(round_trip: Any) -> None:
    saved, fresh = nn.Linear(1, 1), nn.Linear(1, 1)
    saved.register_buffer("scratch", torch.ones(3), persistent=False)
    fresh.register_buffer("scratch", torch.zeros(3), persistent=False)
    round_trip({"model": saved}, {"model": fresh})
    assert fresh.scratch.tolist() == [0, 0, 0]


class Counting(nn.Module):
    """A module with state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.counts: dict[Any, Any] = {}

    def get_extra_state(self) -> Any:
        return self.counts

    def set_extra_state(self, state: Any) -> None:
        self.counts = state


def test_extra_state_comes_back_whatever_it_holds(round_trip: Any) -> None:
    saved, fresh = nn.Sequential(Counting(), Counting()), nn.Sequential(Counting(), Counting())
    saved[0].counts = {"seen": 3, ("a", 1): [torch.arange(3)]}
    saved[1].counts = {"t": torch.ones(2, 2)}
    fresh[1].counts = {"another": "shape"}
    round_trip({"model": saved}, {"model": fresh})
    assert fresh[0].counts["seen"] == 3
    assert fresh[0].counts["a", 1][0].tolist() == [0, 1, 2]
    assert torch.equal(fresh[1].counts["t"], torch.ones(2, 2))


def test_extra_state_that_is_a_tensor_may_change_its_shape(round_trip: Any) -> None:
    saved, fresh = Counting(), Counting()
    saved.counts, fresh.counts = torch.arange(5), torch.zeros(2)  # type: ignore[assignment]
    round_trip({"model": saved}, {"model": fresh})
    assert torch.equal(fresh.counts, torch.arange(5))  # type: ignore[arg-type]


class Grown(nn.Module):
    """A module whose second version stores its scale as its logarithm, and still reads the first's."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(1))
        self.seen_versions: list[Any] = []

    def _load_from_state_dict(self, state_dict: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        self.seen_versions.append(metadata.get("version"))
        super()._load_from_state_dict(state_dict, prefix, metadata, *rest)


def test_a_modules_version_reaches_its_loader(round_trip: Any) -> None:
    saved, fresh = nn.Sequential(Grown(), nn.BatchNorm1d(2)), nn.Sequential(Grown(), nn.BatchNorm1d(2))
    round_trip({"model": saved}, {"model": fresh})
    assert fresh[0].seen_versions == [2]


def test_a_state_dict_saved_as_a_value_keeps_its_versions_too(round_trip: Any) -> None:
    fresh = nn.Sequential(Grown())
    round_trip({"model": nn.Sequential(Grown()).state_dict()}, {"model": fresh})
    assert fresh[0].seen_versions == [2]


def test_a_dict_of_tensors_that_knows_no_versions_loads_as_torch_would_load_it(round_trip: Any) -> None:
    fresh = nn.Sequential(Grown())
    plain = dict(nn.Sequential(Grown()).state_dict())
    round_trip({"model": plain}, {"model": fresh})
    through_torch = nn.Sequential(Grown())
    through_torch.load_state_dict(plain)
    assert fresh[0].seen_versions == through_torch[0].seen_versions


def test_a_batch_norm_keeps_what_it_tracked(round_trip: Any) -> None:
    saved, fresh = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    for _ in range(4):
        saved(torch.randn(5, 3))
    round_trip({"norm": saved}, {"norm": fresh})
    assert fresh.num_batches_tracked.item() == 4
    assert equal_modules(fresh, saved)


def test_hooks_on_the_way_out_and_in_see_the_whole_state(round_trip: Any) -> None:
    def add_square(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
        state[f"{prefix}square"] = module.weight.detach() ** 2

    seen: list[Any] = []

    def take_square(module: nn.Module, state: Any, prefix: str, *rest: Any) -> None:
        seen.append((sorted(state), state.pop(f"{prefix}square").tolist()))

    def build() -> nn.Linear:
        model = nn.Linear(1, 1)
        model.register_state_dict_post_hook(add_square)
        model.register_load_state_dict_pre_hook(take_square)
        return model

    saved, fresh = build(), build()
    round_trip({"model": saved}, {"model": fresh})
    assert seen == [(["bias", "square", "weight"], (saved.weight.detach() ** 2).tolist())]
    assert torch.equal(fresh.weight, saved.weight)


def test_a_hook_that_renames_parameters_is_undone_by_its_pair(round_trip: Any) -> None:
    def build() -> nn.Linear:
        def out(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
            state[f"{prefix}kernel"] = state.pop(f"{prefix}weight").detach().clone().t()

        def back(module: nn.Module, state: Any, prefix: str, *rest: Any) -> None:
            state[f"{prefix}weight"] = state.pop(f"{prefix}kernel").t()

        model = nn.Linear(2, 3)
        model.register_state_dict_post_hook(out)
        model.register_load_state_dict_pre_hook(back)
        return model

    saved, fresh = build(), build()
    round_trip({"model": saved}, {"model": fresh})
    assert torch.equal(fresh.weight, saved.weight)


class PlainDict(nn.Module):
    """A module whose ``state_dict`` gives a plain dict, as wrappers often do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return dict(self.inner.state_dict())

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        return self.inner.load_state_dict(state, strict=strict)


def test_a_module_whose_state_dict_is_a_plain_dict_is_served_as_well(round_trip: Any) -> None:
    saved, fresh = PlainDict(), PlainDict()
    round_trip({"model": saved}, {"model": fresh})
    assert torch.equal(fresh.inner.weight, saved.inner.weight)


class Numbered(nn.Module):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {0: torch.ones(1)}


def test_a_state_dict_without_names_is_refused(begin: Any) -> None:
    with pytest.raises(StateEncodingError, match=r"state\['model'\].*names"):
        begin(MemoryStore()).save(1, {"model": Numbered()})


def test_parametrized_modules_come_back(round_trip: Any) -> None:
    def build() -> nn.Module:
        return parametrizations.weight_norm(nn.Linear(3, 2))

    saved, fresh = build(), build()
    round_trip({"model": saved}, {"model": fresh})
    assert torch.equal(fresh.weight, saved.weight)


def test_modules_stand_anywhere_in_the_state(round_trip: Any) -> None:
    saved = [nn.Linear(1, 2), {"teacher": nn.Linear(2, 1)}]
    fresh = [nn.Linear(1, 2), {"teacher": nn.Linear(2, 1)}]
    state = round_trip({"models": saved}, {"models": fresh})
    assert state["models"][0] is fresh[0]
    assert torch.equal(fresh[0].weight, saved[0].weight)
    assert torch.equal(fresh[1]["teacher"].weight, saved[1]["teacher"].weight)


@pytest.mark.parametrize("kind", (dict, OrderedDict))
def test_a_state_dict_that_was_saved_as_a_value_restores_into_a_module(kind: Any, round_trip: Any) -> None:
    saved, fresh = trained_net(), trained_net()
    state = round_trip({"model": kind(saved.state_dict())}, {"model": fresh})
    assert state["model"] is fresh
    assert equal_modules(fresh, saved)


def test_a_module_restores_into_a_state_dict(round_trip: Any) -> None:
    saved = nn.Linear(2, 3)
    mine = {name: torch.zeros_like(tensor) for name, tensor in saved.state_dict().items()}
    round_trip({"model": saved}, {"model": mine})
    assert torch.equal(mine["weight"], saved.weight)


def test_a_module_that_refuses_its_state_is_a_mismatch(begin: Any) -> None:
    class Picky(nn.Linear):
        def _load_from_state_dict(self, *args: Any) -> None:
            super()._load_from_state_dict(*args)
            args[-1].append("not today")

    memory = MemoryStore()
    begin(memory).save(1, {"model": nn.Linear(1, 1)}).result()
    with pytest.raises(StateMismatchError, match="not today"):
        begin(memory).restore({"model": Picky(1, 1)})


def test_a_meta_module_must_be_materialized_first(begin: Any) -> None:
    memory = MemoryStore()
    begin(memory).save(1, {"model": nn.Linear(1, 1)}).result()
    with pytest.raises(StateMismatchError, match=r"model\.weight.*meta device"):
        begin(memory).restore({"model": nn.Linear(1, 1, device="meta")})
