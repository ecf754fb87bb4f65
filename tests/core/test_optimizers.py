"""Optimizers through a checkpoint: state by parameter name, and never a hidden step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

from strongroom import Checkpointer, StateMismatchError
from strongroom.stores.memory import MemoryStore

Make = Callable[[Any], optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda p: optim.AdamW(p, lr=1e-2, amsgrad=True),
    "Adam with a tensor lr": lambda p: optim.Adam(p, lr=torch.tensor(1e-2), foreach=False),
    "SGD": lambda p: optim.SGD(p, lr=1e-2),
    "SGD with momentum": lambda p: optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "Adafactor": lambda p: optim.Adafactor(p, lr=1e-2),
    "RMSprop": lambda p: optim.RMSprop(p, lr=1e-2, momentum=0.5, centered=True),
    "LBFGS": lambda p: optim.LBFGS(p, lr=1e-1, max_iter=3, line_search_fn="strong_wolfe"),
    "Rprop": optim.Rprop,
    "NAdam": optim.NAdam,
    "ASGD": optim.ASGD,
    "Adagrad": optim.Adagrad,
    "Adadelta": optim.Adadelta,
}


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def train(model: nn.Module, optimizer: optim.Optimizer, steps: int, *, seed: int = 1) -> None:
    """Steps whose data depend on the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    for _ in range(steps):
        batch = torch.randn(6, 4, generator=generator).to(dtype)

        def closure(batch: torch.Tensor = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]


