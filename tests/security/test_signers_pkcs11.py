"""Signatures made inside a PKCS #11 token: SoftHSM for real, its tokens in a temporary folder."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from servers import PIN, START_S, SoftHsm, softhsm
from test_signers_file import certificate, write

from strongroom.errors import ConfigError, KeyServiceError, NoKeyError
from strongroom_security.publickeys import PublicKey
from strongroom_security.recipients import pkcs11token
from strongroom_security.recipients.pkcs11token import MODULE_VARIABLE, PIN_FILE_VARIABLE
from strongroom_security.signer_testing import SignerContract
from strongroom_security.signers import pkcs11 as ours
from strongroom_security.signers.base import Signer, sign_checked
from strongroom_security.signers.opening import open_public_key, open_signer
from strongroom_security.signers.pkcs11 import Pkcs11Signer

__all__ = ["softhsm"]

WITHIN_S = 20.0
MESSAGE = b"what is to be signed " * 1000
TOKEN = "rotating"  # noqa: S105 - its label
SIGNER = f"token={TOKEN};object=signer"

# Each is: label, id, the curve or kind, the public half's id (None: it is not in the token), changes.
KEYS: list[tuple[str, bytes, str, bytes | None, dict[str, bool]]] = [
    ("signer", b"\x51", "secp256r1", b"\x51", {}),
    ("other", b"\x52", "secp256r1", b"\x52", {}),
    ("large", b"\x53", "secp384r1", b"\x53", {}),
    ("larger-yet", b"\x54", "secp521r1", b"\x54", {}),
    ("koblitz", b"\x55", "secp256k1", b"\x55", {}),
    ("lonely", b"\x56", "secp256r1", None, {}),
    ("certified", b"\x57", "secp256r1", None, {}),
    ("by-label", b"\x58", "secp256r1", b"\x99", {}),
    ("leaky", b"\x5a", "secp256r1", b"\x5a", {"EXTRACTABLE": True}),
    ("readable", b"\x5b", "secp256r1", b"\x5b", {"SENSITIVE": False}),
    ("deriving", b"\x5c", "secp256r1", b"\x5c", {"SIGN": False, "DERIVE": True}),
    ("signing-twin", b"\x5d", "secp256r1", b"\x5d", {}),
    ("signing-twin", b"\x5e", "secp256r1", b"\x5e", {}),
    ("rsa-signer", b"\x5f", "rsa", b"\x5f", {}),
]


@pytest.fixture(scope="module")
def hsm(softhsm: SoftHsm) -> SoftHsm:
    """The token, with keys in it."""
    # By a process of its own, so that this one first sees the module as a training run would.
    program = f"""
import pkcs11
from pkcs11 import Attribute, KeyType
from pkcs11.util.ec import encode_named_curve_parameters
token = pkcs11.lib({softhsm.module!r}).get_token(token_label={TOKEN!r})
with token.open(rw=True, user_pin={PIN!r}) as session:
    for label, id, curve, public_id, changes in {KEYS!r}:
        usual = {{"SENSITIVE": True, "EXTRACTABLE": False, "SIGN": True, "TOKEN": True, "PRIVATE": True}}
        template = {{Attribute[name]: value for name, value in {{**usual, **changes}}.items()}}
        named = dict(id=id, label=label, store=True, private_template=template)
        if curve == "rsa":
            session.generate_keypair(KeyType.RSA, 2048, **named)
            continue
        domain = session.create_domain_parameters(
            KeyType.EC, {{Attribute.EC_PARAMS: encode_named_curve_parameters(curve)}}, local=True
        )
        public, private = domain.generate_keypair(**named)
        if public_id is None:
            public.destroy()
        elif public_id != id:
            public[Attribute.ID] = public_id
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=START_S)
    return softhsm


@pytest.fixture(autouse=True)
def _this_machine(hsm: SoftHsm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MODULE_VARIABLE, hsm.module)
    monkeypatch.setenv(PIN_FILE_VARIABLE, str(hsm.pin_file))
    monkeypatch.setattr(pkcs11token, "_REFUSED_PINS", set())


class TestPkcs11SignerContract(SignerContract):
    named = f"pkcs11:{SIGNER}"

    @pytest.fixture
    def signer(self) -> Signer:
        return open_signer(self.named, base=Path())

    @pytest.fixture
    def again(self) -> Signer:
        return open_signer(self.named, base=Path())

    @pytest.fixture
    def stranger(self) -> Signer:
        return Pkcs11Signer(f"token={TOKEN};object=other")

    def secrets(self, signer: Signer) -> list[bytes]:
        return [PIN.encode()]

    def test_a_keeper_that_never_answers_is_given_up(self, signer: Signer) -> None:
        began = time.monotonic()
        with pkcs11token.LOCK.get():  # as a thread inside the module holds it that does not come back
            for ask in (signer.sign, lambda *a, **k: sign_checked(signer, *a, **k)):
                with pytest.raises(KeyServiceError, match=signer.uri):
                    ask(MESSAGE, within_s=self.short_s)
        assert time.monotonic() - began < 2 * self.short_s + 10
        sign_checked(signer, MESSAGE, within_s=self.within_s)


