"""Foreign JSON: any spelling of a value is read, and nothing that two readers could take for two values."""

from __future__ import annotations

import base64
import json
import time
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strongroom.canonical import Bounds, Json
from strongroom.errors import FormatError
from strongroom_security.strictjson import base64_of, list_of, load, members_of, text_of

BOUNDS = Bounds(length_bytes=100_000, depth=8, items=1_000)

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(VALUES, st.sampled_from([None, 2]), st.booleans())
def test_any_spelling_of_a_value_is_read(value: Json, indent: int | None, as_ascii: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=as_ascii)
    bounds = Bounds(length_bytes=1 << 20, depth=30, items=10_000)
    assert load(text.encode("utf-8"), "it", bounds) == value


REFUSED = {
    "a member named twice": (b'{"a": 1, "a": 1}', "'a' twice"),
    "a member named twice, once by escapes": (b'{"a": 1, "\\u0061": 2}', "'a' twice"),
    "a member named twice, deep inside": (b'[{"x": [{"b": 1, "b": 2}]}]', "'b' twice"),
    "a fraction": (b"[1.0]", "not an integer"),
    "an exponent": (b"[1e3]", "not an integer"),
    "an exponent beyond all numbers": (b"[1e999999999]", "not an integer"),
    "not a number": (b"[NaN]", "not an integer"),
    "infinity": (b"[-Infinity]", "not an integer"),
    "an integer of 2^53": (b"[9007199254740992]", "not below 2"),
    "an integer of a thousand digits": (b"[" + b"9" * 1000 + b"]", "not below 2"),
    "nesting": (b"[" * 9 + b"]" * 9, "nests 9 deep"),
    "nesting that would end the parser": (b"[" * 90_000, "items|nests"),
    "nesting behind a string with a quote": (b'["\\"",' + b"[" * 9 + b"]" * 10, "nests 10 deep"),
    "nesting behind a string with a backslash": (b'["\\\\",' + b"[" * 9 + b"]" * 10, "nests 10 deep"),
    "nesting of both kinds": (b'{"a":[' * 5 + b"]}" * 5, "nests 10 deep"),
    "brackets that close nothing": (b"]" * 90_000, "closes more brackets than it opens"),
    "braces that close nothing": (b"{}" + b"}" * 90_000, "closes more brackets than it opens"),
    "too many items": (b"[" + b"0," * 1_000 + b"0]", "more than 1000 items"),
    "a flood of strings": (b'""' * 5_000, "more than 1000 items"),
    "too many bytes": (b" " * 100_001, "at most 100000"),
    "nothing": (b"", "not JSON"),
    "bytes behind the end": (b'{"a": 1} x', "not JSON"),
    "a second document": (b"{}{}", "not JSON"),
    "a NUL behind the end": (b"{}\0", "not JSON"),
    "a byte-order mark": (b"\xef\xbb\xbf{}", "byte-order mark"),
    "UTF-16": ("{}".encode("utf-16"), "not valid Unicode"),
    "bytes that are not UTF-8": (b'["\xff"]', "not valid Unicode"),
    "an overlong spelling": (b'["\xc0\x80"]', "not valid Unicode"),
    "half of a surrogate pair": (b'["\\ud800"]', "not valid Unicode"),
    "half of a surrogate pair as a member": (b'{"\\uDFFF": 1}', "not valid Unicode"),
    "a raw line break in a string": (b'["\n"]', "not JSON"),
    "a comment": (b"{} // fine", "not JSON"),
    "a comma at the end": (b"[1,]", "not JSON"),
    "single quotes": (b"{'a': 1}", "not JSON"),
}


@pytest.mark.parametrize(("data", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_readers_could_disagree_about_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(FormatError, match=reason) as caught:
        load(data, "the letter", BOUNDS)
    assert "the letter" in str(caught.value)
    assert len(str(caught.value)) < 300


FLOODS = (b"]", b"}", b"[]", b"{", b"[", b'"', b"\\", b'\\"', b",", b'\\\\"', b" ")


@pytest.mark.parametrize("flood", FLOODS, ids=repr)
def test_a_flood_of_anything_is_refused_at_once(flood: bytes) -> None:
    """In far less than it takes to walk through it byte by byte, which is what it is compared with."""
    data = flood * ((16 << 20) // len(flood))
    began = time.process_time()
    sum(accumulate(memoryview(data)))
    walk_s = time.process_time() - began
    began = time.process_time()
    with pytest.raises(FormatError):
        load(data, "it", Bounds(length_bytes=64 << 20, depth=8, items=100_000))
    assert time.process_time() - began < walk_s / 2


def test_a_whole_surrogate_pair_is_one_character() -> None:
    assert load(b'["\\ud83d\\ude00"]', "it", BOUNDS) == ["\U0001f600"]


def test_brackets_and_commas_inside_of_strings_count_for_nothing() -> None:
    text = "[{" * 1_000 + "," * 2_000 + '\\"'
    assert load(json.dumps([text]).encode(), "it", BOUNDS) == [text]


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused_in_the_same_way(data: bytes) -> None:
    try:
        load(data, "it", BOUNDS)
    except FormatError:
        return
    json.loads(data)


def test_members_have_to_be_all_known_and_all_there() -> None:
    assert members_of({"a": 1}, "it", required=["a"], optional=["b"]) == {"a": 1}
    assert members_of({"a": 1, "b": 2}, "it", required=["a"], optional=["b"]) == {"a": 1, "b": 2}
    with pytest.raises(FormatError, match="it lacks the member 'a'"):
        members_of({"b": 2}, "it", required=["a"], optional=["b"])
    with pytest.raises(FormatError, match="it has the member 'c'"):
        members_of({"a": 1, "c": 2}, "it", required=["a"], optional=["b"])


@pytest.mark.parametrize(
    ("value", "kind"),
    (
        (None, "null"),
        (True, "a boolean"),
        (1, "a number"),
        ("x", "a string"),
        ([], "an array"),
        ({}, "an object"),
    ),
)
def test_a_value_of_another_kind_is_named_by_its_kind(value: Json, kind: str) -> None:
    if kind != "an object":
        with pytest.raises(FormatError, match=f"it is {kind}; expected an object"):
            members_of(value, "it", required=[])
    if kind != "an array":
        with pytest.raises(FormatError, match=f"it is {kind}; expected an array"):
            list_of(value, "it")
    if kind != "a string":
        with pytest.raises(FormatError, match=f"it is {kind}; expected a string"):
            text_of(value, "it")


def test_a_text_can_be_held_to_one_spelling() -> None:
    assert text_of("x", "it", expected="x") == "x"
    with pytest.raises(FormatError, match="it is 'X'; expected 'x'"):
        text_of("X", "it", expected="x")


@given(st.binary(max_size=200))
def test_bytes_come_back_from_standard_base64(data: bytes) -> None:
    assert base64_of(base64.b64encode(data).decode(), "it") == data


@pytest.mark.parametrize(
    "text",
    ("QQ", "QQ=", "QR==", "QQ==\n", " QQ==", "QQ==QQ==", "Q-==", "-_-_", "QQ==x", "=", "Q", "Ä===", "QQ==\0"),
    ids=repr,
)
def test_another_spelling_of_base64_is_refused(text: str) -> None:
    with pytest.raises(FormatError, match="it is not in standard, padded base64"):
        base64_of(text, "it")
