"""Garbage collection by the retention role, on a server that holds it to the policy rendered for it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from s3_identities import ACCOUNT, REGION, Enforcing, Identity, enforcing

from strongroom import Checkpointer, KeepLast, incoming, layout
from strongroom.catalog import Catalog
from strongroom.errors import AccessDeniedError
from strongroom.keeping import find_garbage
from strongroom.roles import Duty
from strongroom.stores.base import Store
from strongroom.sweep import Plan, remove
from strongroom_cli.main import main
from strongroom_security import ActAs
from strongroom_security.roles import definition
from strongroom_security.roles.documents import compact, identity_policy
from strongroom_security.roles.site import Site

__all__ = ["enforcing"]

Become = Callable[[Identity], None]
DEAD = "step-000000000009-0001-0123456789abcdef"
DEADLINE_S = 100


@pytest.fixture
def job(enforcing: Enforcing, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Become:
    """Makes this process one that has an identity's credentials, and reaches this server alone."""
    for name in ("AWS_PROFILE", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_ROLE_ARN"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "config").touch()
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ENDPOINT_URL", enforcing.address)
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)

    def become(who: Identity) -> None:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", who.access_key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", who.secret_key)
        if who.token is None:
            monkeypatch.delenv("AWS_SESSION_TOKEN", raising=False)
        else:
            monkeypatch.setenv("AWS_SESSION_TOKEN", who.token)

    return become


@pytest.fixture
def bucket(enforcing: Enforcing, job: Become) -> str:
    """A run of three checkpoints, what a save that was killed has left of it, and another run."""
    made = enforcing.bucket()
    job(enforcing.root)
    root = f"s3://{made}/runs/run-a"
    with Checkpointer(root, run_id="run-a", timeout_s=DEADLINE_S, scatter=4) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, {"w": torch.ones(10) * step}).result(60)
    s3 = enforcing.client("s3")
    s3.put_object(Bucket=made, Key=f"runs/run-b/{DEAD}/{layout.COMMIT}", Body=b"another run's")
    for path in ("a0/00000-00.safetensors", "state.json"):
        s3.put_object(Bucket=made, Key=f"runs/run-a/{DEAD}/{layout.DATA}/{path}", Body=b"half")
    s3.create_multipart_upload(Bucket=made, Key=f"runs/run-a/{DEAD}/{layout.DATA}/00/00001-00.safetensors")
    return made


@pytest.fixture
def retention(enforcing: Enforcing, job: Become, bucket: str) -> Store:
    """The first run as the retention role has it; this process is nobody else from now on."""
    site = Site(bucket=bucket, run="run-a", account=ACCOUNT)
    arn = enforcing.role()
    enforcing.client("iam").put_role_policy(
        RoleName=arn.rpartition("/")[2],
        PolicyName="rendered",
        PolicyDocument=compact(identity_policy(definition("retention"), site)),
    )
    job(enforcing.assume(arn))
    return ActAs(name="retention", run="run-a").open(f"s3://{bucket}/runs/run-a", Duty.SAVE)


def garbage(store: Store, *, later_s: float = 0.0) -> Plan:
    now_ns = time.time_ns() + int(later_s * 10**9)
    return find_garbage(store, Catalog(store).history(), KeepLast(count=1), now_ns=now_ns)


def left(enforcing: Enforcing, bucket: str, run: str = "run-a") -> list[str]:
    """Names of the folders that there are, and of uploads that nobody finished."""
    s3 = enforcing.client("s3")
    listed = s3.list_objects_v2(Bucket=bucket, Prefix=f"runs/{run}/step-").get("Contents", [])
    begun = s3.list_multipart_uploads(Bucket=bucket, Prefix=f"runs/{run}/").get("Uploads", [])
    return sorted({each["Key"].split("/")[2][:17] for each in [*listed, *begun]})


def test_it_may_see_how_old_things_are_and_remove_them_and_read_no_tensor(
    retention: Store, enforcing: Enforcing, bucket: str
) -> None:
    young = garbage(retention)
    assert [(removal.kind, removal.name.step) for removal in young.removals] == [
        ("checkpoint", 2),
        ("checkpoint", 1),
    ]
    plan = garbage(retention, later_s=2 * DEADLINE_S + 60)
    assert [(removal.kind, removal.name.step) for removal in plan.removals] == [
        ("checkpoint", 2),
        ("checkpoint", 1),
        ("orphan", 9),
        ("upload", 9),
    ]
    assert plan.removals[2].size_bytes == 2 * len(b"half")
    with pytest.raises(AccessDeniedError):
        retention.stat(f"{DEAD}/{layout.DATA}/a0/00000-00.safetensors")
    assert [outcome.error for outcome in (remove(retention, removal) for removal in plan.removals)] == [
        None
    ] * 4
    assert left(enforcing, bucket) == ["step-000000000003"]
    assert garbage(retention, later_s=10**6).removals == ()


def test_what_is_being_copied_there_from_another_tier_is_seen_and_left_alone(
    retention: Store, enforcing: Enforcing, bucket: str
) -> None:
    enforcing.client("s3").put_object(
        Bucket=bucket, Key=f"runs/run-a/{incoming.FOLDER}/{DEAD}/1.json", Body=b"{}"
    )
    plan = garbage(retention, later_s=2 * DEADLINE_S + 60)
    assert [(removal.kind, removal.name.step) for removal in plan.removals] == [
        ("checkpoint", 2),
        ("checkpoint", 1),
    ]
    (kept,) = [decision for decision in plan.kept if decision.name.step == 9]
    assert "being copied here" in kept.reason


def test_another_runs_checkpoints_are_out_of_its_reach(
    retention: Store, enforcing: Enforcing, bucket: str
) -> None:
    other = ActAs(name="retention", run="run-b").open(f"s3://{bucket}/runs/run-b", Duty.SAVE)
    with pytest.raises(AccessDeniedError):
        garbage(other)
    assert len(left(enforcing, bucket, "run-b")) == 1


def test_the_command_goes_by_the_policys_role(
    retention: Store, enforcing: Enforcing, bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = tmp_path / "policy.toml"
    uri = f"s3://{bucket}/runs/run-a"
    for role in ("trainer-writer", "validator-reader"):
        policy.write_text(f'[role]\nname = "{role}"\n')
        assert main(["gc", uri, "--keep-last", "2", "--security", str(policy)]) == 2
        assert f"the role {role} of the policy may not delete" in capsys.readouterr().err
    assert "step-000000000001" in left(enforcing, bucket)
    policy.write_text('[role]\nname = "retention"\n')
    for flags in (["--dry-run"], []):
        assert main(["gc", uri, "--keep-last", "2", "--json", "--security", str(policy), *flags]) == 0
        told: Any = json.loads(capsys.readouterr().out)
        assert [item["step"] for item in told["removed"]] == [1]
        assert {item["step"] for item in told["kept"]} == {2, 3, 9}
        assert ("step-000000000001" in left(enforcing, bucket)) == bool(flags)
