"""Which values differ between ranks, and what is said of them."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from strongroom.differing import (
    check_aliases,
    check_compared,
    differing_documents,
    explain_difference,
)
from strongroom.errors import RanksDisagreeError
from strongroom.tree import capture


def document(state: Any) -> Any:
    return capture(state, rank=0).document


def explained(mine: Any, **others: Any) -> RanksDisagreeError:
    return explain_difference(
        document(mine), {int(rank[1:]): document(state) for rank, state in others.items()}
    )


@pytest.mark.parametrize(
    ("mine", "other", "named"),
    (
        ({"a": {"b": 1}}, {"a": {"b": 2}}, "state['a']['b']"),
        ({"a": [1, (2, 3)]}, {"a": [1, (2, 4)]}, "state['a'][1][1]"),
        ({"a": 1}, {"a": True}, "state['a']"),
        ({"a": [0]}, {"a": [False]}, "state['a'][0]"),
        ({"a": 0.0}, {"a": -0.0}, "state['a']"),
        ({"a": [1]}, {"a": (1,)}, "state['a']"),
        ({"a": [1, 2]}, {"a": [1]}, "state['a']"),
        ({"a": 1}, {"a": 1, "b": 2}, "state['b'] (on some ranks only)"),
        ({"a": {"x": 1, "y": 2}}, {"a": {"y": 2, "x": 1}}, "state['a'] (the order of its entries)"),
        ({"a": "x"}, {"a": None}, "state['a']"),
        ({"a": {1, 2}}, {"a": {1, 3}}, "state['a']"),
        ({"a": OrderedDict(x=1)}, {"a": OrderedDict(x=2)}, "state['a']"),
        ({"a": np.float32(1)}, {"a": np.float64(1)}, "state['a']"),
        ({"a": torch.float32}, {"a": torch.float16}, "state['a']"),
    ),
)
def test_the_place_that_differs_is_named(mine: Any, other: Any, named: str) -> None:
    for first, second in ((mine, other), (other, mine)):
        error = explained(first, r2=second)
        assert named in str(error)
        assert "rank 2 and rank 0" in str(error)
        assert error.ranks == (2,)


def test_at_most_a_few_places_are_named_and_all_ranks() -> None:
    error = explained({str(n): 0 for n in range(50)}, r1={str(n): 1 for n in range(50)}, r3={"0": 2})
    assert error.ranks == (1, 3)
    assert str(error).count("state[") == 5


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=10,
)


@given(PLAIN, PLAIN)
def test_whatever_differs_as_bytes_is_named(mine: Any, other: Any) -> None:
    first, second = document({"a": mine}), document({"a": other})
    text = str(explain_difference(first, {1: second}))
    from strongroom.canonical import encode

    is_same = encode(first) == encode(second)
    assert ("values of state['a']" in text) == (not is_same)


def test_documents_are_held_against_the_coordinators() -> None:
    assert differing_documents(["x", "x", "x"]) == []
    assert differing_documents(["x", "y", "x", "z"]) == [1, 3]
    assert len(differing_documents(["x", *"y" * 50])) < 10


def test_small_values_that_differ_are_named_with_their_ranks() -> None:
    check_compared([{"a": "1"}, {"a": "1"}, {}])
    with pytest.raises(
        RanksDisagreeError, match="ranks 1, 3 and rank 0 hold different values of a, b"
    ) as told:
        check_compared([{"a": "1", "b": "1"}, {"a": "2", "b": "1"}, {"a": "1"}, {"b": "2"}])
    assert told.value.ranks == (1, 3)


def test_names_of_one_memory_are_the_same_everywhere() -> None:
    assert check_aliases([{"b": "a"}, {}, {"b": "a", "d": "c"}]) == {"b": "a", "d": "c"}
    with pytest.raises(RanksDisagreeError, match="b shares its memory with a") as told:
        check_aliases([{"b": "a"}, {"b": "c"}])
    assert told.value.ranks == (1,)
