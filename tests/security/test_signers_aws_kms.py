"""Signatures by AWS KMS: a local server that signs hashes as the real one does, and one that turns away."""

from __future__ import annotations

import base64
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from servers import REGION, Answer, Gate, Kms, absent_port, gate, kms, silent_port
from test_signers_file import certificate, write

from strongroom.errors import ConfigError, KeyServiceError, NoKeyError
from strongroom_security.recipients import aws_kms_calls
from strongroom_security.recipients.calling import PLAIN_HTTP_VARIABLE
from strongroom_security.signer_testing import SignerContract
from strongroom_security.signers.aws_kms import AwsKmsSigner
from strongroom_security.signers.base import Signer, sign_checked
from strongroom_security.signers.opening import open_public_key, open_signer

__all__ = ["absent_port", "gate", "kms", "silent_port"]

WITHIN_S = 20.0
MESSAGE = b"what is to be signed " * 1000


@pytest.fixture(autouse=True)
def _temporary_credentials(kms: Kms, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv(PLAIN_HTTP_VARIABLE, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    # No request leaves for the address of an instance's metadata.
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "ASIAIOSFODNN7EXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "IQoJb3JpZ2luX2VjEXAMPLETOKEN")
    monkeypatch.setenv("AWS_ENDPOINT_URL_KMS", kms.address)


def new_key(kms: Kms, spec: str = "ECC_NIST_P256", usage: str = "SIGN_VERIFY") -> str:
    return kms.key(KeySpec=spec, KeyUsage=usage)


@pytest.fixture(scope="module")
def arn(kms: Kms) -> str:
    return new_key(kms)


class TestAwsKmsSignerContract(SignerContract):
    spec = "ECC_NIST_P256"

    @pytest.fixture
    def named(self, kms: Kms) -> str:
        return f"aws-kms:{new_key(kms, self.spec)}"

    @pytest.fixture
    def signer(self, named: str) -> Signer:
        return open_signer(named, base=Path())

    @pytest.fixture
    def again(self, named: str) -> Signer:
        return open_signer(named, base=Path())

    @pytest.fixture
    def stranger(self, kms: Kms) -> Signer:
        return AwsKmsSigner(new_key(kms, self.spec))

    @pytest.fixture
    def silent(self, arn: str, silent_port: int) -> Signer:
        return AwsKmsSigner(arn, endpoint_url=f"http://127.0.0.1:{silent_port}", within_s=self.short_s)

    def secrets(self, signer: Signer) -> list[bytes]:
        return [b"wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", b"IQoJb3JpZ2luX2VjEXAMPLETOKEN"]


class TestAwsKmsSignerOnP384Contract(TestAwsKmsSignerContract):
    spec = "ECC_NIST_P384"


def _operation(path: str, headers: dict[str, str]) -> str:
    return {key.lower(): value for key, value in headers.items()}["x-amz-target"].rpartition(".")[2]


def _error(code: str, message: str = "", status: int = 400) -> Answer:
    body = json.dumps({"__type": code, "message": message}).encode()
    return Answer(status=status, body=body, headers=(("Content-Type", "application/x-amz-json-1.1"),))


def _answer(**members: object) -> Answer:
    return Answer(status=200, body=json.dumps(members).encode())


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.fixture
def guarded(kms: Kms, gate: Callable[..., Gate], monkeypatch: pytest.MonkeyPatch) -> Gate:
    """A gate before the server, and the environment pointing at it."""
    made = gate(kms.port, _operation)
    monkeypatch.setenv("AWS_ENDPOINT_URL_KMS", made.address)
    return made


# How many requests, and what they say


def test_the_public_key_is_asked_for_once_and_each_signature_by_one_request(guarded: Gate, arn: str) -> None:
    signer = AwsKmsSigner(arn)
    for _ in range(3):
        assert signer.public_key.verify(MESSAGE, sign_checked(signer, MESSAGE, within_s=WITHIN_S))
    assert guarded.passed == {"GetPublicKey": 1, "Sign": 3}


def test_making_a_signer_asks_nobody(guarded: Gate, arn: str) -> None:
    open_signer(f"aws-kms:{arn}", base=Path())
    assert not guarded.requests


@pytest.mark.parametrize(
    ("spec", "algorithm", "length"),
    (("ECC_NIST_P256", "ECDSA_SHA_256", 32), ("ECC_NIST_P384", "ECDSA_SHA_384", 48)),
)
def test_a_request_holds_the_hash_and_says_so(
    guarded: Gate, kms: Kms, spec: str, algorithm: str, length: int
) -> None:
    arn = new_key(kms, spec)
    AwsKmsSigner(arn).sign(MESSAGE, within_s=WITHIN_S)
    sent = json.loads(guarded.requests[-1][2])
    assert len(base64.b64decode(sent.pop("Message"))) == length
    assert sent == {"KeyId": arn, "MessageType": "DIGEST", "SigningAlgorithm": algorithm}


@pytest.mark.parametrize("name", ("id", "alias", "alias-arn"))
def test_a_key_is_used_by_every_name_that_it_has(
    kms: Kms, arn: str, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    kms.client().create_alias(AliasName=f"alias/sign/{name}", TargetKeyId=arn)
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    text = {
        "id": arn.rpartition("/")[2],
        "alias": f"alias/sign/{name}",
        "alias-arn": f"{arn.rpartition(':')[0]}:alias/sign/{name}",
    }[name]
    signer = open_signer(f"aws-kms:{text}", base=Path())
    signature = sign_checked(signer, MESSAGE, within_s=WITHIN_S)
    assert open_public_key(f"aws-kms:{arn}", base=Path()).verify(MESSAGE, signature)


def test_an_alias_that_moves_on_signs_no_more(kms: Kms) -> None:
    first, second = new_key(kms), new_key(kms)
    kms.client().create_alias(AliasName="alias/moving-signer", TargetKeyId=first)
    signer = AwsKmsSigner(f"{first.rpartition(':')[0]}:alias/moving-signer")
    signer.sign(MESSAGE, within_s=WITHIN_S)
    kms.client().update_alias(AliasName="alias/moving-signer", TargetKeyId=second)
    with pytest.raises(NoKeyError, match="another key than the one that it had before"):
        signer.sign(MESSAGE, within_s=WITHIN_S)
    anew = AwsKmsSigner(signer.uri.removeprefix("aws-kms:"))
    assert anew.public_key != signer.public_key


# What answers wrongly


def test_a_server_cannot_choose_the_key(guarded: Gate, kms: Kms, arn: str) -> None:
    other = ec.generate_private_key(ec.SECP256R1())
    der = other.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    guarded.always = _answer(KeyId=new_key(kms), KeyUsage="SIGN_VERIFY", PublicKey=_b64(der))
    with pytest.raises(NoKeyError, match="another key"):
        _ = AwsKmsSigner(arn).public_key
    guarded.always = None
    signer = AwsKmsSigner(arn)
    _ = signer.public_key
    guarded.always = _answer(KeyId=new_key(kms), Signature=_b64(b"signature"))
    with pytest.raises(NoKeyError, match="another key"):
        signer.sign(MESSAGE, within_s=WITHIN_S)


def test_a_signature_that_does_not_hold_is_refused(guarded: Gate, arn: str) -> None:
    signer = AwsKmsSigner(arn)
    earlier = signer.sign(b"another message", within_s=WITHIN_S)
    for signature in (earlier, b"", b"0", bytes(72)):
        guarded.always = _answer(KeyId=arn, Signature=_b64(signature))
        with pytest.raises(KeyServiceError, match="no signature of its key"):
            sign_checked(signer, MESSAGE, within_s=WITHIN_S)


@pytest.mark.parametrize("body", (b"{}", b"<html>", b"[]", b""))
def test_what_is_no_kms_signs_nothing(guarded: Gate, arn: str, body: bytes) -> None:
    signer = AwsKmsSigner(arn)
    guarded.always = Answer(status=200, body=body)
    with pytest.raises((KeyServiceError, NoKeyError)):
        _ = signer.public_key
    guarded.always = None
    _ = signer.public_key
    guarded.always = Answer(status=200, body=body)
    with pytest.raises((KeyServiceError, NoKeyError)):
        sign_checked(signer, MESSAGE, within_s=WITHIN_S)


# Keys that do not sign


@pytest.mark.parametrize(
    ("spec", "usage"),
    (
        ("RSA_2048", "SIGN_VERIFY"),
        ("RSA_2048", "ENCRYPT_DECRYPT"),
        ("ECC_SECG_P256K1", "SIGN_VERIFY"),
        ("ECC_NIST_P521", "SIGN_VERIFY"),
        ("ECC_NIST_P256", "KEY_AGREEMENT"),
    ),
)
def test_a_key_of_another_spec_or_usage_is_refused(guarded: Gate, kms: Kms, spec: str, usage: str) -> None:
    arn = new_key(kms, spec, usage)
    for ask in (lambda signer: signer.public_key, lambda signer: signer.sign(MESSAGE, within_s=WITHIN_S)):
        with pytest.raises(ConfigError, match=r"P-256 or P-384|ECC_NIST_P256 or ECC_NIST_P384"):
            ask(AwsKmsSigner(arn))
    assert "Sign" not in guarded.passed


@pytest.mark.parametrize("code", ("UnsupportedOperationException", "InvalidKeyUsageException"))
def test_a_key_that_kms_itself_says_does_not_sign_is_refused(guarded: Gate, arn: str, code: str) -> None:
    """The first is what KMS answers about the public key of a symmetric key; moto fails there."""
    guarded.always = _error(code, "as the service puts it")
    with pytest.raises(ConfigError, match=f"does not sign; .*{code}: as the service puts it"):
        _ = AwsKmsSigner(arn).public_key


# What the answers mean


@pytest.mark.parametrize(
    ("code", "status", "error"),
    (
        ("AccessDeniedException", 400, NoKeyError),
        ("DisabledException", 400, NoKeyError),
        ("NotFoundException", 400, NoKeyError),
        ("KMSInvalidStateException", 400, NoKeyError),
        ("InvalidKeyUsageException", 400, ConfigError),
        ("ValidationException", 400, ConfigError),
        ("ThrottlingException", 400, KeyServiceError),
        ("KMSInternalException", 500, KeyServiceError),
        ("SomethingNewException", 400, KeyServiceError),
    ),
)
def test_each_refusal_is_told_apart(
    guarded: Gate, arn: str, code: str, status: int, error: type[Exception]
) -> None:
    signer = AwsKmsSigner(arn)
    _ = signer.public_key
    guarded.always = _error(code, "as the service puts it", status)
    within_s = 1.0 if error is KeyServiceError else WITHIN_S
    with pytest.raises(error, match=f"{code}: as the service puts it") as caught:
        sign_checked(signer, MESSAGE, within_s=within_s)
    assert type(caught.value) is error


def test_throttling_is_waited_out(guarded: Gate, arn: str) -> None:
    signer = AwsKmsSigner(arn)
    guarded.refusals = [_error("ThrottlingException", "Rate exceeded")] * 2
    _ = signer.public_key
    guarded.refusals = [
        _error("ThrottlingException", "Rate exceeded"),
        _error("KMSInternalException", "", 500),
    ]
    sign_checked(signer, MESSAGE, within_s=WITHIN_S)
    assert guarded.refused == {"GetPublicKey": 2, "Sign": 2}


def test_a_public_key_that_was_not_to_be_had_is_asked_for_again(guarded: Gate, arn: str) -> None:
    signer = AwsKmsSigner(arn, within_s=0.5)
    guarded.always = _error("ThrottlingException", "Rate exceeded")
    with pytest.raises(KeyServiceError, match=r"0\.5 s"):
        _ = signer.public_key
    guarded.always = None
    assert signer.public_key.curve == "P-256"


def test_a_service_that_is_not_there_is_given_up_in_time(arn: str, absent_port: int) -> None:
    signer = AwsKmsSigner(arn, endpoint_url=f"http://127.0.0.1:{absent_port}")
    with pytest.raises(KeyServiceError, match=r"0\.5 s"):
        sign_checked(signer, MESSAGE, within_s=0.5)


# Who asks


def test_a_long_lived_access_key_is_warned_of(
    arn: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(aws_kms_calls, "_WARNED", set())
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7EXAMPLE")
    monkeypatch.delenv("AWS_SESSION_TOKEN")
    AwsKmsSigner(arn).sign(MESSAGE, within_s=WITHIN_S)
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "long-lived access key ...MPLE" in warning.getMessage()


def test_without_credentials_there_is_no_key(arn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    with pytest.raises(NoKeyError, match="no AWS credentials"):
        AwsKmsSigner(arn).sign(MESSAGE, within_s=WITHIN_S)


@pytest.mark.parametrize("text", ("alias/", "https://kms.example/key", "arn:aws:kms", "a b"))
def test_what_names_no_key_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="names no KMS key"):
        open_signer(f"aws-kms:{text}", base=Path())


# Certificates


def test_a_certificate_for_another_key_is_refused_before_anything_is_signed(
    guarded: Gate, arn: str, tmp_path: Path
) -> None:
    write(tmp_path / "chain.pem", certificate(ec.generate_private_key(ec.SECP256R1())))
    signer: Any = open_signer(f"aws-kms:{arn}", base=tmp_path, certificate="chain.pem")
    for _ in range(2):
        with pytest.raises(ConfigError, match="for another key than this signer's"):
            signer.sign(MESSAGE, within_s=WITHIN_S)
        with pytest.raises(ConfigError, match="for another key than this signer's"):
            _ = signer.public_key
    assert "Sign" not in guarded.passed
