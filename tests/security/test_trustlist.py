"""The list of trusted keys: who may sign it, what it may say, and that no older one is taken."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from signed_checkpoints import key_of, signer

from strongroom import canonical
from strongroom.digest import sha256_of
from strongroom.errors import (
    ConfigError,
    FormatError,
    IntegrityError,
    RollbackError,
    UnsupportedFormatError,
    UntrustedError,
)
from strongroom.manifest import CheckpointRef
from strongroom_security.dsse import pae
from strongroom_security.floors import FileFloor
from strongroom_security.trustlist import (
    PAYLOAD_TYPE,
    Revocation,
    TrustedKey,
    TrustList,
    UpTo,
    add_signature,
    root_set_id,
    sign_trust_list,
    unverified,
)

ROOTS = [key_of("root one"), key_of("root two"), key_of("root three")]
REF = CheckpointRef(launch=2, step=30, attempt="0" * 16, manifest=sha256_of(b"m"))


def a_list(version: int = 1, **members: Any) -> TrustList:
    keys = [
        TrustedKey(key=key_of("trainer"), name="trainer", not_before_ms=5, not_after_ms=9),
        TrustedKey(key=key_of("validator", "P-384"), name="validator"),
    ]
    return TrustList(
        **{
            "version": version,
            "issued_at_ms": 1,
            "expires_at_ms": 2,
            "keys": tuple(sorted(keys, key=lambda each: each.key.id)),
            "revoked": (
                Revocation(
                    id=key_of("thief").id,
                    reason="a laptop was stolen",
                    revoked_at_ms=7,
                    up_to=(UpTo(run="run-a", checkpoint=REF),),
                ),
            ),
            **members,
        }
    )


def verified(data: bytes, threshold: int = 1) -> TrustList:
    return TrustList.verify(data, "trust.json", ROOTS, threshold)


# ------------------------------------------------------------------------------------------------ who signs


def test_a_list_is_read_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "trust.json").write_bytes(sign_trust_list(a_list(), [signer("root one")]))
    found = TrustList.read(tmp_path / "trust.json", ROOTS)
    assert found == a_list()
    assert found.digest == a_list().digest
    assert found.public_keys == tuple(each.key for each in a_list().keys)
    assert found.key(key_of("trainer").id) == next(each for each in found.keys if each.name == "trainer")
    assert found.key("0" * 64) is None
    assert found.revocation(key_of("thief").id) == found.revoked[0]
    assert found.revocation(key_of("trainer").id) is None


def test_the_envelope_is_what_is_documented() -> None:
    """As DSSE has it, so that anybody's tools can sign and verify it."""
    envelope = json.loads(sign_trust_list(a_list(), [signer("root one")]))
    assert envelope["payloadType"] == PAYLOAD_TYPE == "application/vnd.strongroom.trust+json"
    assert [each["keyid"] for each in envelope["signatures"]] == [ROOTS[0].id]
    payload = base64.b64decode(envelope["payload"])
    assert ROOTS[0].verify(pae(PAYLOAD_TYPE, payload), base64.b64decode(envelope["signatures"][0]["sig"]))
    said = json.loads(payload)
    assert set(said) == {"expires_at_ms", "format", "issued_at_ms", "keys", "kind", "revoked", "version"}
    assert (said["format"], said["kind"]) == ("0.1", "trust")
    assert set(said["keys"][0]) == {"id", "name", "not_after_ms", "not_before_ms", "public"}
    assert set(said["revoked"][0]) == {"id", "reason", "revoked_at_ms", "up_to"}
    assert said["revoked"][0]["up_to"] == [{**REF.to_json(), "run": "run-a"}]


def test_a_list_that_no_root_key_has_signed_is_refused() -> None:
    data = sign_trust_list(a_list(), [signer("thief")])
    with pytest.raises(UntrustedError, match=rf"{key_of('thief').id} is no root key of the policy"):
        verified(data)


def test_nothing_of_a_list_is_parsed_before_it_is_verified() -> None:
    data = envelope_of(b"{ not even JSON", "thief")
    with pytest.raises(UntrustedError):
        verified(data)
    with pytest.raises(FormatError):
        verified(envelope_of(b"{ not even JSON", "root one"))


