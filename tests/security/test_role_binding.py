"""A role is for one run, and a grant for some hours: another run's root is refused, and all once it ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from strongroom import layout
from strongroom.errors import AccessDeniedError, ConfigError, FormatError
from strongroom.layout import CheckpointName
from strongroom.manifest import Run
from strongroom.roles import Duty
from strongroom.stores.base import Store
from strongroom.stores.local import LocalStore
from strongroom.stores.memory import MemoryStore
from strongroom_security import ActAs, aws
from strongroom_security.roles import ROLES, definition, grants
from strongroom_security.roles.acting import ActingRole
from strongroom_security.roles.credentials import Credentials
from strongroom_security.roles.grants import Grant, HeldGrant, approve, unapproved
from strongroom_security.signers.file import FileSigner

NAME = CheckpointName(launch=1, step=100, attempt="0123456789abcdef")
SHARD = layout.data_key(NAME, "00000-00.safetensors")
ARN = "arn:aws:iam::111122223333:role/strongroom-break-glass"
HOUR_MS = 3_600_000


def filled(store: Store, run: str | None) -> Store:
    if run is not None:
        store.put(layout.RUN, Run(run=run, created_at_ms=0).encode())
    store.put(SHARD, b"stored")
    return store


@pytest.fixture
def roots(tmp_path: Path) -> Mapping[str, Path]:
    """The root of run a, that of run b, and one that does not say."""
    for name, run in (("a", "a"), ("b", "b"), ("none", None)):
        filled(LocalStore(tmp_path / name), run)
    return {name: tmp_path / name for name in ("a", "b", "none", "new")}


class Glass:
    """Break-glass for run a, by a grant of one hour, and the time."""

    def __init__(self, folder: Path) -> None:
        self.now_ms = int(datetime.now(timezone.utc).timestamp()) * 1000
        granted = Grant(
            role="break-glass",
            run="a",
            who="carol",
            reason="incident 12",
            not_before_ms=self.now_ms,
            not_after_ms=self.now_ms + HOUR_MS,
            nonce="0123456789abcdef" * 2,
        )
        signers = [FileSigner(ec.generate_private_key(ec.SECP256R1()), uri="file:a.pem") for _ in range(2)]
        data = unapproved(granted)
        for signer in signers:
            data = approve(data, "the grant", signer)
        (folder / "grant.json").write_bytes(data)
        keys = [signer.public_key for signer in signers]
        self.held = HeldGrant(
            folder / "grant.json", keys, role="break-glass", run="a", now_ms=lambda: self.now_ms
        )

    def role(self, credentials: Credentials | None = None) -> ActingRole:
        return ActingRole(definition("break-glass"), run="a", save=credentials, ends=self.held)


@pytest.fixture
def glass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Glass:
    monkeypatch.setattr(grants, "_TOLD", set())
    return Glass(tmp_path)


# ------------------------------------------------------------------------------------------------ another run


@pytest.mark.parametrize("role", [each.name for each in ROLES if not each.needs_grant])
def test_a_role_for_one_run_opens_no_root_of_another(role: str, roots: Mapping[str, Path]) -> None:
    acting = ActAs(name=role, run="a")
    for duty in Duty:
        for root in (roots["b"], LocalStore(roots["b"]), filled(MemoryStore(), "b")):
            with pytest.raises(AccessDeniedError, match=rf"is of run b, and the role {role} is for run a"):
                acting.open(root, duty)
        for name in ("a", "none", "new"):
            acting.open(roots[name], duty)
        for uri in ("s3://bucket/runs/b", "s3://bucket/runs/a/b", "s3://bucket", "s3://bucket/runs/b/"):
            with pytest.raises(ConfigError, match=r"make the root s3://bucket/runs/a"):
                acting.open(uri, duty)
    # Without a run nothing is held against anything.
    ActAs(name=role).open(roots["b"], Duty.SAVE)


def test_a_root_whose_record_is_damaged_is_no_runs(roots: Mapping[str, Path]) -> None:
    (roots["b"] / layout.RUN).write_bytes(b"{}")
    with pytest.raises(FormatError):
        ActAs(name="retention", run="a").open(roots["b"], Duty.SAVE)


def test_a_store_that_a_role_opened_may_be_opened_again(roots: Mapping[str, Path]) -> None:
    for role in (ActAs(name="trainer-writer", run="a"), ActAs(name="retention", run="a", save="profile:x")):
        role.open(role.open(roots["a"], Duty.SAVE), Duty.SAVE)


def test_by_a_grant_nothing_is_read_that_does_not_say_which_run_it_is(
    glass: Glass, roots: Mapping[str, Path]
) -> None:
    with pytest.raises(AccessDeniedError, match=r"is of run b.*for run a; have another grant approved"):
        glass.role().open(roots["b"], Duty.RESTORE)
    store = glass.role().open(roots["none"], Duty.RESTORE)
    asks: tuple[Callable[[], object], ...] = (
        lambda: store.read(SHARD, limit_bytes=100),
        lambda: store.open_reader(SHARD),
        lambda: store.stat(SHARD),
    )
    for ask in asks:
        with pytest.raises(AccessDeniedError, match=r"has no run.json, so that nothing says which run"):
            ask()
    # What comes to say so later is heard.
    LocalStore(roots["none"]).put(layout.RUN, Run(run="b", created_at_ms=0).encode())
    later = glass.role().open(roots["new"], Duty.RESTORE)
    filled(LocalStore(roots["new"]), "b")
    with pytest.raises(AccessDeniedError, match="is of run b"):
        later.read(SHARD, limit_bytes=100)
    assert glass.role().open(roots["a"], Duty.RESTORE).read(SHARD, limit_bytes=100) == b"stored"


# ----------------------------------------------------------------------------------------- the end of a grant


def test_once_a_grant_ended_an_open_store_refuses_everything(glass: Glass, roots: Mapping[str, Path]) -> None:
    role = glass.role()
    store = role.open(roots["a"], Duty.RESTORE)
    reader = store.open_reader(SHARD)
    assert reader.read_into(0, memoryview(bytearray(6))) == 6
    glass.now_ms += HOUR_MS
    asks: tuple[Callable[[], object], ...] = (
        lambda: store.read(SHARD, limit_bytes=100),
        lambda: store.list_names(""),
        lambda: store.stat(SHARD),
        lambda: reader.read_into(0, memoryview(bytearray(6))),
        lambda: role.open(roots["a"], Duty.RESTORE),
        lambda: role.session(Duty.RESTORE),
    )
    for ask in asks:
        with pytest.raises(AccessDeniedError, match="held until"):
            ask()


class Sts:
    """Notes what it is asked for, and gives credentials for as long."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def assume_role(self, **asked: Any) -> dict[str, Any]:
        self.asked.append(asked)
        until = datetime.now(timezone.utc) + timedelta(seconds=asked["DurationSeconds"])
        given = {"AccessKeyId": "A", "SecretAccessKey": "s", "SessionToken": "t", "Expiration": until}
        return {"Credentials": given}


