"""Bounded talk between the ranks of one job, over a `TCPStore` of its own.

A training job's process groups are not used: their collectives name no rank when one dies, block
each other across threads, and one that timed out leaves its group unusable. Here every call has
an end, and what ends early says which ranks are missing. Values are bytes; nothing is pickled.

A store's client waits for ever where the process that serves it is stopped, whatever timeout it
is given. So each connection has a thread that speaks on it, and the caller waits for that thread
no longer than it means to: a call that is given up takes its connection with it.

A channel belongs to one thread at a time (`Channel.beside` makes one for another thread).
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Final, TypeVar

from torch.distributed import DistNetworkError, DistStoreError, TCPStore  # type: ignore[attr-defined]

from strongroom.errors import RanksError, RanksMissingError
from strongroom.lifeline import Lifeline, Lifelines

__all__ = ["Address", "Channel", "open_channel"]

Address = dict[str, Any]
"""Where a coordinator listens: ``hosts`` to try in order, ``port``, and a ``nonce`` to know it by."""

_T = TypeVar("_T")
_Act = Callable[[TCPStore], Any]
_Queue = SimpleQueue["tuple[_Act, Future[Any] | None] | None"]

_PART_BYTES: Final = 1 << 20
"""A longer value is cut: TCPStore closes a connection that sends more than 8 MiB at once."""

_ANSWER_S: Final = 10.0
"""The store answers within milliseconds while its process runs; one that does not for so long is lost."""

_LATE_ANSWER_S: Final = 2.0
"""As much, where the time that there was is over."""

_AFTERWARDS_S: Final = 0.5
"""How long a call that timed out is still waited for.

This process may have been stopped itself: then the time is over, and the answer is about to come.
"""

_AT_EXIT_S: Final = 2.0
"""How long the interpreter's end waits for what was asked last."""

_CONNECT_S: Final = 60.0
_TRY_S: Final = 10.0
_NONCE: Final = "nonce"

_GONE: Final = b"gone"
"""In place of a value that begins with how many parts it has: far more than there can be."""


class _Line:
    """The way to the coordinator's store, of all channels of one rank.

    Args:
        connect: opens a connection.
    """

    def __init__(self, connect: Callable[[], TCPStore]) -> None:
        self.connect = connect
        self.has_connected = False
        # Why it is gone for good: the store ends with its process, and does not come back.
        self.end: str | None = None
        # By which rank 0 knows who has ended: its own, or another rank's; None where there is none.
        self.life: Lifelines | Lifeline | None = None

    def let_go(self) -> None:
        """This rank leaves the others."""
        life, self.life = self.life, None
        if life is not None:
            life.let_go()


_UNTIL_CLOSED: Final[set[_Line]] = set()
"""Ways to stores that a `Checkpointer` left behind without closing them. If they ended with it, every
other rank's client would complain on its standard error."""


