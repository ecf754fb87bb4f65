"""Key bytes: what they do, and every way by which they would leak and do not."""

from __future__ import annotations

import copy
import json
import logging
import pickle
import pprint
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from strongroom.errors import ClosedError, ConfigError
from strongroom_security.secret import KEY_BYTES, Secret

KEY = bytes(range(100, 132))


@pytest.fixture
def secret() -> Secret:
    return Secret(KEY)


def shows_key(text: str) -> bool:
    """Whether a text holds a key's bytes in any usual spelling, or a part of them."""
    spellings = (KEY.hex(), repr(KEY)[2:-1], KEY.decode("latin-1"), repr(list(KEY))[1:-1])
    return any(spelling[at : at + 12] in text for spelling in spellings for at in range(len(spelling) - 11))


def test_the_search_for_a_key_finds_one() -> None:
    assert shows_key(str(KEY))
    assert shows_key(repr(bytearray(KEY)))
    assert shows_key(KEY[8:20].hex())
    assert shows_key(str(list(KEY)))
    assert not shows_key("<Secret of 32 bytes>")


def test_reveal_gives_the_bytes_and_a_secret_keeps_its_own(secret: Secret) -> None:
    assert secret.reveal() == KEY
    assert secret.size_bytes == len(KEY)
    original = bytearray(KEY)
    taken = Secret(original)
    original[0] ^= 1
    assert taken.reveal() == KEY


@pytest.mark.parametrize("kind", (bytes, bytearray, memoryview))
def test_any_buffer_of_bytes_can_be_a_secret(kind: Callable[[bytes], Any]) -> None:
    assert Secret(kind(KEY)).reveal() == KEY


@pytest.mark.parametrize(
    "wrong", (32, "text", None, [1, 2], Secret(KEY)), ids=lambda value: type(value).__name__
)
def test_only_bytes_can_be_a_secret(wrong: Any) -> None:
    with pytest.raises(TypeError) as caught:
        Secret(wrong)
    assert not shows_key(str(caught.value))


def test_no_bytes_are_no_secret() -> None:
    with pytest.raises(ConfigError, match="at least one byte"):
        Secret(b"")


def test_drawn_secrets_are_keys_and_differ() -> None:
    drawn = [Secret.draw() for _ in range(100)]
    assert {secret.size_bytes for secret in drawn} == {KEY_BYTES}
    assert len({secret.reveal() for secret in drawn}) == 100
    assert Secret.draw(16).size_bytes == 16


def test_secrets_are_equal_where_their_bytes_are(secret: Secret) -> None:
    assert secret == Secret(KEY)
    assert secret != Secret(KEY[:-1] + b"\0")
    assert secret != Secret(KEY[:-1])
    assert secret != KEY


def test_comparing_takes_constant_time(secret: Secret, monkeypatch: pytest.MonkeyPatch) -> None:
    # What compares in constant time cannot be measured by a test; that it is asked can be seen.
    compared: list[tuple[bytes, bytes]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return one == other

    monkeypatch.setattr("hmac.compare_digest", compare)
    assert secret == Secret(KEY)
    assert compared == [(KEY, KEY)]


def test_a_secret_shows_its_length_and_nothing_else(secret: Secret) -> None:
    assert repr(secret) == "<Secret of 32 bytes>"
    assert "<Secret of 32 bytes>" in pprint.pformat({"key": [secret]})


LEAKS: dict[str, Callable[[Any], object]] = {
    "str": str,
    "str.format": "{}".format,
    "a width": "{:>40}".format,
    "an f-string": lambda secret: f"{secret}",
    "percent": lambda secret: "%s" % secret,  # noqa: UP031
    "bytes": bytes,
    "bytearray": bytearray,
    "memoryview": memoryview,
    "list": list,
    "len": len,
    "int": int,
    "hash": hash,
    "a set": lambda secret: {secret},
    "a key": lambda secret: {secret: 1},
    "vars": vars,
    "json": json.dumps,
    "json by str": lambda secret: json.dumps({"key": secret}, default=str),
    "pickle 0": lambda secret: pickle.dumps([secret], 0),
    "pickle 1": lambda secret: pickle.dumps([secret], 1),
    "pickle 2": lambda secret: pickle.dumps([secret], 2),
    "pickle 5": lambda secret: pickle.dumps([secret], 5),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "deepcopy within": lambda secret: copy.deepcopy({"key": secret}),
    "reduce": lambda secret: secret.__reduce__(),
    "reduce_ex": lambda secret: secret.__reduce_ex__(4),
    "getstate": lambda secret: secret.__getstate__(),
}


@pytest.mark.parametrize("leak", LEAKS.values(), ids=LEAKS)
def test_a_secret_refuses_to_leave_by_accident(leak: Callable[[Secret], object], secret: Secret) -> None:
    with pytest.raises(TypeError) as caught:
        leak(secret)
    assert not shows_key("".join(traceback.format_exception(caught.value)))


def test_an_exception_that_holds_a_secret_shows_nothing(secret: Secret) -> None:
    for error in (ValueError(secret), ValueError("the key", secret), KeyError(secret)):
        assert not shows_key("".join(traceback.format_exception(error)))
        assert not shows_key(repr(error))


def test_a_log_line_with_a_secret_fails_and_shows_nothing(
    secret: Secret, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(TypeError, match="does not print"):
        logging.getLogger("test").error("the key is %s", secret)
    caplog.clear()
    logging.getLogger("test").error("the key is %r", secret)
    assert caplog.messages[-1] == "the key is <Secret of 32 bytes>"
    assert not shows_key(caplog.text + "".join(capsys.readouterr()))


def test_a_secret_has_nowhere_to_hang_more_on(secret: Secret) -> None:
    with pytest.raises(AttributeError):
        secret.note = "more"  # type: ignore[attr-defined]


def test_a_wiped_secret_is_zeros_and_refuses_every_use(secret: Secret) -> None:
    held = secret._data
    secret.wipe()
    secret.wipe()
    assert held == bytes(32)
    for use in (
        Secret.reveal,
        lambda wiped: wiped == Secret(bytes(32)),
        lambda wiped: Secret(bytes(32)) == wiped,
    ):
        with pytest.raises(ClosedError, match="wiped"):
            use(secret)
    assert repr(secret) == "<Secret of 32 bytes>"


class Interrupted(bytearray):
    """Bytes during whose use another thread comes in between."""

    meanwhile: Callable[[], object]

    def __bytes__(self) -> bytes:
        self.meanwhile()
        return bytes(memoryview(self))

    def __setitem__(self, at: Any, value: Any) -> None:
        super().__setitem__(at, value)
        self.meanwhile()


def test_a_secret_that_is_wiped_while_it_is_copied_is_not_revealed_as_zeros(secret: Secret) -> None:
    secret._data = data = Interrupted(KEY)
    data.meanwhile = lambda: None
    assert secret.reveal() == KEY
    data.meanwhile = lambda: Secret.wipe(secret) if any(data) else None
    with pytest.raises(ClosedError, match="wiped"):
        secret.reveal()


def test_a_secret_that_is_copied_while_it_is_wiped_is_not_revealed_as_zeros(secret: Secret) -> None:
    secret._data = data = Interrupted(KEY)
    errors: list[ClosedError] = []

    def reveal() -> None:
        # Asked for anew within the copy that this makes.
        data.meanwhile = lambda: None
        with pytest.raises(ClosedError, match="wiped") as caught:
            secret.reveal()
        errors.append(caught.value)

    data.meanwhile = reveal
    secret.wipe()
    assert len(errors) == 1
    assert data == bytes(32)
