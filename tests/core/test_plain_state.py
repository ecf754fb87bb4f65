"""Containers and scalars through a checkpoint, with and without a template: types, bits and order."""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import decimal
import enum
import math
import struct
import types
import uuid
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strongroom import Checkpointer, PerRank, StateEncodingError, register_codec, register_type
from strongroom.stores.memory import MemoryStore


@register_type(name="core-tests.Phase")
class Phase(enum.Enum):
    WARM_UP = "warm-up"
    MAIN = "main"


@register_type(name="core-tests.Progress")
@dataclasses.dataclass
class Progress:
    epoch: int
    seen: Any = None


@register_type(name="core-tests.Batch")
class Batch(NamedTuple):
    index: int
    data: Any


class Unknown:
    """Nobody said how to store it."""


class Taught:
    def __init__(self, weights: torch.Tensor) -> None:
        self.weights = weights


register_codec(Taught, name="core-tests.Taught", encode=lambda value: {"w": value.weights},
               decode=lambda found: Taught(found["w"]))  # fmt: skip


def same(one: Any, two: Any) -> bool:
    """Same types and bits all the way down, order included."""
    if type(one) is not type(two):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == two.dtype and one.shape == two.shape and torch.equal(one, two)
    if isinstance(one, np.ndarray):
        return one.dtype == two.dtype and one.shape == two.shape and one.tobytes() == two.tobytes()
    if isinstance(one, float):
        return struct.pack(">d", one) == struct.pack(">d", two)
    if isinstance(one, complex):
        return same((one.real, one.imag), (two.real, two.imag))
    if isinstance(one, dict):
        factories = getattr(one, "default_factory", None) is getattr(two, "default_factory", None)
        return factories and same(list(one.items()), list(two.items()))
    if isinstance(one, deque):
        return one.maxlen == two.maxlen and same(list(one), list(two))
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, set | frozenset):
        return one == two and {type(item) for item in one} == {type(item) for item in two}
    if dataclasses.is_dataclass(one):
        return all(same(getattr(one, f.name), getattr(two, f.name)) for f in dataclasses.fields(one))
    if isinstance(one, types.SimpleNamespace | argparse.Namespace):
        return same(vars(one), vars(two))
    return bool(one == two)


SIGNALLING = struct.unpack(">d", b"\x7f\xf0\0\0\0\0\0\1")[0]
"""A NaN with a payload of its own."""

EVERYTHING: dict[str, Any] = {
    "none": None,
    "truths": [True, False],
    "integers": [0, -1, 2**53, -(2**64), 10**400],
    "floats": [0.1, -0.0, math.inf, -math.inf, math.nan, 5e-324, SIGNALLING],
    "complex": complex(-0.0, math.nan),
    "text": ["", "naïve", "\0", "a.b", "\ud800", "$"],
    "bytes": [b"", b"\x00\xff", bytearray(b"x")],
    "tuples": ((), (1, (2, [3]))),
    "sets": [set(), {1, "a", (2, 3)}, frozenset({b"x"})],
    "keys": {1: "int", "1": "text", (1, "a"): "tuple", None: "none", 2.5: "float"},
    "nothing": {},
    "deeper": {"": {"": [{}, [], ()]}},
    "ordered": OrderedDict([("z", 1), ("a", torch.ones(2))]),
    "defaulted": defaultdict(list, {"a": [1]}),
    "counted": Counter({"a": 3}),
    "queued": deque([1, torch.zeros(1)], maxlen=5),
    "named": Batch(3, torch.arange(3)),
    "spaced": types.SimpleNamespace(lr=0.1, t=torch.ones(1)),
    "parsed": argparse.Namespace(batch_size=3, path=Path("/data")),
    "paths": [Path("a/b"), PurePosixPath("/")],
    "times": [
        dt.datetime(2024, 2, 29, 1, 2, 3, 4, tzinfo=zoneinfo.ZoneInfo("UTC")),
        dt.datetime(2024, 2, 29, tzinfo=dt.timezone.utc),
        dt.date(2024, 2, 29),
        dt.timedelta(days=-1, microseconds=1),
    ],
    "phase": Phase.MAIN,
    "progress": Progress(3, [torch.ones(1), Progress(4)]),
    "exact": [decimal.Decimal("1.10"), uuid.UUID(int=7), range(3, 9, 2), slice(1, None)],
    "torch": [torch.float8_e4m3fn, torch.device("cuda:1"), torch.Size([2, 3])],
    "numpy": [np.float32(0.1), np.arange(3), np.array(["x"])],
    "tensors": [torch.ones(2), (torch.zeros(0, 3), {"deep": torch.tensor(1.5)})],
}  # fmt: skip


