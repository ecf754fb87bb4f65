"""Public keys as recipients: the contract for every suite, the files of keys, and who can only seal."""

from __future__ import annotations

import base64
import copy
import hashlib
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite

from strongroom.errors import ConfigError, IntegrityError
from strongroom_security.fields import Context, recipient_info
from strongroom_security.recipients.base import Identity, Recipient
from strongroom_security.recipients.hpke import (
    PASSPHRASE_FILE,
    HpkePrivateKey,
    HpkePublicKey,
    HpkeSuite,
    create_key_pair,
    read_key,
)
from strongroom_security.recipients.opening import open_identity, open_recipient
from strongroom_security.secret import Secret
from strongroom_security.testing import RecipientContract

CONTEXT = Context(run="run-7f", launch=3, step=1200, attempt="0123456789abcdef")
SUITES: tuple[HpkeSuite, ...] = ("x25519", "p256", "mlkem768-x25519")


class HpkeContract(RecipientContract):
    """The writer has the public half alone."""

    suite: ClassVar[HpkeSuite]

    @pytest.fixture
    def recipient(self, tmp_path: Path) -> Recipient:
        create_key_pair(tmp_path / "one", self.suite)
        return read_key(tmp_path / "one.pub")

    @pytest.fixture
    def again(self, recipient: Recipient, tmp_path: Path) -> Recipient:
        return read_key(tmp_path / "one.key")

    @pytest.fixture
    def identity(self, recipient: Recipient, tmp_path: Path) -> Identity:
        key = read_key(tmp_path / "one.key")
        assert isinstance(key, Identity)
        return key

    @pytest.fixture
    def stranger(self, tmp_path: Path) -> Identity:
        return create_key_pair(tmp_path / "two", self.suite)

    def secrets(self, recipient: Recipient) -> list[bytes]:
        path = Path(recipient.uri.removeprefix("hpke:")).with_suffix(".key")
        return path.read_bytes().split(b"\n")[1:-2]


class TestX25519(HpkeContract):
    suite = "x25519"


class TestP256(HpkeContract):
    suite = "p256"


class TestHybrid(HpkeContract):
    suite = "mlkem768-x25519"


@pytest.fixture(params=SUITES)
def suite(request: pytest.FixtureRequest) -> Iterator[HpkeSuite]:
    return request.param


# Who can do what


def test_who_has_the_public_half_can_seal_and_never_open(suite: HpkeSuite, tmp_path: Path) -> None:
    create_key_pair(tmp_path / "breakglass", suite)
    public = open_recipient("hpke:breakglass.pub", base=tmp_path)
    assert type(public) is HpkePublicKey
    assert not isinstance(public, Identity)
    with pytest.raises(
        ConfigError, match=r"hpke:breakglass\.pub is a public key, which can seal and never open"
    ):
        open_identity("hpke:breakglass.pub", base=tmp_path)
    key = Secret.draw()
    wrapped = public.wrap(key, CONTEXT, within_s=1.0)
    assert open_identity("hpke:breakglass.key", base=tmp_path).unwrap(wrapped, CONTEXT, within_s=1.0) == key


def test_a_private_key_is_a_recipient_as_well(suite: HpkeSuite, tmp_path: Path) -> None:
    create_key_pair(tmp_path / "breakglass", suite)
    private = open_recipient("hpke:breakglass.key", base=tmp_path)
    assert isinstance(private, Recipient)
    assert isinstance(private, Identity)


def test_neither_half_is_pickled_or_copied(suite: HpkeSuite, tmp_path: Path) -> None:
    create_key_pair(tmp_path / "one", suite)
    for half in ("key", "pub"):
        for serialise in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="not pickled or copied"):
                serialise(read_key(tmp_path / f"one.{half}"))


def test_a_key_of_another_length_that_was_sealed_to_it_is_refused(tmp_path: Path) -> None:
    private = create_key_pair(tmp_path / "one", "x25519")
    public = serialization.load_pem_public_key((tmp_path / "one.pub").read_bytes())
    suite = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.AES_256_GCM)
    for length in (0, 16, 31, 33):
        sealed = suite.encrypt(bytes(length), public, info=recipient_info(CONTEXT))  # type: ignore[arg-type]
        with pytest.raises(IntegrityError, match=f"{length} bytes were sealed"):
            private.unwrap(sealed, CONTEXT, within_s=1.0)


