"""A walk that remembers the last one finds what a fresh walk finds, whatever happened in between."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn, optim

from strongroom import PerRank, StateEncodingError, guards, survey, tree, values
from strongroom.tree import Captured, Capturer, capture


@pytest.fixture(autouse=True)
def _everything_is_worth_remembering(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small states take the ways of large ones."""
    monkeypatch.setattr(values, "LARGE", 1)
    monkeypatch.setattr(survey, "_MIN_GUARDED", 1)


def view(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.dtype, tensor.stride(), tensor.is_conj()


def facts(captured: Captured) -> Any:
    return [
        (name, captured.units[name], tensor.shape, tensor.dtype) for name, tensor in captured.tensors.items()
    ]


def assert_same(found: Captured, fresh: Captured, *, moved: tuple[str, ...] = ()) -> None:
    """Two captures of one state; what ``moved`` names is made anew by each."""
    assert found.document == fresh.document
    assert found.rank_document == fresh.rank_document
    assert facts(found) == facts(fresh)
    for name, tensor in found.tensors.items():
        if name.rpartition(".")[2] not in moved:
            assert view(tensor) == view(fresh.tensors[name]), name
        assert torch.equal(tensor, fresh.tensors[name]) or tensor.is_complex(), name
    assert found.aliases == fresh.aliases
    assert list(found.aliases) == list(fresh.aliases)
    assert found.units == fresh.units
    assert list(found.compared) == list(fresh.compared)
    assert found.fingerprint == fresh.fingerprint


# ------------------------------------------------------------------------------- any state, mutated


class Meter:
    def __init__(self) -> None:
        self.state: dict[str, Any] = {"total": torch.zeros(2), "seen": 0}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class Noted(nn.Linear):
    """A module with state of its own kind."""

    note: Any = None

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Sequential(nn.Linear(3, 2), nn.ReLU()))


def build() -> dict[str, Any]:
    model, other = net(), nn.Sequential(Noted(1, 1))
    optimizer = optim.AdamW(model.parameters())
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "other": other,
        "flat": {f"t{number}": torch.full((2,), float(number)) for number in range(6)},
        "deep": {"a": {"x": torch.zeros(3), "n": 1}, "b": {"x": torch.ones(3), "n": 2}},
        "sd": OrderedDict(a=torch.zeros(1), b=None),
        "mixed": {
            "t": torch.ones(2, 2),
            "n": 3,
            "f": 0.5,
            "l": [torch.zeros(1), "x"],
            "s": "text",
            "u": torch.ones(1),
        },
        "mine": PerRank({"t": torch.zeros(2), "n": 1}),
        "meter": Meter(),
        "generator": torch.Generator(),
        "array": np.arange(3.0),
        "list": [torch.zeros(2), {"t": torch.zeros(1)}],
    }


MOVED = ("generator", "hooked", "own")
"""Last parts of the names of tensors that each walk makes anew."""

Mutation = Callable[[dict[str, Any]], None]


def tensors_of(state: dict[str, Any]) -> list[torch.Tensor]:
    return [
        *state["flat"].values(),
        state["deep"]["a"]["x"],
        state["mixed"]["t"],
        state["list"][0],
        *(parameter for parameter in state["model"].parameters()),
        *(buffer for buffer in state["model"].buffers()),
    ]


def _resize(state: dict[str, Any]) -> None:
    tensor = state["flat"]["t1"]
    tensor.resize_(tensor.numel() + 1).zero_()


def _repoint(state: dict[str, Any]) -> None:
    state["flat"]["t2"].data = torch.ones(2)


def _recast(state: dict[str, Any]) -> None:
    tensor = state["flat"]["t3"]
    tensor.data = tensor.data.to(torch.float64 if tensor.dtype == torch.float32 else torch.float32)


def _turn(state: dict[str, Any]) -> None:
    state["mixed"]["t"].t_()


def _tie(state: dict[str, Any]) -> None:
    state["flat"]["t4"].data = state["flat"]["t5"].data


def _tie_across(state: dict[str, Any]) -> None:
    state["deep"]["b"]["x"] = state["model"][0].bias.detach()


def _tie_parameters(state: dict[str, Any]) -> None:
    state["model"][2][0].bias.data = state["model"][0].weight.data[0]


def _conjugate(state: dict[str, Any]) -> None:
    base = torch.complex(torch.arange(2.0), torch.ones(2))
    is_conj = state["flat"].get("z", base).is_conj()
    state["flat"]["z"] = base if is_conj else base.conj()
    state["flat"]["y"] = base


def _drop_tie(state: dict[str, Any]) -> None:
    state["flat"]["t4"].data = torch.zeros(2)