def test_every_kind_of_value_comes_back_without_a_template(there_and_back: Any) -> None:
    restored = there_and_back(EVERYTHING)
    assert list(restored) == list(EVERYTHING)
    for name, value in EVERYTHING.items():
        assert same(restored[name], value), name


def test_every_kind_of_value_comes_back_through_a_template_that_only_names_it(there_and_back: Any) -> None:
    restored = there_and_back({"extra": EVERYTHING, "t": torch.ones(1)}, {"extra": {}, "t": torch.zeros(1)})
    for name, value in EVERYTHING.items():
        assert same(restored["extra"][name], value), name


def test_a_template_of_plain_values_is_replaced_by_the_checkpoints(round_trip: Any) -> None:
    state = {"epoch": 7, "best": {"loss": 0.5}, "t": torch.ones(1)}
    template = {"epoch": 0, "best": None, "t": torch.zeros(1)}
    restored = round_trip(state, template)
    assert same(restored, {"epoch": 7, "best": {"loss": 0.5}, "t": torch.ones(1)})
    assert restored["t"] is template["t"]


def test_tensors_inside_containers_are_filled_where_they_stand(round_trip: Any) -> None:
    state = {"a": [torch.ones(2), {"b": (torch.full((3,), 2.0), 5)}]}
    template = {"a": [torch.zeros(2), {"b": (torch.zeros(3), None)}]}
    restored = round_trip(state, template)
    assert restored["a"][0] is template["a"][0]
    assert restored["a"][1]["b"][0] is template["a"][1]["b"][0]
    assert same(restored, state)


def test_a_taught_type_may_hold_tensors(round_trip: Any) -> None:
    restored = round_trip({"t": Taught(torch.arange(4.0))})["t"]
    assert type(restored) is Taught
    assert restored.weights.tolist() == [0, 1, 2, 3]


def test_a_per_rank_value_comes_back_bare(round_trip: Any) -> None:
    state = {"rng": PerRank({"seed": 3, "noise": torch.arange(3.0)}), "shared": 1}
    restored = round_trip(state)
    assert same(restored, {"rng": {"seed": 3, "noise": torch.arange(3.0)}, "shared": 1})
    assert same(round_trip(state, {"rng": None, "shared": None}), restored)


def test_a_type_that_nobody_taught_is_an_error_that_names_its_place(begin: Any) -> None:
    with pytest.raises(StateEncodingError, match="register_codec") as caught:
        begin(MemoryStore()).save(1, {"extra": {"deep": [0, {"x": Unknown()}]}})
    assert caught.value.key_path == "state['extra']['deep'][1]['x']"


@pytest.mark.parametrize("state", ([1, 2], None, 7, torch.nn.Linear(1, 1)), ids=lambda s: type(s).__name__)
def test_a_state_that_is_no_dict_is_refused(state: Any, begin: Any) -> None:
    with pytest.raises(StateEncodingError, match=r"expected a dict"):
        begin(MemoryStore()).save(1, state)


def _circular_dict() -> dict[str, Any]:
    state: dict[str, Any] = {"a": 1}
    state["self"] = state
    return state


def _circular_list() -> dict[str, Any]:
    items: list[Any] = [1]
    items.append(items)
    return {"items": items}


