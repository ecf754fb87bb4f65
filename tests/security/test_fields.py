"""What keys and files are bound to: exact bytes, and no two places with the same ones."""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strongroom.errors import ConfigError, FormatError
from strongroom.layout import CheckpointName
from strongroom_security.fields import (
    Context,
    encode_fields,
    file_aad,
    handover_info,
    recipient_info,
    wrap_info,
)

BINDINGS = Path(__file__).parent / "vectors/bindings"
ATTEMPT = Context(run="run-7f", launch=3, step=1200, attempt="0123456789abcdef")
FILE = dataclasses.replace(ATTEMPT, path="00000-00.safetensors.floe")
ENCODERS: dict[str, Callable[[Context], bytes]] = {
    "file-aad": file_aad,
    "wrap-info": wrap_info,
    "handover-info": handover_info,
    "recipient-info": recipient_info,
    "recipient-info-direct": recipient_info,
}
OTHERS = {
    "run": "run-7e",
    "launch": 4,
    "step": 1201,
    "attempt": "0123456789abcdee",
    "path": "00000-01.safetensors.floe",
}


def vector(name: str) -> tuple[Context, dict[str, Any]]:
    document = json.loads((BINDINGS / f"{name}.json").read_text())
    return Context(**document.pop("context")), document


@pytest.mark.parametrize("name", ENCODERS)
def test_a_binding_has_exactly_the_bytes_that_the_format_says(name: str) -> None:
    context, expected = vector(name)
    assert ENCODERS[name](context).hex() == expected["bytes"]


@pytest.mark.parametrize("name", ("encryption-context", "encryption-context-direct"))
def test_a_key_service_is_given_exactly_the_pairs_that_the_format_says(name: str) -> None:
    context, expected = vector(name)
    assert context.pairs() == expected["pairs"]


def test_no_vector_is_left_out() -> None:
    tested = {*ENCODERS, "encryption-context", "encryption-context-direct"}
    assert {path.stem for path in BINDINGS.iterdir()} == tested


def test_fields_are_utf_8_behind_their_lengths() -> None:
    assert encode_fields() == b""
    assert encode_fields("", "a", "ü") == b"\0\0\0\0\0\0\0\1a\0\0\0\2\xc3\xbc"


@given(st.lists(st.text(max_size=5), max_size=5))
def test_fields_can_be_taken_apart_again_so_no_two_lists_encode_alike(texts: list[str]) -> None:
    encoded, found = encode_fields(*texts), []
    while encoded:
        (length,) = struct.unpack_from(">I", encoded)
        found.append(encoded[4 : 4 + length].decode())
        encoded = encoded[4 + length :]
    assert found == texts


def test_a_text_without_utf_8_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'a\\ud800' has no UTF-8"):
        encode_fields("fine", "a\ud800")


@pytest.mark.parametrize("encode", (file_aad, recipient_info, Context.pairs))
@pytest.mark.parametrize("field", OTHERS)
def test_every_part_of_where_a_file_belongs_counts(encode: Callable[[Context], object], field: str) -> None:
    assert encode(dataclasses.replace(FILE, **{field: OTHERS[field]})) != encode(FILE)


@pytest.mark.parametrize("encode", (wrap_info, handover_info))
@pytest.mark.parametrize("field", OTHERS)
def test_what_holds_for_an_attempt_depends_on_all_but_the_path(
    encode: Callable[[Context], bytes], field: str
) -> None:
    other = dataclasses.replace(FILE, **{field: OTHERS[field]})
    assert (encode(other) == encode(FILE)) == (field == "path")
    assert encode(FILE) == encode(ATTEMPT)


def test_a_binding_for_one_use_is_none_for_another() -> None:
    made = [encode(FILE) for encode in (file_aad, wrap_info, handover_info, recipient_info)]
    assert len(set(made)) == len(made)
    assert recipient_info(FILE) != recipient_info(ATTEMPT)


def test_a_file_is_bound_by_its_path() -> None:
    with pytest.raises(ConfigError, match=r"step 1200 of run run-7f .* name the file's path"):
        file_aad(ATTEMPT)


def test_a_context_is_that_of_a_checkpoints_name() -> None:
    name = CheckpointName(launch=3, step=1200, attempt="0123456789abcdef")
    assert Context.of("run-7f", name) == ATTEMPT
    assert Context.of("run-7f", name, FILE.path) == FILE


@pytest.mark.parametrize(
    ("wrong", "error", "told"),
    (
        ({"run": ""}, FormatError, "run id"),
        ({"run": "a/b"}, FormatError, "run id"),
        ({"launch": 0}, ConfigError, "launch"),
        ({"step": -1}, ConfigError, "step"),
        ({"attempt": "0123"}, ConfigError, "attempt"),
        ({"attempt": "0123456789ABCDEF"}, ConfigError, "attempt"),
        ({"path": "../x"}, FormatError, "safe path"),
        ({"path": ""}, FormatError, "safe path"),
    ),
    ids=str,
)
def test_what_names_no_attempt_is_no_context(
    wrong: dict[str, Any], error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        dataclasses.replace(ATTEMPT, **wrong)


def test_a_context_is_a_value() -> None:
    assert len({ATTEMPT, dataclasses.replace(ATTEMPT), FILE}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        ATTEMPT.step = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        Context("run-7f", 3, 1200, "0123456789abcdef")  # type: ignore[misc]