def _add(state: dict[str, Any]) -> None:
    state["flat"][f"new{len(state['flat'])}"] = torch.zeros(1)


def _remove(state: dict[str, Any]) -> None:
    state["flat"].pop(next(iter(state["flat"])))
    state["flat"].setdefault("t1", torch.zeros(1))
    for number in (2, 3, 4, 5):
        state["flat"].setdefault(f"t{number}", torch.zeros(2))


def _reorder(state: dict[str, Any]) -> None:
    state["flat"] = dict(reversed(state["flat"].items()))


def _replace(state: dict[str, Any]) -> None:
    state["flat"]["t5"] = torch.ones(2, dtype=torch.int64)


def _count(state: dict[str, Any]) -> None:
    state["deep"]["a"]["n"] += 1
    state["mixed"]["f"] *= 0.5
    state["meter"].state["seen"] += 1


def _retype(state: dict[str, Any]) -> None:
    state["mixed"]["n"] = True if state["mixed"]["n"] == 1 else 1


def _nan(state: dict[str, Any]) -> None:
    state["mixed"]["f"] = float("nan")
    state["mixed"]["s"] = 0.0 if state["mixed"]["s"] == "text" else "text"


def _grow(state: dict[str, Any]) -> None:
    state["mixed"]["l"].append(torch.zeros(1))


def _kind(state: dict[str, Any]) -> None:
    state["deep"]["b"] = torch.ones(1)


def _unkind(state: dict[str, Any]) -> None:
    state["deep"]["b"] = {"x": torch.ones(3), "n": 2, 7: torch.ones(1)}


def _step(state: dict[str, Any]) -> None:
    state["model"](torch.ones(4, 2)).sum().backward()
    state["optimizer"].step()
    state["optimizer"].param_groups[0]["lr"] *= 0.9


def _clear(state: dict[str, Any]) -> None:
    state["optimizer"].state.clear()


def _regroup(state: dict[str, Any]) -> None:
    state["optimizer"].param_groups[0]["params"].reverse()


def _deepen(state: dict[str, Any]) -> None:
    state["model"].append(nn.Linear(2, 2))


def _swap(state: dict[str, Any]) -> None:
    state["model"][2][0] = nn.Linear(3, 2, bias=len(state["flat"]) % 2 == 0)


def _demote(state: dict[str, Any]) -> None:
    layer = state["model"][0]
    if isinstance(layer._parameters.get("bias"), nn.Parameter):
        bias = layer.bias.detach().clone()
        del layer.bias
        layer.register_buffer("bias", bias)


def _freeze(state: dict[str, Any]) -> None:
    state["model"][0].weight.requires_grad_(not state["model"][0].weight.requires_grad)


def _hide(state: dict[str, Any]) -> None:
    hidden = state["model"][1]._non_persistent_buffers_set
    hidden.symmetric_difference_update({"running_mean"})


def _hook(state: dict[str, Any]) -> None:
    def hook(module: Any, state_dict: Any, prefix: str, metadata: Any) -> None:
        state_dict[f"{prefix}hooked"] = torch.zeros(1)

    state["model"][0]._register_state_dict_hook(hook)


def _override(state: dict[str, Any]) -> None:
    model = state["model"][0]
    model.get_extra_state = lambda: 1  # torch does not look at the object's own: no change
    model.state_dict = lambda destination, prefix, keep_vars: destination.update(
        {f"{prefix}own": torch.ones(2)}
    )


def _version(state: dict[str, Any]) -> None:
    state["model"][1]._version = 7


def _note(state: dict[str, Any]) -> None:
    state["other"][0].note = {"t": torch.zeros(1), "n": 1}


def _share(state: dict[str, Any]) -> None:
    state["other"].append(state["model"][0])


def _rank(state: dict[str, Any]) -> None:
    mine = state["mine"]
    state["mine"] = mine.value if isinstance(mine, PerRank) else PerRank(mine)


def _tie_to_mine(state: dict[str, Any]) -> None:
    state["mine"] = PerRank({"t": state["flat"]["t5"], "u": state["flat"]["t5"].detach()})


def _draw(state: dict[str, Any]) -> None:
    torch.randn(2, generator=state["generator"])


def _model_in_place_of_a_dict(state: dict[str, Any]) -> None:
    state["sd"] = nn.Linear(1, 1) if isinstance(state["sd"], dict) else nn.Linear(1, 1).state_dict()


