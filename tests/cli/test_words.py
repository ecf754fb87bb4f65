"""Words for people: sizes, ages, outlines, and text that cannot steer a terminal."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strongroom.values import Encoder
from strongroom_cli import words
from strongroom_cli.console import line
from strongroom_cli.outline import outline, plain

MINUTE_MS = 60_000
HOUR_MS = 60 * MINUTE_MS
DAY_MS = 24 * HOUR_MS


@given(st.text())
def test_printable_text_is_printable_and_stays_what_it_was_where_it_could(text: str) -> None:
    shown = words.printable(text)
    assert shown.isprintable()
    assert words.printable(shown) == shown
    if text.isprintable():
        assert shown == text


@pytest.mark.parametrize(
    ("size_bytes", "shown"),
    (
        (None, "-"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (5 << 30, "5.0 GiB"),
        (2**50, "1.0 PiB"),
        (2**70, "1048576.0 PiB"),
    ),
)
def test_sizes(size_bytes: int | None, shown: str) -> None:
    assert words.size(size_bytes) == shown


@pytest.mark.parametrize(
    ("ago_ms", "shown"),
    (
        (0, "just now"),
        (30_000, "30 s ago"),
        (MINUTE_MS, "1 min ago"),
        (119 * MINUTE_MS, "119 min ago"),
        (2 * HOUR_MS, "2 h ago"),
        (2 * DAY_MS, "2 days ago"),
        (1000 * DAY_MS, "2 years ago"),
        (-30_000, "just now"),
        (-MINUTE_MS - 1000, "in the future"),
    ),
)
def test_ages(ago_ms: int, shown: str) -> None:
    assert words.age(10 * 365 * DAY_MS - ago_ms, now_ms=10 * 365 * DAY_MS) == shown


@given(st.integers(0, 2**53))
def test_any_moment_has_words(ms: int) -> None:
    assert words.when(ms)
    assert words.age(ms, now_ms=0)


JSON_LIKE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53) + 1, 2**53 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc$v"), inner, max_size=3),
    max_leaves=12,
)


def _without_nodes(value: Any) -> bool:
    """Whether no dict in a value looks like a node, which `plain` leaves typed."""
    if isinstance(value, list):
        return all(map(_without_nodes, value))
    if isinstance(value, dict):
        return set(value) != {"$", "v"} and all(map(_without_nodes, value.values()))
    return True


@given(JSON_LIKE.filter(_without_nodes))
def test_values_that_json_has_come_out_as_themselves(value: Any) -> None:
    assert json.loads(json.dumps(plain(Encoder().encode(value)))) == value


@pytest.mark.parametrize(
    "value", (float("inf"), {1: 2}, {"$": "tensor", "v": "w"}, b"x", 2**60, {1, 2}, "\ud800")
)
def test_values_that_json_has_not_stay_typed(value: Any) -> None:
    node = Encoder().encode(value)
    assert plain(node) == node


def test_a_tuple_is_an_array() -> None:
    assert plain(Encoder().encode({"at": (1, 2.5)})) == {"at": [1, 2.5]}


TAGS = [
    *("tuple", "set", "dict", "ordered_dict", "defaultdict", "counter", "deque", "namespace", "slice"),
    *("object", "tensor", "ndarray", "generator", "module", "optimizer", "stateful", "per_rank"),
    *("float", "int", "bytes", "str", "numpy.array", "unheard-of"),
]

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.fixed_dictionaries(
            {
                "$": st.sampled_from(TAGS),
                "v": inner,
            }
        )
    ),
    max_leaves=25,
)


@given(ANYTHING)
def test_the_outline_of_any_document_is_printable_lines(node: Any) -> None:
    for item in outline(node, lambda name: name):
        assert line(item.label, item.value).plain.isprintable()
        assert item.depth <= 6
    json.dumps(plain(node))


def test_an_outline_is_cut_where_it_would_be_long() -> None:
    deep: Any = 1
    for _ in range(20):
        deep = {"in": [deep]}
    node = Encoder().encode({"many": {str(number): [number, [1]] for number in range(1000)}, "deep": deep})
    lines = list(outline(node, str))
    assert len(lines) < 100
    assert any(item.label == "... 984 more" for item in lines)
    assert any(item.label == "..." for item in lines)
