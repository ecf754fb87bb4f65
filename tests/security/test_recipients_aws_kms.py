"""Keys wrapped by AWS KMS: a local server that holds callers to the context, and one that turns them away."""

from __future__ import annotations

import base64
import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from servers import REGION, Answer, Gate, Kms, absent_port, gate, kms, silent_port

from strongroom.errors import ConfigError, IntegrityError, KeyServiceError, NoKeyError
from strongroom_security.fields import Context
from strongroom_security.recipients import aws_kms_calls
from strongroom_security.recipients.aws_kms import AwsKms
from strongroom_security.recipients.base import Identity, Recipient, Rewrapper
from strongroom_security.recipients.calling import PLAIN_HTTP_VARIABLE
from strongroom_security.recipients.file import create_key_file
from strongroom_security.secret import Secret
from strongroom_security.testing import RecipientContract

__all__ = ["absent_port", "gate", "kms", "silent_port"]

CONTEXT = Context(run="run-7f", launch=3, step=1200, attempt="0123456789abcdef")
OTHER = replace(CONTEXT, step=1201)
FILE = replace(CONTEXT, path="00000-00.safetensors.floe")
WITHIN_S = 20.0
ACCOUNT = "123456789012"
KEY_ID = "1234abcd-12ab-34cd-56ef-1234567890ab"


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


@pytest.fixture(scope="module")
def arn(kms: Kms) -> str:
    return kms.key()


class TestAwsKmsContract(RecipientContract):
    @pytest.fixture
    def recipient(self, arn: str) -> Recipient:
        return AwsKms(arn)

    @pytest.fixture
    def again(self, arn: str) -> Recipient:
        return AwsKms.of(arn)

    @pytest.fixture
    def stranger(self, kms: Kms) -> Identity:
        return AwsKms(kms.key())

    @pytest.fixture
    def silent(self, arn: str, silent_port: int) -> Recipient:
        return AwsKms(arn, endpoint_url=f"http://127.0.0.1:{silent_port}")

    def secrets(self, recipient: Recipient) -> list[bytes]:
        return [b"wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", b"IQoJb3JpZ2luX2VjEXAMPLETOKEN"]


def _operation(path: str, headers: dict[str, str]) -> str:
    return {key.lower(): value for key, value in headers.items()}["x-amz-target"].rpartition(".")[2]


def _error(code: str, message: str = "", status: int = 400) -> Answer:
    body = json.dumps({"__type": code, "message": message}).encode()
    return Answer(status=status, body=body, headers=(("Content-Type", "application/x-amz-json-1.1"),))


@pytest.fixture
def guarded(kms: Kms, gate: Callable[..., Gate], monkeypatch: pytest.MonkeyPatch) -> Gate:
    """A gate before the server, and the environment pointing at it."""
    made = gate(kms.port, _operation)
    monkeypatch.setenv("AWS_ENDPOINT_URL_KMS", made.address)
    return made


# How many requests, and what they say


def test_one_request_wraps_and_one_unwraps(guarded: Gate, arn: str) -> None:
    recipient, key = AwsKms(arn), Secret.draw()
    wrapped = recipient.wrap(key, CONTEXT, within_s=WITHIN_S)
    assert recipient.unwrap(wrapped, CONTEXT, within_s=WITHIN_S) == key
    assert guarded.passed == {"Encrypt": 1, "Decrypt": 1}
    assert not guarded.refused


def test_a_request_names_the_key_and_the_whole_context(guarded: Gate, arn: str) -> None:
    recipient = AwsKms(arn)
    wrapped = recipient.wrap(Secret.draw(), FILE, within_s=WITHIN_S)
    recipient.unwrap(wrapped, FILE, within_s=WITHIN_S)
    for _, _, body in guarded.requests:
        document = json.loads(body)
        assert document["KeyId"] == arn
        assert document["EncryptionContext"] == {
            "strongroom": "v1",
            "run": "run-7f",
            "launch": "3",
            "step": "1200",
            "attempt": "0123456789abcdef",
            "path": "00000-00.safetensors.floe",
        }


