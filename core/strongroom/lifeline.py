"""How rank 0 knows at once that another rank's process has ended, or that its host is gone.

A `TCPStore` does not say who has left it, so that a rank which was killed would be waited for as long as a
slow one. Each rank therefore holds one more connection to rank 0, on which nothing is said: the kernel closes
it when the process ends, however it ends, and finds out within a minute where a host does not answer. A
process that is stopped, or busy for long, keeps its connection: for such a one the timeout is there.

Without that connection (a firewall, say) nothing is wrong but that the timeout is waited for.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

__all__ = ["Lifeline", "Lifelines"]

_GRACE_S: Final = 1.0
"""What a rank said last may still be on its way, on another connection."""

_RANK_BYTES: Final = 4
_GOODBYE: Final = b"."
_MOST_STRANGERS: Final = 1024
"""Connections that have not said yet whose they are."""

_KEEPALIVE: Final = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 4}
"""Seconds, seconds, and how many times: a host that is gone is given up after a minute."""

_SOCKETS: Final[weakref.WeakSet[socket.socket]] = weakref.WeakSet()
"""Those of this process. A fork that kept one open would have its parent look alive."""

_HELD: Final[set[Lifeline]] = set()
"""Not closed with whoever forgot them: only the process's end means that it has ended."""


def _close_in_fork() -> None:
    for each in list(_SOCKETS):
        each.close()


os.register_at_fork(after_in_child=_close_in_fork)


class Lifeline:
    """The connection of one rank, held from when it is made until `let_go`, or the process ends.

    Args:
        hosts: names of rank 0's host, to try in order.
        port: where its `Lifelines` listen.
        nonce: what they know their ranks by, in ASCII.
        rank: this one.

    Raises:
        OSError: they cannot be reached.
    """

    def __init__(self, hosts: Sequence[str], port: int, nonce: str, rank: int, *, within_s: float) -> None:
        self._socket = _connected(hosts, port, within_s)
        self._process_id = os.getpid()
        _SOCKETS.add(self._socket)
        _keep_alive(self._socket)
        self._socket.sendall(nonce.encode("ascii") + rank.to_bytes(_RANK_BYTES, "big"))
        _HELD.add(self)

    def let_go(self) -> None:
        """Say good-bye: this rank is not to be asked any more."""
        _HELD.discard(self)
        if self._process_id == os.getpid():
            with contextlib.suppress(OSError):
                self._socket.sendall(_GOODBYE)
            self._socket.close()


class _Peer:
    """Who is at the other end of one connection."""

    def __init__(self) -> None:
        self.said = b""
        self.rank: int | None = None


class Lifelines:
    """Rank 0's ends of all of them, watched by a thread.

    Args:
        nonce: what a rank has to say first.

    Raises:
        OSError: this process may not listen.
    """

    def __init__(self, nonce: str) -> None:
        self._nonce = nonce.encode("ascii")
        self._mark: Callable[[str], None] | None = None
        self._lock = threading.Lock()
        self._gone: dict[int, float] = {}
        self._awaited: dict[int, set[str]] = {}
        self._is_over = False
        self._listening = _listening()
        self.port: Final = int(self._listening.getsockname()[1])
        self._wake, self._woken = socket.socketpair()
        _SOCKETS.update((self._listening, self._wake, self._woken))
        self._selector = selectors.DefaultSelector()
        for each in (self._listening, self._woken):
            each.setblocking(False)
            self._selector.register(each, selectors.EVENT_READ)
        self._process_id = os.getpid()

    def begin(self, mark: Callable[[str], None]) -> None:
        """Watch.

        Args:
            mark: says under a key, in a rank's place, that it will not come; called by the thread.
        """
        self._mark = mark
        threading.Thread(target=self._watch, name="strongroom-lifelines", daemon=True).start()

    @contextmanager
    def awaiting(self, keys: Mapping[int, str]) -> Iterator[None]:
        """Meanwhile, what a rank does not say any more, since it has ended, is said in its place.

        Args:
            keys: of each rank that is waited for, the key under which it will say something.
        """
        with self._lock:
            for rank, key in keys.items():
                self._awaited.setdefault(rank, set()).add(key)
            is_any_gone = not self._gone.keys().isdisjoint(keys)
        if is_any_gone:
            self._poke()
        try:
            yield
        finally:
            with self._lock:
                for rank, key in keys.items():
                    self._awaited.get(rank, set()).discard(key)

    def let_go(self) -> None:
        """Watch no longer."""
        if self._process_id == os.getpid():
            self._is_over = True
            self._poke()

    def _poke(self) -> None:
        with contextlib.suppress(OSError):
            self._wake.send(b"!")

    # ------------------------------------------------------------------------------------- the thread

    def _watch(self) -> None:
        try:
            while not self._is_over:
                for key, _ in self._selector.select(self._until_due()):
                    if key.fileobj is self._listening:
                        self._accept()
                    elif key.fileobj is self._woken:
                        self._woken.recv(4096)
                    else:
                        self._hear(key.fileobj, key.data)  # type: ignore[arg-type]
                self._say_who_is_gone()
        finally:
            for key in list(self._selector.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]
            self._selector.close()
            self._wake.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listening.accept()
        except OSError:
            return
        strangers = sum(
            isinstance(key.data, _Peer) and key.data.rank is None for key in self._selector.get_map().values()
        )
        if strangers >= _MOST_STRANGERS:
            connection.close()
            return
        _SOCKETS.add(connection)
        connection.setblocking(False)
        _keep_alive(connection)
        self._selector.register(connection, selectors.EVENT_READ, _Peer())

    def _hear(self, connection: socket.socket, peer: _Peer) -> None:
        try:
            said = connection.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        peer.said += said
        hello_bytes = len(self._nonce) + _RANK_BYTES
        if peer.rank is None and len(peer.said) >= hello_bytes and peer.said.startswith(self._nonce):
            peer.rank = int.from_bytes(peer.said[len(self._nonce) : hello_bytes], "big")
        has_parted = peer.rank is not None and len(peer.said) > hello_bytes
        is_stranger = peer.rank is None and not self._nonce.startswith(peer.said[: len(self._nonce)])
        if said and not has_parted and not is_stranger:
            return
        self._selector.unregister(connection)
        connection.close()
        if peer.rank is not None and not has_parted:
            with self._lock:
                self._gone.setdefault(peer.rank, time.monotonic())

    def _until_due(self) -> float | None:
        """Seconds until something may be said in the place of a rank that is gone; None: nothing is due."""
        with self._lock:
            due = [since for rank, since in self._gone.items() if self._awaited.get(rank)]
        return max(0.0, min(due) + _GRACE_S - time.monotonic()) if due else None

    def _say_who_is_gone(self) -> None:
        now = time.monotonic()
        with self._lock:
            gone = [rank for rank, since in self._gone.items() if now >= since + _GRACE_S]
            keys = [key for rank in gone for key in self._awaited.get(rank, ())]
            for rank in gone:
                self._awaited.pop(rank, None)
        for key in keys:
            if self._mark is not None:
                self._mark(key)


def _connected(hosts: Sequence[str], port: int, within_s: float) -> socket.socket:
    problem: OSError = OSError("no host to connect to")
    for host in hosts:
        try:
            return socket.create_connection((host, port), within_s)
        except OSError as error:
            problem = error
    raise problem


def _listening() -> socket.socket:
    """On every address of this host: by which of them a rank comes is not known."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=1024)


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        # Each system has some of them.
        if hasattr(socket, name):
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
