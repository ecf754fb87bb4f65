"""What `torch.distributed.checkpoint.state_dict` gives, and objects that are `Stateful`, as states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from strongroom import Checkpointer
from strongroom.stores.memory import MemoryStore


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def trained(model: nn.Module, *, steps: int = 2) -> tuple[nn.Module, optim.Optimizer]:
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(steps):
        model(torch.randn(5, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def whole(tensor: Any) -> Any:
    full = getattr(tensor, "full_tensor", None)
    return full() if full is not None else tensor


def same(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(whole(one), whole(two))
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same, one, two))
    return bool(one == two)


def _plain(model: nn.Module) -> nn.Module:
    return model


def _sharded(model: nn.Module) -> nn.Module:
    return fully_shard(model)


OPTIONS = {
    "default": StateDictOptions(),
    "full, on the CPU": StateDictOptions(full_state_dict=True, cpu_offload=True),
    "flattened": StateDictOptions(flatten_optimizer_state_dict=True),
    "without frozen": StateDictOptions(ignore_frozen_params=True, strict=False),
}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("wrap", (_plain, DistributedDataParallel, _sharded), ids=("plain", "ddp", "fsdp2"))
def test_what_get_state_dict_gives_is_saved_and_set_again(wrap: Any, options: Any, round_trip: Any) -> None:
    model, optimizer = trained(wrap(net()))
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    state = {"model": model_state, "optim": optimizer_state}
    anew = round_trip(state)
    assert same(anew["model"], dict(model_state))
    assert same(anew["optim"], optimizer_state)

    fresh, theirs = trained(wrap(net()), steps=1)
    if options.full_state_dict or wrap is _plain or wrap is DistributedDataParallel:
        set_state_dict(
            fresh, theirs, model_state_dict=anew["model"], optim_state_dict=anew["optim"], options=options
        )
        assert same(get_state_dict(fresh, theirs), get_state_dict(model, optimizer))


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("wrap", (_plain, DistributedDataParallel, _sharded), ids=("plain", "ddp", "fsdp2"))
def test_state_dicts_as_a_template_are_filled_in_place_and_set(wrap: Any, round_trip: Any) -> None:
    model, optimizer = trained(wrap(net()))
    fresh, theirs = trained(wrap(net()), steps=1)
    template = {"model": get_model_state_dict(fresh), "optim": get_optimizer_state_dict(fresh, theirs)}
    state = round_trip(
        {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}, template
    )
    set_model_state_dict(fresh, state["model"])
    set_optimizer_state_dict(fresh, theirs, state["optim"])
    assert same(get_state_dict(fresh, theirs), get_state_dict(model, optimizer))


class App(Stateful):
    """As PyTorch's own tutorial has it."""

    def __init__(self, model: nn.Module, optimizer: optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optim"],
        )


@pytest.mark.usefixtures("group")
def test_a_stateful_application_is_saved_and_loaded_by_its_own_methods(round_trip: Any) -> None:
    saved, fresh = App(*trained(net())), App(*trained(net(), steps=1))
    assert round_trip({"app": saved}, {"app": fresh})["app"] is fresh
    assert same(fresh.state_dict(), saved.state_dict())


def test_a_model_that_was_saved_as_a_module_restores_into_what_get_model_state_dict_gives(
    mesh: DeviceMesh, round_trip: Any
) -> None:
    saved = net()
    fresh = fully_shard(net(), mesh=mesh)
    template = get_model_state_dict(fresh)
    round_trip({"model": saved}, {"model": template})
    set_model_state_dict(fresh, template)
    assert same(get_model_state_dict(fresh), dict(saved.state_dict()))


@pytest.mark.usefixtures("group")
def test_getting_a_state_dict_that_we_save_steps_no_optimizer() -> None:
    """DCP's helper does; a state that names the optimizer itself must not."""
    model = net()
    optimizer = optim.AdamW(model.parameters())
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with Checkpointer(MemoryStore()) as checkpointer:
        checkpointer.save(1, {"model": model, "optimizer": optimizer}).result()
        checkpointer.restore({"model": model, "optimizer": optimizer})
    assert not optimizer.state
    assert all(map(torch.equal, before, model.parameters()))


# -------------------------------------------------------------- parameters without optimizer state


class Partly(nn.Module):
    """One part is trained, one is frozen, one never gets a gradient."""

    def __init__(self, *, frozen: bool = True) -> None:
        super().__init__()
        self.used = nn.Linear(3, 2)
        self.frozen = nn.Linear(3, 2).requires_grad_(not frozen)
        self.forgotten = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x) + self.frozen(x)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("wrap", (_plain, _sharded), ids=("plain", "fsdp2"))
def test_a_parameter_without_state_gets_none_and_one_with_state_gets_its_own(
    wrap: Any, round_trip: Any
) -> None:
    saved, mine = trained(wrap(Partly()))
    # The template's optimizer knows more than the checkpoint, and less.
    for steps in (0, 1):
        fresh, theirs = trained(wrap(Partly(frozen=False)), steps=steps)
        round_trip({"m": saved, "o": mine}, {"m": fresh, "o": theirs})
        assert set(theirs.state) == {fresh.used.weight, fresh.used.bias}
        assert same(theirs.state[fresh.used.weight], mine.state[saved.used.weight])
        fresh(torch.randn(5, 3)).sum().backward()
        theirs.step()
    everything, more = trained(wrap(Partly(frozen=False)))
    fresh, theirs = trained(wrap(Partly()), steps=0)
    round_trip({"m": everything, "o": more}, {"m": fresh, "o": theirs})
    assert same(theirs.state[fresh.frozen.weight], more.state[everything.frozen.weight])
    assert fresh.forgotten.weight not in theirs.state
