"""The sequencer and its witnesses: nothing is published before enough of them have cosigned."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from segment_making import Writer

from strongroom.errors import ConfigError, IntegrityError, StoreUnavailableError
from strongroom.stores.memory import MemoryStore
from strongroom_security.auditlog.sequencing import Log, sequence_once
from strongroom_security.tlog.notekeys import NoteSigner
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


def test_who_asks_witnesses_signs_by_ed25519_and_knows_their_keys(servers: list[WitnessServer]) -> None:
    ecdsa = NoteSigner(ORIGIN, ec.generate_private_key(ec.SECP256R1()))
    good = log(servers, 1)
    with pytest.raises(ConfigError, match="Ed25519"):
        Log(origin=ORIGIN, signers=(ecdsa,), witnesses=good.witnesses, policy=good.policy)
    with pytest.raises(ConfigError, match="one of the two is missing"):
        Log(origin=ORIGIN, signers=(SIGNER,), witnesses=good.witnesses)
    with pytest.raises(ConfigError, match="one of the two is missing"):
        Log(origin=ORIGIN, signers=(SIGNER,), policy=good.policy)
