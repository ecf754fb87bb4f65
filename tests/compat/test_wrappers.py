"""A module saved in one wrapping restores in another, with its optimizer: names are the bare module's."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel

from strongroom import Checkpointer, StateEncodingError, StateMismatchError
from strongroom.modules import read_module
from strongroom.stores.memory import MemoryStore
from strongroom.tree import Capturer, capture

pytestmark = [
    pytest.mark.usefixtures("group"),
    # A GPU's driver that is not there is no news to a test on the CPU.
    pytest.mark.filterwarnings("ignore:.*CUDA initialization"),
    # torch.compile looks at every tensor's gradient.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
]


class Net(nn.Module):
    """Has a child of a name that wrappers use, which is its own all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self._orig_mod = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._orig_mod(self.norm(self.module(x)))


NAMES = list(Net().state_dict())


def _bare(model: nn.Module) -> nn.Module:
    return model


def _compiled(model: nn.Module) -> nn.Module:
    compiled: nn.Module = torch.compile(model, backend="eager")
    return compiled


def _compiled_within(model: Any) -> nn.Module:
    model._orig_mod[0] = torch.compile(model._orig_mod[0], backend="eager")
    return model


def _compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


def _checkpointed(model: Any) -> nn.Module:
    model.module = checkpoint_wrapper(model.module)
    model._orig_mod = checkpoint_wrapper(model._orig_mod)
    return model


def _everything(model: Any) -> nn.Module:
    model._orig_mod[1] = offload_wrapper(model._orig_mod[1])
    model._orig_mod = checkpoint_wrapper(_compiled(model._orig_mod))
    return DistributedDataParallel(_compiled(checkpoint_wrapper(model)))


def _sharded(model: Any) -> nn.Module:
    fully_shard(model._orig_mod)
    return fully_shard(model)


def _sharded_and_compiled(model: Any) -> nn.Module:
    model._orig_mod = checkpoint_wrapper(model._orig_mod)
    fully_shard(model._orig_mod)
    return _compiled(fully_shard(model))


WRAPPINGS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "bare": _bare,
    "DistributedDataParallel": DistributedDataParallel,
    "DataParallel": DataParallel,
    "compiled": _compiled,
    "compiled within": _compiled_within,
    "compiled in place": _compiled_in_place,
    "checkpoint wrappers": _checkpointed,
    "everything": _everything,
}
SHARDED = {"fully_shard": _sharded, "fully_shard and compiled": _sharded_and_compiled}


