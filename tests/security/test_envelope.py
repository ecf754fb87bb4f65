"""Keys under keys: what a checkpoint's key wraps, and what ranks hand to one another."""

from __future__ import annotations

import copy
import hashlib
import hmac
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite
from hypothesis import given
from hypothesis import strategies as st

from strongroom.errors import ClosedError, ConfigError, IntegrityError, NoKeyError
from strongroom_security import envelope
from strongroom_security.envelope import CheckpointKey, HandedOver, HandOverKey, hand_over
from strongroom_security.fields import Context, handover_info, wrap_info
from strongroom_security.secret import Secret

CONTEXT = Context(run="run-7f", launch=3, step=1200, attempt="0123456789abcdef")
OTHERS = (
    replace(CONTEXT, run="run-7g"),
    replace(CONTEXT, launch=4),
    replace(CONTEXT, step=1201),
    replace(CONTEXT, attempt="0123456789abcdee"),
)
PATH = "00000-00.safetensors.floe"


# Under a checkpoint's key


def test_a_file_s_key_comes_back() -> None:
    checkpoint = CheckpointKey.draw(CONTEXT)
    key = Secret.draw()
    wrapped = checkpoint.wrap(PATH, key)
    assert len(wrapped) == 60
    assert checkpoint.unwrap(PATH, wrapped) == key
    assert CheckpointKey(checkpoint.secret, CONTEXT).unwrap(PATH, wrapped) == key


def test_wrapping_is_aes_gcm_under_hkdf_of_the_checkpoint_s_key() -> None:
    """By hand: RFC 5869 with SHA-384, no salt; the path is the associated data."""
    checkpoint = CheckpointKey.draw(CONTEXT)
    prk = hmac.digest(bytes(48), checkpoint.secret.reveal(), hashlib.sha384)
    wrapping = hmac.digest(prk, wrap_info(CONTEXT) + b"\1", hashlib.sha384)[:32]
    key = Secret.draw()
    wrapped = checkpoint.wrap(PATH, key)
    assert AESGCM(wrapping).decrypt(wrapped[:12], wrapped[12:], PATH.encode()) == key.reveal()


def test_no_two_wraps_are_alike() -> None:
    checkpoint = CheckpointKey.draw(CONTEXT)
    key = Secret.draw()
    wraps = [checkpoint.wrap(PATH, key) for _ in range(1000)]
    assert len({wrapped[:12] for wrapped in wraps}) == 1000
    assert len({CheckpointKey.draw(CONTEXT).secret.reveal() for _ in range(100)}) == 100


def test_every_byte_of_a_wrapped_key_counts() -> None:
    checkpoint = CheckpointKey.draw(CONTEXT)
    wrapped = checkpoint.wrap(PATH, Secret.draw())
    for position in range(len(wrapped)):
        for bit in range(8):
            changed = bytearray(wrapped)
            changed[position] ^= 1 << bit
            with pytest.raises(IntegrityError, match="was changed, or comes from another"):
                checkpoint.unwrap(PATH, bytes(changed))
    for changed_length in (wrapped[:-1], wrapped[1:], wrapped + b"\0", b"", wrapped * 2):
        with pytest.raises(IntegrityError, match=f"has {len(changed_length)} bytes; expected 60"):
            checkpoint.unwrap(PATH, changed_length)


def test_a_wrapped_key_is_its_file_s_and_its_attempt_s_alone() -> None:
    checkpoint = CheckpointKey.draw(CONTEXT)
    wrapped = checkpoint.wrap(PATH, Secret.draw())
    for path in ("00000-01.safetensors.floe", "00000-00.safetensors", "", "index.safetensors.floe"):
        with pytest.raises(IntegrityError):
            checkpoint.unwrap(path, wrapped)
    for other in OTHERS:
        with pytest.raises(IntegrityError):
            CheckpointKey(checkpoint.secret, other).unwrap(PATH, wrapped)
    with pytest.raises(IntegrityError):
        CheckpointKey.draw(CONTEXT).unwrap(PATH, wrapped)


def test_a_checkpoint_s_key_has_32_bytes() -> None:
    for length in (16, 31, 33, 64):
        with pytest.raises(ConfigError, match=f"got {length}"):
            CheckpointKey(Secret(bytes(length)), CONTEXT)


# Handed over


def handed(*paths: str, generation: int = 0) -> HandedOver:
    return HandedOver(generation=generation, keys={path: Secret.draw() for path in paths})


def keys_of(found: HandedOver | None) -> dict[str, bytes]:
    assert found is not None
    return {path: key.reveal() for path, key in found.keys.items()}


paths = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,30}", fullmatch=True)


@given(st.dictionaries(paths, st.binary(min_size=32, max_size=32), max_size=8), st.integers(0, 9999))
def test_what_is_handed_over_arrives(keys: dict[str, bytes], generation: int) -> None:
    one_off = HandOverKey.draw()
    given_over = HandedOver(generation=generation, keys={path: Secret(key) for path, key in keys.items()})
    found = one_off.open(hand_over(one_off.public, given_over, CONTEXT), CONTEXT)
    assert keys_of(found) == keys
    assert found is not None
    assert found.generation == generation


def test_what_is_handed_over_shows_neither_keys_nor_names() -> None:
    one_off = HandOverKey.draw()
    given_over = handed(PATH)
    sealed = hand_over(one_off.public, given_over, CONTEXT)
    assert PATH.encode() not in sealed
    assert given_over.keys[PATH].reveal() not in sealed
    assert sealed != hand_over(one_off.public, given_over, CONTEXT)


