"""Asking witnesses, over HTTP: what they sign is kept, what they say that is wrong is not believed."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from witness_server import STAMP_S, WitnessServer

from strongroom.errors import ConfigError, IntegrityError, StoreError, StoreUnavailableError
from strongroom_security.tlog.checkpoints import Checkpoint
from strongroom_security.tlog.merkle import GrowingTree, consistency_proof, leaf_hashes
from strongroom_security.tlog.notekeys import NoteSigner
from strongroom_security.tlog.notes import Note
from strongroom_security.tlog.witnessing import Witness, request_body

ORIGIN = "example.com/log"
SIGNER = NoteSigner(ORIGIN, Ed25519PrivateKey.from_private_bytes(b"\x07" * 32))
TREE = GrowingTree()
TREE.append(leaf_hashes([b"%d" % number for number in range(40)]))


def note(size: int, *, origin: str = ORIGIN, signer: NoteSigner = SIGNER) -> Note:
    text = Checkpoint(origin=origin, size=size, root=TREE.root(size)).text()
    return Note(text=text, signatures=(signer.sign(text),))


@pytest.fixture(scope="module")
def _server() -> Iterator[WitnessServer]:
    server = WitnessServer("witness.example/w1", ORIGIN, SIGNER.key.public)
    yield server
    server.close()


@pytest.fixture
def server(_server: WitnessServer) -> WitnessServer:
    _server.size, _server.root, _server.asked, _server.lie = 0, b"", [], None
    return _server


def ask(server: WitnessServer, size: int, *, old_size: int = 0, asked: Note | None = None) -> list[str]:
    found = Witness(url=server.url, timeout_s=5).cosign(
        asked or note(size),
        size,
        lambda old: consistency_proof(TREE.node, old, size),
        (server.key,),
        old_size=old_size,
    )
    assert all(each.stamp_s == STAMP_S for each in found)
    return [each.key.name for each in found]


def test_a_witness_that_drips_its_answer_is_left_in_time() -> None:
    """Each of its bytes comes within the time for one wait; all of them would take half a minute."""
    is_left = threading.Event()

    def drip(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection:
            try:
                connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
                for _ in range(600):
                    connection.sendall(b"x")
                    if is_left.wait(0.05):
                        return
            except OSError:
                return

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=drip, args=(listening,), daemon=True)
        thread.start()
        witness = Witness(url=f"http://127.0.0.1:{listening.getsockname()[1]}", timeout_s=5, within_s=0.3)
        begun = time.monotonic()
        with pytest.raises(StoreUnavailableError, match=r"within 0\.3 s"):
            witness.cosign(note(3), 3, lambda old: [], ())
        took_s = time.monotonic() - begun
        is_left.set()
        thread.join(10)
    assert took_s < 20, "that is not what all of its answer takes"


def test_a_witness_cosigns_a_tree_as_it_grows(server: WitnessServer) -> None:
    for old, size in ((0, 3), (3, 8), (8, 8), (8, 33)):
        assert ask(server, size, old_size=old) == ["witness.example/w1"]
    assert server.asked == [200, 200, 200, 200]
    assert server.size == 33


def test_what_the_witness_saw_last_is_learned_from_it(server: WitnessServer) -> None:
    ask(server, 7)
    assert ask(server, 20, old_size=12) == ["witness.example/w1"]
    assert ask(server, 21) == ["witness.example/w1"]
    assert server.asked == [200, 409, 200, 409, 200]


def test_a_tree_that_was_set_back_is_noticed(server: WitnessServer) -> None:
    ask(server, 30)
    with pytest.raises(IntegrityError, match="30 entries"):
        ask(server, 20)


def test_a_tree_that_is_another_one_is_not_cosigned(server: WitnessServer) -> None:
    ask(server, 5)
    server.root = b"\x00" * 32
    with pytest.raises(StoreError, match="422"):
        ask(server, 20, old_size=5)


def test_a_log_that_the_witness_does_not_know_is_told(server: WitnessServer) -> None:
    with pytest.raises(StoreError, match=r"404.*tell its operator"):
        ask(server, 5, asked=note(5, origin="example.com/other"))
    stranger = NoteSigner(ORIGIN, Ed25519PrivateKey.generate())
    with pytest.raises(StoreError, match=r"403.*tell its operator"):
        ask(server, 5, asked=note(5, signer=stranger))


@pytest.mark.parametrize(
    ("status", "answer", "error"),
    (
        (500, b"", StoreUnavailableError),
        (429, b"slow down", StoreUnavailableError),
        (301, b"", StoreError),
        (409, b"many\n", StoreError),
        (409, b"\xff\n", StoreError),
        (409, b"", StoreError),
        (409, b"7\n", StoreUnavailableError),
        (200, b"", StoreError),
        (200, b"hello\n", StoreError),
        (200, b"\xff\xfe\n", StoreError),
        (200, b"x" * 70_000, StoreError),
    ),
    ids=range(11),
)
def test_an_answer_that_is_none_is_told(
    server: WitnessServer, status: int, answer: bytes, error: type[StoreError]
) -> None:
    server.lie = lambda _status, _answer: (status, answer)
    with pytest.raises(error):
        ask(server, 9)


def test_a_signature_by_somebody_else_is_passed_over_and_a_wrong_one_is_told(server: WitnessServer) -> None:
    other = NoteSigner("witness.example/other", Ed25519PrivateKey.generate())
    server.lie = lambda status, answer: (status, other.sign("x\n").line().encode() + answer)
    assert ask(server, 4) == ["witness.example/w1"]
    kept: list[bytes] = []
    server.lie = lambda status, answer: (status, kept.append(answer) or answer)  # type: ignore[func-returns-value]
    ask(server, 5, old_size=4)
    server.lie = lambda status, _answer: (status, kept[0])
    with pytest.raises(StoreError, match="not over this text"):
        ask(server, 6, old_size=5)


def test_a_witness_that_is_not_there_is_told() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(StoreUnavailableError, match="could not be asked"):
        Witness(url=f"http://127.0.0.1:{port}", timeout_s=2).cosign(note(3), 3, lambda _: [], ())


@pytest.mark.parametrize(
    "url", ("", "witness.example", "ftp://a/b", "http://", "http://a/?q", "http://u:p@a/", "http://a:b/")
)
def test_a_witness_is_at_a_url_of_http(url: str) -> None:
    with pytest.raises(ConfigError):
        Witness(url=url)


def test_a_request_is_written_as_the_specification_has_it() -> None:
    body = request_body(20852014, [b"\x01" * 32], note(3))
    assert body.split(b"\n")[:3] == [b"old 20852014", b"AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE=", b""]
    assert body.endswith(b"\n\n" + note(3).to_bytes())
