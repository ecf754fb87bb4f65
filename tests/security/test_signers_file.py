"""Signing keys in files: made here, by openssl, encrypted and not; and every file that is no such key."""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import stat
import subprocess
import traceback
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strongroom.errors import ConfigError
from strongroom_security.publickeys import PublicKey
from strongroom_security.signer_testing import SignerContract
from strongroom_security.signers.base import Signer
from strongroom_security.signers.file import FileSigner
from strongroom_security.signers.generating import generate_key, public_path
from strongroom_security.signers.opening import open_public_key, open_signer
from strongroom_security.signers.passphrases import read_passphrase

WITHIN_S = 20.0
PASSPHRASE = "correct horse battery"  # noqa: S105 - of keys that are made here
SOURCE = "env:SIGNER_PASSPHRASE"
MESSAGE = b"what is to be signed"


@pytest.fixture(autouse=True)
def _passphrase_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIGNER_PASSPHRASE", PASSPHRASE)


def private_pem(
    key: object,
    form: serialization.PrivateFormat = serialization.PrivateFormat.PKCS8,
    passphrase: str | None = None,
) -> bytes:
    encryption = (
        serialization.NoEncryption()
        if passphrase is None
        else serialization.BestAvailableEncryption(passphrase.encode())
    )
    return bytes(key.private_bytes(serialization.Encoding.PEM, form, encryption))  # type: ignore[attr-defined]


def write(path: Path, data: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(data)
    path.chmod(mode)
    return path


def certificate(
    key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey,
    *,
    issuer: ec.EllipticCurvePrivateKey | None = None,
    subject: ec.EllipticCurvePublicKey | None = None,
) -> bytes:
    """One for a key, in PEM; with a subject it is for that one, and the key signs it."""
    now = datetime.now(timezone.utc)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a signer")])
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(subject or key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now)
        .not_valid_after(now + timedelta(days=1))
        .sign(issuer or key, SHA256())
        .public_bytes(serialization.Encoding.PEM)
    )


class TestFileSignerContract(SignerContract):
    curve = "P-256"

    @pytest.fixture
    def signer(self, tmp_path: Path) -> Signer:
        generate_key(tmp_path / "signer.pem", curve=self.curve)
        return open_signer("file:signer.pem", base=tmp_path)

    @pytest.fixture
    def again(self, signer: Signer, tmp_path: Path) -> Signer:
        return open_signer("file:signer.pem", base=tmp_path)

    @pytest.fixture
    def stranger(self, tmp_path: Path) -> Signer:
        generate_key(tmp_path / "other.pem", curve=self.curve)
        return open_signer("file:other.pem", base=tmp_path)

    def secrets(self, signer: Signer) -> list[bytes]:
        assert isinstance(signer, FileSigner)
        number = signer._key.private_numbers().private_value
        pem = signer._key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.TraditionalOpenSSL,
            serialization.NoEncryption(),
        )
        return [number.to_bytes(48, "big").lstrip(b"\0"), *pem.splitlines()[1:-1]]


class TestFileSignerOnP384Contract(TestFileSignerContract):
    curve = "P-384"


class TestEncryptedFileSignerContract(TestFileSignerContract):
    @pytest.fixture
    def signer(self, tmp_path: Path) -> Signer:
        generate_key(tmp_path / "signer.pem", passphrase=SOURCE)
        return self.open(tmp_path)

    @pytest.fixture
    def again(self, signer: Signer, tmp_path: Path) -> Signer:
        return self.open(tmp_path)

    def open(self, folder: Path) -> Signer:
        return open_signer("file:signer.pem", base=folder, passphrase=SOURCE)

    def secrets(self, signer: Signer) -> list[bytes]:
        return [*super().secrets(signer), PASSPHRASE.encode()]