class TestPkcs11SignerOnP384Contract(TestPkcs11SignerContract):
    named = f"pkcs11:token={TOKEN};object=large"


# Which public key


@contextmanager
def _session(hsm: SoftHsm) -> Iterator[Any]:
    import pkcs11

    with (
        pkcs11token.LOCK.get(),
        pkcs11.lib(hsm.module).get_token(token_label=TOKEN).open(rw=True, user_pin=PIN) as session,
    ):
        yield session


def test_the_public_key_is_that_of_the_token_s_object(hsm: SoftHsm) -> None:
    import pkcs11
    from pkcs11.util.ec import encode_ec_public_key

    with _session(hsm) as session:
        found = session.get_key(object_class=pkcs11.ObjectClass.PUBLIC_KEY, label="signer")
        expected = PublicKey.from_der(encode_ec_public_key(found), "the token's key")
    assert open_public_key(f"pkcs11:{SIGNER}", base=Path()) == expected


def test_a_public_key_is_found_by_its_label_where_its_id_is_another() -> None:
    sign_checked(Pkcs11Signer(f"token={TOKEN};object=by-label"), MESSAGE, within_s=WITHIN_S)


def test_a_private_key_whose_public_half_is_elsewhere_signs_nothing() -> None:
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"neither the public key nor a certificate.*pkcs11-tool"):
            Pkcs11Signer(f"token={TOKEN};object=lonely").sign(MESSAGE, within_s=WITHIN_S)


def _write_certificate(hsm: SoftHsm, pem: bytes, key_id: bytes) -> None:
    import pkcs11
    from pkcs11 import Attribute

    loaded = x509.load_pem_x509_certificate(pem)
    with _session(hsm) as session:
        session.create_object(
            {
                Attribute.CLASS: pkcs11.ObjectClass.CERTIFICATE,
                Attribute.CERTIFICATE_TYPE: pkcs11.CertificateType.X_509,
                Attribute.TOKEN: True,
                Attribute.ID: key_id,
                Attribute.SUBJECT: loaded.subject.public_bytes(),
                Attribute.VALUE: loaded.public_bytes(serialization.Encoding.DER),
            }
        )


def test_a_public_key_that_is_not_the_private_key_s_is_found_out_when_it_signs(hsm: SoftHsm) -> None:
    """A certificate lies in the token under the key's id, and is for another key."""
    other = ec.generate_private_key(ec.SECP256R1())
    _write_certificate(hsm, certificate(other), b"\x57")
    signer = Pkcs11Signer(f"token={TOKEN};object=certified")
    assert signer.public_key == PublicKey.of(other.public_key())
    with pytest.raises(KeyServiceError, match="no signature of its key"):
        sign_checked(signer, MESSAGE, within_s=WITHIN_S)


def test_a_chain_for_the_token_s_key_is_taken_and_another_refused(tmp_path: Path) -> None:
    issuer = ec.generate_private_key(ec.SECP256R1())
    public = open_public_key(f"pkcs11:{SIGNER}", base=Path())
    write(tmp_path / "chain.pem", certificate(issuer, subject=public.key))
    signer = open_signer(f"pkcs11:{SIGNER}", base=tmp_path, certificate="chain.pem")
    sign_checked(signer, MESSAGE, within_s=WITHIN_S)
    assert len(signer.certificates) == 1
    write(tmp_path / "chain.pem", certificate(issuer))
    signer = open_signer(f"pkcs11:{SIGNER}", base=tmp_path, certificate="chain.pem")
    with pytest.raises(ConfigError, match="for another key"):
        sign_checked(signer, MESSAGE, within_s=WITHIN_S)


@pytest.mark.parametrize("wrapped", (True, False))
@pytest.mark.parametrize("curve", (ec.SECP256R1(), ec.SECP384R1()))
def test_a_point_is_read_in_both_forms_that_tokens_give(curve: ec.EllipticCurve, wrapped: bool) -> None:
    key = ec.generate_private_key(curve).public_key()
    point = key.public_bytes(serialization.Encoding.X962, serialization.PublicFormat.UncompressedPoint)
    given = bytes([4, len(point)]) + point if wrapped else point
    assert ours._key_at(given, curve) == PublicKey.of(key)
    for broken in (b"", b"\x04", given[:-1], given + b"\0", bytes(len(point))):
        assert ours._key_at(broken, curve) is None


