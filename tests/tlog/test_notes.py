"""Signed notes and tree heads: the specifications' examples, heads of public logs, and what is refused."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, mldsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from strongroom.errors import ConfigError, FormatError, IntegrityError, StrongroomError, UntrustedError
from strongroom_security.tlog.checkpoints import Checkpoint
from strongroom_security.tlog.merkle import EMPTY_ROOT
from strongroom_security.tlog.notekeys import KeyType, NoteSigner, VerifierKey, verify_note
from strongroom_security.tlog.notes import Note, NoteSignature
from strongroom_security.tlog.proofs import TlogProof
from strongroom_security.tlog.witnesses import LogKeys, WitnessPolicy, open_checkpoint

# C2SP signed-note, "Example".
SPEC_KEY = "example.com/foo+530d903a+AekyeRrm56hApGFkyQR4ZCbV54Id2LKaANYcrnKv3U2k"
SPEC_NOTE = """This is an example message.

— example.com/foo Uw2QOkn8srV1yJGh2VYRlL1Tnagv1YEq6TfXppzi2ONncAlTgK7Ztg1ERYNZXsYjOBH3mFXmRKuwHjG1Yu72IneyaQM=
""".encode()

# golang.org/x/mod/sumdb/note, the package's documented example: PeterNeumann's key and note.
GO_KEY = "PeterNeumann+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW"
GO_NOTE = """If you think cryptography is the answer to your problem,
then you don't know what your problem is.

— PeterNeumann x08go/ZJkuBS9UG/SffcvIAQxVBtiFupLLr8pAcElZInNIuGUgYN1FFYC2pZSNXgKvqfqdngotpRZb6KE6RyyBwJnAM=
""".encode()

# Sigstore's Rekor v1: its key, and heads that it signed, with an extension line and without.
REKOR_KEY = (
    "rekor.sigstore.dev+c0d23d6a+AjBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABNhtmPtrWm3U1eQXBogSMdGvXwBcK5AW5i0hrZLOC96l"
    "+smGNM7nwZ4QvFK/4sueRoVj//QP22Ni4Qt9DPfkWLc="
)
REKOR_ORIGIN = "rekor.sigstore.dev - 2605736670972794746"
REKOR_NOTES = (
    """rekor.sigstore.dev - 2605736670972794746
93750551
KgKiXoOl8rM5d4y6Xlbm2QLftvj/FYvTs6z7dJlNO60=

— rekor.sigstore.dev wNI9ajBEAiBkLzdjY8A9HReU7rmtjwZ+JpSuYtEr9SmvSwUIW7FBjgIgKo+vhkW3tqc+gc8fw9gza3xLoncA8a+MTaJYCaLGA9c=
""",  # noqa: E501 - as it was signed
    """rekor.sigstore.dev - 2605736670972794746
11956977
bsvNvfX9esnxdaxvAUZ95z7/TqW8K/QCTTZ9488hhSE=
Timestamp: 1679575021729507429

— rekor.sigstore.dev wNI9ajBEAiBT4UXhcgXKxJAJrqoE4L5AHGpF9cMI/CaRt39/ulvMjQIgCyKEtY8LGT3cZyptA73dtP9pyMuLN8T3XhPfG8P/VpA=
""",  # noqa: E501 - as it was signed
)

# C2SP tlog-checkpoint and tlog-cosignature: the head of the examples. Their keys are not given.
SPEC_HEAD = """example.com/behind-the-sofa
20852163
CsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2I=
"""
SPEC_COSIGNED = (
    SPEC_HEAD
    + """
