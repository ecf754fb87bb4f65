"""The sequencer and its witnesses: nothing is published before enough of them have cosigned."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from s3_servers import free_port
from segment_making import Writer

from strongroom.errors import ConfigError, IntegrityError, StoreUnavailableError
from strongroom.stores.memory import MemoryStore
from strongroom_security.auditlog.sequencing.sequencing import Log, sequence_once
from strongroom_security.tlog.notekeys import NoteSigner, VerifierKey
from strongroom_security.tlog.witnesses import LogKeys, WitnessPolicy, open_checkpoint
from strongroom_security.tlog.witnessing import Witness

sys.path[:0] = [str(Path(__file__).parent.parent / "tlog")]
from witness_server import WitnessServer  # noqa: E402 - of the tests next door

ORIGIN = "example.com/audit"
SIGNER = NoteSigner(ORIGIN, Ed25519PrivateKey.from_private_bytes(b"\x07" * 32))


@pytest.fixture
def servers() -> Iterator[list[WitnessServer]]:
    several = [WitnessServer(f"witness.example/w{n}", ORIGIN, SIGNER.key.public) for n in (1, 2)]
    yield several
    for each in several:
        each.close()


def log(servers: list[WitnessServer], required: int) -> Log:
    return Log(
        origin=ORIGIN,
        signers=(SIGNER,),
        witnesses=tuple(Witness(url=each.url, timeout_s=5) for each in servers),
        policy=WitnessPolicy(keys=tuple(each.key for each in servers), required=required),
    )


def test_a_head_carries_the_cosignatures_of_all_its_witnesses(servers: list[WitnessServer]) -> None:
    sink = MemoryStore()
    for number in (1, 2, 3):
        Writer(number).put(sink, segments=2, events=number * 40)
        found = sequence_once(sink, log(servers, 2))
        assert found.cosigned == ("witness.example/w1", "witness.example/w2")
        assert found.note is not None
        policy = WitnessPolicy(keys=tuple(each.key for each in servers), required=2)
        trusted = LogKeys(origin=ORIGIN, keys=(SIGNER.key,), witnesses=policy)
        assert open_checkpoint(found.note, trusted, "the head").head == found.head
    assert [each.asked for each in servers] == [[200, 200, 200], [200, 200, 200]]


def test_nothing_is_published_before_enough_have_cosigned(servers: list[WitnessServer]) -> None:
    sink = MemoryStore()
    Writer(1).put(sink)
    servers[1].lie = lambda _status, _answer: (503, b"")
    with pytest.raises(StoreUnavailableError, match=r"1 witnesses cosigned.* 2 have to.*503"):
        sequence_once(sink, log(servers, 2))
    assert "tlog/checkpoint" not in sink.contents()
    assert sequence_once(sink, log(servers, 1)).cosigned == ("witness.example/w1",)
    servers[1].lie = None
    Writer(2).put(sink)
    assert len(sequence_once(sink, log(servers, 2)).cosigned) == 2
    # The first has cosigned the same head twice; the second had never heard of the log before.
    assert servers[0].asked == [200, 409, 200, 200]
    assert servers[1].asked[-2:] == [409, 200] or servers[1].asked[-1] == 200


def test_a_log_that_was_set_back_is_noticed_by_a_witness(servers: list[WitnessServer]) -> None:
    sink = MemoryStore()
    Writer(1).put(sink)
    sequence_once(sink, log(servers, 2))
    before = sink.contents()
    Writer(2).put(sink, segments=3)
    sequence_once(sink, log(servers, 2))
    other = MemoryStore()
    other.plant(before)
    Writer(3).put(other)
    with pytest.raises(IntegrityError, match="set back"):
        sequence_once(other, log(servers, 2))
    assert other.contents()["tlog/checkpoint"] == before["tlog/checkpoint"]


def test_one_witness_that_lies_stops_no_log_that_enough_others_have_seen_and_is_told(
    servers: list[WitnessServer], caplog: pytest.LogCaptureFixture
) -> None:
    sink = MemoryStore()
    Writer(1).put(sink)
    servers[0].lie = lambda _status, _answer: (409, b"999999\n")
    found = sequence_once(sink, log(servers, 1))
    assert found.cosigned == ("witness.example/w2",)
    assert "has cosigned a tree of 999999 entries" in found.unwitnessed[0]
    assert not found.is_clean
    assert "set back" in caplog.text
    Writer(2).put(sink)
    with pytest.raises(IntegrityError, match="999999"):
        sequence_once(sink, log(servers, 2))
    servers[0].lie = None
    assert sequence_once(sink, log(servers, 2)).is_clean


def test_who_asks_witnesses_signs_by_ed25519_and_knows_their_keys(servers: list[WitnessServer]) -> None:
    ecdsa = NoteSigner(ORIGIN, ec.generate_private_key(ec.SECP256R1()))
    good = log(servers, 1)
    with pytest.raises(ConfigError, match="Ed25519"):
        Log(origin=ORIGIN, signers=(ecdsa,), witnesses=good.witnesses, policy=good.policy)
    with pytest.raises(ConfigError, match="one of the two is missing"):
        Log(origin=ORIGIN, signers=(SIGNER,), witnesses=good.witnesses)
    with pytest.raises(ConfigError, match="one of the two is missing"):
        Log(origin=ORIGIN, signers=(SIGNER,), policy=good.policy)


# --------------------------------------------------------------------------------- a witness that is not ours


@pytest.fixture
def stranger(tmp_path: Path) -> Iterator[tuple[str, VerifierKey]]:
    """The witness of the package ``aics-witness``, as a process: its URL and its key."""
    pytest.importorskip("aics_witness")
    port = free_port()
    environment = {**os.environ, "AICS_WITNESS_CONFIG": str(tmp_path / "witness.json")}

    def command(*arguments: str) -> str:
        whole = [sys.executable, "-m", "aics_witness", *arguments]
        return subprocess.run(
            whole, env=environment, capture_output=True, text=True, timeout=60, check=True
        ).stdout

    command("init", "--name", "witness.example/other")
    command("add-log", "--origin", ORIGIN, "--vkey", str(SIGNER.key))
    key = VerifierKey.parse(json.loads(command("status", "--json"))["witness"]["vkey"])
    serve = [sys.executable, "-m", "aics_witness", "serve", "--listen", f"127.0.0.1:{port}"]
    with subprocess.Popen(serve, env=environment, stderr=subprocess.DEVNULL) as process:
        try:
            _wait_for(port)
            yield f"http://127.0.0.1:{port}", key
        finally:
            process.terminate()
            process.wait(20)


def _wait_for(port: int) -> None:
    for _ in range(300):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/healthz")
            if connection.getresponse().status == 200:
                return
        except OSError:
            time.sleep(0.05)
        finally:
            connection.close()
    raise TimeoutError("the witness did not begin to answer")


def test_a_witness_that_shares_no_code_with_us_cosigns_our_log(stranger: tuple[str, VerifierKey]) -> None:
    url, key = stranger
    asked = Log(
        origin=ORIGIN,
        signers=(SIGNER,),
        witnesses=(Witness(url=url, timeout_s=10),),
        policy=WitnessPolicy(keys=(key,), required=1),
    )
    sink, before = MemoryStore(), {}
    for number in (1, 2, 3):
        Writer(number).put(sink, segments=2, events=number * 100)
        assert sequence_once(sink, asked).cosigned == ("witness.example/other",)
        before = before or sink.contents()
    back = MemoryStore()
    back.plant(before)
    Writer(4).put(back)
    with pytest.raises(IntegrityError, match="set back"):
        sequence_once(back, asked)