def test_a_threshold_of_root_keys_is_counted_by_keys(tmp_path: Path) -> None:
    one = sign_trust_list(a_list(), [signer("root one")])
    two = add_signature(one, signer("root two"))
    both = sign_trust_list(a_list(), [signer("root two"), signer("root one")])
    assert {each["keyid"] for each in json.loads(two)["signatures"]} == {ROOTS[0].id, ROOTS[1].id}
    assert verified(two, 2) == verified(both, 2) == a_list()
    for too_few in (one, add_signature(one, signer("root one")), add_signature(one, signer("thief"))):
        with pytest.raises(UntrustedError, match="has 1 of 2 root keys' signatures"):
            verified(too_few, 2)
    with pytest.raises(UntrustedError, match="has 2 of 3"):
        verified(two, 3)


def test_a_wrong_signature_does_not_count_and_is_told() -> None:
    envelope = json.loads(sign_trust_list(a_list(), [signer("root one"), signer("root two")]))
    by_key = {each["keyid"]: each for each in envelope["signatures"]}
    by_key[ROOTS[0].id]["sig"] = by_key[ROOTS[1].id]["sig"]
    data = json.dumps(envelope).encode()
    assert verified(data) == a_list()
    with pytest.raises(UntrustedError, match=f"the signature by {ROOTS[0].id} is wrong"):
        verified(data, 2)


@pytest.mark.parametrize("threshold", (0, 4, True, "1"), ids=repr)
def test_a_threshold_that_says_nothing_is_refused(threshold: Any) -> None:
    data = sign_trust_list(a_list(), [signer("root one")])
    with pytest.raises(ConfigError, match="from 1 to the number of its root keys, 3"):
        verified(data, threshold)


def test_one_root_key_that_is_named_twice_is_one() -> None:
    data = sign_trust_list(a_list(), [signer("root one")])
    with pytest.raises(ConfigError, match="root keys, 1"):
        TrustList.verify(data, "trust.json", [ROOTS[0], key_of("root one")], 2)


def test_a_list_is_signed_by_somebody_and_by_each_once() -> None:
    with pytest.raises(ConfigError, match="at least one root key"):
        sign_trust_list(a_list(), [])
    with pytest.raises(ConfigError, match="given twice"):
        sign_trust_list(a_list(), [signer("root one"), signer("root one")])


def test_what_is_no_list_is_not_signed() -> None:
    with pytest.raises(FormatError):
        add_signature(envelope_of(b'{"kind":"launch"}', "root one"), signer("root two"))


def test_a_list_can_be_looked_at_before_it_is_signed() -> None:
    found, claimed = unverified(sign_trust_list(a_list(), [signer("thief")]), "trust.json")
    assert found == a_list()
    assert claimed == (key_of("thief").id,)


def test_a_list_that_is_not_there_is_a_matter_of_the_policy(tmp_path: Path) -> None:
    for name in ("gone.json", ".", "zero\0"):
        with pytest.raises(ConfigError, match="cannot be read"):
            TrustList.read(tmp_path / name, ROOTS)


# --------------------------------------------------------------------------------------------------- floors


def test_an_older_list_is_refused_once_a_newer_one_was_read(tmp_path: Path) -> None:
    floor, path = FileFloor(tmp_path / "floor.json"), tmp_path / "trust.json"
    for version in (3, 3, 5):
        path.write_bytes(sign_trust_list(a_list(version), [signer("root one")]))
        TrustList.read(path, ROOTS, floor=floor)
    path.write_bytes(sign_trust_list(a_list(4), [signer("root one")]))
    with pytest.raises(RollbackError, match=r"is version 4, and .* remembers version 5"):
        TrustList.read(path, ROOTS, floor=floor)
    path.write_bytes(sign_trust_list(a_list(5, issued_at_ms=2), [signer("root one")]))
    with pytest.raises(RollbackError, match="equivocation"):
        TrustList.read(path, ROOTS, floor=floor)


def test_another_signature_does_not_make_it_another_list(tmp_path: Path) -> None:
    floor, path = FileFloor(tmp_path / "floor.json"), tmp_path / "trust.json"
    data = sign_trust_list(a_list(), [signer("root one")])
    for each in (data, add_signature(data, signer("root two"))):
        path.write_bytes(each)
        TrustList.read(path, ROOTS, floor=floor)


def test_a_list_that_is_not_trusted_does_not_lift_the_floor(tmp_path: Path) -> None:
    floor, path = FileFloor(tmp_path / "floor.json"), tmp_path / "trust.json"
    path.write_bytes(sign_trust_list(a_list(99), [signer("thief")]))
    with pytest.raises(UntrustedError):
        TrustList.read(path, ROOTS, floor=floor)
    path.write_bytes(sign_trust_list(a_list(1), [signer("root one")]))
    TrustList.read(path, ROOTS, floor=floor)