def test_a_public_key_that_agrees_with_everybody_seals_nothing(tmp_path: Path) -> None:
    # The neutral element: every private key makes the same secret of it. SubjectPublicKeyInfo, RFC 8410.
    point = bytes.fromhex("302a300506032b656e032100") + bytes(32)
    path = tmp_path / "zero.pub"
    path.write_bytes(
        serialization.load_der_public_key(point).public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    with pytest.raises(ConfigError, match="nothing can be sealed"):
        read_key(path).wrap(Secret.draw(), CONTEXT, within_s=1.0)


# Files


def test_a_private_key_is_its_owner_s_alone_and_a_public_key_is_not(suite: HpkeSuite, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        create_key_pair(tmp_path / "one", suite)
    finally:
        os.umask(before)
    assert (tmp_path / "one.key").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "one.pub").stat().st_mode & 0o777 == 0o644


def test_neither_half_is_written_over_and_no_lone_half_is_left(suite: HpkeSuite, tmp_path: Path) -> None:
    create_key_pair(tmp_path / "one", suite)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ConfigError, match="never written over"):
        create_key_pair(tmp_path / "one", suite)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    (tmp_path / "one.key").unlink()
    with pytest.raises(ConfigError, match="never written over"):
        create_key_pair(tmp_path / "one", suite)
    assert [path.name for path in tmp_path.iterdir()] == ["one.pub"]


def test_a_dot_in_a_key_pair_s_name_stays(tmp_path: Path) -> None:
    create_key_pair(tmp_path / "team.2026", "p256")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["team.2026.key", "team.2026.pub"]


def test_a_private_key_that_others_can_reach_is_refused(suite: HpkeSuite, tmp_path: Path) -> None:
    create_key_pair(tmp_path / "one", suite)
    for mode in (0o640, 0o604, 0o660):
        (tmp_path / "one.key").chmod(mode)
        with pytest.raises(ConfigError, match=f"mode {mode:04o}"):
            read_key(tmp_path / "one.key")


def test_keys_are_read_through_links_as_secrets_are_mounted(tmp_path: Path) -> None:
    create_key_pair(tmp_path / "one", "p256")
    for half in ("key", "pub"):
        (tmp_path / f"link.{half}").symlink_to(tmp_path / f"one.{half}")
    assert read_key(tmp_path / "link.pub").id == read_key(tmp_path / "link.key").id
    (tmp_path / "one.key").chmod(0o640)
    with pytest.raises(ConfigError, match="mode 0640"):
        read_key(tmp_path / "link.key")


def test_a_public_key_that_anyone_may_replace_is_refused(tmp_path: Path) -> None:
    create_key_pair(tmp_path / "one", "p256")
    (tmp_path / "one.pub").chmod(0o666)
    with pytest.raises(ConfigError, match="anyone may write"):
        read_key(tmp_path / "one.pub")


@pytest.mark.parametrize("suite", ("x25519", "p256"))
def test_other_tools_make_and_read_the_keys(suite: HpkeSuite, tmp_path: Path) -> None:
    drawn = X25519PrivateKey.generate() if suite == "x25519" else ec.generate_private_key(ec.SECP256R1())
    path = tmp_path / "theirs.key"
    path.write_bytes(
        drawn.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    path.chmod(0o600)
    assert read_key(path).kind == f"hpke-{suite}"
    create_key_pair(tmp_path / "ours", suite)
    serialization.load_pem_private_key((tmp_path / "ours.key").read_bytes(), None)
    serialization.load_pem_public_key((tmp_path / "ours.pub").read_bytes())


def test_a_hybrid_private_key_is_x_wing_s_seed(tmp_path: Path) -> None:
    """The first test vector of draft-connolly-cfrg-xwing-kem-08, appendix C."""
    seed = bytes.fromhex("7f9c2ba4e88f827d616045507605853ed73b8093f6efbc88eb1a6eacfa66ef26")
    create_key_pair(tmp_path / "any", "mlkem768-x25519")
    lines = (tmp_path / "any.key").read_text().splitlines()
    path = tmp_path / "vector.key"
    path.write_text("\n".join([lines[0], base64.b64encode(seed).decode(), lines[-1], ""]))
    path.chmod(0o600)
    key = read_key(path)
    public = key._key.public_bytes
    assert len(public) == 1216
    assert public.hex().startswith("e2236b35a8c24b39b10aa1323a96a919a2ced88400633a7b07131713fc14b2b5b19cfc3d")


@pytest.mark.parametrize("half", ("key", "pub"))
def test_a_hybrid_key_in_any_other_spelling_is_refused(half: str, tmp_path: Path) -> None:
    create_key_pair(tmp_path / "one", "mlkem768-x25519")
    path = tmp_path / f"one.{half}"
    path.chmod(0o600)
    good = path.read_bytes()
    first, *body, last, _ = good.split(b"\n")
    other = b"PUBLIC" if half == "key" else b"PRIVATE"
    word = b"PRIVATE" if half == "key" else b"PUBLIC"
    wrong = [
        good[:-1],
        b"\n" + good,
        b"\n".join([first, *body[:-1], last, b""]),
        b"\n".join([first, *body, *body, last, b""]),
        b"\n".join([first, *(line[::-1] for line in body), last, b""]) if half == "key" else b"x",
        good.replace(b"MLKEM768-X25519", b"MLKEM768-X448"),
        good.replace(word, other),
        good.replace(last, last.replace(word, other)),
    ]
    for data in wrong:
        path.write_bytes(data)
        with pytest.raises(ConfigError, match="holds no key of a known suite"):
            read_key(path)


def test_keys_of_other_kinds_are_refused(tmp_path: Path) -> None:
    for number, key in enumerate(
        (
            ec.generate_private_key(ec.SECP384R1()),
            ec.generate_private_key(ec.SECP256K1()),
            ed25519.Ed25519PrivateKey.generate(),
            rsa.generate_private_key(65537, 2048),
        )
    ):
        private, public = tmp_path / f"{number}.key", tmp_path / f"{number}.pub"
        private.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        private.chmod(0o600)
        public.write_bytes(
            key.public_key().public_bytes(
                serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
            )
        )
        for path in (private, public):
            with pytest.raises(ConfigError, match="holds no key of a known suite"):
                read_key(path)


@pytest.mark.parametrize(
    "data", (b"", b"PRIVATE KEY", b"\xff" * 100, b"-----BEGIN PUBLIC KEY-----\n", b"A" * 20_000)
)
def test_what_is_no_key_is_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "odd.key"
    path.write_bytes(data)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=r"odd\.key"):
        read_key(path)


