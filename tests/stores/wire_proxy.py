"""A bad wire: an HTTP/1.1 proxy before a server that fails the nth request in a chosen way, and records all.

A client's ``endpoint_url`` is the proxy. Every header is passed on as it came, Host included, since SigV4
signs it::

    with WireProxy(server.port) as wire:
        wire.arm(Fault.ANSWER_LOST, at=3)
        ...
        assert wire.reached

Requests that come at once are counted in the order in which their last byte arrived here.
"""

from __future__ import annotations

import contextlib
import enum
import http.client
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Final
from urllib.parse import urlsplit

__all__ = ["Fault", "Request", "WireProxy", "any_request"]

_WAIT_S: Final = 60.0
"""For the server behind, which is local: longer means that it hangs."""

_LATE_S: Final = 2.0
"""How long a request that is late waits for the one that overtakes it."""


class Fault(enum.Enum):
    """What happens to a request."""

    DROPPED = "dropped"
    """The connection ends before the server has seen anything of it."""
    RESET = "reset"
    """Likewise, and the client is told by a reset instead of an end of file."""
    ANSWER_LOST = "answer lost"
    """The server has done it, and the connection ends before a byte of the answer."""
    LATE = "late"
    """The connection ends, and the server sees it only after it has answered the next request."""
    SLOW = "slow"
    """It takes a while each way, and nothing is lost."""
    REQUEST_CUT = "request cut"
    """Half of the body reaches the server, and then both connections end."""
    REQUEST_SHORT = "request short"
    """Half of the body reaches the server as if it were all of it."""
    ANSWER_CUT = "answer cut"
    """Half of the answer's body reaches the client, and then the connection ends."""
    ERROR = "500"
    """500 InternalError, and the server has seen nothing of it."""
    UNAVAILABLE = "503"
    """503 ServiceUnavailable, likewise."""
    SLOW_DOWN = "slow down"
    """503 SlowDown, likewise."""
    UNAVAILABLE_AFTER = "503 after"
    """503 ServiceUnavailable, and the server has done it."""
    ERROR_IN_200 = "error in 200"
    """200 with an error as its body, as S3 answers what fails after its headers were sent."""

    @property
    def reaches_the_server(self) -> bool:
        """Whether the request takes effect, now or later."""
        return self in (
            Fault.ANSWER_LOST,
            Fault.ANSWER_CUT,
            Fault.LATE,
            Fault.SLOW,
            Fault.UNAVAILABLE_AFTER,
        )


_ANSWERS: Final = {
    Fault.ERROR: (500, "InternalError"),
    Fault.UNAVAILABLE: (503, "ServiceUnavailable"),
    Fault.UNAVAILABLE_AFTER: (503, "ServiceUnavailable"),
    Fault.SLOW_DOWN: (503, "SlowDown"),
    Fault.ERROR_IN_200: (200, "InternalError"),
}


@dataclass(slots=True, kw_only=True)
class Request:
    """One request as it came by.

    Attributes:
        number: from 1, since the proxy began.
        sent_bytes: of its body.
        received_bytes: of the answer's body, as the server gave it.
        status: the server's; None where it was not asked.
        fault: what befell it.
        at_s: when it came, since the epoch.
        access_key: by whose credentials, as its signature says; empty: by nobody's.
        agent: the program, as it calls itself.
    """

    number: int
    method: str
    path: str
    query: str
    sent_bytes: int
    received_bytes: int = 0
    status: int | None = None
    fault: Fault | None = None
    at_s: float = 0.0
    access_key: str = ""
    agent: str = ""


def any_request(request: Request) -> bool:
    """What counts unless said otherwise."""
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes


class WireProxy:
    """The proxy; it listens from the moment it is made.

    Attributes:
        requests: all of them, in order; appended to while it runs.
    """

    def __init__(self, target_port: int, *, slow_s: float = 0.01) -> None:
        self.requests: list[Request] = []
        self.slow_s = slow_s
        self._target_port = target_port
        self._lock = threading.Lock()
        self._answered = threading.Condition(self._lock)
        self._answers = 0
        self._fault: Fault | None = None
        self._at, self._lasting, self._counts = 0, False, any_request
        self._then: tuple[Fault, ...] = ()
        self._seen = self._hit = 0
        self._open: set[socket.socket] = set()
        self._late: list[threading.Thread] = []
        self._server = _Server(self)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def arm(
        self,
        fault: Fault,
        *,
        at: int = 1,
        lasting: bool = False,
        then: Sequence[Fault] = (),
        counts: Callable[[Request], bool] = any_request,
    ) -> None:
        """Let a request fail.

        Args:
            at: which one, from 1, of those that come from now on.
            lasting: that one, and every one after it.
            then: what befalls those right after it.
            counts: which requests are counted and failed; others pass.
        """
        with self._lock:
            self._fault, self._at, self._lasting, self._counts = fault, at, lasting, counts
            self._then = tuple(then)
            self._seen = self._hit = 0

    def disarm(self) -> None:
        """Let everything pass, once what is late has arrived."""
        with self._answered:
            self._fault = None
            late, self._late = self._late, []
            self._answered.notify_all()
        for thread in late:
            thread.join(_WAIT_S)

    @property
    def hits(self) -> int:
        """How many requests have failed since it was armed."""
        with self._lock:
            return self._hit

    @property
    def reached(self) -> bool:
        """Whether one has."""
        return self.hits > 0

    def close(self) -> None:
        """End it, and every connection."""
        self.disarm()
        self._server.shutdown()
        self._thread.join(_WAIT_S)
        with self._lock:
            held = list(self._open)
        for connection in held:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._server.server_close()

    def __enter__(self) -> WireProxy:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # What the handler's threads call.

    def _note(self, method: str, target: str, sent_bytes: int) -> Request:
        """Count a request, and decide what befalls it."""
        parts = urlsplit(target)
        with self._lock:
            request = Request(
                number=len(self.requests) + 1,
                method=method,
                path=parts.path,
                query=parts.query,
                sent_bytes=sent_bytes,
            )
            self.requests.append(request)
            if self._fault is not None and self._counts(request):
                self._seen += 1
                after = self._seen - self._at
                if after == 0 or (self._lasting and after > 0):
                    request.fault = self._fault
                elif 0 < after <= len(self._then):
                    request.fault = self._then[after - 1]
                self._hit += request.fault is not None
        return request

    def _passed(self) -> None:
        with self._answered:
            self._answers += 1
            self._answered.notify_all()

    def _send_late(self, send: Callable[[], object]) -> None:
        """Send it once another has been answered, or after a while."""
        with self._answered:
            before = self._answers

        def wait_and_send() -> None:
            with self._answered:
                self._answered.wait_for(lambda: self._answers > before or self._fault is None, _LATE_S)
            with contextlib.suppress(OSError, http.client.HTTPException):
                send()

        thread = threading.Thread(target=wait_and_send, daemon=True)
        with self._answered:
            self._late.append(thread)
        thread.start()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # A checkpointer's threads connect at once.
    request_queue_size = 128

    def __init__(self, wire: WireProxy) -> None:
        self.wire = wire
        super().__init__(("127.0.0.1", 0), _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away is none."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def setup(self) -> None:
        super().setup()
        self._upstream: http.client.HTTPConnection | None = None
        with self.server.wire._lock:
            self.server.wire._open.add(self.connection)

    def finish(self) -> None:
        with self.server.wire._lock:
            self.server.wire._open.discard(self.connection)
        self._hang_up()
        with contextlib.suppress(OSError):
            super().finish()

    def log_message(self, format: str, *values: object) -> None:  # noqa: A002 - the base class's name
        """Nobody reads it."""

    def _serve(self) -> None:
        wire = self.server.wire
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        request = wire._note(self.command, self.path, len(body))
        request.at_s, request.agent = time.time(), self.headers.get("User-Agent", "")
        request.access_key = (
            self.headers.get("Authorization", "").partition("Credential=")[2].partition("/")[0]
        )
        fault = request.fault
        if fault in (Fault.DROPPED, Fault.RESET):
            self._drop(reset=fault is Fault.RESET)
        elif fault is Fault.LATE:
            self._send_late(body)
            self._drop()
        elif fault is Fault.REQUEST_CUT:
            self._pass_half(body)
            self._drop()
        elif fault in _ANSWERS and fault is not Fault.UNAVAILABLE_AFTER:
            self._refuse(*_ANSWERS[fault])
        else:
            if fault is Fault.REQUEST_SHORT:
                body = body[: len(body) // 2]
            if fault is Fault.SLOW:
                threading.Event().wait(wire.slow_s)
            try:
                answer = self._pass_on(body)
            except (OSError, http.client.HTTPException):
                self._hang_up()
                self._drop()
                return
            request.status, request.received_bytes = answer.status, len(answer.body)
            if fault is Fault.ANSWER_LOST:
                self._drop()
            elif fault is Fault.UNAVAILABLE_AFTER:
                self._refuse(*_ANSWERS[fault])
            else:
                self._answer(answer, cut=fault is Fault.ANSWER_CUT)
                wire._passed()

    def do_GET(self) -> None:
        self._serve()

    def do_HEAD(self) -> None:
        self._serve()

    def do_PUT(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def do_DELETE(self) -> None:
        self._serve()

    # Towards the server.

    def _pass_on(self, body: bytes) -> _Answer:
        headers = list(self.headers.items())
        kept = self._upstream
        self._upstream = kept or _connect(self.server.wire._target_port)
        try:
            return _send(self._upstream, self.command, self.path, headers, body)
        except (OSError, http.client.HTTPException):
            if kept is None:
                raise
        # It had been kept open, and the server has closed it since: nobody has seen the request.
        self._hang_up()
        self._upstream = _connect(self.server.wire._target_port)
        return _send(self._upstream, self.command, self.path, headers, body)

    def _send_late(self, body: bytes) -> None:
        wire, sent = self.server.wire, (self.command, self.path, list(self.headers.items()))

        def send() -> None:
            with contextlib.closing(_connect(wire._target_port)) as connection:
                _send(connection, *sent, body)

        wire._send_late(send)

    def _pass_half(self, body: bytes) -> None:
        connection = _connect(self.server.wire._target_port)
        try:
            _put_head(connection, self.command, self.path, list(self.headers.items()), len(body))
            connection.send(body[: len(body) // 2])
        finally:
            connection.close()

    def _hang_up(self) -> None:
        if self._upstream is not None:
            self._upstream.close()
            self._upstream = None

    # Towards the client.

    def _drop(self, *, reset: bool = False) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            if reset:
                # On, and no time to linger: the kernel sends a reset.
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()
            else:
                self.connection.shutdown(socket.SHUT_RDWR)

    def _refuse(self, status: int, code: str) -> None:
        error = f"<Error><Code>{code}</Code><Message>injected</Message></Error>"
        body = f'<?xml version="1.0" encoding="UTF-8"?>{error}'.encode()
        headers = (("Content-Type", "application/xml"), ("Content-Length", str(len(body))))
        self._answer(_Answer(status=status, headers=headers, body=body))

    def _answer(self, answer: _Answer, *, cut: bool = False) -> None:
        with contextlib.suppress(OSError):
            self.send_response_only(answer.status)
            for name, value in answer.headers:
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer.body[: len(answer.body) // 2] if cut else answer.body)
            self.wfile.flush()
            if cut:
                self._drop()


def _connect(port: int) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", port, timeout=_WAIT_S)


def _put_head(
    connection: http.client.HTTPConnection,
    method: str,
    target: str,
    headers: list[tuple[str, str]],
    length: int,
) -> None:
    connection.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
    for name, value in headers:
        # The client has been told to continue by this proxy.
        if name.lower() not in ("expect", "connection", "content-length"):
            connection.putheader(name, value)
    if length or method in ("PUT", "POST"):
        connection.putheader("Content-Length", str(length))
    connection.endheaders()


def _send(
    connection: http.client.HTTPConnection,
    method: str,
    target: str,
    headers: list[tuple[str, str]],
    body: bytes,
) -> _Answer:
    _put_head(connection, method, target, headers, len(body))
    if body:
        connection.send(body)
    response = connection.getresponse()
    data = response.read()
    kept = [
        (name, value)
        for name, value in response.getheaders()
        if name.lower() not in ("transfer-encoding", "connection", "content-length")
    ]
    # The answer to HEAD has a length and no body.
    length = response.headers.get("Content-Length") if method == "HEAD" else str(len(data))
    if length is not None and response.status != 204:
        kept.append(("Content-Length", length))
    return _Answer(status=response.status, headers=tuple(kept), body=data)