def test_a_set_of_roots_has_one_name_in_any_order() -> None:
    assert root_set_id(ROOTS) == root_set_id([*reversed(ROOTS), ROOTS[0]])
    assert root_set_id(ROOTS) != root_set_id(ROOTS[:2])


# ---------------------------------------------------------------------------------------------- what it says


@pytest.mark.parametrize(
    ("at_ms", "problem"), ((4, "is good from"), (5, None), (8, None), (9, "expired at"), (99, "expired at"))
)
def test_a_window_is_from_its_first_moment_to_before_its_end(at_ms: int, problem: str | None) -> None:
    found = TrustedKey(key=ROOTS[0], name="k", not_before_ms=5, not_after_ms=9).problem_at(at_ms)
    assert (found is None) if problem is None else (found is not None and problem in found)
    assert TrustedKey(key=ROOTS[0], name="k").problem_at(at_ms) is None


@pytest.mark.parametrize(
    ("members", "problem"),
    (
        ({"version": 0}, "version should be an integer from 1"),
        ({"version": True}, "version should be an integer from 1 .*found True"),
        ({"version": 2**53}, "version should be an integer from 1 to"),
        ({"issued_at_ms": -1}, "issued_at_ms"),
        ({"expires_at_ms": 0}, "expires_at_ms should be an integer from 1"),
        ({"keys": tuple(reversed(a_list().keys))}, "keys should list each id once, in order"),
        ({"keys": (a_list().keys[0],) * 2}, "once, in order"),
        ({"revoked": a_list().revoked * 2}, "revoked should list each id once"),
    ),
    ids=str,
)
def test_a_list_out_of_bounds_is_refused_when_built(members: dict[str, Any], problem: str) -> None:
    with pytest.raises(FormatError, match=problem):
        a_list(**members)


@pytest.mark.parametrize("name", ("", " ", "a\nb", "x" * 201, "\u202ename", "\x1b[31m"), ids=repr)
def test_a_name_is_a_few_printable_characters(name: str) -> None:
    with pytest.raises(FormatError, match="printable"):
        TrustedKey(key=ROOTS[0], name=name)
    with pytest.raises(FormatError, match="printable"):
        Revocation(id="0" * 64, reason=name * 5, revoked_at_ms=1)


def test_what_is_revoked_is_an_id_and_names_checkpoints_once() -> None:
    with pytest.raises(FormatError, match="64 lower-case hex digits"):
        Revocation(id="trainer", reason="r", revoked_at_ms=1)
    with pytest.raises(FormatError, match="each once"):
        Revocation(id="0" * 64, reason="r", revoked_at_ms=1, up_to=(UpTo(run="r", checkpoint=REF),) * 2)
    with pytest.raises(FormatError, match="ends before"):
        TrustedKey(key=ROOTS[0], name="k", not_before_ms=9, not_after_ms=9)
    with pytest.raises(FormatError, match="is not a run id"):
        UpTo(run="../x", checkpoint=REF)


def envelope_of(payload: bytes, name: str = "root one") -> bytes:
    signature = signer(name).sign(pae(PAYLOAD_TYPE, payload), within_s=9)
    return json.dumps(
        {
            "payload": base64.b64encode(payload).decode(),
            "payloadType": PAYLOAD_TYPE,
            "signatures": [
                {"keyid": key_of(name).id, "sig": base64.b64encode(signature).decode()},
            ],
        }
    ).encode()


def said(change: Callable[[Any], object]) -> bytes:
    """A list with a change, signed as it should be."""
    value = json.loads(a_list().encode())
    change(value)
    return envelope_of(canonical.encode(value))


