"""The bad wire does to a request what it was told to, and nothing to the others."""

from __future__ import annotations

import contextlib
import http.client
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from wire_proxy import Fault, WireProxy

_BODY = b"0123456789"
_LOST = (OSError, http.client.HTTPException)


class _Echo(ThreadingHTTPServer):
    """Answers with what it was sent, and keeps it."""

    daemon_threads = True

    def __init__(self) -> None:
        self.seen: list[bytes] = []
        super().__init__(("127.0.0.1", 0), _EchoHandler)

    def handle_error(self, request: object, client_address: object) -> None:
        """A connection that was cut is none."""


class _EchoHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Echo

    def do_PUT(self) -> None:
        length = int(self.headers["Content-Length"])
        body = self.rfile.read(length)
        if len(body) < length:
            return
        self.server.seen.append(body)
        self.send_response_only(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Host", self.headers["Host"])
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def echo() -> Iterator[_Echo]:
    server = _Echo()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def wire(echo: _Echo) -> Iterator[WireProxy]:
    with WireProxy(int(echo.server_address[1])) as proxy:
        yield proxy


def _put(wire: WireProxy, body: bytes = _BODY) -> tuple[int, bytes]:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", wire.port, timeout=30)) as connection:
        connection.request("PUT", "/a/key?part=1", body)
        answer = connection.getresponse()
        assert answer.headers.get("X-Host") in (None, f"127.0.0.1:{wire.port}")
        return answer.status, answer.read()


def test_what_is_not_armed_passes_and_is_recorded(wire: WireProxy, echo: _Echo) -> None:
    assert _put(wire) == (200, _BODY)
    assert echo.seen == [_BODY]
    [request] = wire.requests
    assert (request.method, request.path, request.query) == ("PUT", "/a/key", "part=1")
    assert (request.sent_bytes, request.received_bytes, request.status, request.fault) == (10, 10, 200, None)


@pytest.mark.parametrize(
    ("fault", "server_saw", "answer"),
    (
        (Fault.DROPPED, [], None),
        (Fault.RESET, [], None),
        (Fault.ANSWER_LOST, [_BODY], None),
        (Fault.SLOW, [_BODY], (200, _BODY)),
        (Fault.REQUEST_CUT, [], None),
        (Fault.REQUEST_SHORT, [_BODY[:5]], (200, _BODY[:5])),
        (Fault.ANSWER_CUT, [_BODY], None),
        (Fault.ERROR, [], 500),
        (Fault.UNAVAILABLE, [], 503),
        (Fault.SLOW_DOWN, [], 503),
        (Fault.UNAVAILABLE_AFTER, [_BODY], 503),
        (Fault.ERROR_IN_200, [], 200),
    ),
)
def test_each_fault_befalls_the_request_that_was_chosen(
    wire: WireProxy,
    echo: _Echo,
    fault: Fault,
    server_saw: list[bytes],
    answer: tuple[int, bytes] | int | None,
) -> None:
    wire.arm(fault, at=2, counts=lambda request: request.method == "PUT")
    assert _put(wire) == (200, _BODY)
    if answer is None:
        with pytest.raises(_LOST):
            _put(wire)
    elif isinstance(answer, int):
        status, body = _put(wire)
        assert status == answer
        assert b"<Error><Code>" in body
    else:
        assert _put(wire) == answer
    assert wire.hits == 1
    assert _put(wire) == (200, _BODY)
    assert echo.seen == [_BODY, *server_saw, _BODY]


def test_what_is_late_is_overtaken(wire: WireProxy, echo: _Echo) -> None:
    wire.arm(Fault.LATE)
    with pytest.raises(_LOST):
        _put(wire, b"first")
    assert _put(wire, b"second") == (200, b"second")
    wire.disarm()
    assert echo.seen == [b"second", b"first"]


def test_a_lasting_fault_befalls_every_request_that_counts(wire: WireProxy, echo: _Echo) -> None:
    wire.arm(Fault.UNAVAILABLE, lasting=True, counts=lambda request: request.sent_bytes > 3)
    assert [_put(wire, body)[0] for body in (b"abcd", b"abc", b"abcde")] == [503, 200, 503]
    wire.disarm()
    assert _put(wire)[0] == 200
    assert wire.hits == 2