class TestCertifiedFileSignerContract(TestFileSignerContract):
    @pytest.fixture
    def signer(self, tmp_path: Path) -> Signer:
        generate_key(tmp_path / "signer.pem")
        key = serialization.load_pem_private_key((tmp_path / "signer.pem").read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        issuer = ec.generate_private_key(ec.SECP256R1())
        write(tmp_path / "chain.pem", certificate(key, issuer=issuer) + certificate(issuer))
        signer = open_signer("file:signer.pem", base=tmp_path, certificate="file:chain.pem")
        assert len(signer.certificates) == 2
        return signer


# What is read


@pytest.mark.parametrize("curve", (ec.SECP256R1(), ec.SECP384R1()))
@pytest.mark.parametrize(
    "form", (serialization.PrivateFormat.PKCS8, serialization.PrivateFormat.TraditionalOpenSSL)
)
@pytest.mark.parametrize("passphrase", (None, PASSPHRASE))
def test_every_form_of_a_key_is_read(
    tmp_path: Path, curve: ec.EllipticCurve, form: serialization.PrivateFormat, passphrase: str | None
) -> None:
    key = ec.generate_private_key(curve)
    write(tmp_path / "signer.pem", private_pem(key, form, passphrase))
    signer = open_signer(
        "file:signer.pem",
        base=tmp_path,
        passphrase=None if passphrase is None else SOURCE,
    )
    assert signer.public_key == PublicKey.of(key.public_key())
    assert signer.public_key.verify(MESSAGE, signer.sign(MESSAGE, within_s=WITHIN_S))


PLAIN = "openssl ecparam -name prime256v1 -genkey -out plain.pem"
OPENSSL = (
    "openssl ecparam -name prime256v1 -genkey -out signer.pem",
    "openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-384 -out signer.pem",
    f"openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -aes256 -pass {SOURCE} -out signer.pem",
    f"{PLAIN} && openssl pkcs8 -topk8 -scrypt -in plain.pem -passout {SOURCE} -out signer.pem",
    f"{PLAIN} && openssl ec -in plain.pem -aes256 -passout {SOURCE} -out signer.pem",
)


@pytest.mark.parametrize("command", OPENSSL)
def test_what_openssl_makes_is_read_and_what_is_signed_openssl_verifies(tmp_path: Path, command: str) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    subprocess.run(["sh", "-c", command], cwd=tmp_path, check=True, capture_output=True, timeout=60)
    (tmp_path / "signer.pem").chmod(0o600)
    source = SOURCE if SOURCE in command else None
    signer = open_signer("file:signer.pem", base=tmp_path, passphrase=source)
    (tmp_path / "signer.pub").write_bytes(signer.public_key.pem)
    (tmp_path / "message").write_bytes(MESSAGE)
    (tmp_path / "signature").write_bytes(signer.sign(MESSAGE, within_s=WITHIN_S))
    digest = "-sha384" if signer.public_key.curve == "P-384" else "-sha256"
    subprocess.run(
        ["openssl", "dgst", digest, "-verify", "signer.pub", "-signature", "signature", "message"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        timeout=60,
    )


# What is refused, each in its own words


def other_keys() -> dict[str, tuple[bytes, str]]:
    p256 = ec.generate_private_key(ec.SECP256R1())
    public = PublicKey.of(p256.public_key()).pem
    return {
        "rsa": (
            private_pem(rsa.generate_private_key(65537, 2048)),
            "a private key of kind RSA; expected an ECDSA",
        ),
        "ed25519": (
            private_pem(ed25519.Ed25519PrivateKey.generate()),
            "a private key of kind Ed25519; expected an ECDSA",
        ),
        "p521": (private_pem(ec.generate_private_key(ec.SECP521R1())), "on the curve P-521"),
        "secp256k1": (private_pem(ec.generate_private_key(ec.SECP256K1())), "on the curve secp256k1"),
        "public": (public, "holds a public key, which verifies and cannot sign"),
        "certificate": (certificate(p256), "holds a certificate, which verifies and cannot sign"),
        "nothing": (b"", "holds no private key"),
        "text": (b"hello\n", "holds no private key"),
        "damaged": (private_pem(p256)[:80] + b"\n-----END PRIVATE KEY-----\n", "cannot be read"),
        "openssh": (private_pem(p256, serialization.PrivateFormat.OpenSSH), "cannot be read"),
        "long": (b"#" * 20_000, "longer than"),
    }


@pytest.mark.parametrize("which", sorted(other_keys()))
def test_what_is_no_signing_key_is_refused_by_what_it_is(tmp_path: Path, which: str) -> None:
    data, told = other_keys()[which]
    write(tmp_path / "signer.pem", data)
    with pytest.raises(ConfigError, match=told):
        open_signer("file:signer.pem", base=tmp_path)


def test_an_absent_key_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not there"):
        open_signer("file:signer.pem", base=tmp_path)


@pytest.mark.parametrize("mode", (0o640, 0o604, 0o644, 0o660, 0o620))
def test_a_key_that_others_can_reach_is_refused(tmp_path: Path, mode: int) -> None:
    generate_key(tmp_path / "signer.pem")
    (tmp_path / "signer.pem").chmod(mode)
    for opened in (open_signer, open_public_key):
        with pytest.raises(ConfigError, match=f"{mode:04o}"):
            opened("file:signer.pem", base=tmp_path)


@pytest.mark.parametrize("form", ("PKCS8", "TraditionalOpenSSL"))
def test_an_encrypted_key_asks_for_its_passphrase_and_takes_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    write(tmp_path / "signer.pem", private_pem(key, getattr(serialization.PrivateFormat, form), PASSPHRASE))
    with pytest.raises(ConfigError, match="encrypted, and nothing says where its passphrase is"):
        open_signer("file:signer.pem", base=tmp_path)
    for wrong in ("wrong", PASSPHRASE + " ", PASSPHRASE.upper(), "x" * 1023):
        monkeypatch.setenv("SIGNER_PASSPHRASE", wrong)
        with pytest.raises(ConfigError, match="the passphrase does not open this key") as caught:
            open_signer("file:signer.pem", base=tmp_path, passphrase=SOURCE)
        assert wrong not in str(caught.value)


def test_a_passphrase_for_a_key_that_is_not_encrypted_is_refused(tmp_path: Path) -> None:
    generate_key(tmp_path / "signer.pem")
    with pytest.raises(ConfigError, match="is not encrypted, and a passphrase was named"):
        open_signer("file:signer.pem", base=tmp_path, passphrase=SOURCE)


# Passphrases


@pytest.mark.parametrize("ending", ("", "\n", "\r\n"))
def test_a_passphrase_is_read_from_a_file_for_this_user_alone(tmp_path: Path, ending: str) -> None:
    generate_key(tmp_path / "signer.pem", passphrase=SOURCE)
    source = write(tmp_path / "passphrase", f"{PASSPHRASE}{ending}".encode())
    open_signer("file:signer.pem", base=tmp_path, passphrase=f"file:{source.name}")
    open_signer(f"file:{tmp_path}/signer.pem", base=Path("elsewhere"), passphrase=f"file:{source}")
    source.chmod(0o640)
    with pytest.raises(ConfigError, match="0640"):
        open_signer("file:signer.pem", base=tmp_path, passphrase=f"file:{source.name}")


def test_a_passphrase_that_is_not_there_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMPTY", "")
    write(tmp_path / "empty", b"\n")
    write(tmp_path / "long", b"x" * 1024)
    for source, told in (
        ("env:ABSENT", "environment variable ABSENT is not set"),
        ("env:EMPTY", "environment variable EMPTY is empty"),
        ("file:absent", "is not there"),
        ("file:empty", "is empty"),
        ("file:long", "at most 1023"),
    ):
        with pytest.raises(ConfigError, match=told):
            read_passphrase(source, base=tmp_path)


@pytest.mark.parametrize(
    "text",
    (
        PASSPHRASE,
        f"env:{PASSPHRASE}",
        f"command:echo {PASSPHRASE}",
        f"pass:{PASSPHRASE}",
        "",
        "env:",
        "file:",
    ),
)
def test_what_may_be_the_passphrase_itself_is_not_repeated(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="env:NAME or file:PATH") as caught:
        read_passphrase(text, base=tmp_path)
    assert PASSPHRASE not in str(caught.value)


def test_a_passphrase_is_any_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "raw", b"\xff\xfe \n\n")
    assert read_passphrase("file:raw", base=tmp_path).reveal() == b"\xff\xfe \n"
    monkeypatch.setenv("SIGNER_PASSPHRASE", os.fsdecode(b"gr\xfc\xdfe"))
    assert read_passphrase("env:SIGNER_PASSPHRASE", base=tmp_path).reveal() == b"gr\xfc\xdfe"


# What is shown


def _opened_wrongly(folder: Path, change: Callable[[bytes], bytes]) -> BaseException | None:
    write(folder / "changed.pem", change((folder / "signer.pem").read_bytes()))
    try:
        open_signer("file:changed.pem", base=folder)
    except ConfigError as error:
        return error
    return None


def test_no_error_and_no_frame_of_one_holds_the_key(tmp_path: Path) -> None:
    generate_key(tmp_path / "signer.pem")
    pem = (tmp_path / "signer.pem").read_bytes()
    secrets = [line.decode() for line in pem.splitlines()[1:-1]]
    tried = 0
    for change in (
        lambda data: data.replace(b"\nM", b"\nN"),
        lambda data: data[:100] + data[101:],
        lambda data: data.replace(b" PRIVATE KEY", b" EC PRIVATE KEY"),
        lambda data: data + b"ENCRYPTED",
    ):
        error = _opened_wrongly(tmp_path, change)
        if error is None:
            continue
        tried += 1
        assert error.__cause__ is None
        told = traceback.TracebackException.from_exception(error, capture_locals=True)
        ours = [frame for frame in told.stack if "strongroom" in frame.filename]
        assert ours
        seen = "".join(told.format_exception_only()) + repr([frame.locals for frame in ours])
        assert not any(secret[:12] in seen for secret in secrets)
        assert told.__context__ is None
    assert tried >= 3


def test_a_signer_is_not_pickled(tmp_path: Path) -> None:
    generate_key(tmp_path / "signer.pem")
    with pytest.raises(TypeError, match="holds a private key"):
        pickle.dumps(open_signer("file:signer.pem", base=tmp_path))


def test_nothing_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        generate_key(tmp_path / "signer.pem", passphrase=SOURCE)
        signer = open_signer("file:signer.pem", base=tmp_path, passphrase=SOURCE)
        signer.sign(MESSAGE, within_s=WITHIN_S)
    assert not caplog.records


# Certificates


def _certified(folder: Path, chain: bytes) -> Signer:
    write(folder / "chain.pem", chain, 0o644)
    return open_signer("file:signer.pem", base=folder, certificate="chain.pem")


def test_the_certificates_are_the_file_s_and_the_first_is_for_the_key(tmp_path: Path) -> None:
    key, issuer = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP384R1())
    write(tmp_path / "signer.pem", private_pem(key))
    leaf, authority = certificate(key, issuer=issuer), certificate(issuer)
    expected = tuple(
        x509.load_pem_x509_certificate(each).public_bytes(serialization.Encoding.DER)
        for each in (leaf, authority)
    )
    assert _certified(tmp_path, leaf + authority).certificates == expected
    assert open_signer("file:signer.pem", base=tmp_path).certificates == ()
    with pytest.raises(ConfigError, match="stands at place 2 of the chain"):
        _certified(tmp_path, authority + leaf)
    foreign = certificate(ec.generate_private_key(ec.SECP256R1()))
    for chain in (authority, foreign, certificate(rsa.generate_private_key(65537, 2048))):
        with pytest.raises(ConfigError, match="for another key than this signer's"):
            _certified(tmp_path, chain)
    for chain in (b"", b"hello", private_pem(key), leaf[:100]):
        with pytest.raises(ConfigError, match="no chain of certificates"):
            _certified(tmp_path, chain)
    with pytest.raises(ConfigError, match="at most 10"):
        _certified(tmp_path, leaf * 11)