def test_a_suite_that_is_not_known_is_an_error_that_lists_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="x25519, p256, mlkem768-x25519"):
        create_key_pair(tmp_path / "one", "rsa")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


# Passphrases


@pytest.fixture
def passphrase_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "passphrase"
    path.write_text("correct horse\n")
    path.chmod(0o600)
    monkeypatch.setenv(PASSPHRASE_FILE, str(path))
    return path


@pytest.mark.parametrize("suite", ("x25519", "p256"))
def test_a_private_key_may_be_encrypted(suite: HpkeSuite, tmp_path: Path, passphrase_file: Path) -> None:
    made = create_key_pair(tmp_path / "one", suite, passphrase=Secret(b"correct horse"))
    assert b"ENCRYPTED PRIVATE KEY" in (tmp_path / "one.key").read_bytes()
    read = read_key(tmp_path / "one.key")
    assert isinstance(read, HpkePrivateKey)
    key = Secret.draw()
    assert read.unwrap(made.wrap(key, CONTEXT, within_s=1.0), CONTEXT, within_s=1.0) == key


def test_a_passphrase_that_is_wrong_or_absent_or_in_others_reach_is_told(
    tmp_path: Path, passphrase_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_key_pair(tmp_path / "one", "p256", passphrase=Secret(b"battery staple"))
    with pytest.raises(ConfigError, match="does not open") as caught:
        read_key(tmp_path / "one.key")
    assert "correct horse" not in str(caught.value)
    passphrase_file.write_text("battery staple")
    assert isinstance(read_key(tmp_path / "one.key"), HpkePrivateKey)
    passphrase_file.chmod(0o644)
    with pytest.raises(ConfigError, match="mode 0644"):
        read_key(tmp_path / "one.key")
    passphrase_file.chmod(0o600)
    passphrase_file.write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        read_key(tmp_path / "one.key")
    monkeypatch.delenv(PASSPHRASE_FILE)
    with pytest.raises(ConfigError, match=PASSPHRASE_FILE):
        read_key(tmp_path / "one.key")


def test_a_hybrid_key_has_no_encrypted_form_and_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no form of file"):
        create_key_pair(tmp_path / "one", "mlkem768-x25519", passphrase=Secret(b"correct horse"))
    assert not list(tmp_path.iterdir())


def test_the_id_of_a_public_key_is_its_digest_and_nothing_of_its_name(
    suite: HpkeSuite, tmp_path: Path
) -> None:
    made = create_key_pair(tmp_path / "breakglass", suite)
    parts = (b"strongroom.v1 id", f"hpke-{suite}".encode(), made._key.public_bytes)
    hashed = hashlib.sha256(b"".join(len(part).to_bytes(4, "big") + part for part in parts)).hexdigest()
    assert made.id == f"hpke-{suite}-{hashed[:32]}"


@pytest.mark.parametrize("what", ("mode", "damage", "passphrase"))
@pytest.mark.parametrize("suite", SUITES)
def test_no_frame_of_an_error_holds_a_private_key(
    suite: HpkeSuite, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash reporter sends the variables of every frame to people who may not have the key."""
    monkeypatch.delenv(PASSPHRASE_FILE, raising=False)
    create_key_pair(tmp_path / "one", suite)
    path = tmp_path / "one.key"
    data = path.read_bytes()
    if what == "mode":
        path.chmod(0o640)
    else:
        path.write_bytes(data.replace(b"KEY", b"KEY." if what == "damage" else b"KEY ENCRYPTED"))
    with pytest.raises(ConfigError) as caught:
        read_key(path)
    shown = []
    error: BaseException | None = caught.value
    while error is not None:
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_globals.get("__name__", "").startswith("strongroom"):
                shown += [repr(value) for value in trace.tb_frame.f_locals.values()]
            trace = trace.tb_next
        error = error.__cause__ or error.__context__
    assert "one.key" in "\n".join(shown)
    assert data.split(b"\n")[1][:32].decode() not in "\n".join(shown)
