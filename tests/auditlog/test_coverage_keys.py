"""What keepers of keys, roles and grants tell the record: ids of requests, refusals, and break-glass."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cryptography.hazmat.primitives.asymmetric import ec
from servers import Answer, Gate, Kms, OpenBaoServer, gate, kms, openbao

from strongroom import AccessDeniedError, AuditError, Checkpointer, ConfigError, NoKeyError
from strongroom.auditing import Act, Action, Activity, Outcome, Phase, unlisted
from strongroom.canonical import encode
from strongroom.catalog import Catalog
from strongroom.dcp import StrongroomWriter
from strongroom.roles import Duty
from strongroom.stores.local import LocalStore
from strongroom.testing.auditing import RecordingAuditor
from strongroom_security import Seal, SecurityPolicy, Sign
from strongroom_security.auditlog.format.events import Actor, event_of, recorded_of
from strongroom_security.keyrequests import Requests, collecting, note_opened, note_request
from strongroom_security.recipients.calling import PLAIN_HTTP_VARIABLE
from strongroom_security.recipients.file import create_key_file
from strongroom_security.role import ActAs
from strongroom_security.roles import grants
from strongroom_security.roles.grants import Grant, HeldGrant, approve, unapproved
from strongroom_security.rotation import AddRecipient, RemoveRecipient, SetRecipients, rotate
from strongroom_security.signers.file import FileSigner

__all__ = ["gate", "kms", "openbao"]

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is .*unavailable")

_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_ID = re.compile(r"[A-Za-z0-9-]{36,60}")
"""As AWS calls a request; moto's are longer."""
HOUR_MS = 3_600_000


@pytest.fixture
def auditor() -> RecordingAuditor:
    return RecordingAuditor()