MUTATIONS: list[Mutation] = [
    _resize, _repoint, _recast, _turn, _tie, _tie_across, _tie_parameters, _conjugate, _drop_tie, _add,
    _remove, _reorder, _replace, _count, _retype, _nan, _grow, _kind, _unkind, _step, _clear, _regroup,
    _deepen, _swap, _demote, _freeze, _hide, _hook, _override, _version, _note, _share, _rank,
    _tie_to_mine, _draw, _model_in_place_of_a_dict,
]  # fmt: skip


def attempt(walk: Callable[[], Captured]) -> Captured | str:
    try:
        return walk()
    except StateEncodingError as error:
        return str(error)


Seen = tuple[Any, Any]
"""A capture's fingerprint, and what it stands for, which a tensor that is changed in place would hide."""


def check(capturer: Capturer, state: dict[str, Any], before: Seen | None) -> Seen | None:
    found, fresh = attempt(lambda: capturer.capture(state)), attempt(lambda: capture(state, rank=0))
    if isinstance(found, str) or isinstance(fresh, str):
        assert found == fresh
        return None
    assert_same(found, fresh, moved=MOVED)
    if before is not None:
        assert (before[0] == found.fingerprint) == (before[1] == facts(found))
    return found.fingerprint, facts(found)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__.strip("_"))
def test_a_change_shows_in_the_next_walk_of_the_same_state(mutation: Mutation) -> None:
    state, capturer = build(), Capturer(rank=0)
    before = check(capturer, state, None)
    before = check(capturer, state, before)
    for _ in range(3):
        mutation(state)
        before = check(capturer, state, before)
        before = check(capturer, state, before)