def build(wrap: Callable[[nn.Module], nn.Module], *, steps: int = 0) -> tuple[nn.Module, optim.Optimizer]:
    model = wrap(Net())
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(steps):
        model(torch.randn(5, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def whole(tensor: Any) -> torch.Tensor:
    full = getattr(tensor, "full_tensor", None)
    return full() if full is not None else tensor.detach()


def assert_equal(one: tuple[nn.Module, optim.Optimizer], two: tuple[nn.Module, optim.Optimizer]) -> None:
    for first, second in zip(one[0].parameters(), two[0].parameters(), strict=True):
        assert torch.equal(whole(first), whole(second))
        mine, theirs = one[1].state[first], two[1].state[second]
        assert mine.keys() == theirs.keys()
        assert mine
        for key in mine:
            assert torch.equal(whole(mine[key]), whole(theirs[key])), key
    for first, second in zip(one[0].buffers(), two[0].buffers(), strict=True):
        assert torch.equal(whole(first), whole(second))


@pytest.mark.parametrize("wrap", (*WRAPPINGS.values(), *SHARDED.values()), ids=[*WRAPPINGS, *SHARDED])
def test_a_checkpoint_has_the_names_of_the_bare_module(wrap: Any) -> None:
    model, optimizer = build(wrap, steps=1)
    state = {"m": model, "o": optimizer}
    for captured in (capture(state, rank=0), *map(Capturer(rank=0).capture, [state] * 2)):
        names = list(captured.tensors)
        assert [name for name in names if name.startswith("m.")] == [f"m.{name}" for name in NAMES]
        assert "o.state.m.module.weight.exp_avg" in names
        assert {name.split(".")[2] for name in names if name.startswith("o.")} == {"m"}
        assert captured.units["m.module.weight"] == "m.module.weight"
        assert captured.units["m.norm.running_mean"] == "m=buffers"


@pytest.mark.parametrize("there", WRAPPINGS.values(), ids=WRAPPINGS)
def test_what_was_saved_wrapped_restores_bare_and_the_reverse(there: Any, round_trip: Any) -> None:
    for one, other in ((there, _bare), (_bare, there)):
        saved, fresh = build(one, steps=2), build(other)
        state = round_trip({"m": saved[0], "o": saved[1]}, {"m": fresh[0], "o": fresh[1]})
        assert state["m"] is fresh[0]
        assert_equal(saved, fresh)


@pytest.mark.parametrize("there", SHARDED.values(), ids=SHARDED)
@pytest.mark.parametrize("back", (_bare, _everything, *SHARDED.values()))
def test_a_sharded_module_restores_into_an_unsharded_one_and_the_reverse(
    there: Any, back: Any, round_trip: Any
) -> None:
    for one, other in ((there, back), (back, there)):
        saved, fresh = build(one, steps=2), build(other)
        round_trip({"m": saved[0], "o": saved[1]}, {"m": fresh[0], "o": fresh[1]})
        assert_equal(saved, fresh)


def test_a_wrapped_module_goes_on_where_it_was(round_trip: Any) -> None:
    saved, fresh = build(_everything, steps=2), build(_everything)
    round_trip({"m": saved[0], "o": saved[1]}, {"m": fresh[0], "o": fresh[1]})
    for model, optimizer in (saved, fresh):
        torch.manual_seed(4)
        model(torch.randn(5, 3)).sum().backward()
        optimizer.step()
    assert_equal(saved, fresh)


def test_parameters_that_are_gathered_for_use_are_saved_as_the_shards_they_are(mesh: DeviceMesh) -> None:
    model = Net()
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    model(torch.randn(5, 3))  # leaves them gathered: other objects stand in the module now
    captured = capture({"m": model, "o": optimizer}, rank=0)
    assert "o.state.m.module.weight.momentum_buffer" in captured.tensors
    assert hasattr(captured.tensors["m.module.weight"], "placements")


class Versioned(nn.Module):
    _version = 3

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.seen: list[Any] = []

    def _load_from_state_dict(self, state_dict: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        self.seen.append(metadata.get("version"))
        super()._load_from_state_dict(state_dict, prefix, metadata, *rest)


@pytest.mark.parametrize("wrap", (_bare, _compiled, checkpoint_wrapper, DistributedDataParallel))
@pytest.mark.parametrize("back", (_bare, _compiled, checkpoint_wrapper, DistributedDataParallel))
def test_a_modules_version_reaches_its_loader_through_any_wrapping(
    wrap: Any, back: Any, round_trip: Any
) -> None:
    inner = Versioned()
    round_trip({"m": wrap(Versioned())}, {"m": back(nn.Sequential(inner)[0])})
    assert inner.seen == [3]


def test_extra_state_and_ties_come_through_a_wrapper(round_trip: Any) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 3)
            self.head = nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight
            self.note: Any = None

        def get_extra_state(self) -> Any:
            return self.note

        def set_extra_state(self, state: Any) -> None:
            self.note = state

    saved, fresh = Tied(), Tied()
    saved.note = {"n": 1, "t": torch.ones(2)}
    round_trip({"m": DistributedDataParallel(saved)}, {"m": _compiled(checkpoint_wrapper(fresh))})
    assert fresh.note["n"] == 1
    assert torch.equal(fresh.head.weight, saved.embed.weight)
    assert fresh.head.weight is fresh.embed.weight


def test_only_and_rename_go_by_the_bare_names(round_trip: Any) -> None:
    saved, fresh = build(DistributedDataParallel)[0], build(_everything)[0]
    before = whole(next(fresh.parameters())).clone()
    round_trip({"m": saved}, {"net": fresh}, only="net.norm", rename={"net": "m"})
    assert torch.equal(whole(next(fresh.parameters())), before)
    round_trip({"m": saved}, {"net": fresh}, rename={"net": "m"})
    assert torch.equal(whole(next(fresh.parameters())), whole(next(saved.parameters())))


def test_a_mismatch_is_told_by_the_bare_name() -> None:
    memory = MemoryStore()
    with Checkpointer(memory) as checkpointer:
        checkpointer.save(1, {"m": nn.Linear(2, 2)}).result()
        with pytest.raises(StateMismatchError) as caught:
            checkpointer.restore({"m": DistributedDataParallel(nn.Linear(3, 2))})
    assert caught.value.different[0].startswith("m.weight:")


def test_the_names_of_a_users_own_wrapper_are_kept() -> None:
    averaged = optim.swa_utils.AveragedModel(nn.Linear(1, 1))
    assert read_module(averaged).names == ["n_averaged", "module.weight", "module.bias"]


# ------------------------------------------------------------------------------ FSDP's first version


def _first_fsdp(**options: Any) -> tuple[nn.Module, optim.Optimizer]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = FullyShardedDataParallel(Net(), device_id=torch.device("cpu"), **options)
        optimizer = optim.AdamW(model.parameters())
        model(torch.randn(5, 3)).sum().backward()
        optimizer.step()
    return model, optimizer


def test_fsdp1_is_refused_with_what_to_do_where_its_state_is_not_sharded() -> None:
    model, _ = _first_fsdp()
    with pytest.raises(StateEncodingError, match=r"state\['m'\].*fully_shard.*SHARDED_STATE_DICT"):
        capture({"m": model}, rank=0)
    memory = MemoryStore()
    with Checkpointer(memory) as checkpointer:
        checkpointer.save(1, {"m": Net()}).result()
        with pytest.raises(StateMismatchError, match=r"state\['m'\].*fully_shard"):
            checkpointer.restore({"m": model})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("keeps_parameters", (False, True))
def test_fsdp1_in_its_sharded_mode_gives_the_bare_modules_names(
    keeps_parameters: bool, round_trip: Any
) -> None:
    model, _ = _first_fsdp(use_orig_params=keeps_parameters)
    FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    assert list(capture({"m": model}, rank=0).tensors) == [f"m.{name}" for name in NAMES]
    fresh = Net()
    round_trip({"m": model}, {"m": fresh})
    assert torch.equal(fresh.module.weight, model.state_dict()["module.weight"])
    round_trip({"m": Net()}, {"m": model})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("keeps_parameters", (False, True))
def test_an_optimizer_over_fsdp1s_parameters_is_refused(keeps_parameters: bool) -> None:
    model, optimizer = _first_fsdp(use_orig_params=keeps_parameters)
    FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    with pytest.raises(StateEncodingError, match=r"state\['o'\].*fully_shard.*get_optimizer_state_dict"):
        capture({"m": model, "o": optimizer}, rank=0)
