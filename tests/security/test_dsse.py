"""Envelopes: what is signed is the type and the payload, told apart by their lengths."""

from __future__ import annotations

import json

import pytest
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from hypothesis import given
from hypothesis import strategies as st

from strongroom.canonical import Json
from strongroom.errors import FormatError
from strongroom_security.dsse import PAYLOAD_TYPE, Envelope, pae

SIGNATURE = encode_dss_signature(1, 2)


def test_the_published_example_is_encoded_as_published() -> None:
    """DSSE's ``protocol.md``, test vectors."""
    expected = b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"
    assert pae("http://example.com/HelloWorld", b"hello world") == expected


def test_lengths_are_of_bytes() -> None:
    assert pae("é", b"\xff\x00") == b"DSSEv1 2 \xc3\xa9 2 \xff\x00"
    assert pae("", b"") == b"DSSEv1 0  0 "


@given(st.text(), st.binary(), st.text(), st.binary())
def test_no_two_documents_are_encoded_alike(kind: str, payload: bytes, other_kind: str, other: bytes) -> None:
    alike = pae(kind, payload) == pae(other_kind, other)
    assert alike == ((kind, payload) == (other_kind, other))


@given(st.binary())
def test_an_envelope_comes_back_from_json(payload: bytes) -> None:
    envelope = Envelope(payload_type=PAYLOAD_TYPE, payload=payload, signature=SIGNATURE)
    assert Envelope.from_json(json.loads(json.dumps(envelope.to_json())), "it") == envelope
    assert envelope.to_be_signed == pae(PAYLOAD_TYPE, payload)


def test_an_envelope_can_be_asked_to_be_of_another_type() -> None:
    envelope = Envelope(payload_type="application/x", payload=b"p", signature=SIGNATURE)
    assert Envelope.from_json(envelope.to_json(), "it", payload_type="application/x") == envelope


def changed(**members: Json) -> dict[str, Json]:
    whole = Envelope(payload_type=PAYLOAD_TYPE, payload=b"p", signature=SIGNATURE).to_json()
    return {name: value for name, value in {**whole, **members}.items() if value is not ...}


def signed(**members: Json) -> dict[str, Json]:
    signature = {**changed()["signatures"][0], **members}
    return changed(signatures=[{name: value for name, value in signature.items() if value is not ...}])


@pytest.mark.parametrize("keyid", (..., None, ""), ids=["absent", "null", "empty"])
def test_writers_leave_the_key_id_out_in_three_ways(keyid: Json) -> None:
    Envelope.from_json(signed(keyid=keyid), "it")


REFUSED: dict[str, tuple[Json, str]] = {
    "no object": ([], "it is an array; expected an object"),
    "no payload": (changed(payload=...), "lacks the member 'payload'"),
    "no type": (changed(payloadType=...), "lacks the member 'payloadType'"),
    "no signatures": (changed(signatures=...), "lacks the member 'signatures'"),
    "an unknown member": (changed(extra=1), "the member 'extra'"),
    "another type": (changed(payloadType="application/vnd.in-toto"), "the payload type of it is"),
    "a type in capitals": (changed(payloadType=PAYLOAD_TYPE.upper()), "the payload type of it is"),
    "a type of no text": (changed(payloadType=None), "the payload type of it is null"),
    "a payload in other base64": (changed(payload="cB=="), "the payload of it is not in standard"),
    "a payload in the alphabet for URLs": (changed(payload="-_8="), "the payload of it is not in standard"),
    "a payload of no text": (changed(payload=None), "the payload of it is null"),
    "not a list of signatures": (changed(signatures={}), "the signatures of it is an object"),
    "an empty list of signatures": (changed(signatures=[]), "has 0 signatures; exactly one"),
    "two signatures": (changed(signatures=changed()["signatures"] * 2), "has 2 signatures; exactly one"),
    "a signature that is no object": (changed(signatures=["MAYC"]), "the signature of it is a string"),
    "a signature without bytes": (signed(sig=...), "the signature of it lacks the member 'sig'"),
    "an empty signature": (signed(sig=""), "not an ECDSA signature in DER"),
    "a signature that is no DER": (signed(sig="AAAA"), "not an ECDSA signature in DER"),
    "a signature in other base64": (signed(sig="MAYCAQECAQI"), "not in standard, padded base64"),
    "a key id": (signed(keyid="a"), "names a key id of its own"),
    "a key id of no text": (signed(keyid=0), "names a key id of its own"),
    "a member beside the signature": (signed(cert="x"), "the member 'cert'"),
}


@pytest.mark.parametrize(("value", "reason"), REFUSED.values(), ids=REFUSED)
def test_any_other_envelope_is_refused(value: Json, reason: str) -> None:
    with pytest.raises(FormatError, match=reason):
        Envelope.from_json(value, "it")