def same(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(two, torch.Tensor) and one.dtype == two.dtype and torch.equal(one, two)
    if isinstance(one, dict):
        return list(one) == list(two) and all(same(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(two) and len(one) == len(two) and all(map(same, one, two))
    return type(one) is type(two) and one == two


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize("fresh_has_state", (False, True), ids=["into a fresh one", "into a used one"])
def test_training_goes_on_bit_for_bit(make: Make, fresh_has_state: bool, there_and_back: Any) -> None:
    model = net()
    optimizer = make(model.parameters())
    train(model, optimizer, 3)
    state = optimizer.state_dict()

    torch.manual_seed(5)
    other = net()
    resumed = make(other.parameters())
    if fresh_has_state:
        train(other, resumed, 2, seed=9)
    there_and_back({"model": model, "optimizer": optimizer}, {"model": other, "optimizer": resumed})
    assert same(resumed.state_dict(), state)

    train(model, optimizer, 3, seed=2)
    train(other, resumed, 3, seed=2)
    assert same(weights(other), weights(model))


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_without_a_template_an_optimizer_comes_back_in_torchs_form(make: Make, round_trip: Any) -> None:
    model = net()
    optimizer = make(model.parameters())
    train(model, optimizer, 2)
    state = round_trip({"model": model, "optimizer": optimizer})["optimizer"]
    assert same(state, optimizer.state_dict())
    make(net().parameters()).load_state_dict(state)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_a_fresh_optimizer_is_never_stepped(make: Make, begin: Any) -> None:
    memory = MemoryStore()
    model = net()
    optimizer = make(model.parameters())
    before, state = weights(model), copy.deepcopy(optimizer.state_dict())
    begin(memory).save(0, {"model": model, "optimizer": optimizer}).result()
    assert same(weights(model), before)
    assert same(optimizer.state_dict(), state)
    begin(memory).restore({"model": model, "optimizer": optimizer})
    assert same(weights(model), before)
    assert same(optimizer.state_dict(), state)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_training_with_and_without_a_save_at_step_0_ends_in_equal_weights(make: Make) -> None:
    ends = []
    for saves in (False, True):
        torch.manual_seed(3)
        model = net()
        optimizer = make(model.parameters())
        with Checkpointer(MemoryStore()) as checkpointer:
            if saves:
                checkpointer.save(0, {"model": model, "optimizer": optimizer})
            train(model, optimizer, 4)
        ends.append(weights(model))
    assert same(*ends)


def test_absent_state_stays_absent(round_trip: Any) -> None:
    model = net()
    used = optim.AdamW(model.parameters())
    train(model, used, 1)
    round_trip(
        {"model": model, "optimizer": optim.AdamW(model.parameters())}, {"model": model, "optimizer": used}
    )
    assert not used.state


def test_frozen_and_never_used_parameters_have_no_state_and_get_none(round_trip: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Linear(4, 2)
            self.frozen = nn.Linear(4, 2).requires_grad_(False)
            self.forgotten = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x) + self.frozen(x)

    saved, fresh = Model(), Model()
    mine, theirs = optim.AdamW(saved.parameters()), optim.AdamW(fresh.parameters())
    train(saved, mine, 2)
    assert set(mine.state) == {saved.used.weight, saved.used.bias}
    round_trip({"m": saved, "o": mine}, {"m": fresh, "o": theirs})
    assert set(theirs.state) == {fresh.used.weight, fresh.used.bias}
    assert same(theirs.state_dict(), mine.state_dict())


def test_float32_state_of_bfloat16_parameters_is_not_rounded(round_trip: Any) -> None:
    saved, fresh = net(torch.bfloat16), net(torch.bfloat16)
    mine, theirs = optim.AdamW(saved.parameters()), optim.AdamW(fresh.parameters())
    train(saved, mine, 1)
    for values in mine.state.values():
        for key in ("exp_avg", "exp_avg_sq"):
            values[key] = values[key].float() + 1e-6
    round_trip({"m": saved, "o": mine}, {"m": fresh, "o": theirs})
    assert theirs.state[fresh[0].weight]["exp_avg"].dtype == torch.float32
    for one, two in zip(mine.state.values(), theirs.state.values(), strict=True):
        assert same(one, two)


def test_nested_state_of_bfloat16_parameters_is_not_rounded_either(round_trip: Any) -> None:
    class Nested(optim.SGD):
        """Keeps state in lists, as some second-order methods do."""

    saved, fresh = net(torch.bfloat16), net(torch.bfloat16)
    mine, theirs = Nested(saved.parameters(), lr=0.1), Nested(fresh.parameters(), lr=0.1)
    mine.state[saved[0].weight] = {"history": [torch.full((2,), 1.0009765625), {"deep": torch.tensor(1e-7)}]}
    round_trip({"m": saved, "o": mine}, {"m": fresh, "o": theirs})
    assert same(theirs.state[fresh[0].weight], mine.state[saved[0].weight])


def two_groups(model: Any, *, swapped: bool = False) -> list[dict[str, Any]]:
    return [
        {"params": list(model[0].parameters()), "lr": 1e-2},
        {"params": list(model[2].parameters())[:: -1 if swapped else 1], "lr": 1e-3, "weight_decay": 0.5},
    ]


def test_groups_keep_their_own_options(round_trip: Any) -> None:
    saved, fresh = net(), net()
    mine = optim.AdamW(two_groups(saved))
    train(saved, mine, 2)
    theirs = optim.AdamW(
        [{"params": group["params"]} for group in two_groups(fresh, swapped=True)], lr=7.0, weight_decay=7.0
    )
    round_trip({"m": saved, "o": mine}, {"m": fresh, "o": theirs})
    assert [group["lr"] for group in theirs.param_groups] == [1e-2, 1e-3]
    assert [group["weight_decay"] for group in theirs.param_groups] == [1e-2, 0.5]
    assert theirs.param_groups[1]["params"] == list(fresh[2].parameters())[::-1]
    for one, two in zip(saved.parameters(), fresh.parameters(), strict=True):
        assert same(mine.state[one], theirs.state[two])
    train(saved, mine, 2, seed=4)
    train(fresh, theirs, 2, seed=4)
    assert same(weights(fresh), weights(saved))


def test_groups_in_another_order_are_a_mismatch_because_schedulers_count_them(begin: Any) -> None:
    memory = MemoryStore()
    saved = net()
    begin(memory).save(1, {"m": saved, "o": optim.AdamW(two_groups(saved))}).result()
    fresh = net()
    with pytest.raises(StateMismatchError, match="groups in another order") as caught:
        begin(memory).restore({"m": fresh, "o": optim.AdamW(two_groups(fresh)[::-1])})
    assert len(caught.value.different) == 1


def test_parameters_in_another_order_find_their_own_state(round_trip: Any) -> None:
    saved, fresh = net(), net()
    mine = optim.SGD(saved.parameters(), lr=0.1, momentum=0.9)
    train(saved, mine, 2)
    theirs = optim.SGD(list(fresh.parameters())[::-1], lr=0.1, momentum=0.9)
    round_trip({"m": saved, "o": mine}, {"m": fresh, "o": theirs})
    for one, two in zip(saved.parameters(), fresh.parameters(), strict=True):
        assert same(mine.state[one], theirs.state[two])


def test_other_groups_than_in_the_checkpoint_are_a_mismatch_that_changes_nothing(begin: Any) -> None:
    memory = MemoryStore()
    saved = net()
    mine = optim.AdamW(saved.parameters())
    train(saved, mine, 1)
    begin(memory).save(1, {"m": saved, "o": mine}).result()
    fresh = net()
    before = weights(fresh)
    halves = [{"params": list(fresh[0].parameters())}, {"params": list(fresh[2].parameters())}]
    with pytest.raises(StateMismatchError, match=r"o has 2 parameter groups here and 1 in the checkpoint"):
        begin(memory).restore({"m": fresh, "o": optim.AdamW(halves)})
    with pytest.raises(StateMismatchError, match=r"group 0 holds other parameters.*\(m\.2\.bias\)"):
        begin(memory).restore(
            {"m": fresh, "o": optim.AdamW([fresh[0].weight, fresh[0].bias, fresh[2].weight])}
        )
    assert same(weights(fresh), before)


def test_parameters_of_no_module_are_named_by_group_and_position(round_trip: Any) -> None:
    def build() -> tuple[list[torch.Tensor], optim.Optimizer]:
        tensors = [torch.zeros(2, requires_grad=True), torch.zeros(3, requires_grad=True)]
        return tensors, optim.SGD([{"params": tensors[:1]}, {"params": tensors[1:]}], lr=0.1, momentum=0.9)

    (mine, saved), (_, fresh) = build(), build()
    for tensor in mine:
        tensor.grad = torch.rand_like(tensor)
    saved.step()
    round_trip({"o": saved}, {"o": fresh})
    assert same(fresh.state_dict(), saved.state_dict())


def test_an_optimizers_state_dict_that_was_saved_as_a_value_restores_into_one(round_trip: Any) -> None:
    saved, fresh = net(), net()
    mine, theirs = optim.AdamW(saved.parameters()), optim.AdamW(fresh.parameters())
    train(saved, mine, 2)
    state = round_trip({"m": saved, "o": mine.state_dict()}, {"m": fresh, "o": theirs})
    assert state["o"] is theirs
    assert same(theirs.state_dict(), mine.state_dict())


def test_two_optimizers_share_one_model(round_trip: Any) -> None:
    def build() -> dict[str, Any]:
        model = net()
        optimizers = [optim.AdamW(model[0].parameters()), optim.SGD(model[2].parameters(), momentum=0.9)]
        return {"model": model, "optimizers": optimizers}

    saved, fresh = build(), build()
    for optimizer in saved["optimizers"]:
        train(saved["model"], optimizer, 2)
    round_trip(saved, fresh)
    for one, two in zip(saved["optimizers"], fresh["optimizers"], strict=True):
        assert same(one.state_dict(), two.state_dict())


def test_state_without_a_parameter_comes_back(round_trip: Any) -> None:
    saved, fresh = net(), net()
    mine, theirs = optim.SGD(saved.parameters(), lr=0.1), optim.SGD(fresh.parameters(), lr=0.1)
    mine.state["global"] = {"norm": torch.tensor(2.0), "n": 3}
    round_trip({"m": saved, "o": mine}, {"m": fresh, "o": theirs})
    assert same(theirs.state["global"], {"norm": torch.tensor(2.0), "n": 3})


def test_hooks_of_an_optimizer_run_once_each_way(round_trip: Any) -> None:
    saved, fresh = net(), net()
    mine, theirs = optim.SGD(saved.parameters(), lr=0.1), optim.SGD(fresh.parameters(), lr=0.1)
    calls: list[str] = []
    mine.register_state_dict_post_hook(lambda *_: calls.append("out"))
    theirs.register_load_state_dict_post_hook(lambda *_: calls.append("in"))
    round_trip({"m": saved, "o": mine}, {"m": fresh, "o": theirs})
    assert calls == ["out", "in"]


@pytest.mark.parametrize(
    ("saved", "restored", "fits"),
    (
        (torch.optim.Adam, torch.optim.SGD, False),
        (torch.optim.SGD, torch.optim.Adam, False),
        (torch.optim.Adam, torch.optim.RMSprop, False),
        (torch.optim.AdamW, torch.optim.AdamW, True),
    ),
)
def test_an_optimizer_of_another_kind_is_refused_before_anything_is_touched(
    there_and_back: Any, saved: Any, restored: Any, fits: bool
) -> None:
    def build(kind: Any) -> dict[str, Any]:
        model = torch.nn.Linear(3, 2)
        optimizer = kind(model.parameters(), lr=0.1)
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    template = build(restored)
    before = {name: value.clone() for name, value in template["model"].state_dict().items()}
    if fits:
        there_and_back(build(saved), template)
        return
    with pytest.raises(StateMismatchError, match=f"is a {restored.__name__}.*another optimizer's"):
        there_and_back(build(saved), template)
    assert all(torch.equal(value, before[name]) for name, value in template["model"].state_dict().items())