# Public keys


def test_a_public_key_is_read_from_each_file_that_holds_it(tmp_path: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    expected = PublicKey.of(key.public_key())
    write(tmp_path / "signer.pub", expected.pem, 0o644)
    write(tmp_path / "signer.crt", certificate(key), 0o644)
    write(tmp_path / "signer.pem", private_pem(key))
    for name in ("signer.pub", "signer.crt", "signer.pem"):
        assert open_public_key(f"file:{name}", base=tmp_path) == expected
    write(tmp_path / "signer.pem", private_pem(key, passphrase=PASSPHRASE))
    with pytest.raises(ConfigError, match="name its public half"):
        open_public_key("file:signer.pem", base=tmp_path)


@pytest.mark.parametrize("curve", (ec.SECP384R1(), ec.SECP521R1()))
def test_public_keys_on_every_curve_verify(tmp_path: Path, curve: ec.EllipticCurve) -> None:
    expected = PublicKey.of(ec.generate_private_key(curve).public_key())
    write(tmp_path / "signer.pub", expected.pem, 0o644)
    assert open_public_key("file:signer.pub", base=tmp_path) == expected


def test_a_public_key_that_anyone_may_replace_is_refused(tmp_path: Path) -> None:
    generate_key(tmp_path / "signer.pem")
    (tmp_path / "signer.pub").chmod(0o666)
    with pytest.raises(ConfigError, match="anyone may write"):
        open_public_key("file:signer.pub", base=tmp_path)


def test_what_is_no_public_key_is_refused(tmp_path: Path) -> None:
    edwards = ed25519.Ed25519PrivateKey.generate().public_key()
    write(
        tmp_path / "ed25519",
        edwards.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo),
    )
    write(tmp_path / "rsa.crt", certificate(rsa.generate_private_key(65537, 2048)))
    write(tmp_path / "k1.crt", certificate(ec.generate_private_key(ec.SECP256K1())))
    write(tmp_path / "broken.crt", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    write(tmp_path / "text", b"hello")
    for name in ("ed25519", "rsa.crt", "k1.crt", "broken.crt", "text", "absent"):
        with pytest.raises(ConfigError, match=name):
            open_public_key(f"file:{name}", base=tmp_path)


# New keys


def test_a_new_key_is_this_user_s_alone_and_its_public_half_everybody_s(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        public_key = generate_key(tmp_path / "signer.pem")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "signer.pem").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "signer.pub").stat().st_mode) == 0o644
    assert (tmp_path / "signer.pub").read_bytes() == public_key.pem
    assert public_key.curve == "P-256"
    assert open_signer("file:signer.pem", base=tmp_path).public_key == public_key
    assert open_public_key("file:signer.pub", base=tmp_path) == public_key
    assert generate_key(tmp_path / "large.pem", curve="P-384").curve == "P-384"


