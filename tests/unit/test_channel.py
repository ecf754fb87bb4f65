"""Talk over a real store, whose process also dies, stops, or was never there."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from strongroom.channel import Channel, open_channel
from strongroom.errors import RanksError, RanksMissingError

COORDINATOR = """
import sys, time
from strongroom.channel import open_channel
def share(data):
    print(data.decode(), flush=True)
    return data
channel = open_channel(0, 2, share)
channel.post("there", b"yes")
sys.stdin.read()
"""


def gone() -> RanksError:
    return RanksMissingError("it did not come", phase="x")


def unnamed(ranks: list[int]) -> RanksError:
    return gone()


def count_keys(channel: Channel) -> int:
    """How many keys the coordinator's store holds, those of all lanes."""
    return int(channel._call(lambda store: store.num_keys(), 10.0))


LONG_S = 30.0
"""Far longer than anything here takes, on whatever machine."""

SILENCE_S = 10.0
"""How long an answer is waited for where no shorter time was asked for; and each try to connect."""


def soon(seconds: float = LONG_S) -> float:
    return time.monotonic() + seconds


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    address: Future[bytes] = Future()

    def share(data: bytes | None) -> bytes:
        if data is not None:
            address.set_result(data)
        return address.result(LONG_S)

    first = open_channel(0, 2, share)
    second = open_channel(1, 2, share)
    yield first, second
    second.close()
    first.close()


