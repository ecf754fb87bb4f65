"""Optimizer state under its parameters' names, by itself; through a checkpoint it is tested elsewhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn, optim

from strongroom.modules import read_module
from strongroom.optim import NamedParameters, load_named_state, name_parameters, named_state, state_target


def named(model: nn.Module, optimizer: optim.Optimizer, path: Any = ("model",)) -> NamedParameters:
    return NamedParameters.of(optimizer, name_parameters([(path, read_module(model))]))


def test_parameters_are_named_by_the_module_they_stand_in() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    found = named(
        model, optim.SGD([{"params": [model[1].bias, model[0].weight]}, {"params": [model[1].weight]}])
    )
    assert found.groups == (("model.1.bias", "model.0.weight"), ("model.1.weight",))
    assert found.numbers == {"model.1.bias": 0, "model.0.weight": 1, "model.1.weight": 2}
    assert found.parameters["model.0.weight"] is model[0].weight
    assert found.paths["model.0.weight"] == ("model", "0", "weight")


def test_what_stands_in_no_module_is_named_by_group_and_position() -> None:
    tensors = [torch.zeros(1, requires_grad=True) for _ in range(3)]
    found = NamedParameters.of(optim.SGD([{"params": tensors[:1]}, {"params": tensors[1:]}]), {})
    assert found.groups == (("[0].[0]",), ("[1].[0]", "[1].[1]"))


def test_a_tied_parameter_has_the_first_name_it_is_found_under() -> None:
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    model[1].weight = model[0].weight
    assert list(name_parameters([(path, read_module(model)) for path in (("a",), ("b",))]).values()) == [
        ("a", "0", "weight")
    ]


def test_state_goes_by_name_and_comes_back_as_numbers() -> None:
    model = nn.Linear(2, 1)
    optimizer = optim.SGD([model.bias, model.weight], momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = named_state(optimizer, named(model, optimizer))
    assert list(state.state) == ["model.bias", "model.weight"]
    assert state.groups[0]["params"] == ["model.bias", "model.weight"]
    assert state.state["model.bias"]["momentum_buffer"] is optimizer.state[model.bias]["momentum_buffer"]
    numbered = state.numbered()
    assert numbered["param_groups"] == optimizer.state_dict()["param_groups"]
    assert list(numbered["state"]) == [0, 1]


def test_state_finds_its_parameter_in_an_optimizer_that_numbers_them_otherwise() -> None:
    model = nn.Linear(2, 1)
    one = optim.SGD([model.bias, model.weight], momentum=0.9)
    two = optim.SGD([model.weight, model.bias], momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    one.step()
    load_named_state(two, named_state(one, named(model, one)), named(model, two))
    for parameter in model.parameters():
        assert torch.equal(two.state[parameter]["momentum_buffer"], one.state[parameter]["momentum_buffer"])


def test_reading_state_steps_nothing() -> None:
    model = nn.Linear(2, 1)
    optimizer = optim.AdamW(model.parameters())
    assert named_state(optimizer, named(model, optimizer)).state == {}
    assert not optimizer.state


def test_memory_for_stored_state_is_what_is_there_if_it_fits() -> None:
    parameter = torch.zeros(2, 3, requires_grad=True)
    optimizer = optim.AdamW([parameter])
    present = torch.zeros(2, 3)
    optimizer.state[parameter] = {"exp_avg": present}
    same = state_target(optimizer, parameter, "exp_avg", (2, 3), torch.float32)
    assert same.data_ptr() == present.data_ptr()
    for shape, dtype in (((2, 3), torch.float64), ((3, 2), torch.float32)):
        other = state_target(optimizer, parameter, "exp_avg", shape, dtype)
        assert (tuple(other.shape), other.dtype) == (shape, dtype)
        assert other.data_ptr() != present.data_ptr()
        assert not other.requires_grad


def test_new_memory_is_laid_out_as_the_parameter_is() -> None:
    parameter = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last).requires_grad_()
    optimizer = optim.AdamW([parameter])
    target = state_target(optimizer, parameter, "exp_avg", (2, 3, 4, 5), torch.float32)
    assert target.stride() == parameter.stride()
    counter = state_target(optimizer, parameter, "step", (), torch.float32)
    assert (tuple(counter.shape), counter.device.type) == ((), "cpu")