def test_no_two_keys_are_the_same(tmp_path: Path) -> None:
    assert len({generate_key(tmp_path / f"{number}.pem") for number in range(4)}) == 4


@pytest.mark.parametrize("existing", ("signer.pem", "signer.pub"))
def test_a_key_is_never_written_over_and_no_half_of_one_is_left(tmp_path: Path, existing: str) -> None:
    (tmp_path / existing).write_text("precious")
    with pytest.raises(ConfigError, match=r"exists"):
        generate_key(tmp_path / "signer.pem")
    assert (tmp_path / existing).read_text() == "precious"
    assert os.listdir(tmp_path) == [existing]


def test_a_curve_that_nothing_signs_on_is_refused(tmp_path: Path) -> None:
    for curve in ("P-521", "secp256r1", ""):
        with pytest.raises(ConfigError, match="P-256 or P-384"):
            generate_key(tmp_path / "signer.pem", curve=curve)
    assert not os.listdir(tmp_path)


def test_without_the_passphrase_that_was_named_no_key_is_made(tmp_path: Path) -> None:
    absent = "env:ABSENT"
    with pytest.raises(ConfigError, match="ABSENT"):
        generate_key(tmp_path / "signer.pem", passphrase=absent)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("private", "public"),
    (("signer.pem", "signer.pub"), ("signer", "signer.pub"), ("signer.key", "signer.key.pub")),
)
def test_the_public_half_lies_beside(private: str, public: str) -> None:
    assert public_path(Path("keys") / private) == Path("keys") / public