@pytest.fixture
def aws(kms: Kms, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Kms:
    """The server, which this process asks for everything about keys."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv(PLAIN_HTTP_VARIABLE, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "ASIAIOSFODNN7EXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "IQoJb3JpZ2luX2VjEXAMPLETOKEN")
    monkeypatch.setenv("AWS_ENDPOINT_URL_KMS", kms.address)
    return kms


def save_and_restore(root: Path, policy: SecurityPolicy) -> None:
    with Checkpointer(root, security=policy, run_id="r") as checkpointer:
        checkpointer.save(1, {"t": torch.ones(3)})
    assert Checkpointer(root, security=policy).restore() is not None


def test_requests_to_a_key_service_are_on_record_of_the_save_and_of_the_unwrapping(
    aws: Kms, auditor: RecordingAuditor, tmp_path: Path
) -> None:
    policy = SecurityPolicy(auditor=auditor, seal=Seal(recipients=[f"aws-kms:{aws.key()}"]))
    save_and_restore(tmp_path / "run", policy)
    (committed,) = auditor.of(Action.SAVE, Phase.FINISHED)
    (unwrapped,) = auditor.of(Action.UNWRAP)
    wrapped_by, unwrapped_by = committed.details["kms_request_id"], unwrapped.details["kms_request_id"]
    assert _ID.fullmatch(str(wrapped_by))
    assert _ID.fullmatch(str(unwrapped_by))
    assert wrapped_by != unwrapped_by
    assert unwrapped.details["recipient_kind"] == "aws-kms"


def test_the_request_by_which_a_checkpoint_was_signed_is_on_record_of_the_save(
    aws: Kms, auditor: RecordingAuditor, tmp_path: Path
) -> None:
    arn = aws.key(KeySpec="ECC_NIST_P256", KeyUsage="SIGN_VERIFY")
    policy = SecurityPolicy(auditor=auditor, sign=Sign(key=f"aws-kms:{arn}"))
    save_and_restore(tmp_path / "run", policy)
    (committed,) = auditor.of(Action.SAVE, Phase.FINISHED)
    (launched,) = auditor.of(Action.LAUNCH)
    ids = [str(act.details["kms_request_id"]) for act in (launched, committed)]
    assert all(map(_ID.fullmatch, ids))
    assert len(set(ids)) == 2
    auditor.acts.clear()
    dcp.save({"t": torch.ones(3)}, storage_writer=StrongroomWriter(tmp_path / "dcp", step=1, security=policy))
    (launched,) = auditor.of(Action.LAUNCH)
    assert _ID.fullmatch(str(launched.details["kms_request_id"]))


def test_where_each_file_is_wrapped_by_itself_each_request_is_on_record(
    aws: Kms, auditor: RecordingAuditor, tmp_path: Path
) -> None:
    policy = SecurityPolicy(auditor=auditor, seal=Seal(recipients=[f"aws-kms:{aws.key()}"], wrap="direct"))
    save_and_restore(tmp_path / "run", policy)
    (committed,) = auditor.of(Action.SAVE, Phase.FINISHED)
    (unwrapped,) = auditor.of(Action.UNWRAP)
    files = len(list((tmp_path / "run").glob("step-*/data/*.floe")))
    for act in (committed, unwrapped):
        assert len(set(unlisted("kms_request_id", act.details))) == files


def test_a_request_that_was_refused_is_on_record_too(
    aws: Kms,
    gate: Callable[..., Gate],
    auditor: RecordingAuditor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    guarded = gate(aws.port, lambda path, headers: path)
    monkeypatch.setenv("AWS_ENDPOINT_URL_KMS", guarded.address)
    policy = SecurityPolicy(auditor=auditor, seal=Seal(recipients=[f"aws-kms:{aws.key()}"]))
    with Checkpointer(tmp_path / "run", security=policy) as checkpointer:
        checkpointer.save(1, {"t": torch.ones(3)})
    guarded.always = Answer(
        status=400,
        body=b'{"__type": "AccessDeniedException", "message": "not yours"}',
        headers=(
            ("Content-Type", "application/x-amz-json-1.1"),
            ("x-amzn-RequestId", "00000000-1111-2222-3333-444444444444"),
        ),
    )
    with pytest.raises(NoKeyError, match="not yours"):
        Checkpointer(tmp_path / "run", security=policy).restore()
    (unwrapped,) = auditor.of(Action.UNWRAP)
    assert unwrapped.outcome is Outcome.DENIED
    assert unwrapped.details["kms_request_id"] == "00000000-1111-2222-3333-444444444444"
    assert "recipient" not in unwrapped.details


def test_openbaos_requests_are_on_record(
    openbao: OpenBaoServer, auditor: RecordingAuditor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BAO_ADDR", openbao.address)
    monkeypatch.setenv("BAO_TOKEN", openbao.token("transit/encrypt/audited", "transit/decrypt/audited"))
    key = openbao.key("audited", derived=True)
    policy = SecurityPolicy(auditor=auditor, seal=Seal(recipients=[f"openbao:{key}"]))
    save_and_restore(tmp_path / "run", policy)
    (committed,) = auditor.of(Action.SAVE, Phase.FINISHED)
    (unwrapped,) = auditor.of(Action.UNWRAP)
    for act in (committed, unwrapped):
        assert all(_UUID.fullmatch(each) for each in str(act.details["kms_request_id"]).split(","))


def test_no_more_ids_are_kept_than_a_line_has_room_for() -> None:
    with collecting(Requests()) as requests:
        for number in range(1_000):
            note_request(f"id-{number}")
        note_request(None)
        note_request("a\nb")
        note_opened("file-0", "file")
    assert len(requests.ids) == 1_000
    assert "kms_requests" not in requests.details
    with collecting(Requests()) as requests:
        for number in range(2_000):
            note_request(f"{number:08}-1111-2222-3333-444444444444")
        for odd in ("a,b", "\u00e9"):
            note_request(odd)
    note_request("nobody collects this")
    assert 500 < len(requests.ids) < 600
    assert requests.details["kms_requests"] == 2_000


@pytest.mark.parametrize("length", (8, 36, 60, 128))
def test_each_id_that_is_kept_is_found_again_in_the_events_line(length: int) -> None:
    with collecting(Requests()) as requests:
        for number in range(300):
            note_request(f"{number:0{length}}")
        note_opened("file-0", "file")
    act = Act(
        action=Action.UNWRAP,
        phase=Phase.FINISHED,
        outcome=Outcome.SUCCESS,
        operation="0" * 16,
        details={**requests.details, "keyring": 1},
    )
    actor = Actor(user="u", uid="0", pid=1, process="p", host="h")
    line = event_of(act, actor, writer="0" * 32, seq=0, prev="0" * 64, time_ms=1)
    recorded = recorded_of(line, "it")
    assert recorded.details["keyring"] == 1
    assert unlisted("kms_request_id", recorded.details) == list(requests.ids)
    assert len(requests.ids) >= min(300, 20_000 // (length + 1))
    assert len(encode(line)) < 65_535


# -------------------------------------------------------------------------------------------- rotations


@pytest.fixture
def sealed_root(tmp_path: Path) -> Path:
    create_key_file(tmp_path / "kek.key")
    policy = SecurityPolicy(seal=Seal(recipients=[f"file:{tmp_path / 'kek.key'}"]))
    with Checkpointer(tmp_path / "run", security=policy, run_id="r") as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"t": torch.ones(3)})
    return tmp_path / "run"


def test_a_rotation_is_on_record_checkpoint_by_checkpoint_before_a_key_is_touched(
    sealed_root: Path, auditor: RecordingAuditor
) -> None:
    folder = sealed_root.parent
    kek = Seal(recipients=[f"file:{folder / 'kek.key'}"])
    other = create_key_file(folder / "other.key")
    store = LocalStore(sealed_root)
    commits = list(Catalog(store).history().commits.values())
    with Activity(auditor, Action.RECIPIENTS, root=store.uri) as activity:
        report = rotate(
            store, commits, AddRecipient(recipient=other), identities=kek.openers, activity=activity
        )
    assert report.count("rotated") == 2
    intended = auditor.of(Action.RECIPIENTS, Phase.INTENDED)
    assert {act.checkpoint.step for act in intended if act.checkpoint} == {1, 2}
    *each, whole = auditor.of(Action.RECIPIENTS, Phase.FINISHED)
    assert whole.outcome is Outcome.SUCCESS
    for act in each:
        assert act.outcome is Outcome.SUCCESS
        assert (act.details["keyring_before"], act.details["keyring"]) == (1, 2)
        assert act.run == "r"
    # A second one finds everything as wanted; one by nobody who can open is denied.
    auditor.acts.clear()
    with Activity(auditor, Action.ROTATE, root=store.uri) as activity:
        new = create_key_file(folder / "new.key")
        report = rotate(store, commits, SetRecipients(recipients=[new]), activity=activity)
    assert [outcome.result for outcome in report.outcomes] == ["failed", "failed"]
    failed = auditor.of(Action.ROTATE, Phase.FINISHED, Outcome.DENIED)
    assert [act.details["error"] for act in failed] == ["NoKeyError", "NoKeyError"]


def test_a_rotation_that_cannot_be_put_on_record_touches_nothing(
    sealed_root: Path, auditor: RecordingAuditor
) -> None:
    auditor.refuses = True
    store = LocalStore(sealed_root)
    commits = list(Catalog(store).history().commits.values())
    kek = Seal(recipients=[f"file:{sealed_root.parent / 'kek.key'}"])
    before = sorted(path.name for path in sealed_root.rglob("keyring/*"))
    with pytest.raises(AuditError), Activity(auditor, Action.RECIPIENTS) as activity:
        rotate(
            store,
            commits,
            RemoveRecipient(id=kek.recipients[0].id),
            identities=kek.openers,
            activity=activity,
        )
    assert sorted(path.name for path in sealed_root.rglob("keyring/*")) == before
    assert auditor.told == [("recipients", "finished", "denied")]


# ------------------------------------------------------------------------------------------------ roles


def test_what_a_role_refuses_is_on_record_once_of_each_kind(
    auditor: RecordingAuditor, tmp_path: Path
) -> None:
    with Checkpointer(tmp_path / "run", run_id="r") as checkpointer:
        checkpointer.save(1, {"t": torch.ones(3)})
    policy = SecurityPolicy(auditor=auditor, role=ActAs(name="validator-reader", run="r"))
    assert policy.role is not None
    store = policy.role.open(tmp_path / "run", Duty.SAVE)
    folder = next((tmp_path / "run").glob("step-*")).name
    for _ in range(3):
        with pytest.raises(AccessDeniedError):
            store.put(f"{folder}/data/x", b"")
        with pytest.raises(AccessDeniedError):
            store.delete_tree(folder)
    created, removed = auditor.acts
    assert (created.action, created.outcome) == (Action.SAVE, Outcome.DENIED)
    assert (removed.action, removed.outcome) == (Action.REMOVE, Outcome.DENIED)
    assert created.details["operation"] == "create"
    assert created.details["role"] == "validator-reader"
    assert created.path == "data/x"
    assert created.checkpoint is not None
    assert (created.checkpoint.step, created.run) == (1, "r")


def test_another_runs_root_is_refused_on_record(auditor: RecordingAuditor, tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "run", run_id="other") as checkpointer:
        checkpointer.save(1, {"t": torch.ones(3)})
    policy = SecurityPolicy(auditor=auditor, role=ActAs(name="validator-reader", run="r"))
    with pytest.raises(AccessDeniedError, match="is of run other"):
        Checkpointer(tmp_path / "run", security=policy)
    assert auditor.told == [("read", "finished", "denied")]


# ---------------------------------------------------------------------------------------------- a grant


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, auditor: RecordingAuditor) -> Any:
    monkeypatch.setattr(grants, "_TOLD", set())
    now = [int(datetime.now(timezone.utc).timestamp()) * 1000]
    granted = Grant(
        role="break-glass",
        run="r",
        who="carol",
        reason="incident 12",
        not_before_ms=now[0],
        not_after_ms=now[0] + HOUR_MS,
        nonce="0123456789abcdef" * 2,
    )
    signers = [FileSigner(ec.generate_private_key(ec.SECP256R1()), uri="file:a.pem") for _ in range(2)]
    data = unapproved(granted)
    for signer in signers:
        data = approve(data, "the grant", signer)
    (tmp_path / "grant.json").write_bytes(data)
    keys = [signer.public_key for signer in signers]
    made = HeldGrant(tmp_path / "grant.json", keys, role="break-glass", run="r", now_ms=lambda: now[0])
    made.auditor = auditor
    made.clock = now  # type: ignore[attr-defined]
    return made


def test_a_grant_is_on_record_before_it_is_used_for_the_first_time(
    held: HeldGrant, auditor: RecordingAuditor
) -> None:
    held.check()
    held.check()
    intended, used = auditor.acts
    assert (intended.action, intended.phase) == (Action.BREAK_GLASS, Phase.INTENDED)
    assert (used.phase, used.outcome, used.run) == (Phase.FINISHED, Outcome.SUCCESS, "r")
    assert intended.details["who"] == "carol"
    assert intended.details["why"] == "incident 12"
    assert len(str(intended.details["approvers"]).split(",")) == 2
    assert str(intended.details["grant"]).startswith("sha256:")


def test_a_grant_that_cannot_be_put_on_record_is_not_used(held: HeldGrant, auditor: RecordingAuditor) -> None:
    auditor.refuses = True
    for _ in range(2):
        with pytest.raises(AuditError):
            held.check()
    assert held.use is None
    assert auditor.told == [("break-glass", "finished", "denied")] * 2
    auditor.refuses = False
    held.check()
    assert held.use is not None


def test_a_grant_that_has_ended_is_denied_on_record(held: Any, auditor: RecordingAuditor) -> None:
    held.check()
    held.clock[0] += 2 * HOUR_MS
    for _ in range(2):
        with pytest.raises(AccessDeniedError):
            held.check()
    assert auditor.told[2:] == [("break-glass", "finished", "denied")]


def test_by_a_policy_nothing_is_read_before_break_glass_is_on_record(
    tmp_path: Path, auditor: RecordingAuditor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grants, "_TOLD", set())
    now_ms = int(datetime.now(timezone.utc).timestamp()) * 1000
    granted = Grant(
        role="break-glass",
        run="r",
        who="carol",
        reason="incident 12",
        not_before_ms=now_ms - 1000,
        not_after_ms=now_ms + HOUR_MS,
        nonce="0123456789abcdef" * 2,
    )
    data = unapproved(granted)
    for name in ("a", "b"):
        signer = FileSigner(ec.generate_private_key(ec.SECP256R1()), uri=f"file:{name}.pem")
        (tmp_path / f"{name}.pub").write_bytes(signer.public_key.pem)
        data = approve(data, "the grant", signer)
    (tmp_path / "grant.json").write_bytes(data)
    with Checkpointer(tmp_path / "run", run_id="r") as checkpointer:
        checkpointer.save(1, {"t": torch.ones(3)})
    role = ActAs(
        name="break-glass", run="r", grant="grant.json", approvers=("file:a.pub", "file:b.pub"), base=tmp_path
    )
    policy = SecurityPolicy(auditor=auditor, role=role)
    auditor.refuses = True
    with pytest.raises(AuditError):
        Checkpointer(tmp_path / "run", security=policy)
    auditor.refuses = False
    auditor.acts.clear()
    assert Checkpointer(tmp_path / "run", security=policy).restore() is not None
    assert auditor.told == [
        ("break-glass", "intended", "unknown"),
        ("break-glass", "finished", "success"),
        ("restore", "intended", "unknown"),
        ("restore", "finished", "success"),
    ]


def test_a_policy_records_by_one_auditor_and_wraps_its_sealing_once(
    auditor: RecordingAuditor, tmp_path: Path
) -> None:
    seal = Seal(recipients=[create_key_file(tmp_path / "kek.key")])
    first = SecurityPolicy(auditor=auditor, seal=seal)
    assert first.sealing is not None
    again = SecurityPolicy(auditor=auditor, sealing=first.sealing)
    save_and_restore(tmp_path / "run", again)
    assert len(auditor.of(Action.UNWRAP)) == 1
    assert again.sealing is not None
    assert again.sealing.fingerprint == first.sealing.fingerprint
    assert again.guard.auditor is auditor
    with pytest.raises(ConfigError, match="both were given"):
        replace(first, sealing=first.sealing)