# Which private key


@pytest.mark.parametrize(
    ("label", "error", "told"),
    (
        ("absent", NoKeyError, "holds no elliptic-curve private key"),
        ("signing-twin", ConfigError, "2 keys of the token fit"),
        ("rsa-signer", ConfigError, "private key of another kind"),
        ("larger-yet", ConfigError, "P-256 and P-384"),
        ("koblitz", ConfigError, "P-256 and P-384"),
        ("leaky", ConfigError, "CKA_EXTRACTABLE false"),
        ("readable", ConfigError, "CKA_SENSITIVE true"),
        ("deriving", NoKeyError, "does not allow this key to sign"),
    ),
)
def test_a_key_that_cannot_sign_is_told_by_what_it_is(label: str, error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told) as caught:
        sign_checked(Pkcs11Signer(f"token={TOKEN};object={label}"), MESSAGE, within_s=WITHIN_S)
    assert type(caught.value) is error


@pytest.mark.parametrize("named", (f"token={TOKEN};id=%51", f"token={TOKEN};id=%51;type=private"))
def test_a_key_is_named_by_every_attribute_of_the_uri(named: str) -> None:
    assert Pkcs11Signer(named).public_key == Pkcs11Signer(SIGNER).public_key


@pytest.mark.parametrize(
    ("text", "told"),
    (
        ("token=a", "names no key"),
        ("token=a;object=b;type=public", "expected a private key, type=private"),
        ("token=a;object=b;type=secret-key", "expected a private key, type=private"),
        ("token=a;object=b?module-path=/evil.so", "module-path"),
        ("token=a;object=b?pin-value=4711", "tells the PIN"),
    ),
)
def test_a_uri_that_is_none_or_says_too_much_is_refused(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        open_signer(f"pkcs11:{text}", base=Path())
    assert "4711" not in str(caught.value)


# What the token answers


def test_two_numbers_of_another_length_are_no_signature() -> None:
    signer = Pkcs11Signer(SIGNER)
    for raw in (b"", bytes(63), bytes(65), bytes(96)):
        with pytest.raises(KeyServiceError, match="a signature on this curve has 64"):
            signer._as_der(raw, signer.public_key)


def test_the_pin_comes_from_a_file_for_this_user_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(PIN_FILE_VARIABLE)
    with pytest.raises(NoKeyError, match=PIN_FILE_VARIABLE):
        Pkcs11Signer(SIGNER).sign(MESSAGE, within_s=WITHIN_S)
    path = write(tmp_path / "pin", PIN.encode())
    Pkcs11Signer(f"{SIGNER}?pin-source=file:{path}").sign(MESSAGE, within_s=WITHIN_S)
    write(path, b"11112222")
    with pytest.raises(NoKeyError, match="PinIncorrect") as caught:
        sign_checked(Pkcs11Signer(SIGNER, pin_file=path), MESSAGE, within_s=WITHIN_S)
    assert "11112222" not in str(caught.value)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="0640"):
        Pkcs11Signer(SIGNER, pin_file=path).sign(MESSAGE, within_s=WITHIN_S)


def test_without_python_pkcs11_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pkcs11", None)
    with pytest.raises(ConfigError, match=r"strongroom\[pkcs11\]"):
        Pkcs11Signer(SIGNER).sign(MESSAGE, within_s=WITHIN_S)


def test_signers_and_recipients_of_one_process_take_turns(hsm: SoftHsm) -> None:
    from strongroom_security.fields import Context
    from strongroom_security.recipients.pkcs11 import Pkcs11
    from strongroom_security.secret import Secret

    with _session(hsm) as session:
        import pkcs11

        session.generate_key(
            pkcs11.KeyType.AES,
            256,
            label="kek-beside",
            id=b"\x60",
            store=True,
            template={pkcs11.Attribute.SENSITIVE: True, pkcs11.Attribute.EXTRACTABLE: False},
        )
    signer, recipient = Pkcs11Signer(SIGNER), Pkcs11(f"token={TOKEN};object=kek-beside")
    context = Context(run="run-7f", launch=3, step=1200, attempt="0123456789abcdef")
    errors: list[BaseException] = []

    def use() -> None:
        try:
            for _ in range(5):
                sign_checked(signer, MESSAGE, within_s=WITHIN_S)
                recipient.wrap(Secret.draw(), context, within_s=WITHIN_S)
        except BaseException as error:  # noqa: BLE001 - asserted below, in the test's own thread
            errors.append(error)

    threads = [threading.Thread(target=use) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
