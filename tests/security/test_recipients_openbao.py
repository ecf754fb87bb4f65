"""Keys wrapped by a transit engine: a real OpenBao server, and what a server can do wrong."""

from __future__ import annotations

import base64
import http.client
import json
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from servers import Answer, Gate, OpenBaoServer, ServerError, absent_port, gate, openbao, silent_port

from strongroom.errors import ConfigError, IntegrityError, KeyServiceError, NoKeyError
from strongroom_security.fields import Context
from strongroom_security.recipients.base import Identity, Recipient, Rewrapper
from strongroom_security.recipients.calling import PLAIN_HTTP_VARIABLE
from strongroom_security.recipients.file import create_key_file
from strongroom_security.recipients.openbao import OpenBao
from strongroom_security.secret import Secret
from strongroom_security.testing import RecipientContract

__all__ = ["absent_port", "gate", "openbao", "silent_port"]

CONTEXT = Context(run="run-7f", launch=3, step=1200, attempt="0123456789abcdef")
OTHER = Context(run="run-7f", launch=3, step=1201, attempt="0123456789abcdef")
WITHIN_S = 20.0

KINDS = {"derived": {"derived": True}, "plain": {}, "chacha": {"type": "chacha20-poly1305"}}


@pytest.fixture(autouse=True)
def _as_root(openbao: OpenBaoServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for prefix in ("BAO", "VAULT"):
        for name in ("ADDR", "TOKEN", "NAMESPACE", "CACERT", "CAPATH", "CLIENT_CERT", "CLIENT_KEY"):
            monkeypatch.delenv(f"{prefix}_{name}", raising=False)
    monkeypatch.delenv("BAO_TOKEN_PATH", raising=False)
    monkeypatch.delenv(PLAIN_HTTP_VARIABLE, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("BAO_ADDR", openbao.address)
    monkeypatch.setenv("BAO_TOKEN", openbao.root)


@pytest.fixture(params=KINDS)
def key(openbao: OpenBaoServer, request: pytest.FixtureRequest) -> str:
    """Each kind of key that may wrap."""
    return openbao.key(f"each-{request.param}", **KINDS[request.param])


@pytest.fixture
def derived(openbao: OpenBaoServer) -> str:
    return openbao.key("derived", derived=True)


class TestOpenBaoContract(RecipientContract):
    @pytest.fixture
    def recipient(self, key: str) -> Recipient:
        return OpenBao(key)

    @pytest.fixture
    def again(self, key: str) -> Recipient:
        return OpenBao.of(key)

    @pytest.fixture
    def stranger(self, openbao: OpenBaoServer) -> Identity:
        return OpenBao(openbao.key("another", derived=True))

    @pytest.fixture
    def silent(self, key: str, silent_port: int) -> Recipient:
        return OpenBao(key, address=f"http://127.0.0.1:{silent_port}")

    def test_a_keeper_that_never_answers_is_given_up(self, recipient: Recipient, silent: OpenBao) -> None:
        # Asked to unwrap what it could have wrapped: other bytes are refused before the server is asked.
        wrapped = recipient.wrap(Secret.draw(), CONTEXT, within_s=self.within_s)
        began = time.monotonic()
        with pytest.raises(KeyServiceError, match=silent.uri):
            silent.wrap(Secret.draw(), CONTEXT, within_s=self.short_s)
        with pytest.raises(KeyServiceError, match=silent.uri):
            silent.unwrap(wrapped, CONTEXT, within_s=self.short_s)
        assert time.monotonic() - began < 2 * self.short_s + 10

    def secrets(self, recipient: Recipient) -> list[bytes]:
        return [os.environ["BAO_TOKEN"].encode()]


def _operation(path: str, headers: dict[str, str]) -> str:
    return path.split("/")[-2]


def _errors(status: int, text: str = "") -> Answer:
    return Answer(status=status, body=json.dumps({"errors": [text] if text else []}).encode())


@pytest.fixture
def guarded(openbao: OpenBaoServer, gate: Callable[..., Gate], monkeypatch: pytest.MonkeyPatch) -> Gate:
    """A gate before the server, and the environment pointing at it."""
    made = gate(openbao.port, _operation)
    monkeypatch.setenv("BAO_ADDR", made.address)
    return made


# How many requests


def test_one_request_wraps_and_one_unwraps(guarded: Gate, openbao: OpenBaoServer) -> None:
    recipient, key = OpenBao(openbao.key("plain")), Secret.draw()
    wrapped = recipient.wrap(key, CONTEXT, within_s=WITHIN_S)
    assert recipient.unwrap(wrapped, CONTEXT, within_s=WITHIN_S) == key
    assert guarded.passed == {"encrypt": 1, "decrypt": 1}


def test_that_a_key_is_derived_is_found_out_once(guarded: Gate, derived: str) -> None:
    recipient, key = OpenBao(derived), Secret.draw()
    for _ in range(3):
        wrapped = recipient.wrap(key, CONTEXT, within_s=WITHIN_S)
        assert wrapped.startswith(b"context:vault:v1:")
    assert guarded.passed == {"encrypt": 4}
    assert OpenBao(derived).unwrap(wrapped, CONTEXT, within_s=WITHIN_S) == key
    assert guarded.passed["decrypt"] == 1


def test_a_context_is_never_sent_alone_to_a_key_that_would_ignore_it(
    guarded: Gate, openbao: OpenBaoServer
) -> None:
    wrapped = OpenBao(openbao.key("plain")).wrap(Secret.draw(), CONTEXT, within_s=WITHIN_S)
    assert wrapped.startswith(b"aad:vault:v1:")
    assert all("associated_data" in json.loads(body) for _, _, body in guarded.requests)


@pytest.mark.parametrize(("made", "claimed"), ((b"aad:", b"context:"), (b"context:", b"aad:")))
def test_how_the_context_is_bound_cannot_be_exchanged(
    openbao: OpenBaoServer, made: bytes, claimed: bytes
) -> None:
    recipient = OpenBao(openbao.key(f"swap-{made[:-1].decode()}", derived=made == b"context:"))
    wrapped = recipient.wrap(Secret.draw(), CONTEXT, within_s=WITHIN_S)
    assert wrapped.startswith(made)
    with pytest.raises((IntegrityError, NoKeyError)):
        recipient.unwrap(claimed + wrapped.removeprefix(made), CONTEXT, within_s=WITHIN_S)


# Who may do what


def test_a_writer_seals_and_cannot_open(
    openbao: OpenBaoServer, derived: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BAO_TOKEN", openbao.token("transit/encrypt/derived"))
    recipient, key = OpenBao(derived), Secret.draw()
    wrapped = recipient.wrap(key, CONTEXT, within_s=WITHIN_S)
    with pytest.raises(NoKeyError, match=r"may update transit/decrypt/derived") as caught:
        recipient.unwrap(wrapped, CONTEXT, within_s=WITHIN_S)
    assert openbao.root not in str(caught.value)
    monkeypatch.setenv("BAO_TOKEN", openbao.token("transit/decrypt/derived"))
    assert recipient.unwrap(wrapped, CONTEXT, within_s=WITHIN_S) == key
    with pytest.raises(NoKeyError):
        recipient.wrap(key, CONTEXT, within_s=WITHIN_S)


def test_a_rotator_rewraps_and_can_neither_open_nor_seal(
    openbao: OpenBaoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipient, key = OpenBao(openbao.key("turning", derived=True)), Secret.draw()
    old = recipient.wrap(key, CONTEXT, within_s=WITHIN_S)
    openbao.do("POST", "transit/keys/turning/rotate", {})
    monkeypatch.setenv("BAO_TOKEN", openbao.token("transit/rewrap/turning"))
    assert isinstance(recipient, Rewrapper)
    new = recipient.rewrap(old, CONTEXT, recipient, within_s=WITHIN_S)
    assert new is not None
    assert new.startswith(b"context:vault:v2:")
    for refused in (
        lambda: recipient.unwrap(new, CONTEXT, within_s=WITHIN_S),
        lambda: recipient.wrap(key, CONTEXT, within_s=WITHIN_S),
    ):
        with pytest.raises(NoKeyError):
            refused()
    monkeypatch.setenv("BAO_TOKEN", openbao.root)
    assert recipient.unwrap(new, CONTEXT, within_s=WITHIN_S) == key
    assert recipient.unwrap(old, CONTEXT, within_s=WITHIN_S) == key
    openbao.do("POST", "transit/keys/turning/config", {"min_decryption_version": 2})
    assert recipient.unwrap(new, CONTEXT, within_s=WITHIN_S) == key
    with pytest.raises(NoKeyError, match="too old"):
        recipient.unwrap(old, CONTEXT, within_s=WITHIN_S)


def test_the_policies_of_the_documentation_give_each_role_its_right_and_no_other(
    openbao: OpenBaoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "key-services.md").read_text(encoding="utf-8")
    policies = dict(re.findall(r'```hcl title="(\w+)\.hcl"\n(.*?)```', page, re.DOTALL))
    assert set(policies) == {"writer", "reader", "rotator"}
    recipient, key = OpenBao(openbao.key("ckpt", derived=True)), Secret.draw()
    wrapped = recipient.wrap(key, CONTEXT, within_s=WITHIN_S)
    calls = {
        "writer": lambda: recipient.wrap(key, CONTEXT, within_s=WITHIN_S),
        "reader": lambda: recipient.unwrap(wrapped, CONTEXT, within_s=WITHIN_S),
        "rotator": lambda: recipient.rewrap(wrapped, CONTEXT, recipient, within_s=WITHIN_S),
    }
    for role, policy in policies.items():
        monkeypatch.setenv("BAO_TOKEN", openbao.token_by(policy))
        for name, call in calls.items():
            if name == role:
                call()
            else:
                with pytest.raises(NoKeyError):
                    call()


def test_a_rewrap_stays_bound_to_its_context(openbao: OpenBaoServer, derived: str) -> None:
    recipient = OpenBao(derived)
    wrapped = recipient.wrap(Secret.draw(), CONTEXT, within_s=WITHIN_S)
    with pytest.raises(IntegrityError):
        recipient.rewrap(wrapped, OTHER, recipient, within_s=WITHIN_S)


def test_what_the_server_cannot_rewrap_is_left_to_the_caller(
    openbao: OpenBaoServer, derived: str, guarded: Gate, tmp_path: Path
) -> None:
    plain = OpenBao(openbao.key("plain"))
    wrapped = plain.wrap(Secret.draw(), CONTEXT, within_s=WITHIN_S)
    assert plain.rewrap(wrapped, CONTEXT, plain, within_s=WITHIN_S) is None
    recipient = OpenBao(derived)
    wrapped = recipient.wrap(Secret.draw(), CONTEXT, within_s=WITHIN_S)
    for other in (plain, create_key_file(tmp_path / "kek"), OpenBao(derived, address=openbao.address)):
        assert recipient.rewrap(wrapped, CONTEXT, other, within_s=WITHIN_S) is None
    assert "rewrap" not in guarded.passed


def test_a_key_that_is_not_there_is_no_key(openbao: OpenBaoServer, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped = OpenBao(openbao.key("plain")).wrap(Secret.draw(), CONTEXT, within_s=WITHIN_S)
    for name in ("transit/nowhere", "elsewhere/plain"):
        with pytest.raises(NoKeyError, match=name):
            OpenBao(name).unwrap(wrapped, CONTEXT, within_s=WITHIN_S)
    # With the rights that the documentation gives a writer, a mistyped name makes no key.
    monkeypatch.setenv("BAO_TOKEN", openbao.token("transit/encrypt/+"))
    with pytest.raises(NoKeyError):
        OpenBao("transit/mistyped").wrap(Secret.draw(), CONTEXT, within_s=WITHIN_S)
    with pytest.raises(ServerError, match="404"):
        openbao.do("GET", "transit/keys/mistyped")


def test_a_key_of_another_type_is_refused_with_what_to_do(openbao: OpenBaoServer) -> None:
    with pytest.raises(ConfigError, match="aes256-gcm96"):
        OpenBao(openbao.key("asymmetric", type="rsa-2048")).wrap(Secret.draw(), CONTEXT, within_s=WITHIN_S)


# Who asks, and where


def test_a_token_is_read_from_its_file_each_time(
    openbao: OpenBaoServer, derived: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("BAO_TOKEN")
    recipient = OpenBao(derived)
    with pytest.raises(NoKeyError, match="no token"):
        recipient.wrap(Secret.draw(), CONTEXT, within_s=WITHIN_S)
    (tmp_path / ".vault-token").write_text(openbao.root)
    recipient.wrap(Secret.draw(), CONTEXT, within_s=WITHIN_S)
    elsewhere = tmp_path / "sink"
    elsewhere.write_text("stale\n")
    monkeypatch.setenv("BAO_TOKEN_PATH", str(elsewhere))
    with pytest.raises(NoKeyError):
        recipient.wrap(Secret.draw(), CONTEXT, within_s=WITHIN_S)
    elsewhere.write_text(f"{openbao.root}\n")
    recipient.wrap(Secret.draw(), CONTEXT, within_s=WITHIN_S)


@pytest.mark.parametrize("token", ("two words", "hvs.line\nbreak", "hvs.ä", "x" * 20_000))
def test_a_token_that_no_header_can_hold_is_not_shown(
    derived: str, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    monkeypatch.setenv("BAO_TOKEN", token)
    with pytest.raises(NoKeyError) as caught:
        OpenBao(derived).wrap(Secret.draw(), CONTEXT, within_s=WITHIN_S)
    assert token[:8] not in str(caught.value)


def test_the_variables_of_vault_count_after_those_of_openbao(
    openbao: OpenBaoServer, derived: str, monkeypatch: pytest.MonkeyPatch, absent_port: int
) -> None:
    monkeypatch.setenv("VAULT_ADDR", f"http://127.0.0.1:{absent_port}")
    monkeypatch.setenv("VAULT_TOKEN", "wrong")
    recipient = OpenBao(derived)
    recipient.wrap(Secret.draw(), CONTEXT, within_s=WITHIN_S)
    monkeypatch.setenv("VAULT_ADDR", openbao.address)
    monkeypatch.setenv("VAULT_TOKEN", openbao.root)
    monkeypatch.delenv("BAO_ADDR")
    monkeypatch.delenv("BAO_TOKEN")
    recipient.wrap(Secret.draw(), CONTEXT, within_s=WITHIN_S)


def test_a_namespace_is_sent(guarded: Gate, openbao: OpenBaoServer, monkeypatch: pytest.MonkeyPatch) -> None:
    openbao.do("PUT", "sys/namespaces/team", {})
    openbao.do("POST", "team/sys/mounts/transit", {"type": "transit"})
    openbao.do("POST", "team/transit/keys/ours", {"derived": True})
    with pytest.raises(NoKeyError):
        OpenBao("transit/ours").unwrap(b"context:vault:v1:" + b"A" * 80, CONTEXT, within_s=WITHIN_S)
    monkeypatch.setenv("BAO_NAMESPACE", "team")
    recipient, key = OpenBao("transit/ours"), Secret.draw()
    wrapped = recipient.wrap(key, CONTEXT, within_s=WITHIN_S)
    assert recipient.unwrap(wrapped, CONTEXT, within_s=WITHIN_S) == key
    assert guarded.requests[-1][1]["X-Vault-Namespace"] == "team"
    monkeypatch.setenv("BAO_NAMESPACE", "a\nb")
    with pytest.raises(ConfigError, match="BAO_NAMESPACE"):
        recipient.wrap(key, CONTEXT, within_s=WITHIN_S)


@pytest.mark.parametrize(
    "address",
    (
        "http://vault.example:8200",
        "http://10.0.0.5:8200",
        "http://127.0.0.1.example",
        "127.0.0.1:8200",
        "unix:///run/bao.sock",
        "https://",
        "https://host:99999",
        "https://user:word@host",
        "https://host/?a=b",
    ),
)
def test_an_address_that_keys_may_not_be_sent_to_is_refused(
    derived: str, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setenv("BAO_ADDR", address)
    with pytest.raises(ConfigError, match=r"address|unencrypted"):
        OpenBao(derived).wrap(Secret.draw(), CONTEXT, within_s=WITHIN_S)


def test_plain_http_to_another_machine_can_be_allowed(derived: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAO_ADDR", "http://host.invalid:8200")
    monkeypatch.setenv(PLAIN_HTTP_VARIABLE, "1")
    with pytest.raises(KeyServiceError):
        OpenBao(derived).wrap(Secret.draw(), CONTEXT, within_s=0.5)


def test_a_redirect_is_not_followed(guarded: Gate, derived: str, openbao: OpenBaoServer) -> None:
    there = f"{openbao.address}/v1/transit/encrypt/derived"
    guarded.always = Answer(status=307, body=b"", headers=(("Location", there),))
    with pytest.raises(KeyServiceError, match="BAO_ADDR"):
        OpenBao(derived).wrap(Secret.draw(), CONTEXT, within_s=WITHIN_S)


# When it is not well


@pytest.mark.parametrize("status", (412, 429, 500, 502, 503))
def test_what_passes_is_tried_again(guarded: Gate, openbao: OpenBaoServer, status: int) -> None:
    recipient, key = OpenBao(openbao.key("plain")), Secret.draw()
    guarded.refusals = [_errors(status, "in a moment")] * 2
    wrapped = recipient.wrap(key, CONTEXT, within_s=WITHIN_S)
    guarded.refusals = [_errors(status, "in a moment")] * 2
    assert recipient.unwrap(wrapped, CONTEXT, within_s=WITHIN_S) == key
    assert guarded.refused == {"encrypt": 2, "decrypt": 2}
    assert guarded.passed == {"encrypt": 1, "decrypt": 1}


def test_a_quota_that_stays_used_up_ends_in_an_error_that_says_so(
    openbao: OpenBaoServer, derived: str
) -> None:
    recipient = OpenBao(derived)
    recipient.wrap(Secret.draw(), CONTEXT, within_s=WITHIN_S)
    openbao.do("POST", "sys/quotas/rate-limit/q", {"path": "transit", "rate": 0.001, "interval": "1h"})
    try:
        with pytest.raises(KeyServiceError, match="rate limit quota exceeded"):
            for _ in range(3):
                recipient.wrap(Secret.draw(), CONTEXT, within_s=1.0)
    finally:
        openbao.do("DELETE", "sys/quotas/rate-limit/q")


def test_a_sealed_server_is_out_of_reach_and_no_damage(guarded: Gate, derived: str) -> None:
    wrapped = OpenBao(derived).wrap(Secret.draw(), CONTEXT, within_s=WITHIN_S)
    guarded.always = _errors(503, "Vault is sealed")
    with pytest.raises(KeyServiceError, match="Vault is sealed"):
        OpenBao(derived).unwrap(wrapped, CONTEXT, within_s=0.5)


@pytest.mark.parametrize("what", ("silent", "absent"))
def test_a_server_that_is_down_is_given_up_in_time(
    openbao: OpenBaoServer, derived: str, silent_port: int, absent_port: int, what: str
) -> None:
    port = silent_port if what == "silent" else absent_port
    wrapped = OpenBao(derived).wrap(Secret.draw(), CONTEXT, within_s=WITHIN_S)
    recipient = OpenBao(derived, address=f"http://127.0.0.1:{port}")
    began = time.monotonic()
    with pytest.raises(KeyServiceError, match=r"0\.5 s"):
        recipient.wrap(Secret.draw(), CONTEXT, within_s=0.5)
    with pytest.raises(KeyServiceError):
        recipient.unwrap(wrapped, CONTEXT, within_s=0.5)
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    "body",
    (
        b"",
        b"<html>",
        b"[]",
        b'{"data": []}',
        b'{"data": {}}',
        b'{"data": {"ciphertext": 1, "plaintext": 2}}',
        b'{"data": {"ciphertext": "vault:vX:", "plaintext": "%"}}',
        b'{"data": {"ciphertext": "hello", "plaintext": "%%%%"}}',
        b"[" * 60_000,
        b"x" * 70_000,
    ),
)
def test_what_is_no_transit_engine_is_told_from_damage(guarded: Gate, derived: str, body: bytes) -> None:
    recipient = OpenBao(derived)
    wrapped = recipient.wrap(Secret.draw(), CONTEXT, within_s=WITHIN_S)
    guarded.always = Answer(status=200, body=body)
    with pytest.raises(KeyServiceError):
        recipient.wrap(Secret.draw(), CONTEXT, within_s=WITHIN_S)
    with pytest.raises(KeyServiceError):
        recipient.unwrap(wrapped, CONTEXT, within_s=WITHIN_S)


def test_a_key_of_another_length_is_refused(openbao: OpenBaoServer, derived: str) -> None:
    from strongroom_security.fields import recipient_info

    encode = base64.b64encode
    answer = openbao.do(
        "POST",
        f"transit/encrypt/{derived.partition('/')[2]}",
        {"plaintext": encode(b"short").decode(), "context": encode(recipient_info(CONTEXT)).decode()},
    )
    with pytest.raises(IntegrityError, match="5 bytes"):
        OpenBao(derived).unwrap(
            b"context:" + answer["data"]["ciphertext"].encode(), CONTEXT, within_s=WITHIN_S
        )


def test_requests_are_not_printed_when_a_program_prints_all_of_them(
    derived: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(http.client.HTTPConnection, "debuglevel", 1)
    OpenBao(derived).wrap(Secret.draw(), CONTEXT, within_s=WITHIN_S)
    assert "plaintext" not in "".join(capfd.readouterr())


# Over TLS


def test_a_server_is_trusted_by_its_ca_alone(
    openbao: OpenBaoServer, derived: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    certificate, port, stop = _tls_front(openbao.port, tmp_path)
    try:
        monkeypatch.setenv("BAO_ADDR", f"https://localhost:{port}")
        recipient, key = OpenBao(derived), Secret.draw()
        with pytest.raises(KeyServiceError, match="BAO_CACERT"):
            recipient.wrap(key, CONTEXT, within_s=WITHIN_S)
        monkeypatch.setenv("BAO_CACERT", str(tmp_path / "absent"))
        with pytest.raises(ConfigError, match="BAO_CACERT"):
            recipient.wrap(key, CONTEXT, within_s=WITHIN_S)
        monkeypatch.setenv("BAO_CACERT", str(certificate))
        wrapped = recipient.wrap(key, CONTEXT, within_s=WITHIN_S)
        assert recipient.unwrap(wrapped, CONTEXT, within_s=WITHIN_S) == key
        monkeypatch.setenv("BAO_ADDR", f"https://127.0.0.1:{port}")  # not a name in the certificate
        with pytest.raises(KeyServiceError):
            recipient.wrap(key, CONTEXT, within_s=WITHIN_S)
    finally:
        stop()


def _tls_front(target: int, folder: Path) -> tuple[Path, int, Callable[[], None]]:
    """A TLS listener with a certificate for ``localhost`` that passes bytes on to a port."""
    import datetime as dt
    import socket
    import ssl

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = dt.datetime.now(dt.timezone.utc)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    certificate, private = folder / "ca.pem", folder / "key.pem"
    certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    private.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, private)
    listener = socket.create_server(("127.0.0.1", 0))
    is_over = threading.Event()

    def serve() -> None:
        while not is_over.is_set():
            try:
                plain, _ = listener.accept()
            except OSError:
                return
            plain.settimeout(WITHIN_S)
            try:
                with (
                    context.wrap_socket(plain, server_side=True) as near,
                    socket.create_connection(("127.0.0.1", target), timeout=WITHIN_S) as far,
                ):
                    data = b""
                    while b"\r\n\r\n" not in data:
                        data += near.recv(65536)
                    head, _, body = data.partition(b"\r\n\r\n")
                    length = next(
                        int(line.split(b":")[1]) for line in head.split(b"\r\n") if b"ontent-Length" in line
                    )
                    while len(body) < length:
                        body += near.recv(65536)
                    far.sendall(head + b"\r\nConnection: close\r\n\r\n" + body)
                    while answer := far.recv(65536):
                        near.sendall(answer)
            except (OSError, ssl.SSLError):
                continue

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()

    def stop() -> None:
        is_over.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(WITHIN_S)

    return certificate, int(listener.getsockname()[1]), stop


# What a policy may say


@pytest.mark.parametrize(
    "text",
    (
        "",
        "ckpt",
        "/ckpt",
        "transit/",
        "transit//ckpt",
        "../transit/ckpt",
        "transit/../ckpt",
        "transit/ckpt?x",
        "transit/ck pt",
        "transit/ck%2Fpt",
        "transit/-",
        "transit/ckpt\n",
        "a/" * 9 + "b",
        "https://host/transit/ckpt",
    ),
)
def test_what_names_no_key_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="MOUNT/KEY"):
        OpenBao.of(text)


def test_a_mount_may_lie_deep(openbao: OpenBaoServer) -> None:
    openbao.do("POST", "sys/mounts/teams/vision/transit", {"type": "transit"})
    openbao.do("POST", "teams/vision/transit/keys/ckpt-1.a", {"derived": True})
    recipient, key = OpenBao.of("teams/vision/transit/ckpt-1.a"), Secret.draw()
    wrapped = recipient.wrap(key, CONTEXT, within_s=WITHIN_S)
    assert recipient.unwrap(wrapped, CONTEXT, within_s=WITHIN_S) == key
