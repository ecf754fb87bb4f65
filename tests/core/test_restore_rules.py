"""What a restore does with a template that fits, fits in part, or does not fit."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

from strongroom import CheckpointNotFoundError, ConfigError, StateMismatchError
from strongroom.stores.memory import MemoryStore


@pytest.fixture
def saved(memory: Any, begin: Any) -> Any:
    """A store that holds step 1 of a model, an optimizer and more."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optimizer = optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = {
        "model": model,
        "optimizer": optimizer,
        "t": torch.arange(4.0),
        "extra": {"epoch": 3, "list": [1, 2], "noise": torch.ones(2)},
    }
    begin(memory).save(1, state).result()
    memory.state = state
    return memory


def everything_in(state: dict[str, Any]) -> list[bytes]:
    """Every byte of a template, to see that none has changed."""
    found: list[bytes] = []
    for value in state.values():
        if isinstance(value, nn.Module):
            found += everything_in(value.state_dict())
        elif isinstance(value, optim.Optimizer):
            found.append(repr(value.state_dict()).encode())
        elif isinstance(value, torch.Tensor):
            found.append(value.detach().numpy().tobytes())
        elif isinstance(value, dict):
            found += everything_in(value)
        else:
            found.append(repr(value).encode())
    return found


def test_one_error_lists_everything_that_does_not_fit_and_nothing_was_written(saved: Any, begin: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 4), nn.Linear(3, 1), nn.Linear(1, 1))
    template = {
        "model": model,
        "optimizer": optim.SGD(model.parameters(), lr=7.0),
        "t": torch.zeros(4, dtype=torch.float64),
        "ours": torch.zeros(1),
        "extra": {"noise": torch.zeros(2, 2)},
    }
    before = everything_in(template)
    with pytest.raises(StateMismatchError) as caught:
        begin(saved).restore(template)
    error = caught.value
    assert set(error.missing) == {"model.2.weight", "model.2.bias", "ours"}
    assert set(error.unexpected) == {"extra.epoch", "extra.list"}
    told = "\n".join(error.different)
    for name in (
        "model.0.weight",
        "model.0.bias",
        "t: float64[4] here, float32[4]",
        "extra.noise",
        "optimizer",
    ):
        assert name in told
    for name in (*error.missing, *error.unexpected):
        assert name in str(error)
    assert "Nothing was changed" in str(error)
    assert everything_in(template) == before


@pytest.mark.parametrize(
    ("name", "wrong"),
    (
        ("model", torch.zeros(1)),
        ("model", optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)),
        ("optimizer", torch.zeros(1)),
        ("optimizer", nn.Linear(1, 1)),
        ("t", nn.Linear(1, 1)),
        ("t", {"a": torch.zeros(1)}),
        ("t", [torch.zeros(1)]),
        ("extra", torch.zeros(1)),
        ("extra", (torch.zeros(1),)),
        ("extra", torch.Generator()),
    ),
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_another_kind_of_thing_than_was_saved_is_a_mismatch(
    name: str, wrong: Any, saved: Any, begin: Any
) -> None:
    with pytest.raises(StateMismatchError) as caught:
        begin(saved).restore({name: wrong}, strict=False)
    assert any(difference.startswith(name) for difference in caught.value.different)


def test_a_list_of_another_length_is_a_mismatch(memory: Any, begin: Any) -> None:
    begin(memory).save(1, {"l": [torch.ones(1), torch.ones(1)]}).result()
    with pytest.raises(StateMismatchError, match="l is a list of 3 here"):
        begin(memory).restore({"l": [torch.zeros(1) for _ in range(3)]})


def test_a_name_that_only_the_checkpoint_has_is_an_error_unless_relaxed(saved: Any, begin: Any) -> None:
    template = {"t": torch.zeros(4)}
    with pytest.raises(StateMismatchError) as caught:
        begin(saved).restore(template)
    assert set(caught.value.unexpected) == {"model", "optimizer", "extra"}
    assert template["t"].tolist() == [0, 0, 0, 0]
    restored = begin(saved).restore(template, strict=False)
    assert restored.state["t"] is template["t"]
    assert list(restored.state) == ["t"]
    assert template["t"].tolist() == [0, 1, 2, 3]


