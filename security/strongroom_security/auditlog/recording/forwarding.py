"""Events on their way to others besides the sink: syslog (RFC 5424) and Python's own logging.

They go from a thread of their own. What these receivers lose is not lost: the log is in the sink.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import socket
import ssl
import threading
from collections import deque
from collections.abc import Sequence
from datetime import datetime, timezone
from itertools import count
from queue import SimpleQueue
from typing import Any, Final, Protocol

from strongroom.auditing import Outcome
from strongroom.errors import ConfigError

__all__ = ["Forwarding", "LoggingReceiver", "Receiver", "SyslogReceiver", "receiver_of", "syslog_message"]

_LOG: Final = logging.getLogger("strongroom")

_FACILITY: Final = 13
"""RFC 5424, 6.2.1: log audit."""
_ALERT, _ERROR, _WARNING, _INFORMATIONAL = 1, 3, 4, 6
_HIGH: Final = 4
"""OCSF's severity_id of what somebody should look at."""

_WAITING: Final = 10_000
_CONNECT_S: Final = 5.0
_PAUSE_S: Final = 5.0
_DATAGRAM_BYTES: Final = 60_000
"""What is longer is cut: a datagram has at most 65,507 bytes over IPv4."""

_NETWORK: Final = re.compile(r"(udp|tcp|tls)://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?")
_PORTS: Final = {"udp": 514, "tcp": 601, "tls": 6514}
"""RFC 5426, RFC 6587 and RFC 5425."""
_EXPECTED: Final = (
    "expected 'syslog:udp://HOST:PORT', 'syslog:tcp://HOST:PORT', 'syslog:tls://HOST:PORT', "
    "'syslog:unix:/dev/log' or 'logging:NAME'"
)


class Receiver(Protocol):
    """Whoever else hears of events; used by one thread."""

    @property
    def name(self) -> str:
        """As the policy names it."""

    def send(self, line: bytes, event: dict[str, Any]) -> None:
        """Hand an event on.

        Args:
            line: the event as it stands in the log, without its line feed.
            event: the same, decoded.

        Raises:
            OSError: it could not be; it may be tried again.
        """


def receiver_of(text: object) -> Receiver:
    """What a policy's text means; nothing is connected yet.

    Raises:
        ConfigError: it means nothing.
    """
    if isinstance(text, str):
        kind, _, rest = text.partition(":")
        if kind == "logging" and rest and rest.isprintable():
            return LoggingReceiver(rest)
        if kind == "syslog" and rest.startswith("unix:/"):
            return SyslogReceiver(text, "unix", rest.removeprefix("unix:"), 0)
        match = _NETWORK.fullmatch(rest) if kind == "syslog" else None
        if match is not None:
            port = int(match[3] or _PORTS[match[1]])
            if 0 < port < 65536:
                return SyslogReceiver(text, match[1], match[2].strip("[]"), port)
    raise ConfigError(f"{_EXPECTED}; got {text!r:.100}")


def syslog_message(line: bytes, event: dict[str, Any]) -> bytes:
    """One message of RFC 5424: the event's JSON, behind a header that other tools sort by."""
    extension = event["strongroom"]
    when = datetime.fromtimestamp(event["time"] / 1000, timezone.utc)
    header = (
        f"<{_FACILITY * 8 + _severity(event)}>1 {when.strftime('%Y-%m-%dT%H:%M:%S.%f')[:-3]}Z "
        f"{_printable(event['src_endpoint']['hostname'], 255)} strongroom "
        f"{event['actor']['process']['pid']} {_printable(extension['action'], 32)} - "
    )
    return header.encode("ascii") + line


def _severity(event: dict[str, Any]) -> int:
    if event["severity_id"] >= _HIGH:
        return _ALERT
    outcome = event["strongroom"]["outcome"]
    if outcome == Outcome.DENIED.value:
        return _WARNING
    return _ERROR if outcome == Outcome.FAILURE.value else _INFORMATIONAL


def _printable(text: str, most: int) -> str:
    return "".join(each if "!" <= each <= "~" else "_" for each in text)[:most] or "-"


class LoggingReceiver:
    """A logger of Python's ``logging``: the event is each record's ``strongroom_audit``."""

    def __init__(self, name: str) -> None:
        self.name: Final = f"logging:{name}"
        self._logger = logging.getLogger(name)
        if not self._logger.handlers:
            # Without any handler logging prints what is graver than a notice, and here that is raw JSON.
            self._logger.addHandler(logging.NullHandler())

    def send(self, line: bytes, event: dict[str, Any]) -> None:
        severity = _severity(event)
        level = {_ALERT: logging.CRITICAL, _ERROR: logging.ERROR, _WARNING: logging.WARNING}.get(
            severity, logging.INFO
        )
        self._logger.log(level, "%s", line.decode("utf-8"), extra={"strongroom_audit": event})