@pytest.mark.parametrize("make", (_circular_dict, _circular_list), ids=["dict", "list"])
def test_a_state_that_contains_itself_is_refused_and_not_followed_for_ever(make: Any, begin: Any) -> None:
    with pytest.raises(StateEncodingError, match="contains itself"):
        begin(MemoryStore()).save(1, make())


@pytest.mark.parametrize("make", (_circular_dict, _circular_list), ids=["dict", "list"])
def test_a_template_that_contains_itself_is_refused(make: Any, begin: Any) -> None:
    memory = MemoryStore()
    begin(memory).save(1, {"a": 1}).result()
    with pytest.raises(StateEncodingError, match="contains itself"):
        begin(memory).restore(make())


def test_an_empty_state_is_a_checkpoint_too(there_and_back: Any) -> None:
    assert there_and_back({}) == {}


def test_names_that_look_alike_stay_apart(round_trip: Any) -> None:
    state: dict[Any, Any] = {
        "a.b": torch.tensor(1),
        "a": {"b": torch.tensor(2)},
        "a%2Eb": torch.tensor(3),
        "": {"": torch.tensor(4)},
        "[0]": torch.tensor(5),
        "l": [torch.tensor(6)],
        1: torch.tensor(7),
        "1": torch.tensor(8),
        (1,): torch.tensor(9),
        "@": torch.tensor(10),
        "=a": torch.tensor(11),
        "\ud800": torch.tensor(12),
        "ümlaut": torch.tensor(13),
        2.5: torch.tensor(15),
        None: torch.tensor(16),
        b"x": torch.tensor(17),
    }
    assert same(round_trip(state), state)
    template = {
        key: {"b": torch.tensor(0)} if key == "a"
        else {"": torch.tensor(0)} if key == ""
        else [torch.tensor(0)] if key == "l"
        else torch.tensor(0)
        for key in state
    }  # fmt: skip
    assert same(round_trip(state, template), state)


# -------------------------------------------------------------------------------------- properties

leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=4)
    | st.binary(max_size=4)
    | st.sampled_from([*Phase, torch.float16, Path("a")])
    | st.integers(0, 4).map(lambda n: torch.arange(n, dtype=torch.float32))
    | st.integers(0, 4).map(lambda n: np.arange(n, dtype=np.int16))
)
keys = st.text(max_size=3) | st.integers() | st.booleans() | st.tuples(st.integers(), st.text(max_size=2))


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
        | st.lists(inner, max_size=3).map(deque)
        | st.builds(Progress, st.integers(), inner)
        | st.builds(Batch, st.integers(), inner)
    )


states = st.dictionaries(keys, st.recursive(leaves, _containers, max_leaves=10), max_size=4)


def emptied(value: Any) -> Any:
    """A template of the same shape: tensors zeroed, other values gone."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if type(value) in (dict, OrderedDict):
        return {key: emptied(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(emptied, value))
    return None


@settings(
    max_examples=max(1, 60 * settings.default.max_examples // 100),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(states)
def test_any_nested_state_comes_back_with_and_without_a_template(state: dict[Any, Any]) -> None:
    memory = MemoryStore()
    with Checkpointer(memory) as checkpointer:
        checkpointer.save(1, state).result()
        anew = checkpointer.restore()
        assert anew is not None
        assert same(anew.state, state)
        filled = checkpointer.restore(emptied(state))
        assert filled is not None
        # A container that is walked comes back as a plain dict; everything else keeps its type.
        assert list(filled.state) == list(state)
        again = checkpointer.restore(filled.state)
        assert again is not None
    flat_before, flat_after = tensors_of(state), tensors_of(filled.state)
    assert len(flat_before) == len(flat_after)
    assert all(map(same, flat_before, flat_after))


def tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in tensors_of(item)]
    if isinstance(value, list | tuple | deque):
        return [tensor for item in value for tensor in tensors_of(item)]
    if isinstance(value, Progress):
        return tensors_of(value.seen)
    return []
