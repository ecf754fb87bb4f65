"""Canonical JSON: one byte string for each value, and nothing else is read."""

from __future__ import annotations

import hashlib
import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strongroom import canonical
from strongroom.canonical import MAX_INTEGER, Bounds, check_self_digest, decode, encode, with_self_digest
from strongroom.digest import sha256_of
from strongroom.errors import FormatError

BOUNDS = Bounds(length_bytes=10_000_000, depth=100)

text = st.text(st.characters(exclude_categories=("Cs",)))
scalars = st.none() | st.booleans() | st.integers(-MAX_INTEGER, MAX_INTEGER) | text
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(text, inner, max_size=5),
    max_leaves=15,
)


def read(data: bytes) -> Any:
    return decode(data, "the document", BOUNDS)


@given(values)
def test_a_value_is_read_back_from_its_bytes(value: Any) -> None:
    data = encode(value)
    assert read(data) == value
    assert encode(read(data)) == data


@given(values)
def test_the_bytes_are_json_that_any_reader_takes_alike(value: Any) -> None:
    data = encode(value)
    assert json.loads(data) == value
    assert data == json.dumps(json.loads(data), separators=(",", ":"), ensure_ascii=False).encode()


@given(st.dictionaries(text, st.integers(0, 5)))
def test_the_order_of_members_does_not_reach_the_bytes(members: dict[str, int]) -> None:
    assert encode(dict(reversed(members.items()))) == encode(members)


def utf_16_units(name: str) -> list[int]:
    units = name.encode("utf-16-be")
    return [int.from_bytes(units[at : at + 2], "big") for at in range(0, len(units), 2)]


@given(st.dictionaries(text, st.none()))
def test_members_are_sorted_by_utf_16_code_units(members: dict[str, None]) -> None:
    names = list(json.loads(encode(members)))
    assert names == sorted(names, key=utf_16_units)


def test_members_are_sorted_as_the_rfcs_example_is() -> None:
    # RFC 8785, 3.2.3: an emoji's surrogates sort before U+FB33, though its code point does not.
    names = ["\u20ac", "\r", "\ufb33", "1", "\U0001f600", "\u0080", "\u00f6"]
    ordered = ["\r", "1", "\u0080", "\u00f6", "\u20ac", "\U0001f600", "\ufb33"]
    assert list(json.loads(encode(dict.fromkeys(names)))) == ordered
    assert list(json.loads(encode([dict.fromkeys(names)]))[0]) == ordered


def test_strings_are_escaped_as_the_rfc_says() -> None:
    # RFC 8785, 3.2.2.2 and its example.
    assert (
        encode("\u20ac$\u000f\u000aA'\u0042\u0022\u005c\\\"/") == '"€$\\u000f\\nA\'B\\"\\\\\\\\\\"/"'.encode()
    )
    controls = {chr(code): f"\\u{code:04x}" for code in range(0x20)}
    controls |= {"\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}
    for character, escape in controls.items():
        assert encode(character) == f'"{escape}"'.encode()
    for character in ["\x7f", "\u2028", "\u2029", "\ufeff", "\U0010ffff"]:
        assert encode(character) == f'"{character}"'.encode()


@pytest.mark.parametrize(
    ("value", "data"),
    (
        (None, b"null"),
        (True, b"true"),
        (0, b"0"),
        (-MAX_INTEGER, b"-9007199254740991"),
        ([], b"[]"),
        ({}, b"{}"),
        ({"b": [1, {"d": "x", "c": None}], "a": ""}, b'{"a":"","b":[1,{"c":null,"d":"x"}]}'),
    ),
    ids=str,
)
def test_known_answers(value: Any, data: bytes) -> None:
    assert encode(value) == data
    assert read(data) == value


class Text(str):
    __slots__ = ()


def a_cycle() -> Any:
    value: dict[str, Any] = {}
    value["self"] = [value]
    return value


UNWRITABLE: dict[str, Any] = {
    "float": 1.0,
    "nan": float("nan"),
    "2^53": MAX_INTEGER + 1,
    "-2^53": -MAX_INTEGER - 1,
    "an integer that repr refuses": 10**5000,
    "tuple": (1,),
    "bytes": b"a",
    "set": {1},
    "subclass": Text("a"),
    "bool is no int, but int is no bool": object(),
    "integer key": {1: 1},
    "huge key": {10**5000: 1},
    "mixed keys": {"a": 1, None: 2},
    "subclassed key": {Text("a"): 1},
    "surrogate": "\ud800",
    "surrogate key": {"\udfff": 1},
    "cycle": a_cycle(),
    "nested": [{"a": [1.5]}],
}


@pytest.mark.parametrize("value", UNWRITABLE.values(), ids=UNWRITABLE)
def test_what_has_no_place_in_canonical_json_is_refused(value: Any) -> None:
    with pytest.raises(FormatError):
        encode(value)
    with pytest.raises(FormatError):
        encode({"a": [value]})


UNREADABLE: dict[str, bytes] = {
    "empty": b"",
    "space before": b" 1",
    "space after": b"1 ",
    "newline after": b"[1]\n",
    "space within": b'{"a": 1}',
    "byte order mark": b"\xef\xbb\xbf1",
    "utf-16": "[1]".encode("utf-16"),
    "two documents": b"1 2",
    "float": b"1.0",
    "exponent": b"1e3",
    "minus zero": b"-0",
    "leading zero": b"01",
    "plus": b"+1",
    "2^53": b"9007199254740992",
    "-2^53": b"-9007199254740992",
    "NaN": b"NaN",
    "Infinity": b"[-Infinity]",
    "duplicate": b'{"a":1,"a":1}',
    "duplicate, spelled apart": b'{"a":1,"\\u0061":1}',
    "unsorted": b'{"b":1,"a":1}',
    "unsorted by utf-16": '{"\ufb33":1,"\U0001f600":1}'.encode(),
    "escaped letter": b'"\\u0061"',
    "escaped slash": b'"\\/"',
    "escaped surrogates": b'"\\ud83d\\ude00"',
    "lone surrogate": b'"\\ud800"',
    "upper-case escape": b'"\\u000F"',
    "long escape": b'"\\u000a"',
    "raw control": b'"\n"',
    "raw surrogate": b'"\xed\xa0\x80"',
    "invalid utf-8": b'"\xff"',
    "overlong": b'"\xc0\xaf"',
    "cut short": b'{"a":[1',
    "unbalanced": b"]",
    "trailing comma": b"[1,]",
    "comment": b"[1/**/]",
    "single quotes": b"['a']",
    "NUL": b"\x00",
    "bare word": b"nul",
}


@pytest.mark.parametrize("data", UNREADABLE.values(), ids=UNREADABLE)
def test_any_other_spelling_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError, match="the document"):
        read(data)