class SyslogReceiver:
    """A syslog server: by datagrams, by TCP with counted octets (RFC 6587, 3.4.1), by TLS (RFC 5425)."""

    def __init__(self, name: str, transport: str, host: str, port: int) -> None:
        self.name: Final = name
        self._transport = transport
        self._host = host
        self._port = port
        self._socket: socket.socket | None = None

    def send(self, line: bytes, event: dict[str, Any]) -> None:
        message = syslog_message(line, event)
        is_stream = self._transport in ("tcp", "tls")
        data = b"%d %s" % (len(message), message) if is_stream else message[:_DATAGRAM_BYTES]
        if self._socket is not None and is_stream and _has_ended(self._socket):
            self.close()  # else the first message after the server went would be lost without a trace
        if self._socket is None:
            self._socket = self._connect()
        try:
            self._socket.sendall(data)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        connection, self._socket = self._socket, None
        if connection is not None:
            connection.close()

    def _connect(self) -> socket.socket:
        if self._transport == "unix":
            made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            target: Any = self._host
        elif self._transport == "udp":
            family, kind, _, _, target = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_DGRAM)[0]
            made = socket.socket(family, kind)
        else:
            made = socket.create_connection((self._host, self._port), _CONNECT_S)
            if self._transport == "tls":
                return ssl.create_default_context().wrap_socket(made, server_hostname=self._host)
            return made
        try:
            made.settimeout(_CONNECT_S)
            made.connect(target)
        except OSError:
            made.close()
            raise
        return made


def _has_ended(connection: socket.socket) -> bool:
    """Whether the other side has closed a connection on which it never says anything."""
    timeout = connection.gettimeout()
    try:
        connection.settimeout(0)
        return not connection.recv(1)
    except (BlockingIOError, ssl.SSLWantReadError):
        return False
    except OSError:
        return True
    finally:
        connection.settimeout(timeout)


class Forwarding:
    """Hands events on to all receivers, in order, from a thread that begins with the first event.

    Args:
        receivers: whom.
        pause_s: between tries, where one is out of reach.
    """

    def __init__(self, receivers: Sequence[Receiver], *, pause_s: float = _PAUSE_S) -> None:
        self._ways = [_Way(receiver, pause_s) for receiver in receivers]

    def put(self, line: bytes) -> None:
        """Take an event; never waits, and never raises."""
        for way in self._ways:
            way.put(line)

    def drain(self, within_s: float) -> None:
        """Wait for what was taken until now to be handed on, for no longer than that."""
        for way in self._ways:
            way.drain(within_s)


class _Way:
    """To one receiver: a dead one must not keep the others from hearing.

    What it shares with whoever puts lines in are queues that a signal's handler may come in between of.
    """

    def __init__(self, receiver: Receiver, pause_s: float) -> None:
        self._receiver = receiver
        self._pause_s = pause_s
        self._lines: deque[bytes] = deque(maxlen=_WAITING)
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._taken = count(1)
        self._put = 0
        self._begun: dict[str, threading.Thread] = {}
        self._changed = threading.Condition()
        self._handed_on = 0
        self._lost = 0
        self._is_down = False

    def put(self, line: bytes) -> None:
        self._lines.append(line)  # the oldest goes where it is full
        self._put = next(self._taken)
        self._bell.put(None)
        if not self._begun:
            thread = threading.Thread(target=self._run, name="strongroom-audit-also", daemon=True)
            # Two that begin it at once, or a program that is ending: the one that is entered goes on.
            with contextlib.suppress(RuntimeError):
                thread.start()

    def drain(self, within_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_down or not self._lines, within_s)

    def _run(self) -> None:
        this = threading.current_thread()
        if self._begun.setdefault("it", this) is not this:
            return
        while True:
            if not self._lines:
                self._bell.get()
                continue
            line, lost = self._lines[0], self._lost
            problem = self._send(line)
            with self._changed:
                if problem is None or not isinstance(problem, OSError):
                    with contextlib.suppress(IndexError):
                        if self._lines[0] is line:
                            self._lines.popleft()
                    self._handed_on += 1
                self._lost = max(0, self._put - self._handed_on - len(self._lines))
                was_down, self._is_down = self._is_down, problem is not None
                self._changed.notify_all()
            if problem is not None and not was_down:
                _LOG.warning(
                    "audit events do not reach %s: %s; they are in the log all the same",
                    self._receiver.name,
                    problem,
                )
            elif problem is None and lost:
                _LOG.warning("%d audit events never reached %s", lost, self._receiver.name)
                self._handed_on += lost
            if isinstance(problem, OSError):
                threading.Event().wait(self._pause_s)

    def _send(self, line: bytes) -> Exception | None:
        try:
            self._receiver.send(line, json.loads(line))
        except Exception as error:  # noqa: BLE001 - a handler of logging is anybody's code
            return error
        return None