class Channel:
    """One rank's end. Keys are strings; every method ends within the time that it is given.

    Args:
        rank: this rank.
        world_size: how many there are.
        connect: opens a connection of its own to the coordinator's store; or what another channel
            of this rank knows of it.

    Attributes:
        phase: what the ranks are doing, for errors.
    """

    def __init__(self, rank: int, world_size: int, connect: Callable[[], TCPStore] | _Line) -> None:
        self.rank = rank
        self.world_size = world_size
        self.phase = "meeting"
        self._is_first = not isinstance(connect, _Line)
        self._line = connect if isinstance(connect, _Line) else _Line(connect)
        self._is_answering = True
        self._process_id = os.getpid()
        self._parts: dict[str, int] = {}
        self._queue: _Queue | None = None
        self._end: Callable[[], object] | None = None

    def connect(self, within_s: float = _CONNECT_S) -> None:
        """Open the connection, which the first call would open.

        Raises:
            RanksError: the coordinator cannot be reached.
        """
        self._call(lambda _: None, within_s)

    def beside(self) -> Channel:
        """A channel to the same ranks for another thread: a connection serves one call at a time.

        It connects when it is first used.
        """
        return Channel(self.rank, self.world_size, self._line)

    def hold(self, life: Lifelines | Lifeline | None) -> None:
        """Keep what rank 0 knows this rank, or all of them, to be alive by, until this channel is closed."""
        self._line.life = life

    def keep_until_closed(self) -> None:
        """Keep the store though nobody holds this channel any more: others may still read there."""
        _UNTIL_CLOSED.add(self._line)

    def close(self) -> None:
        """Let the connection go, once what was asked of it is done; the first one's end is this rank's."""
        if self._process_id == os.getpid():
            _UNTIL_CLOSED.discard(self._line)
            self._hang_up()
            if self._is_first:
                self._line.let_go()

    def post(self, key: str, value: bytes, *, within_s: float = _ANSWER_S) -> None:
        """Leave a value under a key.

        Args:
            within_s: how long to wait until it is there; 0: not at all, nor for an error.

        Raises:
            RanksError: the coordinator cannot be reached.
        """
        parts = [value[start : start + _PART_BYTES] for start in range(0, len(value), _PART_BYTES)]
        # The first one last: who sees it finds the others there.
        cut = [(f"{key}#{number}", part) for number, part in enumerate(parts[1:], start=1)]
        cut.append((key, len(parts).to_bytes(4, "big") + (parts[0] if parts else b"")))
        if len(parts) > 1:
            self._parts[key] = len(parts)

        def act(store: TCPStore) -> None:
            for name, part in cut:
                store.set(name, part)  # type: ignore[arg-type]
                if len(cut) > 1:
                    # To set waits for no answer, and the server of torch 2.7 closes the connection of
                    # who sends much faster than it takes.
                    store.check([name])

        if within_s > 0:
            self._call(act, within_s)
        else:
            self._ask(act)

    def read(self, key: str, *, until: float, missing: Callable[[], RanksError]) -> bytes:
        """Wait for a value and take it.

        Args:
            until: by ``time.monotonic``.
            missing: makes the error to raise when it does not come.
        """
        if not self._wait([key], until):
            raise missing()
        return self._call(lambda store: self._take(store, key, store.get(key)), _left(until))

    def read_all(
        self,
        keys: Mapping[int, str],
        *,
        until: float,
        missing: Callable[[list[int]], RanksError],
        ended: Callable[[list[int]], RanksError],
    ) -> list[bytes]:
        """Wait for the value of every key and take them; only rank 0 does.

        Args:
            keys: of each rank, what it posts.
            missing: makes the error to raise, given the ranks that did not post in time.
            ended: likewise, given ranks whose process has ended before it did: for them nobody waits.
        """
        ranks, names = list(keys), list(keys.values())
        life = self._line.life
        with life.awaiting(keys) if isinstance(life, Lifelines) else contextlib.nullcontext():
            if not self._wait(names, until):
                absent = self.absent(names)
                if absent:
                    raise missing([ranks[place] for place in absent])
                # The last one came just now.

        def act(store: TCPStore) -> list[bytes | None]:
            heads = store.multi_get(names)
            return [
                None if head == _GONE else self._take(store, key, head)
                for key, head in zip(names, heads, strict=True)
            ]

        found = self._call(act, _left(until))
        values = [value for value in found if value is not None]
        if len(values) < len(found):
            raise ended([rank for rank, value in zip(ranks, found, strict=True) if value is None])
        return values

    def mark_gone(self, key: str) -> None:
        """Let whoever waits for a key know that nobody will post it; what is there already stays."""
        with contextlib.suppress(RanksError):
            self._call(lambda store: store.compare_set(key, "", _GONE.decode()), _ANSWER_S)

    def look(self, key: str) -> bytes | None:
        """A value, if it is there."""
        return self._call(
            lambda store: self._take(store, key, store.get(key)) if store.check([key]) else None, _ANSWER_S
        )

    def absent(self, keys: Sequence[str], *, within_s: float = _ANSWER_S) -> list[int]:
        """The places of the keys that hold nothing yet."""

        def look(store: TCPStore, first: int, end: int) -> list[int]:
            # By halves: most are there.
            if first == end or store.check(list(keys[first:end])):
                return []
            if end - first == 1:
                return [first]
            middle = (first + end) // 2
            return look(store, first, middle) + look(store, middle, end)

        return self._call(lambda store: look(store, 0, len(keys)), within_s)

    def add(self, key: str, number: int, *, within_s: float = _ANSWER_S) -> int:
        """Add to a counter, and return it."""
        return int(self._call(lambda store: store.add(key, number), within_s))

    def drop(self, keys: Iterable[str]) -> None:
        """Forget values that this rank has posted or read; does not wait, nor say where that fails."""
        counted = [(key, self._parts.pop(key, 1)) for key in keys]

        def act(store: TCPStore) -> None:
            for key, count in counted:
                store.delete_key(key)
                for number in range(1, count):
                    store.delete_key(f"{key}#{number}")

        self._ask(act)

    def sweep(self, keys: Iterable[str]) -> None:
        """Forget values of whoever posted them; as `drop`, and slower."""
        listed = list(keys)

        def act(store: TCPStore) -> None:
            for key in listed:
                store.delete_key(key)
                number = 1
                while store.delete_key(f"{key}#{number}"):
                    number += 1

        self._ask(act)

    def _take(self, store: TCPStore, key: str, head: bytes) -> bytes:
        count = int.from_bytes(head[:4], "big")
        if count <= 1:
            return head[4:]
        self._parts[key] = count
        rest = [store.get(f"{key}#{number}") for number in range(1, count)]
        return b"".join((head[4:], *rest))

    def _wait(self, keys: Sequence[str], until: float) -> bool:
        """Whether every key came in time."""
        left = until - time.monotonic()

        def act(store: TCPStore) -> bool:
            # Short waits would let an interrupt in, and print two lines of warning each.
            if left > 0:
                try:
                    store.wait(list(keys), timedelta(seconds=left))
                except DistNetworkError:
                    raise
                except DistStoreError:
                    # The time may be over because this process was stopped: only what is there counts.
                    return bool(store.check(list(keys)))
                return True
            return bool(store.check(list(keys)))

        return self._call(act, max(left, _AFTERWARDS_S))

    def _call(self, act: Callable[[TCPStore], _T], within_s: float) -> _T:
        """Have the connection's thread do something, and wait for it so long."""
        answer: Future[_T] = Future()
        is_answered = False
        try:
            self._ask(act, answer)
            result = _wait_for(answer, within_s)
            is_answered = self._is_answering = self._line.has_connected = True
        except FutureTimeoutError:
            self._is_answering = False
            raise self._lost("it does not answer") from None
        except RanksMissingError as error:
            if self._line.has_connected:
                raise self._lost(f"{error!s:.200}") from None
            raise
        except RuntimeError as error:
            if isinstance(error, DistNetworkError):
                self._line.end = f"{error!s:.200}"
            raise self._lost(f"{error!s:.200}") from None
        finally:
            if not is_answered:
                # An answer that is no longer waited for must not be taken for the next one's.
                self._hang_up()
        return result

    @property
    def is_answering(self) -> bool:
        """Whether the coordinator's store has answered when it was asked last."""
        return self._is_answering and self._line.end is None

    def _ask(self, act: _Act, answer: Future[Any] | None = None) -> None:
        if self._process_id != os.getpid():
            raise RanksError(
                f"the connection between the ranks belongs to process {self._process_id}, of which this one "
                "is a fork",
                phase=self.phase,
            )
        if self._line.end is not None:
            raise self._lost(self._line.end)
        if self._queue is None:
            queue: _Queue = SimpleQueue()
            # A daemon: a call that never ends must not keep the interpreter from ending.
            thread = threading.Thread(
                target=_serve, args=(queue, self._line.connect), name="strongroom-ranks", daemon=True
            )
            thread.start()
            _SERVING[thread] = queue
            self._queue = queue
            self._end = weakref.finalize(self, queue.put, None)
        self._queue.put((act, answer))

    def _hang_up(self) -> None:
        """Leave the connection to its thread, which ends after what it was asked."""
        end, self._end, self._queue = self._end, None, None
        if end is not None:
            end()

    def _lost(self, why: str) -> RanksMissingError:
        return RanksMissingError(
            f"rank {self.rank} has lost rank 0, which coordinates saves and restores ({self.phase}): its "
            f"process has ended or is stopped, or its host cannot be reached: {why}",
            ranks=(0,),
            phase=self.phase,
        )