def test_only_the_one_off_key_that_it_was_sealed_to_opens_it() -> None:
    one_off = HandOverKey.draw()
    sealed = hand_over(one_off.public, handed(PATH), CONTEXT)
    assert HandOverKey.draw().open(sealed, CONTEXT) is None
    assert one_off.open(sealed, CONTEXT) is not None


def test_it_opens_for_its_own_attempt_alone() -> None:
    one_off = HandOverKey.draw()
    sealed = hand_over(one_off.public, handed(PATH), CONTEXT)
    for other in OTHERS:
        assert one_off.open(sealed, other) is None
    # A file's context is its attempt's here.
    assert one_off.open(sealed, replace(CONTEXT, path=PATH)) is not None


def test_every_byte_that_is_handed_over_counts() -> None:
    one_off = HandOverKey.draw()
    sealed = hand_over(one_off.public, handed(PATH), CONTEXT)
    for position in range(len(sealed)):
        changed = bytearray(sealed)
        changed[position] ^= 1
        assert one_off.open(bytes(changed), CONTEXT) is None
        assert one_off.open(sealed[:position], CONTEXT) is None
    assert one_off.open(sealed + b"\0", CONTEXT) is None


def test_contents_in_any_other_form_are_refused() -> None:
    """Anyone can seal to a public key, so what opens is not yet what was meant."""
    one_off = HandOverKey.draw()
    public = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), one_off.public)
    suite = Suite(KEM.P256, KDF.HKDF_SHA256, AEAD.AES_256_GCM)

    def entry(path: bytes, key: bytes = bytes(32)) -> bytes:
        return len(path).to_bytes(4, "big") + path + key

    def opened(packed: bytes) -> HandedOver | None:
        return one_off.open(suite.encrypt(packed, public, info=handover_info(CONTEXT)), CONTEXT)

    zero = bytes(4)
    assert keys_of(opened(zero)) == {}
    assert keys_of(opened(zero + entry(b"a") + entry(b"b"))) == {"a": bytes(32), "b": bytes(32)}
    for packed in (
        b"",
        b"\0\0\0",
        (10_000).to_bytes(4, "big"),
        zero + b"\0",
        zero + entry(b"a")[:-1],
        zero + entry(b"a", b""),
        zero + entry(b"a") + b"\0",
        zero + entry(b"b") + entry(b"a"),
        zero + entry(b"a") + entry(b"a"),
        zero + entry(b""),
        zero + entry(b"../a"),
        zero + entry(b"/a"),
        zero + entry(b"\xff"),
        zero + entry("ä".encode()),
        zero + b"\xff\xff\xff\xff" + bytes(64),
    ):
        assert opened(packed) is None, packed


def test_a_public_key_that_is_none_is_refused_and_is_no_damage() -> None:
    """A restore falls back to an older checkpoint for an IntegrityError."""
    good = HandOverKey.draw().public
    assert len(good) == 65
    for public in (
        b"",
        b"x",
        bytes(65),
        good[:-1],
        good + b"\0",
        b"\5" + good[1:],
        good[:64] + bytes([good[64] ^ 1]),
    ):
        with pytest.raises(NoKeyError, match="no point of P-256"):
            hand_over(public, handed(PATH), CONTEXT)


def test_no_more_is_handed_over_than_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    one_off = HandOverKey.draw()
    sealed = hand_over(one_off.public, handed(PATH), CONTEXT)
    monkeypatch.setattr(envelope, "_MAX_HANDED_BYTES", len(sealed) - 1)
    assert one_off.open(sealed, CONTEXT) is None
    with pytest.raises(NoKeyError, match="1 keys come to more"):
        hand_over(one_off.public, handed(PATH), CONTEXT)


def test_what_was_packed_to_be_sealed_is_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[bytearray] = []
    pack = envelope._packed
    monkeypatch.setattr(envelope, "_packed", lambda given: packed.append(pack(given)) or packed[-1])
    hand_over(HandOverKey.draw().public, handed(PATH), CONTEXT)
    assert len(packed[0]) == 4 + 4 + len(PATH) + 32
    assert not any(packed[0])


def test_one_off_keys_differ() -> None:
    assert len({HandOverKey.draw().public for _ in range(50)}) == 50


# What is shown


@pytest.mark.parametrize(
    "make", (lambda: CheckpointKey.draw(CONTEXT), HandOverKey.draw), ids=("checkpoint", "one-off")
)
def test_a_key_is_neither_shown_nor_pickled_nor_copied(make: Callable[[], Any]) -> None:
    key = make()
    assert repr(key) == str(key) == f"<{type(key).__name__}>"
    for serialise in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="not pickled or copied"):
            serialise(key)


def test_what_is_handed_over_does_not_show_its_keys() -> None:
    given_over = handed(PATH)
    assert given_over.keys[PATH].reveal().hex()[:16] not in repr(given_over)
    with pytest.raises(TypeError):
        pickle.dumps(given_over)


def test_a_key_that_was_wiped_is_not_wrapped_as_zeros() -> None:
    checkpoint = CheckpointKey.draw(CONTEXT)
    key = Secret.draw()
    key.wipe()
    with pytest.raises(ClosedError):
        checkpoint.wrap(PATH, key)
    with pytest.raises(ClosedError):
        hand_over(HandOverKey.draw().public, HandedOver(generation=0, keys={PATH: key}), CONTEXT)