# What a policy may say


@pytest.mark.parametrize(
    "text",
    ("", "file", "file:", "signer.pem", "hpke:a", "openbao:transit/a", "aws-kms", "aws-kms:", "x" * 500),
)
def test_what_names_no_signer_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="names no signer; expected one of file:PATH") as caught:
        open_signer(text, base=tmp_path)
    assert len(str(caught.value)) < 300
    with pytest.raises(ConfigError, match="names no"):
        open_public_key(text, base=tmp_path)


def test_a_signer_of_one_s_own_is_taken_as_it_is(tmp_path: Path) -> None:
    generate_key(tmp_path / "signer.pem")
    own = open_signer("file:signer.pem", base=tmp_path)
    assert open_signer(own, base=tmp_path) is own
    for given_with_it in ({"certificate": "chain.pem"}, {"passphrase": SOURCE}):
        with pytest.raises(ConfigError, match="of your own"):
            open_signer(own, base=tmp_path, **given_with_it)
    for no_signer in (None, 3, FileSigner, object()):
        with pytest.raises(ConfigError, match="expected a text or a signer"):
            open_signer(no_signer, base=tmp_path)  # type: ignore[arg-type]


def test_a_passphrase_for_a_keeper_with_its_own_credentials_is_refused(tmp_path: Path) -> None:
    for text in ("aws-kms:alias/signer", "pkcs11:token=a;object=b"):
        with pytest.raises(ConfigError, match="a passphrase is for a key file"):
            open_signer(text, base=tmp_path, passphrase=SOURCE)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(message=st.binary(max_size=300), other=st.binary(max_size=300))
def test_a_signature_is_over_one_message(tmp_path: Path, message: bytes, other: bytes) -> None:
    path = tmp_path / "signer.pem"
    if not path.exists():
        generate_key(path)
    signer = open_signer("file:signer.pem", base=tmp_path)
    signature = signer.sign(message, within_s=WITHIN_S)
    assert signer.public_key.verify(message, signature)
    assert signer.public_key.verify(other, signature) == (message == other)