@settings(max_examples=max(1, 40 * settings.default.max_examples // 100))
@given(st.lists(st.lists(st.sampled_from(MUTATIONS), max_size=3), max_size=8), st.booleans())
def test_a_state_that_changes_in_any_way_is_walked_as_if_anew(history: Any, is_guarded: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(values, "LARGE", 1)
        patch.setattr(survey, "_MIN_GUARDED", 1 if is_guarded else 10**9)
        state, capturer = build(), Capturer(rank=0)
        before: Seen | None = None
        for mutations in history:
            for mutation in mutations:
                # What an earlier one made impossible.
                with contextlib.suppress(AttributeError, LookupError, RuntimeError, TypeError):
                    mutation(state)
            before = check(capturer, state, before)


def test_a_parameter_that_becomes_a_buffer_of_the_same_name_changes_its_unit() -> None:
    module, capturer = nn.Module(), Capturer(rank=0)
    module.w = nn.Parameter(torch.zeros(1))
    before = capturer.capture({"m": module})
    assert before.units == {"m.w": "m.w"}
    kept = module.w
    del module.w
    module.register_buffer("w", kept)
    after = capturer.capture({"m": module})
    assert after.units == {"m.w": "m=buffers"}
    # Or who stores it would stay decided as for a parameter.
    assert after.fingerprint != before.fingerprint


def test_the_same_names_in_another_part_of_the_state_are_walked_anew() -> None:
    capturer = Capturer(rank=0)
    module = Noted(1, 1)
    module.note = {"t": torch.zeros(1)}
    assert capturer.capture({"m": module}).units["m._extra_state.t"] == "m=buffers"
    assert capturer.capture({"m": {"_extra_state": module.note}}).units["m._extra_state.t"] == "m"


def test_a_child_under_another_name_is_seen() -> None:
    layer, capturer = nn.Linear(1, 1), Capturer(rank=0)
    model = nn.ModuleDict({"a": layer})
    state = {"m": model, "o": optim.SGD(model.parameters(), lr=0.1)}
    assert list(capturer.capture(state).tensors) == ["m.a.weight", "m.a.bias"]
    model["b"] = model.pop("a")
    assert_same(capturer.capture(state), capture(state, rank=0))


def test_an_unchanged_state_gives_the_same_fingerprint_object() -> None:
    state, capturer = build(), Capturer(rank=0)
    first = capturer.capture(state)
    assert capturer.capture(state).fingerprint is first.fingerprint


def test_an_earlier_capture_is_not_touched_by_a_later_one() -> None:
    state, capturer = build(), Capturer(rank=0)
    first = capturer.capture(state)
    kept = capture(state, rank=0)
    _count(state)
    _step(state)
    capturer.capture(state)
    assert first.document == kept.document
    assert first.units == kept.units


# ------------------------------------------------------------------------------------ what is kept


def test_nothing_of_a_state_is_kept_alive() -> None:
    state, capturer = build(), Capturer(rank=0)
    for _ in range(3):
        capturer.capture(state)
    watched: list[Any] = [*tensors_of(state), state["model"], state["optimizer"], state["meter"]]
    watched += [value for states in state["optimizer"].state.values() for value in states.values()]
    references = [weakref.ref(value) for value in watched]
    del watched
    state.clear()
    gc.collect()
    assert [reference() for reference in references if reference() is not None] == []


class Labelled(torch.Tensor):
    label = ""


def test_a_walk_that_failed_is_not_remembered() -> None:
    state = {"x": {"a": torch.zeros(1), "b": torch.zeros(1)}}
    capturer = Capturer(rank=0)
    capturer.capture(state)
    state["x"]["b"] = torch.zeros(1, device="meta")
    for _ in range(2):
        with pytest.raises(StateEncodingError, match=r"state\['x'\]\['b'\].*meta"):
            capturer.capture(state)
    state["x"]["b"] = torch.zeros(1)
    assert_same(capturer.capture(state), capture(state, rank=0))


def test_two_capturers_share_nothing() -> None:
    state = build()
    assert list(Capturer(rank=3).capture(state).tensors) != list(Capturer(rank=1).capture(state).tensors)


# --------------------------------------------------------------------------------- units, comparing


def test_a_parameter_and_its_optimizer_state_and_a_modules_buffers_are_units() -> None:
    captured = capture(build(), rank=2)
    units = captured.units
    assert units["model.0.weight"] == "model.0.weight"
    assert units["model.1.running_mean"] == units["model.1.num_batches_tracked"] == "model=buffers"
    state = {name: unit for name, unit in units.items() if name.startswith("optimizer.state.model.0.weight.")}
    assert len(state) == 3
    assert set(state.values()) == {"optimizer.state.model.0.weight"}
    assert units["flat.t0"] == units["flat.t1"] == "flat"
    assert units["mixed.l.[0]"] == "mixed"
    assert units["mine.rank2.t"] == "mine.rank2"
    assert units["generator"] == "generator"
    assert list(units) == list(captured.tensors)


def test_two_modules_in_one_list_have_their_own_units_of_buffers() -> None:
    units = capture({"m": [nn.BatchNorm1d(1), nn.BatchNorm1d(1)]}, rank=0).units
    assert units["m.[0].running_mean"] != units["m.[1].running_mean"]


def test_what_is_compared_between_ranks_is_small_and_exact_and_not_a_models_or_a_ranks_own() -> None:
    state = build()
    state["large"] = torch.zeros(tree.MAX_COMPARED_BYTES // 4 + 1, dtype=torch.int32)
    state["just"] = torch.zeros(tree.MAX_COMPARED_BYTES // 4, dtype=torch.int32)
    state["deep"]["count"] = torch.tensor(3)
    state["mine"] = PerRank(torch.tensor(3))
    state["measured"] = torch.zeros(3)
    state["other"][0].note = torch.zeros(1, dtype=torch.uint8)
    compared = capture(state, rank=0).compared
    assert {"generator", "just", "deep.count", "other.0._extra_state"} <= set(compared)
    assert not [name for name in compared if name.startswith(("model", "optimizer", "mine", "large"))]
    assert "measured" not in compared


def test_what_all_ranks_share_never_goes_by_the_name_of_one_ranks_own() -> None:
    tensor = torch.ones(2)
    captured = capture({"mine": PerRank({"a": tensor, "b": tensor}), "all": tensor, "again": tensor}, rank=1)
    assert captured.aliases == {"mine.rank1.b": "mine.rank1.a", "again": "all"}
    assert list(captured.tensors) == ["mine.rank1.a", "all"]


# ------------------------------------------------------------------------------------------ guards


def test_a_guard_tells_what_a_save_must_tell_apart_or_there_is_none() -> None:
    tensors = [torch.zeros(2, 3), torch.zeros(3)]
    guard = guards.guard_of(tensors)
    if guard is None:
        pytest.skip("this torch has no guard that proves itself")
    assert guard.holds([torch.ones(2, 3), torch.ones(3)])
    for others in (
        [torch.ones(3, 2), torch.ones(3)],
        [torch.ones(2, 3), torch.ones(3, dtype=torch.int32)],
        [torch.ones(3, 2).t(), torch.ones(3)],
        [torch.ones(2, 3, device="meta"), torch.ones(3)],
        [torch.ones(2, 3), torch.ones(3).as_subclass(Labelled)],
    ):
        assert not guard.holds(others)
    references = [weakref.ref(tensor) for tensor in tensors]
    tensors.clear()
    assert [reference() for reference in references] == [None, None]


def test_without_a_guard_the_same_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "guard_of", lambda tensors: None)
    state, capturer = build(), Capturer(rank=0)
    for mutation in (_count, _resize, _recast, _tie, _swap):
        mutation(state)
        check(capturer, state, None)
        check(capturer, state, None)
