"""Calls to keepers of keys end in time, spread out when they are repeated, and start afresh in a child."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
import weakref

import pytest

from strongroom.errors import ConfigError, KeyServiceError, NoKeyError
from strongroom_security.recipients import calling
from strongroom_security.recipients.calling import (
    PLAIN_HTTP_VARIABLE,
    Deadline,
    PerProcess,
    TryAgainError,
    ask,
    check_endpoint,
    library,
)


class _Flaky:
    """Fails a few times, and then answers."""

    def __init__(self, failures: int, *, not_before_s: float = 0.0) -> None:
        self.left = failures
        self.not_before_s = not_before_s

    def __call__(self, deadline: Deadline) -> str:
        if self.left == 0:
            return "answer"
        self.left -= 1
        raise TryAgainError("busy", not_before_s=self.not_before_s)


def test_pauses_are_drawn_below_a_bound_that_doubles() -> None:
    bounds: list[tuple[float, float]] = []
    pauses: list[float] = []

    def draw(low: float, high: float) -> float:
        bounds.append((low, high))
        return high

    assert ask(_Flaky(8), whom="x", within_s=60, sleep=pauses.append, draw=draw) == "answer"
    assert bounds == [(0.0, bound) for bound in (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0)]
    assert pauses == [high for _, high in bounds]


def test_a_keeper_that_asks_to_be_left_alone_is() -> None:
    pauses: list[float] = []
    ask(_Flaky(1, not_before_s=7.0), whom="x", within_s=60, sleep=pauses.append, draw=lambda low, high: high)
    assert pauses == [7.1]
    with pytest.raises(KeyServiceError, match=r"1 tries failed.*busy"):
        ask(_Flaky(1, not_before_s=70.0), whom="x", within_s=60, sleep=pauses.append)
    assert len(pauses) == 1


def test_what_does_not_pass_is_raised_at_once() -> None:
    tries: list[Deadline] = []

    def attempt(deadline: Deadline) -> None:
        tries.append(deadline)
        raise NoKeyError("refused")

    with pytest.raises(NoKeyError, match="refused"):
        ask(attempt, whom="x", within_s=60)
    assert len(tries) == 1


def test_a_call_that_does_not_return_is_left_behind() -> None:
    let_go, ended = threading.Event(), threading.Event()

    def attempt(deadline: Deadline) -> None:
        let_go.wait(60)
        ended.set()

    began = time.monotonic()
    with pytest.raises(KeyServiceError, match=r"^x could not be used within 0\.2 s: it did not answer"):
        ask(attempt, whom="x", within_s=0.2)
    assert time.monotonic() - began < 10
    let_go.set()
    assert ended.wait(60)


@pytest.mark.parametrize("within_s", (0.0, -1.0))
def test_no_time_is_no_answer(within_s: float) -> None:
    with pytest.raises(KeyServiceError):
        ask(_Flaky(1000), whom="x", within_s=within_s)


class _Traced:
    """Something that an error's frames hold."""


def test_an_error_keeps_nothing_alive_once_it_is_gone() -> None:
    seen: list[weakref.ref[_Traced]] = []

    def attempt(deadline: Deadline) -> None:
        held = _Traced()
        seen.append(weakref.ref(held))
        raise NoKeyError("refused")

    # What a cycle holds, a collection frees at some time or other; a key should not wait for it.
    gc.disable()
    try:
        with contextlib.suppress(NoKeyError):
            ask(attempt, whom="x", within_s=60)
        end = time.monotonic() + 60
        while seen[0]() is not None and time.monotonic() < end:
            time.sleep(0.01)  # its thread may not have ended yet
        assert seen[0]() is None
    finally:
        gc.enable()


def test_the_deadline_is_told_to_each_try() -> None:
    assert 59 < ask(lambda deadline: deadline.remaining_s(), whom="x", within_s=60) <= 60
    assert Deadline(-1).remaining_s() == 0


def test_a_value_is_made_once_a_process() -> None:
    made: list[int] = []

    def make() -> int:
        time.sleep(0.05)
        made.append(os.getpid())
        return os.getpid()

    value = PerProcess(make)
    threads = [threading.Thread(target=value.get) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert made == [os.getpid()]
    value.forget()
    value.get()
    assert len(made) == 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_makes_its_own_even_while_the_parent_makes_one() -> None:
    begun, let_go = threading.Event(), threading.Event()

    def make() -> int:
        begun.set()
        let_go.wait(60)
        return os.getpid()

    value = PerProcess(make)
    thread = threading.Thread(target=value.get)
    thread.start()
    assert begun.wait(60)
    child = os.fork()
    if child == 0:
        let_go.set()
        os._exit(0 if value.get() == os.getpid() else 1)
    let_go.set()
    thread.join(60)
    end, ended = time.monotonic() + 60, (0, 0)
    while ended[0] == 0 and time.monotonic() < end:
        ended = os.waitpid(child, os.WNOHANG)
        time.sleep(0.01)
    assert ended == (child, 0)


def test_a_failure_to_make_it_is_not_remembered() -> None:
    outcomes: list[Exception | int] = [ConfigError("not yet"), 7]

    def make() -> int:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    value = PerProcess(make)
    with pytest.raises(ConfigError):
        value.get()
    assert value.get() == 7


def test_a_library_that_is_absent_is_named_with_its_extra() -> None:
    assert library("json", extra="aws", whom="x").loads("1") == 1
    with pytest.raises(ConfigError, match=r"^x needs the package nowhere_at_all.*'strongroom\[aws\]'"):
        library("nowhere_at_all.deep", extra="aws", whom="x")


@pytest.mark.parametrize(
    "url",
    (
        "https://vault.example",
        "https://vault.example:8200/prefix",
        "http://127.0.0.1:1",
        "http://127.8.9.10",
        "http://[::1]:8200",
        "http://localhost:8200",
    ),
)
def test_keys_go_over_tls_or_nowhere_else_than_here(url: str) -> None:
    assert check_endpoint(url, whom="x") == url


@pytest.mark.parametrize(
    "url", ("http://[::ffff:10.0.0.1]", "http://0.0.0.0:8200", "http://localhost.example")
)
def test_plain_http_to_elsewhere_takes_an_ugly_word(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLAIN_HTTP_VARIABLE, "yes")
    with pytest.raises(ConfigError, match=PLAIN_HTTP_VARIABLE):
        check_endpoint(url, whom="x")
    monkeypatch.setenv(PLAIN_HTTP_VARIABLE, "1")
    assert check_endpoint(url, whom="x") == url


@pytest.mark.parametrize("url", ("", "ftp://host", "https://", "https://ho st:x", "//host", "https://[::1"))
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="address"):
        check_endpoint(url, whom="x")


def test_every_value_is_known_until_nobody_holds_it() -> None:
    value = PerProcess(lambda: 1)
    assert value in calling._EVERY
    count = len(calling._EVERY)
    del value
    gc.collect()
    assert len(calling._EVERY) < count
