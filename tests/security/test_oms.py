"""Statements and bundles: what is written, and the many ways in which what is read can be wrong."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from authorities import CURVES, MemorySigner, issue, issue_signer
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from hypothesis import given
from hypothesis import strategies as st

from strongroom.canonical import Json
from strongroom.errors import ConfigError, FormatError, KeyServiceError
from strongroom_security.oms import (
    GIT_PATHS,
    MEDIA_TYPE,
    SIGNATURE_PREDICATE,
    STATEMENT_TYPE,
    attest,
    decode_bundle,
    decode_statement,
    encode_bundle,
    sign_folder,
    sign_payload,
    statement,
    subject_digest,
)
from strongroom_security.publickeys import PublicKey

VECTORS = Path(__file__).parent / "vectors/oms"
SIGNATURE = encode_dss_signature(1, 2)
KEY_ID = "ab" * 32


def digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


FILES = {
    name: digest(name) for name in ("00000-00.safetensors", "MANIFEST.json", "a/x.bin", "index.safetensors")
}

PARTS = st.from_regex(r"[a-z0-9_][a-z0-9._-]{0,6}", fullmatch=True)
FOLDERS = st.dictionaries(
    PARTS.map(lambda part: f"d{part}/f{part}"), st.binary(min_size=32, max_size=32), min_size=1
)


# ------------------------------------------------------------------------------------------- as written


def test_a_statement_is_the_bytes_that_the_specification_asks_for() -> None:
    one, two = digest("1"), digest("2")
    subject = hashlib.sha256(one + two).hexdigest()
    assert (
        statement({"b": two, "a": one})
        == (
            '{"_type":"https://in-toto.io/Statement/v1",'
            '"predicate":{"resources":['
            f'{{"algorithm":"sha256","digest":"{one.hex()}","name":"a"}},'
            f'{{"algorithm":"sha256","digest":"{two.hex()}","name":"b"}}],'
            '"serialization":{"allow_symlinks":false,"hash_type":"sha256","method":"files"}},'
            '"predicateType":"https://model_signing/signature/v1.0",'
            f'"subject":[{{"digest":{{"sha256":"{subject}"}},"name":"data"}}]}}'
        ).encode()
    )


def test_a_bundle_is_the_bytes_that_the_specification_asks_for() -> None:
    payload, signature = base64.b64encode(b"{}").decode(), base64.b64encode(SIGNATURE).decode()
    head = (
        f'{{"dsseEnvelope":{{"payload":"{payload}","payloadType":"application/vnd.in-toto+json",'
        f'"signatures":[{{"keyid":"","sig":"{signature}"}}]}},'
        '"mediaType":"application/vnd.dev.sigstore.bundle.v0.3+json","verificationMaterial":'
    )
    assert (
        encode_bundle(b"{}", SIGNATURE, key_id=KEY_ID)
        == (head + f'{{"publicKey":{{"hint":"{KEY_ID}"}},"tlogEntries":[]}}}}').encode()
    )
    assert (
        encode_bundle(b"{}", SIGNATURE, certificates=[b"1", b"2"])
        == (
            head + '{"tlogEntries":[],"x509CertificateChain":'
            '{"certificates":[{"rawBytes":"MQ=="},{"rawBytes":"Mg=="}]}}}'
        ).encode()
    )


@given(FOLDERS)
def test_what_was_stated_is_read(files: dict[str, bytes]) -> None:
    read = decode_statement(statement(files), "it")
    assert read.resources == files
    assert list(read.resources) == sorted(files)
    assert read.subject == subject_digest(files)
    assert read.ignored == ()


def test_the_subject_is_ordered_by_whole_names_and_not_by_folders() -> None:
    one, two = digest("1"), digest("2")
    assert subject_digest({"sub/x": one, "sub.x/y": two}) == hashlib.sha256(two + one).digest()


def test_a_subject_may_have_any_name() -> None:
    files = {"a": digest("a")}
    named = statement(files, subject="My model, v2 (ÄÖ)")
    assert json.loads(named)["subject"][0]["name"] == "My model, v2 (ÄÖ)"
    assert decode_statement(named, "it") == decode_statement(statement(files), "it")


def test_what_was_left_out_is_said() -> None:
    assert decode_statement(statement(FILES, ignored=["model.sig", ".git"]), "it").ignored == (
        ".git",
        "model.sig",
    )


def test_a_bundle_comes_back_with_a_key_or_with_certificates() -> None:
    by_key = decode_bundle(encode_bundle(b"{}", SIGNATURE, key_id=KEY_ID), "it")
    assert (by_key.envelope.payload, by_key.envelope.signature) == (b"{}", SIGNATURE)
    assert (by_key.key_id, by_key.certificates) == (KEY_ID, ())
    by_chain = decode_bundle(encode_bundle(b"{}", SIGNATURE, certificates=[b"1", b"2"]), "it")
    assert (by_chain.key_id, by_chain.certificates) == (None, (b"1", b"2"))


def test_a_bundle_without_a_signer_or_with_two_is_not_written() -> None:
    with pytest.raises(ConfigError, match="exactly one"):
        encode_bundle(b"{}", SIGNATURE)
    with pytest.raises(ConfigError, match="exactly one"):
        encode_bundle(b"{}", SIGNATURE, key_id=KEY_ID, certificates=[b"1"])


def test_what_a_reader_would_refuse_is_not_written() -> None:
    with pytest.raises(FormatError, match="names its key by 'AB"):
        encode_bundle(b"{}", SIGNATURE, key_id="AB" * 32)
    with pytest.raises(FormatError, match="11 certificates"):
        encode_bundle(b"{}", SIGNATURE, certificates=[b"1"] * 11)
    with pytest.raises(FormatError, match="lists no file"):
        statement({})
    with pytest.raises(FormatError, match="unsafe name"):
        statement({"../x": digest("x")})
    with pytest.raises(FormatError, match="take for one"):
        statement({"a": digest("x"), "A": digest("x")})
    with pytest.raises(FormatError, match="the digest of a has 20 bytes"):
        statement({"a": bytes(20)})
    with pytest.raises(FormatError, match="both lists and ignores 'a'"):
        statement({"a/x": digest("x")}, ignored=["a"])


def test_other_statements_name_their_subject_and_predicate() -> None:
    payload = attest({"data": digest("x")}, "https://slsa.dev/provenance/v1", {"buildDefinition": {"n": 1}})
    assert json.loads(payload) == {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": "data", "digest": {"sha256": digest("x").hex()}}],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {"buildDefinition": {"n": 1}},
    }
    assert payload == json.dumps(json.loads(payload), sort_keys=True, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    ("subject", "reason"),
    (({}, "got none"), ({"": bytes(32)}, "expected a name"), ({"x": bytes(31)}, "31 bytes")),
)
def test_other_statements_are_about_something(subject: dict[str, bytes], reason: str) -> None:
    with pytest.raises(FormatError, match=reason):
        attest(subject, "https://slsa.dev/provenance/v1", {})


def test_a_statement_of_another_predicate_is_not_taken_for_a_signed_folder() -> None:
    payload = attest({"data": digest("x")}, "https://slsa.dev/provenance/v1", {})
    with pytest.raises(FormatError, match=r"the predicate type of .* is 'https://slsa\.dev"):
        decode_statement(payload, "it")


def test_a_hundred_thousand_files_fit() -> None:
    files = {f"{rank:05d}-00.safetensors.floe": digest(str(rank)) for rank in range(100_000)}
    payload = statement(files)
    read = decode_bundle(encode_bundle(payload, SIGNATURE, key_id=KEY_ID), "it")
    assert decode_statement(read.envelope.payload, "it").resources == files


def test_as_many_files_as_the_independent_writer_indents_them_fit() -> None:
    names = sorted(f"{rank:05d}-00.safetensors.floe" for rank in range(100_000))
    document = json.loads(statement({"x": digest("x")}))
    document["predicate"]["resources"] = [
        {"name": name, "digest": "ab" * 32, "algorithm": "sha256"} for name in names
    ]
    document["subject"][0]["digest"]["sha256"] = hashlib.sha256(b"\xab" * 32 * len(names)).hexdigest()
    payload = json.dumps(document, indent=2).encode()
    read = decode_bundle(encode_bundle(payload, SIGNATURE, key_id=KEY_ID), "it")
    assert len(decode_statement(read.envelope.payload, "it").resources) == 100_000


# ---------------------------------------------------------------------------------- as others wrote it


def published(name: str) -> bytes:
    return (VECTORS / f"{name}.bundle.json").read_bytes()


def test_the_published_bundle_of_a_key_is_read_and_holds() -> None:
    bundle = decode_bundle(published("key"), "key.bundle.json")
    read = decode_statement(bundle.envelope.payload, "key.bundle.json")
    assert list(read.resources) == ["signme-1", "signme-2"]
    assert sorted(read.ignored) == [".git", ".gitattributes", ".github", ".gitignore", "ignore-me"]
    # Who published them made both bundles with one key, and only the other one holds it.
    chain = decode_bundle(published("certificate"), "it").certificates
    public = x509.load_der_x509_certificate(chain[0]).public_key()
    key = PublicKey.of(public)  # type: ignore[arg-type]
    assert key.id == bundle.key_id
    assert key.verify(bundle.envelope.to_be_signed, bundle.envelope.signature)


def test_the_published_bundle_of_a_certificate_is_read_and_holds() -> None:
    bundle = decode_bundle(published("certificate"), "it")
    assert bundle.key_id is None
    assert len(bundle.certificates) == 2
    public = x509.load_der_x509_certificate(bundle.certificates[0]).public_key()
    assert PublicKey.of(public).verify(bundle.envelope.to_be_signed, bundle.envelope.signature)  # type: ignore[arg-type]
    assert len(decode_statement(bundle.envelope.payload, "it").resources) == 2


def test_a_bundle_out_of_a_transparency_log_is_refused_by_what_is_verified_here() -> None:
    with pytest.raises(FormatError, match=r"transparency log.*does not verify.*of keys and of certificates"):
        decode_bundle(published("sigstore"), "it")


@pytest.mark.parametrize(
    ("name", "reason"),
    (
        ("invalid-empty", "not JSON"),
        ("invalid-missing-envelope", "lacks the member 'dsseEnvelope'"),
        ("invalid-missing-verification-material", "lacks the member 'verificationMaterial'"),
    ),
)
def test_the_published_malformed_bundles_are_refused(name: str, reason: str) -> None:
    with pytest.raises(FormatError, match=reason):
        decode_bundle(published(name), "it")


def test_the_published_statement_of_another_predicate_is_refused() -> None:
    bundle = decode_bundle(published("invalid-wrong-predicate"), "it")
    with pytest.raises(FormatError, match="the predicate type"):
        decode_statement(bundle.envelope.payload, "it")


def test_resources_in_the_order_of_the_independent_writer_are_read() -> None:
    """It sorts folders before it sorts what is in them, and the subject follows."""
    one, two = digest("1"), digest("2")
    document = json.loads(statement({"sub/x": one, "sub.x/y": two}))
    document["predicate"]["resources"].reverse()
    document["subject"][0]["digest"]["sha256"] = hashlib.sha256(one + two).hexdigest()
    read = decode_statement(json.dumps(document).encode(), "it")
    assert list(read.resources) == ["sub/x", "sub.x/y"]
    assert read.subject == hashlib.sha256(one + two).digest()


# ------------------------------------------------------------------------------------ malformed statements

Change = Callable[[dict[str, Any]], object]


def resources(document: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = document["predicate"]["resources"]
    return found


def serialization(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = document["predicate"]["serialization"]
    return found


def settle(document: dict[str, Any]) -> None:
    """Make the subject fit again, so that what is refused is not refused for it."""
    listed = b"".join(bytes.fromhex(item["digest"]) for item in resources(document))
    document["subject"][0]["digest"]["sha256"] = hashlib.sha256(listed).hexdigest()


def renamed(name: str) -> Change:
    def change(document: dict[str, Any]) -> None:
        document["predicate"]["resources"] = [{"algorithm": "sha256", "digest": "ab" * 32, "name": name}]
        settle(document)

    return change


def listing(*names: str) -> Change:
    def change(document: dict[str, Any]) -> None:
        document["predicate"]["resources"] = [
            {"algorithm": "sha256", "digest": "ab" * 32, "name": name} for name in names
        ]
        settle(document)

    return change


def with_algorithm(name: str, digest_hex: str = "ab" * 32) -> Change:
    def change(document: dict[str, Any]) -> None:
        resources(document)[0].update(algorithm=name, digest=digest_hex)
        settle(document)

    return change


def with_digest(text: Json) -> Change:
    return lambda document: resources(document)[0].update(digest=text)


def with_serialization(**members: Json) -> Change:
    def change(document: dict[str, Any]) -> None:
        serialization(document).update(members)
        for name in [name for name, value in members.items() if value is ...]:
            del serialization(document)[name]

    return change


def without(*path: str) -> Change:
    def change(document: dict[str, Any]) -> None:
        for name in path[:-1]:
            document = document[name]
        del document[path[-1]]

    return change


MALFORMED: dict[str, tuple[Change, str]] = {
    "another type of statement": (
        lambda document: document.update(_type="https://in-toto.io/Statement/v0.1"),
        "the type of the statement of step 7 is 'https://in-toto.io/Statement/v0.1'",
    ),
    "the predicate of old": (
        lambda document: document.update(predicateType="https://model_signing/Digests/v0.1"),
        "the predicate type of .* is 'https://model_signing/Digests/v0.1'",
    ),
    "a later predicate": (
        lambda document: document.update(predicateType="https://model_signing/signature/v1.1"),
        "the predicate type of .*; expected 'https://model_signing/signature/v1.0'",
    ),
    "no type": (without("_type"), "lacks the member '_type'"),
    "no subject": (without("subject"), "lacks the member 'subject'"),
    "no predicate": (without("predicate"), "lacks the member 'predicate'"),
    "no predicate type": (without("predicateType"), "lacks the member 'predicateType'"),
    "no resources": (without("predicate", "resources"), "lacks the member 'resources'"),
    "no serialization": (without("predicate", "serialization"), "lacks the member 'serialization'"),
    "an unknown member": (lambda document: document.update(x=1), "the member 'x'"),
    "an unknown member of the predicate": (
        lambda document: document["predicate"].update(x=1),
        "the predicate of .* has the member 'x'",
    ),
    "an unknown member of the serialization": (
        with_serialization(x=1),
        "the serialization of .* the member 'x'",
    ),
    "an unknown member of a resource": (
        lambda document: resources(document)[1].update(uri="x"),
        "resource 1 of .* the member 'uri'",
    ),
    "an unknown member of the subject": (
        lambda document: document["subject"][0].update(uri="x"),
        "the subject of .* the member 'uri'",
    ),
    # Subjects
    "no subjects": (lambda document: document.update(subject=[]), "has 0 subjects"),
    "two subjects": (lambda document: document["subject"].append(document["subject"][0]), "has 2 subjects"),
    "a subject that is no list": (
        lambda document: document.update(subject=document["subject"][0]),
        "the subject of .* is an object; expected an array",
    ),
    "a subject without a name": (
        lambda document: document["subject"][0].update(name=""),
        "the subject's name of .* is empty",
    ),
    "a wrong subject": (
        lambda document: document["subject"][0]["digest"].update(sha256="cd" * 32),
        f"inconsistent: its subject is {'cd' * 32}, and what it lists comes to",
    ),
    "a subject by another algorithm": (
        lambda document: document["subject"][0].update(digest={"sha1": "ab" * 20}),
        "the subject's digest of .* lacks the member 'sha256'",
    ),
    "a subject by two algorithms": (
        lambda document: document["subject"][0]["digest"].update(sha1="ab" * 20),
        "the subject's digest of .* has the member 'sha1'",
    ),
    "a subject in capitals": (
        lambda document: document["subject"][0]["digest"].update(
            sha256=document["subject"][0]["digest"]["sha256"].upper()
        ),
        "the subject's digest of .*lower-case hex digits",
    ),
    # Resources
    "nothing listed": (lambda document: document["predicate"].update(resources=[]), "lists no file"),
    "resources that are no list": (
        lambda document: document["predicate"].update(resources={"a": "ab" * 32}),
        "the resources of .* is an object",
    ),
    "a resource that is no object": (
        lambda document: resources(document).insert(0, "a"),  # type: ignore[arg-type]
        "resource 0 of .* is a string",
    ),
    "a resource dropped": (lambda document: resources(document).pop(), "inconsistent"),
    "a resource added": (
        lambda document: resources(document).append(
            {"algorithm": "sha256", "digest": "ab" * 32, "name": "z"}
        ),
        "inconsistent",
    ),
    "a resource's digest changed": (with_digest("ab" * 32), "inconsistent"),
    "a resource listed twice": (listing("a", "a"), "lists 'a' twice"),
    "resources out of order": (listing("b", "a"), "in the order of their names"),
    "resources in an order of neither kind": (
        listing("sub/x", "sub.x/y", "a"),
        "in the order of their names",
    ),
    "a resource without a digest": (
        lambda document: resources(document)[2].pop("digest"),
        "resource 2 of .* lacks the member 'digest'",
    ),
    "a resource without a name": (
        lambda document: resources(document)[2].pop("name"),
        "resource 2 of .* lacks the member 'name'",
    ),
    "a resource without an algorithm": (
        lambda document: resources(document)[2].pop("algorithm"),
        "resource 2 of .* lacks the member 'algorithm'",
    ),
    "a name of no text": (lambda document: resources(document)[0].update(name=7), "the name of resource 0"),
    "a digest too short": (with_digest("ab" * 31), "the digest of resource 0 .*64 lower-case hex digits"),
    "a digest too long": (with_digest("ab" * 64), "the digest of resource 0 .*64 lower-case hex digits"),
    "a digest in capitals": (with_digest("AB" * 32), "the digest of resource 0 .*64 lower-case hex digits"),
    "a digest in digits of elsewhere": (with_digest("\u0660" * 64), "the digest of resource 0"),
    "a digest with its algorithm before it": (with_digest("sha256:" + "ab" * 32), "the digest of resource 0"),
    "a digest with a line break": (with_digest("ab" * 32 + "\n"), "the digest of resource 0"),
    "a digest of no text": (with_digest(None), "the digest of resource 0 of .* is null"),
    # Names
    "a name that climbs out": (renamed("../x"), "unsafe name: '../x'"),
    "a name that climbs inside": (renamed("a/../x"), "unsafe name"),
    "a name that climbs at the end": (renamed("a/.."), "unsafe name"),
    "the folder itself": (renamed("."), "unsafe name"),
    "a name with a dot as a part": (renamed("a/./x"), "unsafe name"),
    "an absolute name": (renamed("/etc/passwd"), "unsafe name"),
    "an absolute name of another system": (renamed("C:\\x"), "unsafe name"),
    "a drive": (renamed("C:x"), "unsafe name"),
    "a share": (renamed("//host/x"), "unsafe name"),
    "a backslash": (renamed("a\\x"), "unsafe name"),
    "a NUL": (renamed("a\0.bin"), "unsafe name"),
    "a line break": (renamed("a\n"), "unsafe name"),
    "an empty name": (renamed(""), "unsafe name"),
    "an empty part": (renamed("a//x"), "unsafe name"),
    "a slash at the end": (renamed("a/"), "unsafe name"),
    "a hidden file": (renamed(".bashrc"), "unsafe name"),
    "a space at the end": (renamed("a "), "unsafe name"),
    "letters that look alike": (renamed("MANIFEST.js\u043en"), "unsafe name"),
    "a letter in two characters": (renamed("e\u0301"), "unsafe name"),
    "a mark that turns the text around": (renamed("a\u202e.bin"), "unsafe name"),
    "a very long name": (renamed("a" * 600), "unsafe name"),
    "a shard's name": (renamed("a.bin:0:10"), "unsafe name"),
    "twins by case": (listing("MANIFEST.json", "manifest.json"), "which some file systems take for one"),
    "twins by a folder's case": (listing("A/x", "a/y"), "which some file systems take for one"),
    "a file that is a folder, too": (listing("a", "a/x"), "lists 'a' as a file, and 'a/x' in it"),
    "a file that is a folder, far apart": (listing("a", "a-b", "a/x/y"), "lists 'a' as a file"),
    # Algorithms and methods
    "SHA-1": (
        with_algorithm("sha1", "ab" * 20),
        "the algorithm of resource 0 of .* is 'sha1'; expected 'sha256'",
    ),
    "BLAKE2b": (with_algorithm("blake2b", "ab" * 64), "is 'blake2b'; expected 'sha256'"),
    "BLAKE3": (with_algorithm("blake3"), "is 'blake3'; expected 'sha256'"),
    "MD5": (with_algorithm("md5", "ab" * 16), "is 'md5'; expected 'sha256'"),
    "SHA-256 of shards": (with_algorithm("sha256-sharded-1000000000"), "is 'sha256-sharded-1000000000'"),
    "SHA-256 in capitals": (with_algorithm("SHA256"), "is 'SHA256'; expected 'sha256'"),
    "no algorithm": (with_algorithm(""), "is ''; expected 'sha256'"),
    "the method of shards": (
        with_serialization(method="shards", shard_size=1_000_000_000),
        "the method of .* is 'shards'; expected 'files'",
    ),
    "a shard size with files": (with_serialization(shard_size=10), "has a shard size"),
    "a shard size as a fraction": (with_serialization(shard_size=1e9), "not an integer"),
    "another hash type": (with_serialization(hash_type="blake3"), "the hash type of .* is 'blake3'"),
    "no method": (with_serialization(method=...), "lacks the member 'method'"),
    "no hash type": (with_serialization(hash_type=...), "lacks the member 'hash_type'"),
    "nothing said of links": (with_serialization(allow_symlinks=...), "lacks the member 'allow_symlinks'"),
    "links followed": (with_serialization(allow_symlinks=True), "follows symbolic links"),
    "links, in words": (with_serialization(allow_symlinks="false"), "follows symbolic links"),
    # What is ignored
    "ignored paths that are no list": (
        with_serialization(ignore_paths=".git"),
        "the ignored paths of .*a string",
    ),
    "an ignored path of no text": (with_serialization(ignore_paths=[None]), "an ignored path of .* is null"),
    "everything ignored": (with_serialization(ignore_paths=["."]), "ignores '.'"),
    "nothing named, ignored": (with_serialization(ignore_paths=[""]), "ignores ''"),
    "an ignored path outside": (with_serialization(ignore_paths=["../x"]), "ignores '../x'"),
    "an ignored absolute path": (with_serialization(ignore_paths=["/x"]), "ignores '/x'"),
    "an ignored pattern": (with_serialization(ignore_paths=["*.bin"]), r"ignores '\*.bin'"),
    "an ignored NUL": (with_serialization(ignore_paths=["x\0"]), "ignores 'x"),
    "a listed file, ignored": (with_serialization(ignore_paths=["MANIFEST.json"]), "both lists and ignores"),
    "a listed file's folder, ignored": (with_serialization(ignore_paths=["a"]), "both lists and ignores 'a'"),
    "a flood of ignored paths": (with_serialization(ignore_paths=["x"] * 1_001), "ignores 1001 paths"),
}


def changed(change: Change) -> bytes:
    document = json.loads(statement(FILES))
    change(document)
    return json.dumps(document).encode()


def test_the_statement_that_is_changed_below_is_fine_without() -> None:
    assert decode_statement(changed(lambda document: None), "step 7").resources == FILES


@pytest.mark.parametrize(("change", "reason"), MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_statement_is_refused(change: Change, reason: str) -> None:
    with pytest.raises(FormatError, match=reason) as caught:
        decode_statement(changed(change), "step 7")
    assert "step 7" in str(caught.value)
    assert len(str(caught.value)) < 1_000


WHOLE = statement(FILES)
SPELLED: dict[str, tuple[bytes, str]] = {
    "a member named twice": (
        WHOLE.replace(b'"_type"', b'"predicateType":"x","_type"'),
        "'predicateType' twice",
    ),
    "resources named twice": (
        WHOLE.replace(b'"resources"', b'"resources":[],"resources"'),
        "'resources' twice",
    ),
    "a digest named twice": (WHOLE.replace(b'"digest":"', b'"digest":"00","digest":"', 1), "'digest' twice"),
    "bytes behind the end": (WHOLE + b"{}", "not JSON"),
    "a NUL behind the end": (WHOLE + b"\0", "not JSON"),
    "a byte-order mark": (b"\xef\xbb\xbf" + WHOLE, "byte-order mark"),
    "an array": (b"[" + WHOLE + b"]", "is an array"),
    "text": (b'"statement"', "is a string"),
    "nothing": (b"", "not JSON"),
    "deep nesting": (WHOLE.replace(b'"name":"data"', b'"name":' + b"[" * 2_000 + b"]" * 2_000), "nests"),
    "a huge number": (WHOLE.replace(b"false", b"9" * 5_000), "not below 2"),
    "a fraction": (WHOLE.replace(b"false", b"0.0"), "not an integer"),
    "a million and one items": (
        WHOLE.replace(b"false", b"[" + b"0," * 1_000_000 + b"0]"),
        "more than 1000000",
    ),
    "fifty million bytes": (WHOLE + b" " * (50 << 20), "at most"),
}


@pytest.mark.parametrize(("payload", "reason"), SPELLED.values(), ids=SPELLED)
def test_a_statement_that_two_readers_could_read_differently_is_refused(payload: bytes, reason: str) -> None:
    with pytest.raises(FormatError, match=reason):
        decode_statement(payload, "it")


@given(st.data())
def test_no_changed_byte_of_a_statement_goes_unnoticed(data: st.DataObject) -> None:
    """Whatever is still read says the same as before of every file."""
    position = data.draw(st.integers(0, len(WHOLE) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda byte: byte != WHOLE[position]))
    payload = WHOLE[:position] + bytes([byte]) + WHOLE[position + 1 :]
    try:
        read = decode_statement(payload, "it")
    except FormatError:
        return
    assert list(read.resources.values()) == list(FILES.values())


# --------------------------------------------------------------------------------------- malformed bundles


def bundled(change: Change) -> bytes:
    document = json.loads(encode_bundle(WHOLE, SIGNATURE, key_id=KEY_ID))
    change(document)
    return json.dumps(document).encode()


def with_material(**members: Json) -> Change:
    return lambda document: document.update(verificationMaterial=members)


def with_envelope(**members: Json) -> Change:
    return lambda document: document["dsseEnvelope"].update(members)


def hint(key_id: Json) -> Change:
    return with_material(publicKey={"hint": key_id}, tlogEntries=[])


def chain(*certificates: Json) -> Change:
    return with_material(x509CertificateChain={"certificates": list(certificates)}, tlogEntries=[])


CERTIFICATE = {"rawBytes": "MQ=="}

READ: dict[str, Change] = {
    "as it is": lambda document: None,
    "log entries left out": with_material(publicKey={"hint": KEY_ID}),
    "the key id left out": with_envelope(signatures=[{"sig": base64.b64encode(SIGNATURE).decode()}]),
    "the key id null": with_envelope(
        signatures=[{"sig": base64.b64encode(SIGNATURE).decode(), "keyid": None}]
    ),
    "certificates": chain(CERTIFICATE, CERTIFICATE),
}


@pytest.mark.parametrize("change", READ.values(), ids=READ)
def test_what_writers_of_the_format_leave_open_is_read(change: Change) -> None:
    assert decode_bundle(bundled(change), "it").envelope.payload == WHOLE


BUNDLES: dict[str, tuple[Change, str]] = {
    "an older media type": (
        lambda document: document.update(mediaType="application/vnd.dev.sigstore.bundle+json;version=0.2"),
        "the media type of signature.json is",
    ),
    "another spelling of the media type": (
        lambda document: document.update(mediaType="application/vnd.dev.sigstore.bundle+json;version=0.3"),
        f"the media type of signature.json .*; expected '{MEDIA_TYPE.replace('+', '.')}'",
    ),
    "no media type": (without("mediaType"), "lacks the member 'mediaType'"),
    "no envelope": (without("dsseEnvelope"), "lacks the member 'dsseEnvelope'"),
    "no material": (without("verificationMaterial"), "lacks the member 'verificationMaterial'"),
    "a message's signature": (
        lambda document: document.update(messageSignature={"signature": "MQ=="}),
        "the member 'messageSignature'",
    ),
    "another type of payload": (with_envelope(payloadType="text/plain"), "the payload type of"),
    "no signature": (with_envelope(signatures=[]), "has 0 signatures"),
    "two signatures": (
        with_envelope(signatures=[{"sig": base64.b64encode(SIGNATURE).decode(), "keyid": ""}] * 2),
        "has 2 signatures",
    ),
    "a signature of another kind": (
        with_envelope(signatures=[{"sig": base64.b64encode(bytes(64)).decode(), "keyid": ""}]),
        "not an ECDSA signature in DER",
    ),
    "a signature with bytes behind it": (
        with_envelope(signatures=[{"sig": base64.b64encode(SIGNATURE + b"x").decode(), "keyid": ""}]),
        "not an ECDSA signature in DER",
    ),
    "a payload in two lines": (with_envelope(payload="e30=\n"), "not in standard, padded base64"),
    "a payload without padding": (with_envelope(payload="e30"), "not in standard, padded base64"),
    "nothing to verify with": (with_material(tlogEntries=[]), "exactly one of them"),
    "a key and certificates": (
        with_material(publicKey={"hint": KEY_ID}, x509CertificateChain={"certificates": [CERTIFICATE]}),
        "exactly one of them",
    ),
    "a key and a certificate of the public authority": (
        with_material(publicKey={"hint": KEY_ID}, certificate=CERTIFICATE),
        "transparency log",
    ),
    "a certificate of the public authority": (
        with_material(certificate=CERTIFICATE, tlogEntries=[{"logIndex": "1"}]),
        "rests on a transparency log .*, which this release does not verify",
    ),
    "a key with log entries": (
        with_material(publicKey={"hint": KEY_ID}, tlogEntries=[{"logIndex": "1"}]),
        "transparency log",
    ),
    "log entries that are no list": (
        with_material(publicKey={"hint": KEY_ID}, tlogEntries={}),
        "the log entries",
    ),
    "a timestamp": (
        with_material(publicKey={"hint": KEY_ID}, timestampVerificationData={}),
        "the member 'timestampVerificationData'",
    ),
    "material that is no object": (
        lambda document: document.update(verificationMaterial="key"),
        "the verification material of signature.json is a string",
    ),
    "no hint": (hint(None), "the key's id of .* is null"),
    "an empty hint": (hint(""), "names its key by ''"),
    "a short hint": (hint("ab" * 16), "64 lower-case hex digits"),
    "a hint in capitals": (hint("AB" * 32), "64 lower-case hex digits"),
    "a hint in base64": (hint(base64.b64encode(bytes(32)).decode()), "64 lower-case hex digits"),
    "a hint with an algorithm": (hint("sha256:" + KEY_ID), "64 lower-case hex digits"),
    "the key itself": (
        with_material(publicKey={"hint": KEY_ID, "rawBytes": "MQ=="}),
        "the public key of .* has the member 'rawBytes'",
    ),
    "the key in place of its hint": (
        with_material(publicKey={"rawBytes": "MQ=="}),
        "lacks the member 'hint'",
    ),
    "no certificates": (chain(), "holds 0 certificates"),
    "a flood of certificates": (chain(*[CERTIFICATE] * 11), "holds 11 certificates"),
    "certificates that are no list": (
        with_material(x509CertificateChain={"certificates": CERTIFICATE}),
        "the certificates of .* is an object",
    ),
    "a certificate in PEM": (chain({"rawBytes": "-----BEGIN"}), "certificate 0 of .*base64"),
    "a certificate that is text": (chain(CERTIFICATE, "MQ=="), "certificate 1 of .* is a string"),
    "a certificate with more to it": (chain({**CERTIFICATE, "x": 1}), "the member 'x'"),
}


@pytest.mark.parametrize(("change", "reason"), BUNDLES.values(), ids=BUNDLES)
def test_a_malformed_bundle_is_refused(change: Change, reason: str) -> None:
    with pytest.raises(FormatError, match=reason) as caught:
        decode_bundle(bundled(change), "signature.json")
    assert "signature.json" in str(caught.value)
    assert len(str(caught.value)) < 1_000


BUNDLE = encode_bundle(WHOLE, SIGNATURE, key_id=KEY_ID)
BUNDLE_SPELLINGS: dict[str, tuple[bytes, str]] = {
    "a member named twice": (BUNDLE.replace(b'"payload"', b'"payload":"e30=","payload"'), "'payload' twice"),
    "a signature named twice": (BUNDLE.replace(b'"sig"', b'"sig":"","sig"'), "'sig' twice"),
    "bytes behind the end": (BUNDLE + b"x", "not JSON"),
    "deep nesting": (BUNDLE.replace(b"[]", b"[" * 500 + b"]" * 500), "nests 502 deep"),
    "a huge number": (BUNDLE.replace(b"[]", b"[" + b"1" * 5_000 + b"]"), "not below 2"),
    "a fraction": (BUNDLE.replace(b"[]", b"[1.5]"), "not an integer"),
    "a thousand and one items": (BUNDLE.replace(b"[]", b"[" + b"0," * 1_000 + b"0]"), "more than 1000 items"),
    "seventy million bytes": (BUNDLE + b" " * (70 << 20), "at most"),
}


@pytest.mark.parametrize(("data", "reason"), BUNDLE_SPELLINGS.values(), ids=BUNDLE_SPELLINGS)
def test_a_bundle_that_two_readers_could_read_differently_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(FormatError, match=reason):
        decode_bundle(data, "it")


def test_the_payload_is_not_looked_at_before_its_signature_was_verified() -> None:
    junk = encode_bundle(b"\xff not JSON", SIGNATURE, key_id=KEY_ID)
    assert decode_bundle(junk, "it").envelope.payload == b"\xff not JSON"


# ------------------------------------------------------------------------------------------------ signing


@pytest.mark.parametrize("curve", CURVES)
def test_a_signed_statement_names_its_key_and_holds(curve: str) -> None:
    signer = MemorySigner(curve)
    bundle = decode_bundle(sign_payload(WHOLE, signer, within_s=10), "it")
    assert bundle.key_id == signer.public_key.id
    assert signer.public_key.verify(bundle.envelope.to_be_signed, bundle.envelope.signature)


def test_a_signer_with_certificates_is_named_by_them() -> None:
    signer = MemorySigner()
    root = issue("root")
    leaf = issue_signer(root, signer.private)
    signer.certificates = (leaf.der, root.der)
    bundle = decode_bundle(sign_payload(WHOLE, signer, within_s=10), "it")
    assert (bundle.key_id, bundle.certificates) == (None, (leaf.der, root.der))


def test_a_signature_by_another_key_is_not_put_into_a_bundle() -> None:
    signer = MemorySigner()
    signer.public_key = MemorySigner().public_key
    with pytest.raises(KeyServiceError, match="memory:test"):
        sign_payload(WHOLE, signer, within_s=10)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "model"
    (root / "deep/er").mkdir(parents=True)
    (root / "empty").mkdir()
    (root / "config.json").write_bytes(b"{}")
    (root / "deep/er/weights.safetensors").write_bytes(bytes(3 << 20))
    (root / "deep/nothing").write_bytes(b"")
    return root


def files_of(root: Path, **options: Any) -> dict[str, bytes]:
    return decode_statement(
        decode_bundle(sign_folder(root, MemorySigner(), within_s=10, **options), "it").envelope.payload, "it"
    ).resources


def test_every_file_of_a_folder_is_signed(folder: Path) -> None:
    signer = MemorySigner()
    bundle = decode_bundle(sign_folder(folder, signer, within_s=10), "it")
    assert signer.public_key.verify(bundle.envelope.to_be_signed, bundle.envelope.signature)
    read = decode_statement(bundle.envelope.payload, "it")
    assert read.resources == {
        path: hashlib.sha256((folder / path).read_bytes()).digest()
        for path in ("config.json", "deep/er/weights.safetensors", "deep/nothing")
    }
    assert read.ignored == GIT_PATHS
    assert json.loads(bundle.envelope.payload)["subject"][0]["name"] == "model"
    assert json.loads(bundle.envelope.payload)["predicateType"] == SIGNATURE_PREDICATE


def test_what_is_ignored_is_ignored_whole_and_nowhere_else(folder: Path) -> None:
    (folder / "deep/config.json").write_bytes(b"x")
    (folder / ".git").mkdir()
    (folder / ".git/HEAD").write_bytes(b"x")
    (folder / ".gitignore").write_bytes(b"x")
    assert set(files_of(folder, ignore=["config.json", "deep/er"])) == {"deep/config.json", "deep/nothing"}


def test_what_is_ignored_may_be_what_could_not_be_signed(folder: Path) -> None:
    (folder / "link").symlink_to("config.json")
    assert "config.json" in files_of(folder, ignore=["link"])


@pytest.mark.parametrize("what", ("link to a file", "link to a folder", "dangling link", "pipe"))
def test_a_folder_with_anything_but_files_and_folders_is_refused(folder: Path, what: str) -> None:
    odd = folder / "deep/odd"
    if what == "pipe":
        os.mkfifo(odd)
    else:
        odd.symlink_to({"link to a file": "nothing", "link to a folder": "er"}.get(what, "absent"))
    with pytest.raises(ConfigError, match="deep/odd is a link or a special file"):
        sign_folder(folder, MemorySigner(), within_s=10)


def test_a_link_to_a_folder_is_not_signed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(ConfigError, match="link is not a folder"):
        sign_folder(tmp_path / "link", MemorySigner(), within_s=10)


def test_a_folder_without_files_is_not_signed(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    with pytest.raises(FormatError, match="lists no file"):
        sign_folder(tmp_path, MemorySigner(), within_s=10)


def test_what_is_no_folder_is_not_signed(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json is not a folder"):
        sign_folder(folder / "config.json", MemorySigner(), within_s=10)
    with pytest.raises(ConfigError, match="absent cannot be signed"):
        sign_folder(folder / "absent", MemorySigner(), within_s=10)


@pytest.mark.parametrize("name", ("a b", ".hidden", "ä", "a\nb", "-x"))
def test_a_file_that_no_reader_would_take_by_its_name_is_refused(folder: Path, name: str) -> None:
    (folder / name).write_bytes(b"x")
    with pytest.raises(FormatError, match="unsafe name"):
        sign_folder(folder, MemorySigner(), within_s=10)