@given(values, st.data())
def test_a_changed_byte_never_reads_as_the_same_value(value: Any, data: st.DataObject) -> None:
    whole = encode(value)
    at = data.draw(st.integers(0, len(whole) - 1))
    changed = bytearray(whole)
    changed[at] = data.draw(st.integers(0, 255).filter(lambda byte: byte != whole[at]))
    try:
        found = read(bytes(changed))
    except FormatError:
        return
    assert encode(found) == bytes(changed)
    assert json.dumps(found, sort_keys=True) != json.dumps(value, sort_keys=True)


@given(st.binary(max_size=30) | st.text('[]{}",:\\u0123ab \ue000', max_size=30).map(str.encode))
def test_whatever_is_read_is_the_canonical_form_of_its_value(data: bytes) -> None:
    try:
        value = read(data)
    except FormatError:
        return
    assert encode(value) == data


# ----------------------------------------------------------------------------------------- bounds


def test_each_bound_holds_exactly() -> None:
    value = {"a": [1, 2, {"b": 'x,[]{}\\"'}]}
    data = encode(value)
    # Items: the commas and the opening brackets outside of strings.
    exact = Bounds(length_bytes=len(data), depth=3, items=2 + 3)
    assert decode(data, "it", exact) == value
    assert encode(value, bounds=exact) == data
    for tight, message in [
        (Bounds(length_bytes=len(data) - 1, depth=3, items=5), f"at most {len(data) - 1}"),
        (Bounds(length_bytes=len(data), depth=2, items=5), "nests 3 deep; at most 2"),
        (Bounds(length_bytes=len(data), depth=3, items=4), "more than 4 items"),
    ]:
        with pytest.raises(FormatError, match=f"^it .*{message}"):
            decode(data, "it", tight)
        with pytest.raises(FormatError, match=f"^it .*{message}"):
            encode(value, what="it", bounds=tight)


@given(values)
def test_brackets_and_commas_in_strings_do_not_count(value: Any) -> None:
    def depth(item: Any) -> int:
        inner = item.values() if isinstance(item, dict) else item if isinstance(item, list) else None
        return 0 if inner is None else 1 + max(map(depth, inner), default=0)

    data = encode(value)
    assert decode(data, "it", Bounds(length_bytes=len(data), depth=depth(value))) == value
    if depth(value):
        with pytest.raises(FormatError, match="deep"):
            decode(data, "it", Bounds(length_bytes=len(data), depth=depth(value) - 1))


