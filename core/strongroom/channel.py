"""Bounded talk between the ranks of one job, over a `TCPStore` of its own.

A training job's process groups are not used: their collectives name no rank when one dies, block
each other across threads, and one that timed out leaves its group unusable. Here every wait has
an end, and what ends early says which ranks are missing. Values are bytes; nothing is pickled.

A channel belongs to one thread at a time (`Channel.beside` makes one for another thread).
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, Final

from torch.distributed import DistNetworkError, DistStoreError, TCPStore

from strongroom.errors import RanksError, RanksMissingError

__all__ = ["Address", "Channel", "open_channel"]

Address = dict[str, Any]
"""Where a coordinator listens: ``hosts`` to try in order, ``port``, and a ``nonce`` to know it by."""

_PART_BYTES: Final = 4 << 20
"""A longer value is cut: TCPStore closes a connection that sends more than 8 MiB at once."""

_SLICE_S: Final = 1.0
"""A wait returns to Python this often, so that an interrupt is noticed."""

_CONNECT_S: Final = 60.0
_TRY_S: Final = 10.0
_NONCE: Final = "nonce"


class Channel:
    """One rank's end. Keys are strings; every method is bounded by the deadline that it is given.

    Args:
        rank: this rank.
        world_size: how many there are.
        connect: opens a connection of its own to the coordinator's store.
    """

    def __init__(self, rank: int, world_size: int, connect: Callable[[], TCPStore]) -> None:
        self.rank = rank
        self.world_size = world_size
        self._connect = connect
        self._store = connect()

    def beside(self) -> Channel:
        """A channel to the same ranks for another thread: a connection serves one call at a time."""
        return Channel(self.rank, self.world_size, self._connect)

    def post(self, key: str, value: bytes) -> None:
        """Leave a value under a key, once.

        Raises:
            RanksError: the coordinator cannot be reached.
        """
        parts = [value[start : start + _PART_BYTES] for start in range(0, len(value), _PART_BYTES)]
        with self._reachable():
            for number, part in enumerate(parts[1:], start=1):
                self._store.set(f"{key}#{number}", part)  # type: ignore[arg-type]
            # The first one last: who sees it finds the others there.
            head = len(parts).to_bytes(4, "big") + (parts[0] if parts else b"")
            self._store.set(key, head)  # type: ignore[arg-type]

    def read(self, key: str, *, until: float, missing: Callable[[], RanksError]) -> bytes:
        """Wait for a value and take it.

        Args:
            until: by ``time.monotonic``.
            missing: the error to raise when it does not come.
        """
        self._wait([key], until, missing)
        with self._reachable():
            return self._take(key, self._store.get(key))

    def read_all(
        self, keys: Sequence[str], *, until: float, missing: Callable[[list[int]], RanksError]
    ) -> list[bytes]:
        """Wait for the value of every key and take them.

        Args:
            missing: the error to raise, given the places of the keys that did not come.
        """
        self._wait(keys, until, lambda: missing(self._absent(keys)))
        with self._reachable():
            return [
                self._take(key, head)
                for key, head in zip(keys, self._store.multi_get(list(keys)), strict=True)
            ]

    def is_there(self, key: str) -> bool:
        with self._reachable():
            return bool(self._store.check([key]))

    def add(self, key: str, number: int) -> int:
        """Add to a counter, and return it."""
        with self._reachable():
            return int(self._store.add(key, number))

    def drop(self, keys: Iterable[str]) -> None:
        """Forget values that nobody reads any more; says nothing where that fails."""
        with contextlib.suppress(RuntimeError):
            for key in keys:
                self._store.delete_key(key)

    def _take(self, key: str, head: bytes) -> bytes:
        count = int.from_bytes(head[:4], "big")
        if count <= 1:
            return head[4:]
        rest = [self._store.get(f"{key}#{number}") for number in range(1, count)]
        return b"".join((head[4:], *rest))

    def _wait(self, keys: Sequence[str], until: float, missing: Callable[[], RanksError]) -> None:
        while True:
            left = until - time.monotonic()
            if left <= 0:
                # Only what is already there counts.
                with self._reachable():
                    if self._store.check(list(keys)):
                        return
                raise missing()
            with self._reachable():
                try:
                    self._store.wait(list(keys), timedelta(seconds=min(left, _SLICE_S)))
                except DistNetworkError:
                    raise
                except DistStoreError:
                    continue
                return

    def _absent(self, keys: Sequence[str]) -> list[int]:
        with self._reachable():
            return [place for place, key in enumerate(keys) if not self._store.check([key])]

    @contextlib.contextmanager
    def _reachable(self) -> Any:
        """What the store's client raises once its server is gone, in words."""
        try:
            yield
        except RanksError:
            raise
        except RuntimeError as error:
            raise RanksMissingError(
                f"rank {self.rank} lost its connection to rank 0, which coordinates saves and restores: that "
                f"process has ended or its host cannot be reached ({error!s:.200})",
                ranks=(0,),
                phase="talking to the coordinator",
            ) from None


def open_channel(
    rank: int, world_size: int, share: Callable[[bytes | None], bytes], *, fixed_host: str | None = None
) -> Channel:
    """Meet the other ranks; called once on every rank.

    Args:
        share: takes the coordinator's bytes (None elsewhere) and returns them on every rank.
        fixed_host: a name by which every rank reaches the coordinator's host, if one is known.

    Raises:
        RanksError: the coordinator cannot be reached from here.
    """
    if rank == 0:
        server = TCPStore(
            "localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=_CONNECT_S)
        )
        address: Address = {
            "hosts": _hosts(fixed_host),
            "machine": _machine(),
            "nonce": secrets.token_hex(16),
            "port": server.port,
        }
        server.set(_NONCE, address["nonce"])
        share(json.dumps(address).encode())

        def connect() -> TCPStore:
            # The closure keeps the server alive for as long as anyone may connect.
            return _client(address, ("localhost",), server)

        return Channel(rank, world_size, connect)
    address = json.loads(share(None))
    hosts = ("localhost",) if address["machine"] == _machine() else tuple(address["hosts"])
    return Channel(rank, world_size, lambda: _client(address, hosts))


def _client(address: Address, hosts: Sequence[str], _server: TCPStore | None = None) -> TCPStore:
    problems = []
    for host in hosts:
        try:
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
        except RuntimeError as error:
            problems.append(f"{host}: {error!s:.120}")
    raise RanksMissingError(
        f"rank 0 listens on port {address['port']} and cannot be reached from here: {'; '.join(problems)}. "
        "Ranks need a route to the coordinator's host on any port; set MASTER_ADDR to a name that all ranks "
        "resolve",
        ranks=(0,),
        phase="meeting",
    )


def _hosts(fixed_host: str | None) -> list[str]:
    """Names and addresses of this host, the likeliest to work first."""
    found = [fixed_host] if fixed_host else []
    if fixed_host:
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # Sends nothing: it asks which own address a packet to that host would leave from.
            probe.connect((fixed_host, 9))
            found.append(probe.getsockname()[0])
    found.append(socket.gethostname())
    return list(dict.fromkeys(found))


def _machine() -> str:
    """What two processes share only on one host: its name and, on Linux, the boot and the network."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        parts.append(file.read().strip())
    with contextlib.suppress(OSError):
        import os

        # Two containers on one host may have networks of their own.
        parts.append(os.readlink("/proc/self/ns/net"))
    return " ".join(parts)
