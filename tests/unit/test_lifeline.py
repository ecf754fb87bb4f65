"""Ranks that are real processes, and end in one way or another while rank 0 waits for them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from strongroom.channel import Channel, open_channel
from strongroom.errors import RanksError, RanksMissingError
from strongroom.lifeline import Lifeline, Lifelines

RANK = """
import os, sys
from strongroom.channel import open_channel
channel = open_channel({rank}, 3, lambda _: {address!r})
print("met", flush=True)
for line in sys.stdin:
    exec(line)
    print("done", flush=True)
"""

LONG_S = 60.0
"""Far longer than anything here takes, on whatever machine: a wait that was not cut short fails the test."""


class Peer:
    """Another rank, which does what it is told, a line at a time."""

    def __init__(self, rank: int, address: bytes) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", RANK.format(rank=rank, address=address)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.answers()

    def answers(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() in {"met\n", "done\n"}

    def do(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        self.answers()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def job() -> Iterator[tuple[Channel, Peer, Peer]]:
    """Rank 0 here, and two more."""
    told: list[bytes] = []

    def share(data: bytes | None) -> bytes:
        assert data is not None
        told.append(data)
        return data

    channel = open_channel(0, 3, share)
    peers = [Peer(rank, told[0]) for rank in (1, 2)]
    yield channel, *peers
    for peer in peers:
        with contextlib.suppress(ProcessLookupError):  # with what it has forked
            os.killpg(peer.process.pid, signal.SIGKILL)
        peer.process.communicate()
    channel.close()


def said(kind: str) -> Callable[[list[int]], RanksError]:
    return lambda ranks: RanksMissingError(kind, ranks=ranks)


def wait(channel: Channel, within_s: float = LONG_S, keys: dict[int, str] | None = None) -> list[bytes]:
    return channel.read_all(
        keys or {1: "one", 2: "two"},
        until=time.monotonic() + within_s,
        missing=said("missing"),
        ended=said("ended"),
    )


def test_a_rank_that_is_killed_is_known_at_once_and_is_not_waited_for_again(job: Any) -> None:
    channel, one, two = job
    two.do("channel.post('two', b'2')")
    began = time.monotonic()
    threading.Timer(0.5, one.kill).start()
    with pytest.raises(RanksMissingError, match="ended") as lost:
        wait(channel)
    assert lost.value.ranks == (1,)
    with pytest.raises(RanksMissingError, match="ended"):
        wait(channel, keys={1: "another", 2: "two"})
    assert time.monotonic() - began < LONG_S / 2


def test_what_a_rank_said_before_it_ended_counts_and_its_forks_do_not_speak_for_it(job: Any) -> None:
    channel, one, two = job
    one.do("channel.post('one', b'1')")
    one.do("child = os.fork() or os.execvp('sleep', ['sleep', '120'])")
    one.do("second = os.fork() or [os.close(1), __import__('time').sleep(120), os._exit(0)]")
    one.kill()
    threading.Timer(2.5, two.do, ("channel.post('two', b'2')",)).start()
    assert wait(channel) == [b"1", b"2"]
    with pytest.raises(RanksMissingError, match="ended"):
        wait(channel, keys={1: "another"})


def test_one_that_is_stopped_or_has_parted_is_waited_for_as_long_as_was_said(job: Any) -> None:
    channel, one, two = job
    one.process.send_signal(signal.SIGSTOP)
    two.do("channel.close()")
    with pytest.raises(RanksMissingError, match="missing") as lost:
        wait(channel, within_s=3.0)
    assert lost.value.ranks == (1, 2)


def test_strangers_do_not_speak_for_a_rank() -> None:
    marked: list[str] = []
    lifelines = Lifelines("n" * 32)
    lifelines.begin(marked.append)
    with lifelines.awaiting({1: "one"}):
        for hello in (b"GET / HTTP/1.0\r\n\r\n", b"n" * 31, b"n" * 31 + b"m" + bytes(4), b""):
            with socket.create_connection(("localhost", lifelines.port), 10) as stranger:
                stranger.sendall(hello)
        kept = Lifeline(("localhost",), lifelines.port, "n" * 32, 2, within_s=10)
        time.sleep(2.0)
        assert marked == []
        kept.let_go()
    lifelines.let_go()


def test_a_port_where_nobody_listens_is_an_error() -> None:
    with socket.create_server(("localhost", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
        Lifeline(("localhost",), port, "n", 1, within_s=1)