@pytest.mark.parametrize(
    "string", ("\\", '"', '\\"', '"\\', "\\\\", '[\\"[', '","', '\\\\\\"[[[['), ids=ascii
)
def test_a_backslash_or_a_quote_hides_no_bracket(string: str) -> None:
    for value in ([string], [string, [string]], {string: [string]}):
        data = encode(value)
        deep = 1 if value == [string] else 2
        assert decode(data, "it", Bounds(length_bytes=100, depth=deep)) == value
        with pytest.raises(FormatError, match="deep"):
            decode(data, "it", Bounds(length_bytes=100, depth=deep - 1))


BOMBS: dict[str, bytes] = {
    "opening brackets": b"[" * 1_000_000,
    "nested arrays": b"[" * 500_000 + b"]" * 500_000,
    "nested objects": b'{"a":' * 150_000 + b"1" + b"}" * 150_000,
    "brackets after a fake end of string": b'["\\\\",' + b"[" * 500_000,
    "a huge integer": b"9" * 5_000_000,
    "a huge negative integer": b"[-" + b"9" * 5_000_000 + b"]",
    "a huge float": b"1." + b"9" * 5_000_000,
    "a huge exponent": b"1e999999999",
    "commas": b"[" + b"0," * 2_500_000 + b"0]",
    "empty strings": b"[" + b'"",' * 1_500_000 + b'""]',
    "quotes": b'"' * 5_000_000,
    "backslashes": b"\\" * 5_000_000,
}


@pytest.mark.parametrize("data", BOMBS.values(), ids=BOMBS)
def test_a_bomb_is_refused_before_it_goes_off(data: bytes) -> None:
    started = time.process_time()
    with pytest.raises(FormatError):
        decode(data, "it", Bounds(length_bytes=6_000_000, depth=64, items=1_000_000))
    # int() of five million digits takes minutes, a million frames of recursion end the process.
    assert time.process_time() - started < 20


def test_a_document_too_deep_for_the_interpreter_is_refused_whatever_the_bound() -> None:
    with pytest.raises(FormatError):
        decode(b"[" * 400_000 + b"]" * 400_000, "it", Bounds(length_bytes=1_000_000, depth=1_000_000))


# ------------------------------------------------------------------------------------ self-digest


@given(st.dictionaries(text.filter(lambda name: name != canonical.SELF_DIGEST), values, max_size=4))
def test_a_document_carries_its_own_digest(members: dict[str, Any]) -> None:
    data = with_self_digest(members)
    assert check_self_digest(read(data), "it") == members
    assert read(data)["~digest"] == str(sha256_of(encode(members)))


def test_anyone_can_recompute_the_digest() -> None:
    head, _, tail = with_self_digest({"step": 7, "run": "a"}).partition(b',"~digest":"')
    assert head == b'{"run":"a","step":7'
    assert tail == b"sha256:" + hashlib.sha256(head + b"}").hexdigest().encode() + b'"}'


@given(st.data())
def test_a_changed_byte_of_a_sealed_document_is_found(data: st.DataObject) -> None:
    whole = with_self_digest({"launch": 3, "run": "a run", "files": [{"path": "x", "size": 10}]})
    at = data.draw(st.integers(0, len(whole) - 1))
    changed = bytearray(whole)
    changed[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(FormatError):
        check_self_digest(read(bytes(changed)), "it")


@pytest.mark.parametrize(
    ("value", "message"),
    (
        ([1], "no JSON object|not a JSON object"),
        ({"a": 1}, "has no ~digest"),
        ({"a": 1, "~digest": None}, "has no ~digest"),
        ({"a": 1, "~digest": "sha256:00"}, "it is damaged"),
        ({"a": 1, "~digest": "sha256:" + "0" * 64}, "it is damaged"),
        ({"a": 1, "~digest": "blake3:" + "0" * 64}, "it is damaged"),
    ),
    ids=str,
)
def test_a_missing_or_wrong_digest_is_refused(value: Any, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        check_self_digest(value, "it")


def test_the_digest_of_another_algorithm_does_not_pass() -> None:
    right = str(sha256_of(encode({"a": 1})))
    assert check_self_digest({"a": 1, "~digest": right}, "it") == {"a": 1}
    with pytest.raises(FormatError, match="damaged"):
        check_self_digest({"a": 1, "~digest": right.replace("sha256", "blake3")}, "it")


def test_a_digest_is_added_and_not_given() -> None:
    with pytest.raises(FormatError, match="not given"):
        with_self_digest({"~digest": "x"})


def test_checking_does_not_change_the_document() -> None:
    value = read(with_self_digest({"a": 1}))
    check_self_digest(value, "it")
    assert "~digest" in value


@pytest.mark.parametrize("digits", (16, 17, 18, 5_000, 100_000))
def test_an_integer_of_any_length_is_refused_for_its_size(digits: int) -> None:
    for data in (b"9" * digits, b"-" + b"9" * digits):
        with pytest.raises(FormatError, match=r"not below 2\^53"):
            read(data)