PAYLOADS: dict[str, tuple[Callable[[Any], object], str]] = {
    "another kind": (lambda each: each.update(kind="launch"), "expected 'trust'"),
    "a member missing": (lambda each: each.pop("revoked"), "lacks the member 'revoked'"),
    "a member unknown": (lambda each: each.update(more=1), "the member 'more'"),
    "a format that is none": (lambda each: each.update(format=1), "expected a string"),
    "keys that are none": (lambda each: each.update(keys={}), "expected an array"),
    "a key that is none": (lambda each: each.update(keys=[7]), "expected an object"),
    "a key's member unknown": (lambda each: each["keys"][0].update(more=1), "the member 'more'"),
    "a key by another's id": (
        lambda each: each["keys"][0].update(id="0" * 64), "is named 0{64} is",
    ),
    "a key that is no PEM": (lambda each: each["keys"][0].update(public="x"), "is not a public key in PEM"),
    "a key with words around it": (
        lambda each: each["keys"][0].update(public="x\n" + each["keys"][0]["public"]), "spelled otherwise",
    ),
    "a window that is no number": (
        lambda each: each["keys"][0].update(not_after_ms="never"), "a key's window should be",
    ),
    "a version that is text": (lambda each: each.update(version="1"), "version should be"),
    "keys out of order": (lambda each: each["keys"].reverse(), "in order"),
    "a revoked id that is none": (lambda each: each["revoked"][0].update(id="x"), "64 lower-case hex"),
    "a named checkpoint without run": (
        lambda each: each["revoked"][0]["up_to"][0].pop("run"), "lacks the member 'run'",
    ),
    "a named checkpoint of a BLAKE3 digest": (
        lambda each: each["revoked"][0]["up_to"][0].update(manifest="blake3:" + "0" * 64), "a sha256 digest",
    ),
    "a run that is none": (
        lambda each: each["revoked"][0]["up_to"][0].update(run="/"), "is not a run id",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", PAYLOADS)
def test_a_list_that_is_malformed_is_refused_though_it_is_signed(case: str) -> None:
    change, problem = PAYLOADS[case]
    assert verified(said(lambda each: None)) == a_list()
    with pytest.raises(FormatError, match=problem):
        verified(said(change))


def test_a_list_of_another_format_says_so() -> None:
    with pytest.raises(UnsupportedFormatError, match=r"has format '0.9', and this release reads 0.1"):
        verified(said(lambda each: each.update(format="0.9", novel=[])))


def test_a_list_that_is_not_canonical_is_refused() -> None:
    with pytest.raises(FormatError, match="canonical"):
        verified(envelope_of(a_list().encode().replace(b",", b", ", 1)))


ENVELOPES: dict[str, tuple[Callable[[Any], object], str]] = {
    "another type": (
        lambda each: each.update(payloadType="application/vnd.in-toto+json"),
        "the payload type",
    ),
    "a member unknown": (lambda each: each.update(more=1), "the member 'more'"),
    "no payload": (lambda each: each.pop("payload"), "lacks the member 'payload'"),
    "one key twice": (lambda each: each.update(signatures=each["signatures"] * 2), "two signatures by"),
    "too many": (lambda each: each.update(signatures=each["signatures"] * 65), "has 65 signatures"),
    "a key id that is none": (lambda each: each["signatures"][0].update(keyid="root"), "64 lower-case hex"),
    "a signature that is none": (lambda each: each["signatures"][0].update(sig="AAAA"), "ECDSA"),
    "a signature that is no base64": (lambda each: each["signatures"][0].update(sig="*"), "base64"),
    "no signatures": (lambda each: each.update(signatures=[]), "has 0 of 1"),
}


@pytest.mark.parametrize("case", ENVELOPES)
def test_an_envelope_that_is_malformed_is_refused(case: str) -> None:
    change, problem = ENVELOPES[case]
    envelope = json.loads(sign_trust_list(a_list(), [signer("root one")]))
    change(envelope)
    with pytest.raises(IntegrityError, match=problem):
        verified(json.dumps(envelope).encode())


@pytest.mark.parametrize(
    ("data", "problem"),
    (
        (b'{"payload":1,"payload":2}', "twice"),
        (b"[" * 9, "nests 9 deep"),
        (b'{"payload":1e9}', "not an integer"),
        (b" " * ((12 << 20) + 1), "at most"),
        (b"", "not JSON"),
    ),
    ids=("twice", "deep", "huge", "long", "empty"),
)
def test_hostile_json_is_refused(data: bytes, problem: str) -> None:
    with pytest.raises(FormatError, match=problem):
        verified(data)


@given(where=st.floats(0, 1, exclude_max=True), change=st.integers(1, 255))
def test_any_changed_byte_is_refused_by_an_error_of_ours(where: float, change: int) -> None:
    # Signed anew each time, and so of a length that is not always the same.
    whole = sign_trust_list(a_list(), [signer("root one")])
    at = int(where * len(whole))
    with pytest.raises(IntegrityError):
        verified(whole[:at] + bytes([whole[at] ^ change]) + whole[at + 1 :])