@pytest.fixture
def sts(monkeypatch: pytest.MonkeyPatch) -> Sts:
    pytest.importorskip("boto3")
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    found, client = Sts(), aws.client
    monkeypatch.setattr(
        aws,
        "client",
        lambda session, service, **more: found if service == "sts" else client(session, service, **more),
    )
    return found


def test_a_session_of_a_grant_ends_with_it_and_is_tagged_with_its_run(glass: Glass, sts: Sts) -> None:
    credentials = Credentials(kind="role", name=ARN)
    glass.role(credentials).session(Duty.RESTORE)
    glass.now_ms += 50 * 60_000
    session = glass.role(credentials).session(Duty.RESTORE)
    first, second = sts.asked
    assert first["Tags"] == [{"Key": "strongroom-run", "Value": "a"}]
    assert f'"DateLessThan":{{"aws:CurrentTime":"{glass.held.when}"}}' in first["Policy"]
    assert first["DurationSeconds"] == 3600
    # Not much longer than the grant; and longer than boto3 fetches anew before the end.
    assert second["DurationSeconds"] == 10 * 60 + 15 * 60

    client = aws.client(session, "kms", whom="a test", connect_s=1, read_s=1, region="us-east-1")
    glass.now_ms += 10 * 60_000
    with pytest.raises(AccessDeniedError, match="held until"):
        client.list_keys()  # a client that was made before
    with pytest.raises(AccessDeniedError, match="held until"):
        glass.role(credentials).session(Duty.RESTORE)
    assert len(sts.asked) == 2


def test_a_role_without_a_grant_has_no_end(sts: Sts) -> None:
    ActAs(name="validator-reader", run="a", save=f"role:{ARN}").session(Duty.RESTORE)
    ActAs(name="validator-reader", save=f"role:{ARN}").session(Duty.RESTORE)
    first, second = sts.asked
    assert first["DurationSeconds"] == second["DurationSeconds"] == 3600
    assert "CurrentTime" not in first["Policy"]
    assert first["Tags"] == [{"Key": "strongroom-run", "Value": "a"}]
    assert "Tags" not in second


# -------------------------------------------------------------------------------------- roots that are stores


def test_a_store_of_a_bucket_goes_by_the_roles_credentials_and_not_by_its_own(sts: Sts) -> None:
    from strongroom.stores.limited import unlimited
    from strongroom.stores.s3 import S3Options, S3Store

    class Wrapped(S3Store):
        pass

    options = S3Options(endpoint_url="http://127.0.0.1:9", region_name="us-east-1", part_bytes=32 << 20)
    own = S3Store("s3://bucket/runs/a", options=options)
    named = ActAs(name="validator-reader", run="a", save=f"role:{ARN}")
    opened = unlimited(named.open(own, Duty.RESTORE))
    assert isinstance(opened, S3Store)
    assert opened is not own
    assert opened.options == options
    assert len(sts.asked) == 1
    with pytest.raises(ConfigError, match=r"a Wrapped goes by its own; give the root's URI"):
        named.open(Wrapped("s3://bucket/runs/a", options=options), Duty.RESTORE)
    # By this process's own credentials it is as it was given.
    plain = ActAs(name="validator-reader", run="a")
    assert unlimited(plain.open(own, Duty.RESTORE)) is own
    with pytest.raises(ConfigError, match="is for the run a"):
        plain.open(S3Store("s3://bucket/runs/b", options=options), Duty.RESTORE)


def test_credentials_that_save_and_restore_are_refused_where_saving_must_not_read() -> None:
    for save, restore in (
        ("env", "env"),
        ("profile:x", "profile:x"),
        (f"role:{ARN}", f"web-identity:{ARN}"),
    ):
        with pytest.raises(ConfigError, match=r"\[role\] restore: .* saves as well"):
            ActAs(name="trainer-writer", run="a", save=save, restore=restore)
        ActAs(name="recovery-reader-writer", run="a", save=save, restore=restore)
