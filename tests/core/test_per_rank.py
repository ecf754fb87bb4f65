"""Values that each rank has its own of: marked, unmarked, and missing where a rank did not exist."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

from strongroom import Checkpointer, FormatError, PerRank
from strongroom.catalog import Catalog
from strongroom.fetch import fetch
from strongroom.fill import Filling, match
from strongroom.index import Index
from strongroom.opened import open_checkpoint
from strongroom.plan import plan_read
from strongroom.selection import Selection
from strongroom.signing import NO_GUARD
from strongroom.stores.memory import MemoryStore
from strongroom.tree import capture

AsRank = Callable[..., tuple[Any, list[str]]]


@pytest.fixture
def as_rank() -> AsRank:
    """Saves a state as the only rank and restores it as the given one; also what was missing."""

    def go(state: dict[str, Any], template: Any, rank: int, selection: Selection | None = None) -> Any:
        store = MemoryStore()
        with Checkpointer(store) as writer:
            writer.save(1, state).result()
        (commit,) = Catalog(store).history().commits.values()
        opened = open_checkpoint(store, commit, NO_GUARD)
        filling = match(
            template, opened.state, opened.rank_state(rank), opened.index, selection or Selection()
        )
        reads = plan_read(filling.targets, filling.records)
        fetch(opened, reads, filling.records, workers=1, touched=set())
        return filling.finish(), filling.missing_per_rank

    return go


def test_a_rank_that_stored_its_own_gets_it_bare(as_rank: AsRank) -> None:
    state, missing = as_rank({"mine": PerRank({"n": 3, "t": torch.ones(2)})}, None, 0)
    assert state["mine"]["n"] == 3
    assert torch.equal(state["mine"]["t"], torch.ones(2))
    assert missing == []


def test_a_rank_that_stored_none_gets_none_where_the_template_names_nothing(as_rank: AsRank) -> None:
    state, missing = as_rank({"mine": PerRank(3), "deep": {"n": 1, "own": PerRank(2)}}, None, 1)
    assert state == {"mine": None, "deep": {"n": 1, "own": None}}
    assert sorted(missing) == ["deep.own", "mine"]


def test_a_rank_that_stored_none_keeps_what_its_template_has(as_rank: AsRank) -> None:
    tensor = torch.full((2,), 7.0)
    template = {
        "marked": PerRank(5),
        "bare": 6,
        "deep": {"n": 0, "own": "mine", "l": [1, PerRank(8)]},
        "t": tensor,
    }
    stored = {
        "marked": PerRank(1),
        "bare": PerRank(2),
        "deep": {"n": 1, "own": PerRank(2), "l": [4, PerRank(3)]},
        "t": PerRank(torch.ones(2)),
    }
    state, missing = as_rank(stored, template, 1)
    assert state["marked"] == 5
    assert state["bare"] == 6
    assert state["deep"] == {"n": 1, "own": "mine", "l": [4, 8]}
    assert state["t"] is tensor
    assert tensor.tolist() == [7, 7]
    assert sorted(missing) == ["bare", "deep.l.[1]", "deep.own", "marked", "t"]


def test_what_stands_in_a_marked_template_is_filled_in_place(as_rank: AsRank) -> None:
    def build(value: float) -> dict[str, Any]:
        return {
            "t": PerRank(torch.full((2,), value)),
            "g": PerRank(torch.Generator().manual_seed(int(value))),
            "m": PerRank(nn.Linear(2, 2)),
            "deep": {"own": PerRank({"t": torch.full((1,), value), "n": value})},
        }

    saved, fresh = build(3.0), build(9.0)
    state, missing = as_rank(saved, fresh, 0)
    assert missing == []
    for name in ("t", "g", "m"):
        assert state[name] is fresh[name].value
    assert torch.equal(state["t"], saved["t"].value)
    assert torch.equal(state["g"].get_state(), saved["g"].value.get_state())
    assert torch.equal(state["m"].weight, saved["m"].value.weight)
    assert state["deep"]["own"]["t"] is fresh["deep"]["own"].value["t"]
    assert state["deep"]["own"]["n"] == 3.0


def test_nothing_in_a_marked_template_is_touched_where_the_rank_stored_none(as_rank: AsRank) -> None:
    saved = {"t": PerRank(torch.ones(2)), "g": PerRank(torch.Generator()), "m": PerRank(nn.Linear(2, 2))}
    fresh = {
        "t": PerRank(torch.zeros(2)),
        "g": PerRank(torch.Generator().manual_seed(5)),
        "m": PerRank(nn.Linear(2, 2)),
    }
    before = fresh["g"].value.get_state(), fresh["m"].value.weight.detach().clone()
    state, missing = as_rank(saved, fresh, 4)
    assert missing == ["t", "g", "m"]
    assert state["t"].tolist() == [0, 0]
    assert torch.equal(state["g"].get_state(), before[0])
    assert torch.equal(state["m"].weight, before[1])


def test_a_module_and_its_optimizer_that_are_one_ranks_own_find_each_other(as_rank: AsRank) -> None:
    def build(steps: int) -> dict[str, Any]:
        model = nn.Linear(2, 2)
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(steps):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        return {"m": PerRank(model), "o": PerRank(optimizer)}

    saved, fresh = build(2), build(0)
    state, _ = as_rank(saved, fresh, 0)
    assert torch.equal(
        state["o"].state[state["m"].weight]["momentum_buffer"],
        saved["o"].value.state[saved["m"].value.weight]["momentum_buffer"],
    )


def test_a_value_that_all_shared_fills_a_template_that_marks_it(as_rank: AsRank) -> None:
    state, missing = as_rank({"n": 3, "t": torch.ones(2)}, {"n": PerRank(0), "t": PerRank(torch.zeros(2))}, 1)
    assert (state["n"], state["t"].tolist(), missing) == (3, [1, 1], [])


class Loader:
    """An object whose state is in part each rank's own."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"epoch": 0, "position": 0}

    def state_dict(self) -> dict[str, Any]:
        return {**self.state, "position": PerRank(self.state["position"])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_an_object_keeps_its_own_part_where_the_rank_stored_none(as_rank: AsRank) -> None:
    saved, fresh = Loader(), Loader()
    saved.state, fresh.state = {"epoch": 2, "position": 10}, {"epoch": 0, "position": 5}
    _, missing = as_rank({"loader": saved}, {"loader": fresh}, 1)
    assert fresh.state == {"epoch": 2, "position": 5}
    assert missing == ["loader.position"]
    as_rank({"loader": saved}, {"loader": fresh}, 0)
    assert fresh.state == {"epoch": 2, "position": 10}


def test_what_is_not_asked_for_is_not_missing(as_rank: AsRank) -> None:
    stored = {"a": PerRank(torch.ones(1)), "b": PerRank(2), "t": torch.ones(1)}
    template = {"a": torch.zeros(1), "b": 0, "t": torch.zeros(1)}
    state, missing = as_rank(stored, template, 1, Selection(only=("t",)))
    assert missing == []
    assert state["t"].item() == 1


def test_a_rank_keeps_its_own_under_a_renamed_key(as_rank: AsRank) -> None:
    state, missing = as_rank(
        {"old": {"own": PerRank(1)}}, {"new": {"own": 7}}, 1, Selection(rename={"new": "old"})
    )
    assert state == {"new": {"own": 7}}
    assert missing == ["old.own"]


def test_an_own_value_that_names_itself_is_no_endless_walk() -> None:
    found = capture({"a": PerRank({"t": torch.ones(1)})}, rank=0)
    loop = {"a": {"$": "per_rank", "v": "a"}}
    with pytest.raises(FormatError):
        match({"a": torch.zeros(1)}, found.document, loop, Index([], [], {}), Selection())
    nameless = {"$": "dict", "v": [["a", {"$": "per_rank", "v": ["x"]}]]}
    with pytest.raises(FormatError, match="without a name"):
        match({"a": torch.zeros(1)}, nameless, {}, Index([], [], {}), Selection())


def test_decoding_loads_nothing_and_loading_decodes_nothing() -> None:
    loaded: list[Any] = []

    class Told(Loader):
        def load_state_dict(self, state: Any) -> None:
            loaded.append(state)

    found = capture({"x": Loader(), "n": 3}, rank=0)
    values = dict(found.rank_document)
    filling = match({"x": Told(), "n": 0}, found.document, values, Index([], [], {}), Selection())
    assert isinstance(filling, Filling)
    assert filling.decode()["n"] == 3
    assert loaded == []
    assert filling.load()["n"] == 3
    assert len(loaded) == 1
