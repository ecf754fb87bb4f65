"""The safetensors container: our headers open with the stock library, and no header crashes our parser."""

from __future__ import annotations

import contextlib
import json
import math
from typing import Any

import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from strongroom import tensorfile
from strongroom.dtypes import DTYPE_BYTES
from strongroom.errors import FormatError

WHAT = "a shard"


def file_of(tensors: Any, metadata: dict[str, str] | None = None) -> bytes:
    header, parsed = tensorfile.build_header(tensors, metadata or {})
    return header + bytes(parsed.end - len(header))


def raw(document: Any, body: bytes = b"", *, length: int | None = None) -> bytes:
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + body


names = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=8)
tensors = st.lists(
    st.tuples(
        names.filter(lambda name: name != "__metadata__"),
        st.sampled_from(sorted(DTYPE_BYTES)),
        st.lists(st.integers(0, 3), max_size=4).map(tuple),
    ),
    unique_by=lambda tensor: tensor[0],
    max_size=6,
)


@given(tensors, st.dictionaries(names, names, max_size=3))
def test_what_is_built_is_read_back_and_stock_safetensors_agrees(described: Any, metadata: Any) -> None:
    data = file_of(described, metadata)
    header = tensorfile.parse_header(data, len(data), WHAT)
    assert sorted((e.name, e.dtype, e.shape) for e in header.entries) == sorted(described)
    assert header.metadata == metadata
    assert header.data_start % 64 == 0
    assert tensorfile.header_length(data[:8], len(data), WHAT) == header.data_start
    found = dict(safetensors.deserialize(data))
    assert {name: tuple(item["shape"]) for name, item in found.items()} == {
        name: shape for name, _, shape in described
    }


def test_values_of_equal_length_keep_the_headers_length() -> None:
    one, two = (
        tensorfile.build_header([("t", "F32", (2,))], {"strongroom.step": step})[0]
        for step in ("000000000001", "999999999999")
    )
    assert len(one) == len(two)


def test_a_header_that_stock_readers_would_refuse_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorfile, "MAX_HEADER_BYTES", 1000)
    with pytest.raises(FormatError, match="at most 1000"):
        tensorfile.build_header([(f"tensor {number}", "F32", ()) for number in range(30)], {})


T = {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}
BAD: dict[str, bytes] = {
    "nothing": b"",
    "fewer than eight bytes": b"\0" * 7,
    "a length beyond the file": raw({}, length=3),
    "a length beyond any file": b"\xff" * 8 + b"{}",
    "no JSON": raw(b"{"),
    "no UTF-8": raw(b'{"\xff": 1}'),
    "a list": raw([]),
    "nesting without end": raw(b"[" * 100_000),
    "a number beyond reason": raw(
        b'{"t":{"dtype":"U8","shape":[' + b"9" * 10_000 + b'],"data_offsets":[0,2]}}'
    ),
    "a name twice": raw(b'{"t":' + json.dumps(T).encode() + b',"t":' + json.dumps(T).encode() + b"}", b"ab"),
    "metadata that is no object": raw({"__metadata__": 1}),
    "metadata that is no text": raw({"__metadata__": {"a": 1}}),
    "a tensor that is no object": raw({"t": 1}),
    "a tensor without offsets": raw({"t": {"dtype": "U8", "shape": [2]}}, b"ab"),
    "a tensor with more": raw({"t": {**T, "x": 1}}, b"ab"),
    "an unknown dtype": raw({"t": {**T, "dtype": "F4"}}, b"ab"),
    "a dtype that is no text": raw({"t": {**T, "dtype": ["U8"]}}, b"ab"),
    "a negative size": raw({"t": {**T, "shape": [-2]}}, b"ab"),
    "a size that is no integer": raw({"t": {**T, "shape": [2.0]}}, b"ab"),
    "a size that is true": raw({"t": {**T, "shape": [True]}}, b"a"),
    "too many dimensions": raw({"t": {**T, "shape": [1] * 65, "data_offsets": [0, 1]}}, b"a"),
    "offsets that do not fit the shape": raw({"t": {**T, "data_offsets": [0, 3]}}, b"abc"),
    "offsets backwards": raw({"t": {**T, "data_offsets": [2, 0]}}, b"ab"),
    "three offsets": raw({"t": {**T, "data_offsets": [0, 1, 2]}}, b"ab"),
    "a hole": raw({"t": {**T, "data_offsets": [1, 3]}}, b"abc"),
    "an overlap": raw({"t": T, "u": {**T, "data_offsets": [1, 3]}}, b"abc"),
    "bytes that no tensor owns": raw({"t": T}, b"abc"),
    "too few bytes": raw({"t": T}, b"a"),
    "a product that wraps": raw({"t": {**T, "shape": [2**32, 2**32], "data_offsets": [0, 0]}}),
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD.keys())
def test_a_malformed_header_is_refused_with_what_is_wrong(data: bytes) -> None:
    with pytest.raises(FormatError, match=WHAT):
        tensorfile.parse_header(data, len(data), WHAT)


@given(data=st.data())
def test_no_change_of_a_header_crashes_the_parser(data: st.DataObject) -> None:
    whole = bytearray(file_of([("a", "F32", (2, 3)), ("b", "U8", (5,))], {"k": "v"}))
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(whole) - 1))
        whole[position] = data.draw(st.integers(0, 255))
    cut = bytes(whole[: data.draw(st.integers(0, len(whole)))])
    for changed in (bytes(whole), cut):
        try:
            header = tensorfile.parse_header(changed, len(changed), WHAT)
        except FormatError:
            continue
        assert header.end == len(changed)
        for entry in header.entries:
            assert header.data_start <= entry.start
            assert entry.start + entry.size_bytes <= len(changed)
            assert entry.size_bytes == math.prod(entry.shape) * DTYPE_BYTES[entry.dtype]


@given(st.binary(max_size=200))
def test_no_bytes_crash_the_parser(data: bytes) -> None:
    with contextlib.suppress(FormatError):
        tensorfile.parse_header(data, len(data), WHAT)
