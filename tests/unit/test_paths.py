"""Names of stored tensors: different places have different names, and plain ones stay as users know them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strongroom.keypath import Attribute
from strongroom.paths import from_dotted, spell


@pytest.mark.parametrize(
    ("path", "name"),
    (
        (("model", "layers", "0", "weight"), "model.layers.0.weight"),
        (("a", 0, "b"), "a.[0].b"),
        (("a.b",), "a%2Eb"),
        (("a%2Eb",), "a%252Eb"),
        (("[0]",), "%5B0%5D"),
        (("x@0,1",), "x%400,1"),
        (("=x",), "%3Dx"),
        (("",), "['']"),
        ((1,), "[1]"),
        (("1",), "1"),
        ((True,), "[True]"),
        (((1, "a"),), "[(1, 'a')]"),
        ((None, 2.5), "[None].[2%2E5]"),
        (("naïve", "日本"), "naïve.日本"),
        (("a\nb",), "a%0Ab"),
        (("__metadata__",), "%5F_metadata__"),
        (("%5F_metadata__",), "%255F_metadata__"),
        (("a", "__metadata__"), "a.__metadata__"),
        (("\ud800",), "%ED%A0%80"),
        ((Attribute("x"),), "x"),
        ((), ""),
    ),
)
def test_a_path_is_spelled(path: Any, name: str) -> None:
    assert spell(path) == name


def test_a_modules_own_names_have_one_element_a_part() -> None:
    assert from_dotted("layers.0.weight") == ("layers", "0", "weight")
    assert spell(from_dotted("layers.0.weight")) == "layers.0.weight"


keys = (
    st.text(max_size=4)
    | st.text(st.sampled_from(".[]%@='\"0a"), max_size=6)
    | st.integers(-3, 3)
    | st.none()
    | st.floats(allow_nan=False)
    | st.binary(max_size=2)
    | st.tuples(st.integers(0, 2), st.text(max_size=2))
)
all_paths = st.lists(keys, max_size=4).map(tuple)


def kinded(path: Any) -> Any:
    """Told apart as the spelling must: 1 and 1.0 are equal to Python, and one key of a dict."""
    return tuple((type(key), repr(key)) for key in path)


@given(all_paths, all_paths)
def test_different_paths_have_different_names(one: Any, two: Any) -> None:
    assert (spell(one) == spell(two)) == (kinded(one) == kinded(two))


@given(all_paths)
def test_a_name_never_holds_what_marks_a_part_of_a_tensor(path: Any) -> None:
    name = spell(path)
    assert "@" not in name
    assert "=" not in name
    name.encode("utf-8")