@pytest.fixture
def remote() -> Iterator[tuple[subprocess.Popen[str], Callable[[], Channel]]]:
    """A coordinator in a process of its own, and how to meet it."""
    process = subprocess.Popen(
        [sys.executable, "-c", COORDINATOR], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    address = process.stdout.readline().encode()
    yield process, lambda: open_channel(1, 2, lambda _: address)
    process.kill()
    process.communicate()


@pytest.mark.parametrize("size", (0, 1, 4 << 20, (4 << 20) + 1, 20 << 20))
def test_a_value_of_any_size_comes_whole_and_goes_without_a_trace(
    pair: tuple[Channel, Channel], size: int
) -> None:
    first, second = pair
    before = count_keys(first)
    value = os.urandom(size)
    first.post("a", value)
    assert second.read("a", until=soon(), missing=gone) == value
    second.post("b", value)
    assert first.read_all({0: "a", 1: "b"}, until=soon(), missing=unnamed, ended=unnamed) == [value, value]
    # By who posted it, by who read it, and by who did neither.
    first.drop(["b"])
    second.sweep(["a"])
    assert second.look("a") is None
    assert first.look("b") is None
    assert (count_keys(first), count_keys(second)) == (before, before)


def test_a_value_that_comes_late_is_waited_for(pair: tuple[Channel, Channel]) -> None:
    first, second = pair
    threading.Timer(0.5, first.post, ("a", b"x")).start()
    assert second.read("a", until=soon(), missing=gone) == b"x"


def test_what_does_not_come_is_named(pair: tuple[Channel, Channel]) -> None:
    first, second = pair
    first.post("a", b"")
    first.post("c", b"")
    absent: list[int] = []

    def missing(ranks: list[int]) -> RanksError:
        absent.extend(ranks)
        return gone()

    with pytest.raises(RanksMissingError, match="did not come"):
        second.read_all(dict(enumerate("abcde")), until=soon(0.2), missing=missing, ended=unnamed)
    assert absent == [1, 3, 4]
    # As it is after a wait that has run out: the connection goes on.
    assert second.read_all({0: "a", 2: "c"}, until=soon(-1), missing=missing, ended=unnamed) == [b"", b""]


def test_counters_count(pair: tuple[Channel, Channel]) -> None:
    first, second = pair
    assert (first.add("n", 0), second.add("n", 2), first.add("n", 1)) == (0, 2, 3)


def test_waits_that_run_out_while_the_value_comes_lose_nothing(pair: tuple[Channel, Channel]) -> None:
    """A wait that is cancelled at the moment at which it is answered."""
    first, second = pair
    for number in range(200):
        key = f"k{number}"
        timer = threading.Timer(0.002, first.post, (key, b"%d" % number))
        timer.start()
        try:
            assert second.read(key, until=soon(0.002), missing=gone) == b"%d" % number
        except RanksMissingError:
            timer.join()
            assert second.read(key, until=soon(), missing=gone) == b"%d" % number
        timer.join()


def test_a_coordinator_that_died_is_known_at_once_and_for_good(remote: Any) -> None:
    process, meet = remote
    channel = meet()
    channel.phase = "writing"
    beside = channel.beside()
    assert channel.read("there", until=soon(), missing=gone) == b"yes"
    threading.Timer(0.3, process.kill).start()
    began = time.monotonic()
    with pytest.raises(RanksMissingError, match=r"has lost rank 0.*\(writing\)") as told:
        channel.read("never", until=soon(60), missing=gone)
    assert told.value.ranks == (0,)
    for _ in range(3):
        with pytest.raises(RanksMissingError, match="has lost rank 0"):
            channel.post("a", b"")
        with pytest.raises(RanksMissingError, match="has lost rank 0"):
            beside.add("n", 1)
        assert not channel.is_answering
    assert time.monotonic() - began < SILENCE_S


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs signals that stop a process")
def test_a_coordinator_that_is_stopped_holds_nobody_up_for_longer_than_was_meant(remote: Any) -> None:
    process, meet = remote
    channel = meet()
    os.kill(process.pid, signal.SIGSTOP)
    calls: tuple[Callable[[], object], ...] = (
        lambda: channel.read("never", until=soon(0.5), missing=gone),
        lambda: channel.add("n", 1, within_s=0.5),
        lambda: channel.absent(["there"], within_s=0.5),
        lambda: channel.beside().connect(0.5),
    )
    for call in calls:
        began = time.monotonic()
        with pytest.raises(RanksMissingError, match="does not answer"):
            call()
        assert time.monotonic() - began < SILENCE_S
    assert not channel.is_answering
    # A word may be left for when it wakes, without a wait.
    channel.post("left", b"word", within_s=0)
    os.kill(process.pid, signal.SIGCONT)
    other = meet()
    assert other.read("left", until=soon(), missing=gone) == b"word"
    # Who gave up goes on with it too.
    assert channel.read("there", until=soon(), missing=gone) == b"yes"
    assert channel.is_answering


ENDING = """
import time
from strongroom.channel import open_channel
from datetime import timedelta

class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(1.0)

address = []
channel = open_channel(0, 2, lambda data: address.append(data) or data)
slow = Slow()
# Comes back from the store while the interpreter is taking this module apart.
channel._ask(lambda store: store.wait(["never"], timedelta(seconds=0.5)))
"""


def test_no_thread_comes_back_from_a_call_while_the_interpreter_ends() -> None:
    ended = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr


def test_a_coordinator_whose_channel_was_dropped_unclosed_still_serves_the_others() -> None:
    address: Future[bytes] = Future()

    def share(data: bytes | None) -> bytes:
        if data is not None:
            address.set_result(data)
        return address.result(LONG_S)

    first = open_channel(0, 2, share)
    second = open_channel(1, 2, share)
    first.post("there", b"yes")
    port = int(json.loads(address.result())["port"])
    del first
    gc.collect()
    assert second.read("there", until=soon(), missing=gone) == b"yes"
    second.post("late", b"word")
    assert second.read("late", until=soon(), missing=gone) == b"word"
    with socket.create_connection(("localhost", port), 1.0):
        second.close()


def test_where_nobody_listens_that_is_said_and_at_once() -> None:
    import json
    import socket

    from strongroom import channel as module

    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        port = taken.getsockname()[1]
    address = {"hosts": ["localhost"], "machine": module._machine(), "nonce": "n", "port": port}
    began = time.monotonic()
    with pytest.raises(RanksMissingError, match=f"port {port} and cannot be reached") as told:
        open_channel(1, 2, lambda _: json.dumps(address).encode())
    assert told.value.ranks == (0,)
    assert time.monotonic() - began < SILENCE_S


def test_where_something_else_listens_that_is_said() -> None:
    import json

    from strongroom import channel as module

    found: list[bytes] = []
    first = open_channel(0, 2, lambda data: found.append(data or b"") or b"")  # type: ignore[func-returns-value]
    address = {**json.loads(found[0]), "nonce": "another", "machine": module._machine()}
    with pytest.raises(RanksMissingError, match="something else answers there"):
        open_channel(1, 2, lambda _: json.dumps(address).encode())
    first.close()


def test_a_channel_that_nobody_holds_ends_its_thread() -> None:
    address: list[bytes] = []
    channel: Channel | None = open_channel(0, 2, lambda data: address.append(data or b"") or b"")  # type: ignore[func-returns-value]
    other: Channel | None = open_channel(1, 2, lambda _: address[0])
    del channel, other
    until = soon()
    while time.monotonic() < until and any(t.name == "strongroom-ranks" for t in threading.enumerate()):
        time.sleep(0.01)
    assert not [thread for thread in threading.enumerate() if thread.name == "strongroom-ranks"]
