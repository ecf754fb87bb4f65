"""Rotation by real key services: how often they are asked, what a rotator may do, what old keys open then."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from sealed_roots import commits_of, keyrings_of, make_root
from servers import Gate, Kms, OpenBaoServer, SoftHsm, gate, kms, openbao, softhsm

from strongroom.errors import IntegrityError, NoKeyError
from strongroom.opened import open_checkpoint
from strongroom.signing import NO_GUARD
from strongroom.stores.base import Store
from strongroom_security.recipients.aws_kms import AwsKms
from strongroom_security.recipients.base import Identity
from strongroom_security.recipients.file import create_key_file
from strongroom_security.recipients.openbao import OpenBao
from strongroom_security.recipients.pkcs11 import Pkcs11
from strongroom_security.rotation import SetRecipients, rotate
from strongroom_security.sealing import EnvelopeSealing

__all__ = ["gate", "kms", "openbao", "softhsm"]

STEPS = 4


def opened_by(store: Store, identity: Identity) -> list[int | None]:
    """The generation by which each checkpoint opens for who has this key alone."""
    found: list[int | None] = []
    for commit in commits_of(store):
        manifest = open_checkpoint(store, commit, NO_GUARD).manifest
        try:
            found.append(EnvelopeSealing((), [identity]).unlock(store, commit, manifest).keyring)
        except (IntegrityError, NoKeyError):
            found.append(None)
    return found


@pytest.fixture(autouse=True)
def _no_credentials_but_the_tests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith(("AWS_", "BAO_", "VAULT_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))


# ------------------------------------------------------------------------------------------------- AWS KMS


@pytest.fixture
def guarded_kms(kms: Kms, gate: Callable[..., Gate], monkeypatch: pytest.MonkeyPatch) -> Gate:
    def operation(path: str, headers: dict[str, str]) -> str:
        return {key.lower(): value for key, value in headers.items()}["x-amz-target"].rpartition(".")[2]

    made = gate(kms.port, operation)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "ASIAIOSFODNN7EXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "IQoJb3JpZ2luX2VjEXAMPLETOKEN")
    monkeypatch.setenv("AWS_ENDPOINT_URL_KMS", made.address)
    return made


def test_a_new_kms_key_takes_one_request_a_checkpoint_and_shows_nobody_the_key(
    guarded_kms: Gate, kms: Kms, tmp_path: Path
) -> None:
    old, new = AwsKms(kms.key()), AwsKms(kms.key())
    store = make_root(tmp_path / "run", [old], steps=STEPS)
    guarded_kms.passed.clear()
    report = rotate(store, commits_of(store), SetRecipients(recipients=(new,)), identities=[old])
    assert (report.count("rotated"), report.calls) == (STEPS, STEPS)
    assert guarded_kms.passed == {"ReEncrypt": STEPS}
    report = rotate(store, commits_of(store), SetRecipients(recipients=(new,)), identities=[old])
    assert (report.count("already"), guarded_kms.passed) == (STEPS, {"ReEncrypt": STEPS})
    # The old KMS key may go then.
    report = rotate(store, commits_of(store), SetRecipients(recipients=(new,)), remove_old=True)
    assert (report.count("already"), report.calls) == (STEPS, STEPS)
    kms.client().disable_key(KeyId=old.uri.rpartition("/")[2])
    assert opened_by(store, new) == [2] * STEPS
    assert opened_by(store, old) == [None] * STEPS


def test_to_a_region_of_its_own_the_key_is_unwrapped_and_wrapped(
    guarded_kms: Gate, kms: Kms, tmp_path: Path
) -> None:
    old, new = AwsKms(kms.key()), AwsKms(kms.key("us-east-2"))
    store = make_root(tmp_path / "run", [old], steps=STEPS)
    guarded_kms.passed.clear()
    report = rotate(store, commits_of(store), SetRecipients(recipients=(new,)), identities=[old])
    assert report.calls == 2 * STEPS
    assert guarded_kms.passed == {"Decrypt": STEPS, "Encrypt": STEPS}
    assert opened_by(store, new) == [2] * STEPS


# ------------------------------------------------------------------------------------------------- OpenBao


@pytest.fixture
def guarded_bao(openbao: OpenBaoServer, gate: Callable[..., Gate], monkeypatch: pytest.MonkeyPatch) -> Gate:
    made = gate(openbao.port, lambda path, headers: path.split("/")[3])
    monkeypatch.setenv("BAO_ADDR", made.address)
    monkeypatch.setenv("BAO_TOKEN", openbao.root)
    return made


def test_a_rotator_who_can_neither_open_nor_seal_wraps_anew_under_the_newest_version(
    guarded_bao: Gate, openbao: OpenBaoServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    key = OpenBao(openbao.key("rotated", derived=True))
    store = make_root(tmp_path / "run", [key], steps=STEPS)
    openbao.do("POST", "transit/keys/rotated/rotate")
    guarded_bao.passed.clear()
    monkeypatch.setenv("BAO_TOKEN", openbao.token("transit/rewrap/rotated"))
    change = SetRecipients(recipients=(key,), again=True, since_ms=10_000)
    report = rotate(store, commits_of(store), change)
    assert (report.count("rotated"), report.calls) == (STEPS, STEPS)
    assert rotate(store, commits_of(store), change).count("already") == STEPS
    assert guarded_bao.passed == {"rewrap": STEPS}
    # Now the old version may be forbidden.
    monkeypatch.setenv("BAO_TOKEN", openbao.root)
    openbao.do("POST", "transit/keys/rotated/config", {"min_decryption_version": 2})
    assert opened_by(store, key) == [2] * STEPS
    (tmp_path / "run" / commits_of(store)[0].name.folder / "keyring" / "0002.json").unlink()
    assert opened_by(store, key) == [None, *[2] * (STEPS - 1)]


# ------------------------------------------------------------------------------------------------- PKCS #11


def test_from_a_token_to_a_file_and_back_it_is_one_call_a_checkpoint(
    softhsm: SoftHsm, tmp_path: Path
) -> None:
    softhsm.make_keys(("rotating", "kek", b"\x01", {}))
    token = Pkcs11("token=rotating;object=kek", module=softhsm.module, pin_file=softhsm.pin_file)
    file = create_key_file(tmp_path / "kek.key")
    store = make_root(tmp_path / "run", [token], steps=STEPS)
    report = rotate(store, commits_of(store), SetRecipients(recipients=(file,)), identities=[token])
    assert (report.count("rotated"), report.calls) == (STEPS, STEPS)
    assert opened_by(store, file) == [2] * STEPS
    report = rotate(
        store, commits_of(store), SetRecipients(recipients=(token,)), identities=[file], remove_old=True
    )
    assert (report.count("rotated"), report.calls) == (STEPS, 2 * STEPS)
    assert opened_by(store, token) == [3] * STEPS
    assert list(keyrings_of(tmp_path / "run")) == [3]
