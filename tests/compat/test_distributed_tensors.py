"""DTensor and ShardedTensor, in one process: filled where they lie, made where state is to come."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharded_tensor import Shard as Piece
from torch.distributed._shard.sharded_tensor import ShardMetadata
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor

from strongroom import Checkpointer, StateEncodingError, StateMismatchError
from strongroom.optim import state_target
from strongroom.stores.memory import MemoryStore
from strongroom.tree import Capturer, capture

PLACEMENTS = ((Shard(0),), (Shard(1),), (Replicate(),))


@pytest.mark.parametrize("saved_as", PLACEMENTS, ids=str)
@pytest.mark.parametrize("restored_as", (*PLACEMENTS, None), ids=str)
def test_a_dtensor_is_filled_in_whatever_layout(
    saved_as: Any, restored_as: Any, mesh: DeviceMesh, round_trip: Any
) -> None:
    values = torch.arange(12.0).view(3, 4)
    target: Any = torch.zeros(3, 4)
    if restored_as is not None:
        target = distribute_tensor(target, mesh, restored_as)
    saved = distribute_tensor(values.clone(), mesh, saved_as)
    assert round_trip({"t": saved}, {"t": target})["t"] is target
    assert torch.equal(target if restored_as is None else target.to_local(), values)
    if restored_as is not None:
        round_trip({"t": values}, {"t": target.zero_()})
        assert torch.equal(target.to_local(), values)


def test_without_a_template_a_dtensor_comes_back_whole_and_plain(mesh: DeviceMesh, round_trip: Any) -> None:
    saved = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
    found = round_trip({"t": saved})["t"]
    assert type(found) is torch.Tensor
    assert torch.equal(found, torch.arange(6.0))


def test_a_dtensor_of_another_shape_or_dtype_is_a_mismatch(mesh: DeviceMesh) -> None:
    memory = MemoryStore()
    with Checkpointer(memory) as checkpointer:
        checkpointer.save(1, {"a": torch.ones(3), "b": torch.ones(3)}).result()
        with pytest.raises(StateMismatchError) as caught:
            checkpointer.restore(
                {
                    "a": distribute_tensor(torch.zeros(4), mesh, [Shard(0)]),
                    "b": distribute_tensor(torch.zeros(3, dtype=torch.int64), mesh, [Shard(0)]),
                }
            )
    assert len(caught.value.different) == 2


def parallel(mesh: DeviceMesh, placement: Any) -> nn.Module:
    """A linear layer whose weight and bias are distributed, as tensor parallelism makes them."""

    def partition(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(key, nn.Parameter(distribute_tensor(parameter, mesh, [placement])))

    return distribute_module(nn.Linear(4, 4), mesh, partition)


def step(model: nn.Module, optimizer: optim.Optimizer, mesh: DeviceMesh) -> None:
    model(distribute_tensor(torch.randn(2, 4), mesh, [Replicate()])).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("placement", (Shard(0), Replicate()), ids=str)
@pytest.mark.parametrize("other", (Shard(0), Replicate()), ids=str)
def test_optimizer_state_that_is_not_there_yet_lies_as_its_parameter_lies(
    placement: Any, other: Any, mesh: DeviceMesh, round_trip: Any
) -> None:
    saved, fresh = parallel(mesh, placement), parallel(mesh, other)
    mine = optim.AdamW(saved.parameters(), amsgrad=True)
    theirs = optim.AdamW(fresh.parameters(), amsgrad=True)
    step(saved, mine, mesh)
    round_trip({"m": saved, "o": mine}, {"m": fresh, "o": theirs})
    for one, two in zip(saved.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(one.full_tensor(), two.full_tensor())
        assert set(theirs.state[two]) == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
        for key, value in theirs.state[two].items():
            if key == "step":
                assert type(value) is torch.Tensor
                assert torch.equal(value, mine.state[one][key])
                continue
            assert isinstance(value, DTensor)
            assert value.placements == (other,)
            assert value.device_mesh == mesh
            assert torch.equal(value.full_tensor(), mine.state[one][key].full_tensor())
    torch.manual_seed(5)
    step(saved, mine, mesh)
    torch.manual_seed(5)
    step(fresh, theirs, mesh)
    for one, two in zip(saved.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(one.full_tensor(), two.full_tensor())


def test_float32_state_of_a_bfloat16_dtensor_is_not_rounded(mesh: DeviceMesh, round_trip: Any) -> None:
    def build() -> tuple[nn.Module, optim.Optimizer]:
        model = nn.Linear(3, 3, dtype=torch.bfloat16)
        fully_shard(model, mesh=mesh)
        return model, optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    (saved, mine), (fresh, theirs) = build(), build()
    for parameter in saved.parameters():
        buffer = torch.rand(parameter.shape)
        mine.state[parameter]["momentum_buffer"] = distribute_tensor(buffer, mesh, [Shard(0)])
    round_trip({"m": saved, "o": mine}, {"m": fresh, "o": theirs})
    for one, two in zip(saved.parameters(), fresh.parameters(), strict=True):
        found = theirs.state[two]["momentum_buffer"]
        assert isinstance(found, DTensor)
        assert found.dtype == torch.float32
        assert torch.equal(found.to_local(), mine.state[one]["momentum_buffer"].to_local())


def test_new_memory_for_a_dtensors_state_is_on_its_mesh(mesh: DeviceMesh) -> None:
    parameter = nn.Parameter(distribute_tensor(torch.zeros(4, 6), mesh, [Shard(1)]))
    optimizer = optim.Adafactor([parameter])
    like: Any = state_target(optimizer, parameter, "exp_avg", (4, 6), torch.float64)
    assert (like.placements, like.dtype, like.requires_grad) == ((Shard(1),), torch.float64, False)
    row: Any = state_target(optimizer, parameter, "row_var", (4, 1), torch.float32)
    assert isinstance(row, DTensor)
    assert (tuple(row.shape), row.placements) == ((4, 1), (Replicate(),))
    for key in ("step", "mu_product"):
        scalar = state_target(optimizer, parameter, key, (), torch.float32)
        assert type(scalar) is torch.Tensor
        assert tuple(scalar.shape) == ()


def test_factored_state_goes_on_where_it_was(mesh: DeviceMesh, round_trip: Any) -> None:
    saved, fresh = parallel(mesh, Shard(0)), parallel(mesh, Shard(0))
    mine, theirs = optim.Adafactor(saved.parameters()), optim.Adafactor(fresh.parameters())
    step(saved, mine, mesh)
    round_trip({"m": saved, "o": mine}, {"m": fresh, "o": theirs})
    for model, optimizer in ((saved, mine), (fresh, theirs)):
        torch.manual_seed(5)
        step(model, optimizer, mesh)
    for one, two in zip(saved.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(one.full_tensor(), two.full_tensor())


def test_a_walk_that_remembers_sees_a_dtensor_laid_out_anew(group: None) -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
    state = {
        "x": {f"t{n}": distribute_tensor(torch.zeros(2, 2), mesh, [Shard(0), Replicate()]) for n in range(70)}
    }
    capturer = Capturer(rank=0)
    first = capturer.capture(state)
    assert capturer.capture(state).fingerprint is first.fingerprint
    assert first.compared == {}
    state["x"]["t3"] = distribute_tensor(torch.zeros(2, 2), mesh, [Replicate(), Shard(0)])
    second = capturer.capture(state)
    assert second.fingerprint != first.fingerprint
    assert second.fingerprint == capture(state, rank=0).fingerprint


def test_two_dtensors_of_one_memory_are_tied(mesh: DeviceMesh) -> None:
    tensor = distribute_tensor(torch.zeros(2, 2), mesh, [Shard(0)])
    captured = capture({"a": tensor, "b": tensor.detach(), "c": tensor.to_local()}, rank=0)
    assert captured.aliases["b"] == "a"
    assert "c" in captured.tensors


def test_a_dtensor_around_a_subclass_is_refused_by_name(mesh: DeviceMesh) -> None:
    class Marked(torch.Tensor):
        pass

    inner = torch.zeros(2).as_subclass(Marked)
    tensor = DTensor.from_local(inner, mesh, [Shard(0)], run_check=False)
    if type(tensor._local_tensor) is torch.Tensor:
        pytest.skip("this torch's DTensor drops a subclass without a dispatch of its own")
    with pytest.raises(StateEncodingError, match=r"state\['x'\]\['t'\].*subclass"):
        capture({"x": {"t": tensor}}, rank=0)


# ---------------------------------------------------------------------------------- ShardedTensor


def sharded(values: torch.Tensor, *, pieces: int = 1) -> Any:
    rows = values.shape[0] // pieces
    shards = [
        Piece(
            values[number * rows : (number + 1) * rows].clone(),
            ShardMetadata([number * rows, 0], [rows, values.shape[1]], "rank:0/cpu"),
        )
        for number in range(pieces)
    ]
    return sharded_tensor.init_from_local_shards(shards, list(values.shape))


@pytest.mark.filterwarnings("ignore:Please use DTensor instead")
@pytest.mark.parametrize("pieces", (1, 2))
@pytest.mark.usefixtures("group")
def test_a_sharded_tensor_is_carried_both_ways(pieces: int, round_trip: Any) -> None:
    values = torch.arange(8.0).view(4, 2)
    saved = sharded(values, pieces=pieces)
    state = {"x": saved, "deep": {"again": saved, "plain": torch.ones(1)}}
    found = round_trip(state)
    assert torch.equal(found["x"], values)
    assert torch.equal(found["deep"]["again"], values)
    target = sharded(torch.zeros(4, 2), pieces=2)
    round_trip({"x": saved}, {"x": target})
    for number, shard in enumerate(target.local_shards()):
        assert torch.equal(shard.tensor, values[2 * number : 2 * number + 2])
    round_trip({"x": torch.ones(4, 2)}, {"x": target})
    assert all(torch.equal(shard.tensor, torch.ones(2, 2)) for shard in target.local_shards())
