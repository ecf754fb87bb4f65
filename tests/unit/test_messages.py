"""What ranks say to each other, as bytes."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strongroom import errors
from strongroom.errors import (
    FormatError,
    NoWholeCheckpointError,
    RankFailedError,
    RanksMissingError,
    StateEncodingError,
    StateMismatchError,
    StrongroomError,
)
from strongroom.messages import Message, error_members, error_of

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.text(), JSON, max_size=4), st.dictionaries(st.text(), st.binary(), max_size=4))
def test_a_message_comes_back_as_it_was(members: dict[str, Any], pieces: dict[str, bytes]) -> None:
    message = Message(members=members, pieces=pieces)
    assert Message.decode(message.encode()) == message


@given(st.binary(max_size=200))
def test_bytes_that_are_no_message_are_a_format_error(data: bytes) -> None:
    with contextlib.suppress(FormatError):
        Message.decode(data)


@given(st.data())
def test_a_message_that_was_cut_or_changed_is_a_format_error_or_another_message(data: st.DataObject) -> None:
    encoded = bytearray(Message(members={"a": [1, "x"]}, pieces={"b": b"123", "c": b""}).encode())
    if data.draw(st.booleans()):
        del encoded[data.draw(st.integers(0, len(encoded) - 1)) :]
    else:
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(FormatError):
        Message.decode(bytes(encoded))


@pytest.mark.parametrize("head", (b"5", b"[]", b"[1,2]", b"[{},[[1]]]", b'[{},[["a","b"]]]', b"[" * 9999))
def test_a_head_of_another_shape_is_a_format_error(head: bytes) -> None:
    with pytest.raises(FormatError, match="the same release of Strongroom on all ranks"):
        Message.decode(len(head).to_bytes(4, "big") + head)


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_travels_as_its_own_class(name: str) -> None:
    cls = getattr(errors, name)
    error = cls("state['a']", "text") if cls is StateEncodingError else cls("text")
    travelled = error_of(error_members(error), rank=3, phase="doing")
    assert type(travelled) is cls
    assert "text" in str(travelled)
    if not isinstance(error, errors.RanksError):
        assert "rank 3 (doing): " in str(travelled)


def test_what_errors_carry_travels() -> None:
    def travelled(error: StrongroomError) -> Any:
        # Twice: what was told is told on.
        return error_of(error_members(error_of(error_members(error), rank=1, phase="a")), rank=2, phase="b")

    missing = travelled(RanksMissingError("gone", ranks=[1, 2], phase="writing"))
    assert (str(missing), missing.ranks, missing.phase) == ("gone", (1, 2), "writing")
    mismatch = travelled(StateMismatchError("no", missing=["a"], unexpected=["b"], different=["c"]))
    assert (mismatch.missing, mismatch.unexpected, mismatch.different) == (("a",), ("b",), ("c",))
    none_whole = travelled(NoWholeCheckpointError("no", reasons=[(1, "x")], undefined=["w"]))
    assert (none_whole.reasons, none_whole.undefined) == (((1, "x"),), ("w",))
    encoding = travelled(StateEncodingError("state['a']", "a function"))
    assert encoding.key_path == "state['a']"
    assert str(encoding).startswith("state['a']: ")


def test_what_is_not_ours_is_a_failed_rank() -> None:
    error = error_of(error_members(KeyError("x")), rank=3, phase="doing")
    assert isinstance(error, RankFailedError)
    assert (error.ranks, error.phase) == ((3,), "doing")
    assert "KeyError: 'x'" in str(error)


def test_a_class_of_someone_else_travels_as_the_one_it_stands_under() -> None:
    class OurStoreError(errors.AccessDeniedError):
        pass

    travelled = error_of(error_members(OurStoreError("no")), rank=1, phase="x")
    assert type(travelled) is errors.AccessDeniedError


def test_an_error_whose_text_fails_or_is_endless_still_travels() -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise ZeroDivisionError

    assert "MuteError" in error_members(MuteError())["text"]
    assert len(error_members(ValueError("x" * 10_000_000))["text"]) < 100_000


@given(st.text())
def test_any_text_of_an_error_can_be_sent(text: str) -> None:
    members = error_members(ValueError(text + "\ud800"))
    assert Message.decode(Message(members=members).encode()).members == members