— example.com/behind-the-sofa Az3grlgtzPICa5OS8npVmf1Myq/5IZniMp+ZJurmRDeOoRDe4URYN7u5/Zhcyv2q1gGzGku9nTo+zyWE+xeMcTOAYQ8=
— witness.example.com/w1 jWbPPwAAAABkGFDLEZMHwSRaJNiIDoe9DYn/zXcrtPHeolMI5OWXEhZCB9dlrDJsX3b2oyin1nPZqhf5nNo0xUe+mbIUBkBIfZ+qnA==
"""  # noqa: E501 - as it was signed
).encode()

LOG_KEY = Ed25519PrivateKey.from_private_bytes(b"\x05" * 32)
WITNESS_KEY = Ed25519PrivateKey.from_private_bytes(b"\x06" * 32)
ORIGIN = "example.com/log"
HEAD = Checkpoint(origin=ORIGIN, size=12, root=b"\x11" * 32)


def signed(text: str, *signatures: NoteSignature) -> bytes:
    return Note(text=text, signatures=(NoteSigner(ORIGIN, LOG_KEY).sign(text), *signatures)).to_bytes()


def witness(name: str = "witness.example/w1", private: Ed25519PrivateKey = WITNESS_KEY) -> VerifierKey:
    return VerifierKey(name=name, type=KeyType.COSIGNATURE, public=private.public_key().public_bytes_raw())


def cosignature(
    text: str, key: VerifierKey, private: Ed25519PrivateKey = WITNESS_KEY, *, stamp_s: int = 1679315147
) -> NoteSignature:
    """As C2SP tlog-cosignature, "Ed25519 signed message", writes it down."""
    message = f"cosignature/v1\ntime {stamp_s}\n{text}".encode()
    value = stamp_s.to_bytes(8, "big") + private.sign(message)
    return NoteSignature(name=key.name, key_id=key.key_id, value=value)


# ----------------------------------------------------------------------------------------- what others signed


@pytest.mark.parametrize(("key", "note"), ((SPEC_KEY, SPEC_NOTE), (GO_KEY, GO_NOTE)), ids=["spec", "go"])
def test_the_specifications_example_and_gos_verify(key: str, note: bytes) -> None:
    parsed = Note.parse(note, "the note")
    (found,) = verify_note(parsed, [VerifierKey.parse(key)], "the note")
    assert str(found.key) == key
    assert parsed.to_bytes() == note


@pytest.mark.parametrize("note", REKOR_NOTES, ids=["plain", "extended"])
def test_heads_of_a_public_log_verify_by_ecdsa(note: str) -> None:
    log = LogKeys(origin=REKOR_ORIGIN, keys=(VerifierKey.parse(REKOR_KEY),))
    opened = open_checkpoint(note.encode(), log, "the head")
    assert opened.head.size in (93750551, 11956977)
    assert opened.note.to_bytes() == note.encode()
    assert str(opened.signed[0].key) == REKOR_KEY
    with pytest.raises(IntegrityError):
        open_checkpoint(note.replace("\n9", "\n8").replace("\n11", "\n12").encode(), log, "the head")


def test_the_specifications_cosigned_head_is_read() -> None:
    note = Note.parse(SPEC_COSIGNED, "the head")
    head = Checkpoint.parse(note.text, "the head")
    assert (head.origin, head.size) == ("example.com/behind-the-sofa", 20852163)
    assert head.text() == note.text == SPEC_HEAD
    assert [each.name for each in note.signatures] == [head.origin, "witness.example.com/w1"]
    # tlog-cosignature: the timestamp of the example's signed message.
    assert int.from_bytes(note.signatures[1].value[:8], "big") == 1679315147
    assert note.to_bytes() == SPEC_COSIGNED


# ------------------------------------------------------------------------------------------------ notes, keys


@pytest.mark.parametrize("kind", ("ed25519", "p256"))
def test_what_is_signed_verifies_and_nothing_else_does(kind: str) -> None:
    private: Any = LOG_KEY if kind == "ed25519" else ec.generate_private_key(ec.SECP256R1())
    signer = NoteSigner("example.com/a", private)
    note = Note(text="one\n\ntwo\n", signatures=(signer.sign("one\n\ntwo\n"),))
    assert VerifierKey.parse(str(signer.key)) == signer.key
    again = Note.parse(note.to_bytes(), "the note")
    assert again == note
    assert verify_note(again, [signer.key], "the note")[0].stamp_s == 0
    changed = Note(text="one\n\ntwO\n", signatures=note.signatures)
    with pytest.raises(IntegrityError, match="not over this text"):
        verify_note(changed, [signer.key], "the note")
    other = NoteSigner("example.com/a", Ed25519PrivateKey.generate())
    with pytest.raises(UntrustedError, match="expected example"):
        verify_note(note, [other.key], "the note")


def test_unknown_signatures_are_passed_over_and_a_bad_one_by_a_known_key_is_not() -> None:
    good, other = NoteSigner("a", LOG_KEY), NoteSigner("a", WITNESS_KEY)
    text = "text\n"
    note = Note(text=text, signatures=(other.sign(text), good.sign(text), good.sign(text)))
    assert [each.key for each in verify_note(note, [good.key], "the note")] == [good.key]
    bad = Note(text=text, signatures=(good.sign(text), other.sign("other\n")))
    assert verify_note(bad, [good.key], "the note")
    with pytest.raises(IntegrityError):
        verify_note(bad, [good.key, other.key], "the note")


def test_a_private_key_of_another_kind_or_that_would_be_copied_is_refused() -> None:
    import pickle

    with pytest.raises(ConfigError):
        NoteSigner("a", ec.generate_private_key(ec.SECP384R1()))
    with pytest.raises(TypeError):
        pickle.dumps(NoteSigner("a", LOG_KEY))
    assert "PRIVATE" not in repr(NoteSigner("a", LOG_KEY))


@pytest.mark.parametrize(
    "text",
    (
        "",
        "name",
        SPEC_KEY[:-1],
        SPEC_KEY + "=",
        SPEC_KEY.replace("530d903a", "530d903b"),
        SPEC_KEY.replace("530d903a", "530D903A"),
        SPEC_KEY.replace("example.com/foo", "example.com/fop"),
        SPEC_KEY.replace("example.com/foo", ""),
        SPEC_KEY.replace("example.com/foo", "example com/foo"),
        "a+00000000+",
        "a+00000000+" + base64.b64encode(b"\x03" + bytes(32)).decode(),
        "a+00000000+" + base64.b64encode(b"\x01" + bytes(31)).decode(),
        "a+00000000+" + base64.b64encode(b"\x02" + bytes(91)).decode(),
        "a+00000000+" + "A" * 5000,
    ),
)
def test_a_key_that_is_not_written_as_it_must_be_is_refused(text: str) -> None:
    with pytest.raises(FormatError):
        VerifierKey.parse(text)


def test_an_ecdsa_key_on_another_curve_is_refused() -> None:
    from cryptography.hazmat.primitives import serialization

    public = ec.generate_private_key(ec.SECP384R1()).public_key()
    der = public.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    with pytest.raises(FormatError, match="P-256"):
        VerifierKey(name="a", type=KeyType.ECDSA, public=der)


@pytest.mark.parametrize(
    "data",
    (
        b"",
        b"\n\n",
        b"text\n",
        b"text\n\n",
        SPEC_NOTE[:-1],
        SPEC_NOTE + b"\n",
        SPEC_NOTE.replace(b"\n\n", b"\n"),
        SPEC_NOTE.replace("—".encode(), b"-"),
        SPEC_NOTE.replace(b"example.com/foo ", b"example.com/foo  "),
        SPEC_NOTE.replace(b"example.com/foo ", b""),
        SPEC_NOTE.replace(b"example.com/foo ", b"exam+ple "),
        SPEC_NOTE.replace(b"QM=", b"QN="),
        SPEC_NOTE.replace(b"QM=", b"QM"),
        SPEC_NOTE.replace(b"This", b"Th\ris"),
        SPEC_NOTE.replace(b"This", b"Th\x00is"),
        SPEC_NOTE.replace(b"This", b"Th\xffis"),
        "text\n\n— a AAAAAA==\n".encode(),
        "text\n\n— a AAAA\n".encode(),
        b"text\n\n" + "— a AAAAAAA=\n".encode() * 65,
        b"x" * ((1 << 20) + 1),
    ),
    ids=range(20),
)
def test_a_note_that_is_not_written_as_it_must_be_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        Note.parse(data, "the note")


@given(st.binary(max_size=300) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "replace")))
def test_any_bytes_are_a_note_or_refused(data: bytes) -> None:
    try:
        assert Note.parse(data, "the note").to_bytes() == data
    except FormatError:
        return


@given(st.integers(0, len(SPEC_NOTE) - 1), st.integers(1, 255))
def test_no_byte_of_a_note_can_be_changed(at: int, change: int) -> None:
    data = bytearray(SPEC_NOTE)
    data[at] ^= change
    with pytest.raises((IntegrityError, UntrustedError)):
        verify_note(Note.parse(bytes(data), "the note"), [VerifierKey.parse(SPEC_KEY)], "the note")


# ------------------------------------------------------------------------------------------------- tree heads


@pytest.mark.parametrize(
    "text",
    (
        "",
        "o\n",
        "o\n1\n",
        SPEC_HEAD[:-1],
        SPEC_HEAD + "\n",
        SPEC_HEAD.replace("20852163", "020852163"),
        SPEC_HEAD.replace("20852163", "-1"),
        SPEC_HEAD.replace("20852163", "+1"),
        SPEC_HEAD.replace("20852163", "1 "),
        SPEC_HEAD.replace("20852163", "\u0661"),
        SPEC_HEAD.replace("20852163", "9223372036854775808"),
        SPEC_HEAD.replace("20852163", "0"),
        SPEC_HEAD.replace("q2I=", "q2J="),
        SPEC_HEAD.replace("CsUY", ""),
        SPEC_HEAD.replace("example.com/behind-the-sofa", ""),
    ),
    ids=range(15),
)
def test_a_head_that_is_not_written_as_it_must_be_is_refused(text: str) -> None:
    with pytest.raises(FormatError):
        Checkpoint.parse(text, "the head")


@given(st.text(max_size=120))
def test_any_text_is_a_head_or_refused(text: str) -> None:
    try:
        assert Checkpoint.parse(text, "the head").text() == text
    except FormatError:
        return


def test_a_head_has_three_lines_and_its_extensions() -> None:
    empty = Checkpoint(origin="o", size=0, root=EMPTY_ROOT, extensions=("more", "and more"))
    assert empty.text() == "o\n0\n47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=\nmore\nand more\n"
    assert Checkpoint.parse(empty.text(), "the head") == empty


# -------------------------------------------------------------------------------------------------- witnesses


def test_as_many_witnesses_as_are_asked_for_have_to_have_cosigned() -> None:
    text = HEAD.text()
    first, second = (
        witness(),
        witness("witness.example/w2", Ed25519PrivateKey.from_private_bytes(b"\x09" * 32)),
    )
    log = NoteSigner(ORIGIN, LOG_KEY).key
    data = signed(text, cosignature(text, first))

    def opened(required: int, *keys: VerifierKey) -> tuple[str, ...]:
        policy = WitnessPolicy(keys=keys, required=required)
        found = open_checkpoint(data, LogKeys(origin=ORIGIN, keys=(log,), witnesses=policy), "the head")
        assert all(each.stamp_s == 1679315147 for each in found.cosigned)
        return tuple(each.key.name for each in found.cosigned)

    assert opened(0) == ()
    assert opened(1, first) == opened(1, first, second) == ("witness.example/w1",)
    for required, keys in ((1, (second,)), (2, (first, second))):
        with pytest.raises(UntrustedError, match="cosigned by"):
            opened(required, *keys)
    with pytest.raises(ConfigError):
        WitnessPolicy(keys=(first,), required=2)
    with pytest.raises(ConfigError, match="04 or 06"):
        WitnessPolicy(keys=(log,))
    with pytest.raises(ConfigError, match="01 or 02"):
        LogKeys(origin=ORIGIN, keys=(first,))


def test_a_cosignature_is_over_its_time_and_its_text() -> None:
    text, key = HEAD.text(), witness()
    good = cosignature(text, key)
    log = LogKeys(
        origin=ORIGIN,
        keys=(NoteSigner(ORIGIN, LOG_KEY).key,),
        witnesses=WitnessPolicy(keys=(key,), required=1),
    )
    values = [
        (1679315148).to_bytes(8, "big") + good.value[8:],
        good.value[:-1] + bytes([good.value[-1] ^ 1]),
        good.value[:8],
        good.value[:-1],
        b"\x80" + good.value[1:],
        cosignature(text + "more\n", key).value,
        WITNESS_KEY.sign(text.encode()),
    ]
    assert open_checkpoint(signed(text, good), log, "the head").cosigned
    for value in values:
        bad = NoteSignature(name=key.name, key_id=key.key_id, value=value)
        with pytest.raises(IntegrityError):
            open_checkpoint(signed(text, bad), log, "the head")


def test_a_cosignature_alone_does_not_make_a_head_the_logs() -> None:
    text, key = HEAD.text(), witness()
    log = LogKeys(
        origin=ORIGIN,
        keys=(NoteSigner(ORIGIN, LOG_KEY).key,),
        witnesses=WitnessPolicy(keys=(key,), required=1),
    )
    data = Note(text=text, signatures=(cosignature(text, key),)).to_bytes()
    with pytest.raises(UntrustedError, match="not signed by the log"):
        open_checkpoint(data, log, "the head")


def test_a_head_of_another_log_is_refused_though_the_same_key_signed_it() -> None:
    text = Checkpoint(origin="example.com/other", size=1, root=bytes(32)).text()
    log = LogKeys(origin=ORIGIN, keys=(NoteSigner(ORIGIN, LOG_KEY).key,))
    with pytest.raises(IntegrityError, match="the log"):
        open_checkpoint(signed(text), log, "the head")


def test_a_cosignature_by_ml_dsa_is_verified() -> None:
    private = mldsa.MLDSA44PrivateKey.generate()
    public = private.public_key().public_bytes_raw()
    key = VerifierKey(name="witness.example/pq", type=KeyType.COSIGNATURE_ML_DSA_44, public=public)
    assert VerifierKey.parse(str(key)) == key
    text, stamp_s = HEAD.text(), 1700000000
    # C2SP tlog-cosignature, "ML-DSA-44 signed message".
    message = b"subtree/v1\n\x00" + bytes([len(key.name)]) + key.name.encode() + stamp_s.to_bytes(8, "big")
    message += bytes([len(ORIGIN)]) + ORIGIN.encode() + bytes(8) + (12).to_bytes(8, "big") + HEAD.root
    value = stamp_s.to_bytes(8, "big") + private.sign(message)
    log = LogKeys(
        origin=ORIGIN,
        keys=(NoteSigner(ORIGIN, LOG_KEY).key,),
        witnesses=WitnessPolicy(keys=(key,), required=1),
    )
    cosigned = NoteSignature(name=key.name, key_id=key.key_id, value=value)
    assert open_checkpoint(signed(text, cosigned), log, "the head").cosigned[0].stamp_s == stamp_s
    other = Checkpoint(origin=ORIGIN, size=13, root=HEAD.root).text()
    with pytest.raises(IntegrityError):
        open_checkpoint(signed(other, cosigned), log, "the head")


# ----------------------------------------------------------------------------------------------------- proofs


def test_a_proof_is_written_as_the_specification_has_it() -> None:
    proof = TlogProof(index=73894, path=(b"\x01" * 32, b"\x02" * 32), note=SPEC_COSIGNED, extra=b"more")
    lines = proof.to_bytes().split(b"\n")
    assert lines[:6] == [
        b"c2sp.org/tlog-proof@v1",
        b"extra bW9yZQ==",
        b"index 73894",
        base64.b64encode(b"\x01" * 32),
        base64.b64encode(b"\x02" * 32),
        b"",
    ]
    assert proof.to_bytes().endswith(b"\n\n" + SPEC_COSIGNED)
    assert TlogProof.parse(proof.to_bytes(), "the proof") == proof
    bare = TlogProof(index=0, path=(), note=SPEC_COSIGNED)
    assert TlogProof.parse(bare.to_bytes(), "the proof") == bare


@given(st.binary(max_size=400))
def test_any_bytes_are_a_proof_or_refused(data: bytes) -> None:
    for start in (b"", b"c2sp.org/tlog-proof@v1\n", b"c2sp.org/tlog-proof@v1\nindex 0\n\n"):
        try:
            assert TlogProof.parse(start + data, "the proof").to_bytes() == start + data
        except FormatError:
            continue


@given(st.binary(max_size=200))
def test_whatever_a_head_is_made_of_only_our_errors_leave(data: bytes) -> None:
    log = LogKeys(origin=ORIGIN, keys=(NoteSigner(ORIGIN, LOG_KEY).key,))
    with pytest.raises(StrongroomError):
        open_checkpoint(data + b"\n\n" + SPEC_COSIGNED, log, "the head")


def test_a_cosignature_of_no_time_is_none() -> None:
    text = "example.com/log\n0\n47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=\n"
    key = witness()
    assert key.check(text, cosignature(text, key, stamp_s=1).value) == 1
    with pytest.raises(IntegrityError, match="above 0"):
        key.check(text, cosignature(text, key, stamp_s=0).value)


@pytest.mark.parametrize(
    "public",
    (
        bytes(32),
        (1).to_bytes(32, "little"),
        (1 | 1 << 255).to_bytes(32, "little"),
        (2**255 - 20).to_bytes(32, "little"),
        (2**255 - 19).to_bytes(32, "little"),
        (2**255 - 18).to_bytes(32, "little"),
        bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05"),
        bytes.fromhex("c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a"),
        bytes.fromhex("c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac03fa"),
    ),
)
def test_a_key_of_small_order_by_which_anybody_signs_is_none(public: bytes) -> None:
    for kind in (KeyType.ED25519, KeyType.COSIGNATURE):
        with pytest.raises(FormatError, match="small order"):
            VerifierKey(name="example.com/log", type=kind, public=public)
