"""Events on their way to syslog and to Python's logging: real sockets, and what comes of events without."""

from __future__ import annotations

import json
import logging
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from recorders import LONG_S, Place, act, soon

from strongroom.auditing import Action, Outcome
from strongroom.errors import ConfigError
from strongroom_security.auditlog.recording.forwarding import Forwarding, receiver_of, syslog_message

HEADER = re.compile(
    rb"<(?P<pri>[0-9]+)>1 (?P<time>[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]{3}Z) "
    rb"(?P<host>[!-~]{1,255}) strongroom (?P<pid>[0-9]+) (?P<id>[!-~]{1,32}) - (?P<message>\{.*\})"
)
"""RFC 5424, 6: PRI VERSION TIMESTAMP HOSTNAME APP-NAME PROCID MSGID STRUCTURED-DATA MSG."""


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@contextmanager
def datagrams(family: int, address: object) -> Iterator[socket.socket]:
    with closing(socket.socket(family, socket.SOCK_DGRAM)) as listener:
        listener.settimeout(LONG_S)
        listener.bind(address)
        yield listener


def framed(connection: socket.socket) -> bytes:
    """One message with its octets counted: RFC 6587, 3.4.1."""
    length = b""
    while (byte := connection.recv(1)) != b" ":
        length += byte
    message = b""
    while len(message) < int(length):
        message += connection.recv(int(length) - len(message))
    return message


def test_udp_carries_each_event_as_one_message(place: Place) -> None:
    with datagrams(socket.AF_INET, ("127.0.0.1", 0)) as listener:
        also = (f"syslog:udp://127.0.0.1:{listener.getsockname()[1]}",)
        with place.auditor(also=also) as auditor:
            auditor.record(act(7))
            match = HEADER.fullmatch(listener.recv(65536))
    assert match is not None
    event = json.loads(match["message"])
    assert event["strongroom"]["details"] == {"number": 7}
    assert event["class_uid"] == 6005
    assert int(match["pri"]) == 13 * 8 + 6  # log audit, informational
    assert match["id"] == b"save"


def test_a_local_socket_carries_them_too(place: Place, tmp_path: Path) -> None:
    also = (f"syslog:unix:{tmp_path / 'log'}",)
    with (
        datagrams(socket.AF_UNIX, str(tmp_path / "log")) as listener,
        place.auditor(also=also) as auditor,
    ):
        auditor.intend(act(8))
        match = HEADER.fullmatch(listener.recv(65536))
    assert match is not None
    assert json.loads(match["message"])["strongroom"]["details"] == {"number": 8}


def test_tcp_counts_octets_and_connects_again(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "strongroom_security.auditlog.recording.recording.Forwarding", lambda to: Forwarding(to, pause_s=0.02)
    )
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        server.settimeout(LONG_S)
        also = (f"syslog:tcp://127.0.0.1:{server.getsockname()[1]}",)
        with place.auditor(also=also) as auditor:
            auditor.record(act(1))
            auditor.record(act(2))
            first, _ = server.accept()
            assert [HEADER.fullmatch(framed(first)) is not None for _ in range(2)] == [True, True]
            first.close()
            auditor.record(act(3))
            second, _ = server.accept()
            match = HEADER.fullmatch(framed(second))
            second.close()
    assert match is not None
    assert json.loads(match["message"])["strongroom"]["details"] == {"number": 3}


@pytest.mark.parametrize(
    ("action", "outcome", "severity"),
    (
        (Action.SAVE, Outcome.SUCCESS, 6),
        (Action.RESTORE, Outcome.UNKNOWN, 6),
        (Action.RESTORE, Outcome.DENIED, 4),
        (Action.SAVE, Outcome.FAILURE, 3),
        (Action.BREAK_GLASS, Outcome.SUCCESS, 1),
        (Action.ALERT, Outcome.SUCCESS, 1),
    ),
)
def test_what_is_worse_is_more_severe(
    place: Place, caplog: pytest.LogCaptureFixture, action: Action, outcome: Outcome, severity: int
) -> None:
    with caplog.at_level(logging.DEBUG, "audit.test"), place.auditor(also=("logging:audit.test",)) as auditor:
        auditor.record(act(1, action=action, outcome=outcome))
        assert soon(lambda: any(record.name == "audit.test" for record in caplog.records))
    (record,) = [record for record in caplog.records if record.name == "audit.test"]
    event = record.strongroom_audit  # type: ignore[attr-defined]
    assert syslog_message(b"{}", event).startswith(b"<%d>1 " % (13 * 8 + severity))
    assert json.loads(record.message) == event
    assert (
        record.levelno
        == {6: logging.INFO, 4: logging.WARNING, 3: logging.ERROR, 1: logging.CRITICAL}[severity]
    )


def test_a_receiver_that_is_down_keeps_no_event_from_the_log(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))  # and never listens
        also = (f"syslog:tcp://127.0.0.1:{taken.getsockname()[1]}", "logging:audit.test")
        with caplog.at_level(logging.INFO), place.auditor(also=also) as auditor:
            auditor.record(act(1))
            assert soon(lambda: any(record.name == "audit.test" for record in caplog.records))
            assert soon(lambda: "do not reach syslog:tcp" in caplog.text)
    assert place.numbers() == [1]


def test_a_handler_that_raises_or_hangs_keeps_no_event_from_the_log(place: Place) -> None:
    is_free = threading.Event()

    class Bad(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            is_free.wait(LONG_S)
            raise RuntimeError("a handler of somebody's own")

    logger, handler = logging.getLogger("audit.bad"), Bad()
    logger.addHandler(handler)
    try:
        with place.auditor(also=("logging:audit.bad",)) as auditor:
            logger.setLevel(logging.INFO)
            auditor.record(act(1))
            auditor.intend(act(2))
            assert place.numbers() == [1, 2]
            is_free.set()
    finally:
        logger.removeHandler(handler)


@pytest.mark.parametrize(
    "text",
    (
        "syslog",
        "syslog:",
        "syslog:http://a:1",
        "syslog:udp://",
        "syslog:udp://host:0",
        "syslog:udp://host:99999",
        "syslog:udp://ho st:514",
        "syslog:unix:log",
        "logging:",
        "mail:me",
        7,
    ),
)
def test_what_names_no_receiver_is_refused(text: object) -> None:
    with pytest.raises(ConfigError, match="expected 'syslog:udp"):
        receiver_of(text)


def test_a_receiver_without_a_port_has_the_usual_one() -> None:
    for text in ("syslog:udp://loghost", "syslog:tls://[2001:db8::1]", "syslog:tcp://10.0.0.1:601"):
        assert receiver_of(text).name == text