_SERVING: Final[weakref.WeakKeyDictionary[threading.Thread, _Queue]] = weakref.WeakKeyDictionary()
"""The threads of this process's connections, and how each is told to end."""


@atexit.register
def _end_threads() -> None:
    """Let no thread come back from a call while the interpreter ends: it would take the process down."""
    until = time.monotonic() + _AT_EXIT_S
    serving = list(_SERVING.items())
    for _, queue in serving:
        queue.put(None)
    for thread, _ in serving:
        thread.join(max(0.0, until - time.monotonic()))


def _serve(queue: _Queue, connect: Callable[[], TCPStore]) -> None:
    """A connection's thread: does one thing after the other, and leaves errors with who asked."""
    store: TCPStore | None = None
    problem: Exception | None = None
    while (asked := queue.get()) is not None:
        act, answer = asked
        try:
            if problem is not None:
                raise problem
            if store is None:
                store = connect()
            result = act(store)
        except Exception as error:  # noqa: BLE001 - raised again by whoever asked
            if store is None:
                problem = error
            if answer is not None:
                answer.set_exception(error)
        else:
            if answer is not None:
                answer.set_result(result)
        # Nothing of it may live on while this thread waits for the next.
        asked = act = answer = result = None  # type: ignore[assignment]


def _wait_for(answer: Future[_T], within_s: float) -> _T:
    try:
        return answer.result(within_s)
    except FutureTimeoutError:
        return answer.result(_AFTERWARDS_S)


