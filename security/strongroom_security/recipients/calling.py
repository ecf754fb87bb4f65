"""Calls to keepers of keys outside this process: bounded in time, repeated with jitter, whole after a fork.

A keeper's adapter says what one try is and what each of its failures means; when to try again, when
to give up, and on which thread, is decided here for all of them. Nothing here knows a protocol.
"""

from __future__ import annotations

import contextvars
import importlib
import ipaddress
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar, cast
from urllib.parse import urlsplit

from strongroom import chance
from strongroom.errors import ConfigError, KeyServiceError

__all__ = [
    "PLAIN_HTTP_VARIABLE",
    "Deadline",
    "PerProcess",
    "TryAgainError",
    "ask",
    "check_endpoint",
    "library",
]

_T = TypeVar("_T")

_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 5.0

PLAIN_HTTP_VARIABLE: Final = "STRONGROOM_UNSAFE_PLAIN_HTTP"
"""Set to ``1``, it lets keys travel unencrypted to a service on another machine."""


class TryAgainError(Exception):
    """One try failed in a way that passes.

    Args:
        reason: what happened, for people; no key bytes.
        not_before_s: the keeper asked to be left alone for so long.
    """

    def __init__(self, reason: str, *, not_before_s: float = 0.0) -> None:
        super().__init__(reason)
        self.reason = reason
        self.not_before_s = not_before_s


class Deadline:
    """When a call has ended."""

    def __init__(self, within_s: float) -> None:
        self._end = time.monotonic() + within_s

    def remaining_s(self) -> float:
        """Seconds that are left; 0 once there are none."""
        return max(0.0, self._end - time.monotonic())


def ask(
    attempt: Callable[[Deadline], _T],
    *,
    whom: str,
    within_s: float,
    sleep: Callable[[float], None] = time.sleep,
    draw: Callable[[float, float], float] = chance.uniform,
) -> _T:
    """Try until a keeper has answered, and for ``within_s`` seconds at most.

    The pauses between tries are random between nothing and a bound that doubles ("full jitter"), so
    that a thousand jobs which one outage stopped do not come back as one.

    It runs on a thread of its own that is left behind when the time is up. A socket's timeout bounds one
    wait for bytes and not the call: finding the address has no bound, an answer may trickle, and a
    library in C waits as long as it likes.

    Args:
        attempt: one try. It raises `TryAgainError` for what passes, and anything else for what does not.
        whom: the recipient, as the policy names it.
        within_s: seconds.
        sleep: waits.
        draw: a random number between two others.

    Raises:
        KeyServiceError: there was no answer in time.
    """
    deadline = Deadline(within_s)
    outcome: list[tuple[_T | None, BaseException | None]] = []
    has_ended = threading.Event()
    last: list[str] = []

    def run() -> None:
        try:
            outcome.append((_repeat(attempt, deadline, whom, within_s, last, sleep, draw), None))
        except BaseException as error:  # noqa: BLE001 - raised again by whoever waits below
            outcome.append((None, error))
        has_ended.set()

    # A daemon: what waits for a dead service must not keep the interpreter from ending.
    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(run,), name="strongroom-keys", daemon=True).start()
    if not has_ended.wait(deadline.remaining_s()):
        raise KeyServiceError(_gave_up(whom, within_s, last))
    # An error holds frames, and in them keys may stand. Neither this list nor this frame holds it in turn,
    # so all of them go with the error, and not at some later collection of cycles.
    value, error = outcome.pop()
    if error is None:
        return cast(_T, value)
    try:
        raise error
    finally:
        del error


def _repeat(
    attempt: Callable[[Deadline], _T],
    deadline: Deadline,
    whom: str,
    within_s: float,
    last: list[str],
    sleep: Callable[[float], None],
    draw: Callable[[float, float], float],
) -> _T:
    bound = _FIRST_PAUSE_S
    while True:
        try:
            return attempt(deadline)
        except TryAgainError as error:
            last.append(error.reason)
            pause = error.not_before_s + draw(0.0, bound)
        bound = min(_LONGEST_PAUSE_S, 2 * bound)
        if pause >= deadline.remaining_s():
            raise KeyServiceError(_gave_up(whom, within_s, last))
        sleep(pause)


def _gave_up(whom: str, within_s: float, last: list[str]) -> str:
    tries = f"{len(last)} tries failed, the last one: {last[-1]}" if last else "it did not answer"
    return (
        f"{whom} could not be used within {within_s:g} s: {tries}; "
        "see that it is up, reachable from here and not over its quota, then do it again"
    )


class PerProcess(Generic[_T]):
    """A value that is made when it is first asked for, and once more in a forked child.

    Sockets, locks and handles of libraries are not shared by two processes.
    """

    def __init__(self, make: Callable[[], _T]) -> None:
        self._make = make
        self.forget()
        _EVERY.add(self)

    def get(self) -> _T:
        """The value. One thread makes it; others wait."""
        with self._lock:
            if not self._made:
                self._made.append(self._make())
            return self._made[0]

    def forget(self) -> None:
        """Make it anew when it is next asked for."""
        # The lock too: in a forked child the old one may be held by a thread that is not there.
        self._lock = threading.Lock()
        self._made: list[_T] = []


_EVERY: Final[weakref.WeakSet[PerProcess[Any]]] = weakref.WeakSet()


def _forget_all() -> None:
    for each in list(_EVERY):
        each.forget()


os.register_at_fork(after_in_child=_forget_all)


def library(name: str, *, extra: str, whom: str) -> Any:
    """Import a library that an extra brings.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"{whom} needs the package {name.partition('.')[0]}, which cannot be imported ({error}); "
            f"install it with: pip install 'strongroom[{extra}]'"
        ) from error


def check_endpoint(url: str, *, whom: str) -> str:
    """Return a service's address unchanged if keys may be sent there.

    Raises:
        ConfigError: it is no address, or plain HTTP to another machine.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(
            f"{whom}: {url!r} is not an address ({error}); expected https://HOST[:PORT]"
        ) from None
    if parts.scheme not in {"http", "https"} or not host or port == 0:
        raise ConfigError(f"{whom}: {url!r} is not an address; expected https://HOST[:PORT]")
    if parts.username is not None or parts.query or parts.fragment:
        raise ConfigError(
            f"{whom}: the address may hold no user, query or fragment; expected https://HOST[:PORT]"
        )
    if parts.scheme == "http" and not _is_here(host) and os.environ.get(PLAIN_HTTP_VARIABLE) != "1":
        raise ConfigError(
            f"{whom}: {url!r} would send keys over the network unencrypted; use https, or, where "
            f"something else protects that network, set {PLAIN_HTTP_VARIABLE}=1"
        )
    return url


def _is_here(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