@pytest.mark.parametrize("name", ("id", "alias", "alias-arn"))
def test_a_key_is_used_by_every_name_that_it_has(
    kms: Kms, arn: str, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    kms.client().create_alias(AliasName=f"alias/ckpt/{name}", TargetKeyId=arn)
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    text = {
        "id": arn.rpartition("/")[2],
        "alias": f"alias/ckpt/{name}",
        "alias-arn": f"{arn.rpartition(':')[0]}:alias/ckpt/{name}",
    }[name]
    recipient, key = AwsKms.of(text), Secret.draw()
    wrapped = recipient.wrap(key, CONTEXT, within_s=WITHIN_S)
    assert recipient.unwrap(wrapped, CONTEXT, within_s=WITHIN_S) == key
    assert AwsKms(arn).unwrap(wrapped, CONTEXT, within_s=WITHIN_S) == key


def test_an_alias_that_moved_on_no_longer_opens_and_the_key_s_arn_does(kms: Kms) -> None:
    first, second = kms.key(), kms.key()
    kms.client().create_alias(AliasName="alias/moving", TargetKeyId=first)
    moving, key = AwsKms(f"{first.rpartition(':')[0]}:alias/moving"), Secret.draw()
    wrapped = moving.wrap(key, CONTEXT, within_s=WITHIN_S)
    kms.client().update_alias(AliasName="alias/moving", TargetKeyId=second)
    with pytest.raises(NoKeyError):
        moving.unwrap(wrapped, CONTEXT, within_s=WITHIN_S)
    assert AwsKms(first).unwrap(wrapped, CONTEXT, within_s=WITHIN_S) == key


def test_a_server_cannot_choose_the_key(guarded: Gate, kms: Kms, arn: str) -> None:
    answer = {"KeyId": kms.key(), "Plaintext": base64.b64encode(bytes(32)).decode()}
    guarded.always = Answer(status=200, body=json.dumps(answer).encode())
    with pytest.raises(NoKeyError, match="another key"):
        AwsKms(arn).unwrap(bytes(100), CONTEXT, within_s=WITHIN_S)
    guarded.always = Answer(status=200, body=json.dumps({**answer, "KeyId": arn}).encode())
    AwsKms(arn).unwrap(bytes(100), CONTEXT, within_s=WITHIN_S)


def test_a_replica_in_another_region_has_the_same_id_and_another_key_has_not() -> None:
    def key(region: str, resource: str) -> AwsKms:
        return AwsKms(f"arn:aws:kms:{region}:{ACCOUNT}:{resource}")

    replicated = "key/mrk-1234abcd12ab34cd56ef1234567890ab"
    assert key("eu-central-1", replicated).id == key("us-east-1", replicated).id
    assert key("eu-central-1", f"key/{KEY_ID}").id != key("us-east-1", f"key/{KEY_ID}").id


# Passing it on


def test_a_key_is_re_encrypted_for_another_without_being_shown(guarded: Gate, kms: Kms, arn: str) -> None:
    old, new, key = AwsKms(arn), AwsKms(kms.key()), Secret.draw()
    wrapped = old.wrap(key, CONTEXT, within_s=WITHIN_S)
    assert isinstance(old, Rewrapper)
    passed_on = old.rewrap(wrapped, CONTEXT, new, within_s=WITHIN_S)
    assert passed_on is not None
    assert guarded.passed == {"Encrypt": 1, "ReEncrypt": 1}
    sent = json.loads(guarded.requests[-1][2])
    assert sent["SourceKeyId"] == arn
    assert sent["SourceEncryptionContext"] == sent["DestinationEncryptionContext"] == CONTEXT.pairs()
    assert new.unwrap(passed_on, CONTEXT, within_s=WITHIN_S) == key
    with pytest.raises((NoKeyError, IntegrityError)):
        old.unwrap(passed_on, CONTEXT, within_s=WITHIN_S)
    with pytest.raises(IntegrityError):
        new.unwrap(passed_on, OTHER, within_s=WITHIN_S)
    with pytest.raises(IntegrityError):
        old.rewrap(wrapped, OTHER, new, within_s=WITHIN_S)


def test_what_kms_cannot_re_encrypt_is_left_to_the_caller(
    guarded: Gate, kms: Kms, arn: str, tmp_path: Path
) -> None:
    recipient = AwsKms(arn)
    wrapped = recipient.wrap(Secret.draw(), CONTEXT, within_s=WITHIN_S)
    far, near = AwsKms(kms.key("us-east-1")), AwsKms(kms.key(), endpoint_url=kms.address)
    for other in (create_key_file(tmp_path / "kek"), far, near):
        assert recipient.rewrap(wrapped, CONTEXT, other, within_s=WITHIN_S) is None
    assert "ReEncrypt" not in guarded.passed


# Who asks


def test_a_long_lived_access_key_is_warned_of_once(
    arn: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(aws_kms_calls, "_WARNED", set())
    AwsKms(arn).wrap(Secret.draw(), CONTEXT, within_s=WITHIN_S)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7EXAMPLE")
    AwsKms(arn).wrap(Secret.draw(), CONTEXT, within_s=WITHIN_S)
    assert not caplog.records
    monkeypatch.delenv("AWS_SESSION_TOKEN")
    for _ in range(2):
        AwsKms(arn).wrap(Secret.draw(), CONTEXT, within_s=WITHIN_S)
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert warnings[0].name == "strongroom"
    assert "long-lived access key ...MPLE" in warnings[0].getMessage()
    assert "AKIAIOSFODNN7EXAMPLE" not in warnings[0].getMessage()


def test_without_credentials_there_is_no_key(arn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    with pytest.raises(NoKeyError, match="no AWS credentials"):
        AwsKms(arn).wrap(Secret.draw(), CONTEXT, within_s=WITHIN_S)


def test_a_credential_that_a_sidecar_renewed_is_read_again(
    guarded: Gate, arn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipient = AwsKms(arn)
    recipient.wrap(Secret.draw(), CONTEXT, within_s=WITHIN_S)
    guarded.refusals = [_error("ExpiredTokenException", "The security token included is expired")]
    monkeypatch.setenv("AWS_SESSION_TOKEN", "anewtoken")
    recipient.wrap(Secret.draw(), CONTEXT, within_s=WITHIN_S)
    assert "anewtoken" in {value for _, headers, _ in guarded.requests[-1:] for value in headers.values()}
    guarded.always = _error("ExpiredTokenException", "The security token included is expired")
    with pytest.raises(NoKeyError, match="renew"):
        recipient.wrap(Secret.draw(), CONTEXT, within_s=WITHIN_S)
    assert guarded.refused["Encrypt"] == 3


def test_without_a_region_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="region"):
        AwsKms("alias/ckpt").wrap(Secret.draw(), CONTEXT, within_s=WITHIN_S)
    monkeypatch.setenv("AWS_REGION", REGION)
    with pytest.raises(NoKeyError, match="NotFound"):
        AwsKms("alias/ckpt").wrap(Secret.draw(), CONTEXT, within_s=WITHIN_S)
    monkeypatch.setenv("AWS_PROFILE", "absent")
    with pytest.raises(ConfigError, match="absent"):
        AwsKms("alias/ckpt").wrap(Secret.draw(), CONTEXT, within_s=WITHIN_S)


@pytest.mark.parametrize("address", ("http://kms.example", "http://10.0.0.5:4566", "nonsense"))
def test_an_address_that_keys_may_not_be_sent_to_is_refused(
    arn: str, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_KMS", address)
    with pytest.raises(ConfigError, match=r"aws-kms:"):
        AwsKms(arn).wrap(Secret.draw(), CONTEXT, within_s=WITHIN_S)


def test_without_boto3_the_error_names_the_extra(arn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in {"boto3", "botocore"}]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "botocore", None)
    monkeypatch.setitem(sys.modules, "boto3", None)
    recipient = AwsKms(arn)
    with pytest.raises(ConfigError, match=r"strongroom\[aws\]"):
        recipient.wrap(Secret.draw(), CONTEXT, within_s=WITHIN_S)


# What the answers mean


@pytest.mark.parametrize(
    ("code", "status", "error"),
    (
        ("AccessDeniedException", 400, NoKeyError),
        ("DisabledException", 400, NoKeyError),
        ("NotFoundException", 400, NoKeyError),
        ("IncorrectKeyException", 400, NoKeyError),
        ("InvalidKeyUsageException", 400, NoKeyError),
        ("KMSInvalidStateException", 400, NoKeyError),
        ("UnrecognizedClientException", 400, NoKeyError),
        ("InvalidSignatureException", 400, NoKeyError),
        ("InvalidCiphertextException", 400, IntegrityError),
        ("ValidationException", 400, ConfigError),
        ("ThrottlingException", 400, KeyServiceError),
        ("LimitExceededException", 400, KeyServiceError),
        ("KMSInternalException", 500, KeyServiceError),
        ("DependencyTimeoutException", 500, KeyServiceError),
        ("KeyUnavailableException", 500, KeyServiceError),
        ("SomethingNewException", 400, KeyServiceError),
        ("SomethingNewException", 503, KeyServiceError),
    ),
)
def test_each_refusal_is_told_apart(
    guarded: Gate, arn: str, code: str, status: int, error: type[Exception]
) -> None:
    guarded.always = _error(code, "as the service puts it", status)
    within_s = 2.0 if error is KeyServiceError else WITHIN_S
    with pytest.raises(error, match=f"{code}: as the service puts it") as caught:
        AwsKms(arn).unwrap(bytes(100), CONTEXT, within_s=within_s)
    assert type(caught.value) is error
    assert caught.value.__cause__ is caught.value.__context__ is None


def test_throttling_is_waited_out(guarded: Gate, arn: str) -> None:
    recipient, key = AwsKms(arn), Secret.draw()
    guarded.refusals = [_error("ThrottlingException", "Rate exceeded")] * 3
    wrapped = recipient.wrap(key, CONTEXT, within_s=WITHIN_S)
    guarded.refusals = [_error("KMSInternalException", "", 500), _error("SomethingNewException", "", 503)]
    assert recipient.unwrap(wrapped, CONTEXT, within_s=WITHIN_S) == key
    assert guarded.refused == {"Encrypt": 3, "Decrypt": 2}
    assert guarded.passed == {"Encrypt": 1, "Decrypt": 1}


def test_throttling_that_stays_is_given_up_in_time(guarded: Gate, arn: str) -> None:
    recipient = AwsKms(arn)
    recipient.wrap(Secret.draw(), CONTEXT, within_s=WITHIN_S)
    guarded.always = _error("ThrottlingException", "Rate exceeded")
    began = time.monotonic()
    with pytest.raises(KeyServiceError, match=r"within 2 s: \d+ tries failed.*Rate exceeded"):
        recipient.wrap(Secret.draw(), CONTEXT, within_s=2.0)
    assert time.monotonic() - began < 10
    assert 1 < guarded.refused["Encrypt"] < 50


@pytest.mark.parametrize("what", ("silent", "absent"))
def test_a_service_that_is_down_is_given_up_in_time(
    arn: str, silent_port: int, absent_port: int, what: str
) -> None:
    port = silent_port if what == "silent" else absent_port
    recipient = AwsKms(arn, endpoint_url=f"http://127.0.0.1:{port}")
    began = time.monotonic()
    with pytest.raises(KeyServiceError, match=r"0\.5 s"):
        recipient.wrap(Secret.draw(), CONTEXT, within_s=0.5)
    with pytest.raises(KeyServiceError):
        recipient.unwrap(bytes(100), CONTEXT, within_s=0.5)
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("body", (b"{}", b"<html>", b"[]", b"", b'{"Plaintext": "AAAA"}'))
def test_what_is_no_kms_is_told_from_damage(guarded: Gate, arn: str, body: bytes) -> None:
    guarded.always = Answer(status=200, body=body)
    with pytest.raises((KeyServiceError, NoKeyError)):
        AwsKms(arn).unwrap(bytes(100), CONTEXT, within_s=WITHIN_S)
    with pytest.raises(KeyServiceError):
        AwsKms(arn).wrap(Secret.draw(), CONTEXT, within_s=WITHIN_S)


def test_a_key_of_another_length_is_refused(kms: Kms, arn: str) -> None:
    blob = kms.client().encrypt(KeyId=arn, Plaintext=b"short", EncryptionContext=CONTEXT.pairs())
    with pytest.raises(IntegrityError, match="5 bytes"):
        AwsKms(arn).unwrap(blob["CiphertextBlob"], CONTEXT, within_s=WITHIN_S)


@pytest.mark.parametrize("length", (0, 6145, 100_000))
def test_bytes_that_kms_never_makes_are_not_sent(guarded: Gate, arn: str, length: int) -> None:
    for call in (AwsKms(arn).unwrap, lambda *a, **k: AwsKms(arn).rewrap(*a, AwsKms(arn), **k)):
        with pytest.raises(IntegrityError):
            call(bytes(length), CONTEXT, within_s=WITHIN_S)
    assert not guarded.requests


# What is shown


def test_no_log_shows_a_key_when_everything_is_logged(arn: str, caplog: pytest.LogCaptureFixture) -> None:
    import boto3

    recipient, key = AwsKms(arn), Secret.draw()
    with caplog.at_level(logging.DEBUG):
        wrapped = recipient.wrap(key, CONTEXT, within_s=WITHIN_S)
        recipient.unwrap(wrapped, CONTEXT, within_s=WITHIN_S)
        recipient.rewrap(wrapped, CONTEXT, recipient, within_s=WITHIN_S)
        logged = caplog.text
        caplog.clear()
        # The program's own use of boto3 is logged as ever.
        boto3.client("kms", region_name=REGION).encrypt(KeyId=arn, Plaintext=b"its own")
        assert base64.b64encode(b"its own").decode() in caplog.text
    for spelling in (key.reveal().hex(), base64.b64encode(key.reveal()).decode(), repr(key.reveal())):
        assert spelling not in logged


# What the documentation says


def test_the_policies_of_the_documentation_name_what_is_sent() -> None:
    """That KMS carries them out, only the real one shows; here: they are JSON, and the names are ours."""
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "key-services.md").read_text(encoding="utf-8")
    policies = [json.loads(text) for text in re.findall(r"```json\n(.*?)```", page, re.DOTALL)]
    assert len(policies) == 3
    conditioned = set(re.findall(r"kms:EncryptionContext:(\w+)", json.dumps(policies)))
    assert conditioned == {"strongroom", "run"}
    assert conditioned <= set(CONTEXT.pairs())
    actions = set(re.findall(r'"kms:(\w+)', json.dumps(policies)))
    assert actions - {"EncryptionContext"} == {
        "Encrypt",
        "Decrypt",
        "ReEncrypt",
        "ReEncryptFrom",
        "ReEncryptTo",
        "GenerateDataKey",
    }


# What a policy may say


@pytest.mark.parametrize(
    "text",
    (
        "",
        "arn:aws:kms",
        f"arn:aws:s3:eu-central-1:{ACCOUNT}:key/{KEY_ID}",
        f"arn:aws:kms:eu-central-1:{ACCOUNT}:grant/{KEY_ID}",
        f"arn:aws:kms:eu-central-1:12345:key/{KEY_ID}",
        f"arn:evil:kms:eu-central-1:{ACCOUNT}:key/{KEY_ID}",
        f"arn:aws:kms:evil.example/:{ACCOUNT}:key/{KEY_ID}",
        "alias/",
        "alias/a b",
        "https://kms.example/key",
        f"{KEY_ID}\n",
        "a" * 300,
    ),
)
def test_what_names_no_key_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="names no KMS key"):
        AwsKms.of(text)


@pytest.mark.parametrize(
    "text",
    (
        f"arn:aws:kms:eu-central-1:{ACCOUNT}:key/{KEY_ID}",
        f"arn:aws-us-gov:kms:us-gov-west-1:{ACCOUNT}:alias/team/ckpt",
        f"arn:aws-cn:kms:cn-north-1:{ACCOUNT}:key/mrk-1234abcd12ab34cd56ef1234567890ab",
        KEY_ID,
        "alias/ckpt",
    ),
)
def test_every_name_of_a_key_is_one(text: str) -> None:
    recipient = AwsKms.of(text)
    assert recipient.uri == f"aws-kms:{text}"
    assert ACCOUNT not in recipient.id