def _left(until: float) -> float:
    return max(until - time.monotonic(), _LATE_ANSWER_S)


def open_channel(
    rank: int,
    world_size: int,
    share: Callable[[bytes | None], bytes],
    *,
    fixed_host: str | None = None,
    route_to: str | None = None,
    within_s: float = _CONNECT_S,
) -> Channel:
    """Meet the other ranks; called once on every rank.

    Args:
        share: takes the coordinator's bytes (None elsewhere) and returns them on every rank.
        fixed_host: a name by which every rank reaches the coordinator's host, if one is known.
        route_to: a host that ranks can reach, to learn by which address they reach this one.
        within_s: how long it may take to connect.

    Raises:
        RanksError: the coordinator cannot be reached from here.
    """
    address: Address
    lifelines: Lifelines | None = None
    hosts: Sequence[str] = ()
    if rank == 0:
        server = TCPStore(
            "localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=_CONNECT_S)
        )
        address = {
            "hosts": _hosts(fixed_host, route_to or fixed_host),
            "machine": _machine(),
            "nonce": secrets.token_hex(16),
            "port": server.port,
        }
        with contextlib.suppress(OSError):
            lifelines = Lifelines(address["nonce"])
            address["lifelines"] = lifelines.port
        server.set(_NONCE, address["nonce"])
        share(json.dumps(address).encode())

        def connect() -> TCPStore:
            # The closure keeps the server alive for as long as anyone may connect.
            return _client(address, ("localhost",), server)

    else:
        address = json.loads(share(None))
        hosts = ("localhost",) if address["machine"] == _machine() else tuple(address["hosts"])

        def connect() -> TCPStore:
            return _client(address, hosts)

    channel = Channel(rank, world_size, connect)
    if rank == 0:
        channel.keep_until_closed()
    channel.connect(min(within_s, _CONNECT_S))
    if lifelines is not None:
        lifelines.begin(channel.beside().mark_gone)
    channel.hold(lifelines or _lifeline(address, hosts, rank))
    return channel


def _lifeline(address: Address, hosts: Sequence[str], rank: int) -> Lifeline | None:
    if "lifelines" in address and rank != 0:
        with contextlib.suppress(OSError):
            return Lifeline(hosts, address["lifelines"], address["nonce"], rank, within_s=_TRY_S)
    return None


def _client(address: Address, hosts: Sequence[str], _server: TCPStore | None = None) -> TCPStore:
    problems = []
    for host in hosts:
        try:
            # It listens before its address is told: refused is refused for good, and TCPStore would try on.
            with socket.create_connection((host, address["port"]), _TRY_S):
                pass
            store = TCPStore(
                host,
                address["port"],
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=_TRY_S),
            )
            if store.get(_NONCE) == address["nonce"].encode():
                store.set_timeout(timedelta(seconds=_CONNECT_S))
                return store
            problems.append(f"{host}: something else answers there")
        except (OSError, RuntimeError) as error:
            problems.append(f"{host}: {error!s:.120}")
    raise RanksMissingError(
        f"rank 0 listens on port {address['port']} and cannot be reached from here: {'; '.join(problems)}. "
        "Its process has ended, or there is no route to it: ranks must reach the coordinator's host on any "
        "port; set MASTER_ADDR to a name that all ranks resolve",
        ranks=(0,),
        phase="meeting",
    )


def _hosts(fixed_host: str | None, route_to: str | None) -> list[str]:
    """Names and addresses of this host, the likeliest to work first."""
    found = [fixed_host] if fixed_host else []
    if route_to:
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # Sends nothing: it asks which own address a packet to that host would leave from.
            probe.connect((route_to, 9))
            found.append(probe.getsockname()[0])
    found.append(socket.gethostname())
    return list(dict.fromkeys(found))


def _machine() -> str:
    """What two processes share only on one host: its name and, on Linux, the boot and the network."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        parts.append(file.read().strip())
    with contextlib.suppress(OSError):
        # Two containers on one host may have networks of their own.
        parts.append(os.readlink("/proc/self/ns/net"))
    return " ".join(parts)