def test_what_the_checkpoint_lacks_stays_as_it_is_when_relaxed(saved: Any, begin: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1), nn.Linear(1, 1))
    kept = model[2].weight.detach().clone()
    ours = torch.full((2,), 7.0)
    restored = begin(saved).restore({"model": model, "ours": ours, "note": "mine"}, strict=False)
    assert torch.equal(model[0].weight, saved.state["model"][0].weight)
    assert torch.equal(model[2].weight, kept)
    assert restored.state["ours"].tolist() == [7, 7]
    assert restored.state["note"] == "mine"


def test_another_shape_is_an_error_even_when_relaxed(saved: Any, begin: Any) -> None:
    target = torch.zeros(5)
    with pytest.raises(StateMismatchError, match=r"t: float32\[5\] here, float32\[4\] in the checkpoint"):
        begin(saved).restore({"t": target}, strict=False)
    assert target.tolist() == [0] * 5


def test_an_empty_dict_comes_back_filled(saved: Any, begin: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    template = {
        "model": model,
        "optimizer": optim.SGD(model.parameters(), lr=1.0),
        "t": torch.zeros(4),
        "extra": {},
    }
    restored = begin(saved).restore(template)
    assert restored.state["extra"]["epoch"] == 3
    assert restored.state["extra"]["list"] == [1, 2]
    assert restored.state["extra"]["noise"].tolist() == [1, 1]
    assert template["extra"] == {}
    assert restored.state["model"] is model


def test_only_restores_what_its_patterns_name(saved: Any, begin: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    second = model[1].weight.detach().clone()
    template = {"model": model, "t": torch.zeros(4), "extra": {"epoch": 0, "list": None}}
    restored = begin(saved).restore(template, only="model.0.*")
    assert torch.equal(model[0].weight, saved.state["model"][0].weight)
    assert torch.equal(model[1].weight, second)
    assert template["t"].tolist() == [0, 0, 0, 0]
    assert restored.state["extra"] == {"epoch": 0, "list": None}

    begin(saved).restore(template, only=["t", "model.1.weight"])
    assert template["t"].tolist() == [0, 1, 2, 3]
    assert torch.equal(model[1].weight, saved.state["model"][1].weight)


def test_only_can_name_an_optimizer_and_a_plain_value(saved: Any, begin: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    weight = model[0].weight.detach().clone()
    optimizer = optim.SGD(model.parameters(), lr=7.0)
    restored = begin(saved).restore(
        {"model": model, "optimizer": optimizer, "extra": 0}, only=["optimizer", "extra"]
    )
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert torch.equal(model[0].weight, weight)
    assert restored.state["extra"]["epoch"] == 3


def test_only_reads_no_shard_that_it_does_not_need(saved: Any, begin: Any) -> None:
    saved.log.clear()
    begin(saved).restore({"extra": {"epoch": 0}}, only="extra.epoch", strict=False)
    assert saved.keys("open_reader") == []


def test_a_pattern_stands_for_all_that_lies_in_what_it_names(saved: Any, begin: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    restored = begin(saved).restore(
        {"model": model, "t": torch.zeros(4), "extra": {"list": 0}}, only=["mod?l", "extra"]
    )
    assert torch.equal(model[0].weight, saved.state["model"][0].weight)
    assert torch.equal(model[1].bias, saved.state["model"][1].bias)
    assert restored.state["t"].tolist() == [0, 0, 0, 0]
    assert restored.state["extra"]["list"] == [1, 2]


def test_patterns_may_overlap_and_what_they_leave_out_need_not_fit(saved: Any, begin: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    template = {
        "model": model,
        "t": torch.Generator(),
        "extra": torch.zeros(7),
        "optimizer": torch.zeros(1),
    }
    begin(saved).restore(template, only=["model", "model.0", "model.0.weight"])
    assert torch.equal(model[0].weight, saved.state["model"][0].weight)
    with pytest.raises(StateMismatchError, match=r"t is a torch\.Generator here"):
        begin(saved).restore(template, only="t")


def test_a_pattern_that_fits_nothing_is_an_error(saved: Any, begin: Any) -> None:
    target = torch.zeros(4)
    with pytest.raises(StateMismatchError, match="only='modle'"):
        begin(saved).restore({"t": target}, only=["t", "modle"])
    assert target.tolist() == [0, 0, 0, 0]


def test_a_template_of_plain_values_alone_is_as_strict(saved: Any, begin: Any) -> None:
    with pytest.raises(StateMismatchError) as caught:
        begin(saved).restore({"extra": {}, "more": 0})
    assert caught.value.missing == ("more",)
    assert set(caught.value.unexpected) == {"model", "optimizer", "t"}
    assert list(begin(saved).restore({"extra": {}}, strict=False).state) == ["extra"]


def test_names_that_moved_are_mapped(saved: Any, begin: Any) -> None:
    model = nn.ModuleDict({"body": nn.Linear(2, 3), "head": nn.Linear(3, 1)})
    template = {"net": model, "other": torch.zeros(4)}
    begin(saved).restore(
        template,
        rename={"net": "model", "net.body": "model.0", "net.head": "model.1", "other": "t"},
        strict=False,
    )
    assert torch.equal(model["body"].weight, saved.state["model"][0].weight)
    assert torch.equal(model["head"].bias, saved.state["model"][1].bias)
    assert template["other"].tolist() == [0, 1, 2, 3]


def test_a_name_deep_in_a_renamed_container_is_mapped(memory: Any, begin: Any) -> None:
    begin(memory).save(1, {"old": {"in": {"t": torch.ones(2), "u": torch.full((2,), 2.0)}}}).result()
    template = {"new": {"inner": {"t": torch.zeros(2), "v.w": torch.zeros(2)}}}
    rename = {"new": "old", "new.inner": "old.in", "new.inner.v%2Ew": "old.in.u"}
    begin(memory).restore(template, rename=rename)
    assert template["new"]["inner"]["t"].tolist() == [1, 1]
    assert template["new"]["inner"]["v.w"].tolist() == [2, 2]


def test_names_that_gained_a_prefix_where_they_are_are_mapped(memory: Any, begin: Any) -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    saved, fresh = nn.Sequential(nn.Linear(2, 3)), nn.Sequential(nn.Linear(2, 3))
    begin(memory).save(1, {"net": Wrapper(saved).state_dict(), "t": torch.ones(1)}).result()
    begin(memory).restore({"net": fresh, "t": torch.zeros(1)}, rename={"net": "net.module"})
    assert torch.equal(fresh[0].weight, saved[0].weight)


def test_an_optimizer_follows_the_renamed_parameters(saved: Any, begin: Any) -> None:
    model = nn.ModuleDict({"body": nn.Linear(2, 3), "head": nn.Linear(3, 1)})
    optimizer = optim.SGD(model.parameters(), lr=7.0, momentum=0.9)
    begin(saved).restore(
        {"net": model, "optimizer": optimizer},
        rename={"net": "model", "net.body": "model.0", "net.head": "model.1"},
        strict=False,
    )
    mine = saved.state["optimizer"].state[saved.state["model"][0].weight]["momentum_buffer"]
    assert torch.equal(optimizer.state[model["body"].weight]["momentum_buffer"], mine)


def test_without_a_commit_there_is_nothing_to_restore(root: Path, begin: Any) -> None:
    target = torch.zeros(1)
    assert begin(root).restore({"t": target}) is None
    assert begin(root).restore() is None
    assert not root.parent.exists()


def test_a_step_that_nobody_saved_is_told_with_those_that_are_there(saved: Any, begin: Any) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"no checkpoint of step 5.*committed steps are 1"):
        begin(saved).restore(step=5)
    with pytest.raises(CheckpointNotFoundError, match="there is none"):
        begin(MemoryStore()).restore(step=5)


@pytest.mark.parametrize("template", ([torch.zeros(1)], nn.Linear(1, 1), 7), ids=lambda t: type(t).__name__)
def test_a_template_that_is_no_dict_is_refused(template: Any, saved: Any, begin: Any) -> None:
    with pytest.raises(ConfigError, match="must be a dict"):
        begin(saved).restore(template)


def test_reading_a_root_creates_and_changes_nothing(root: Path, begin: Any) -> None:
    with begin(root) as writer:
        writer.save(1, {"t": torch.ones(2)})

    def listing() -> list[tuple[str, int, int]]:
        return sorted((str(p), p.stat().st_mtime_ns, p.stat().st_size) for p in root.rglob("*"))

    before = listing()
    reader = begin(root)
    reader.checkpoints()
    reader.restore()
    reader.restore({"t": torch.zeros(2)})
    reader.close()
    assert listing() == before


def test_an_ordered_dict_comes_back_as_one(round_trip: Any) -> None:
    saved = OrderedDict(a=torch.ones(1), b=2)
    state = round_trip({"x": saved}, {"x": OrderedDict(a=torch.zeros(1), b=None)})
    assert type(state["x"]) is OrderedDict
