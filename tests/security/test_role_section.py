"""``[role]``: what a process may do is refused by itself, before a server is asked; and by whose grant."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from strongroom import layout
from strongroom.errors import (
    AccessDeniedError,
    ConfigError,
    FormatError,
    StoreUnavailableError,
    UnsupportedFormatError,
)
from strongroom.layout import CheckpointName
from strongroom.manifest import Run
from strongroom.roles import Duty, Operation, Role, open_root
from strongroom.stores.limited import unlimited
from strongroom.stores.local import LocalStore
from strongroom.stores.memory import MemoryStore
from strongroom_security import ActAs, SecurityPolicy, aws
from strongroom_security.publickeys import PublicKey
from strongroom_security.roles import ROLES, grants
from strongroom_security.roles.credentials import Credentials, Held
from strongroom_security.roles.grants import (
    Grant,
    HeldGrant,
    approve,
    read_grant,
    signed_by,
    unapproved,
)
from strongroom_security.signers.file import FileSigner

NAME = CheckpointName(launch=1, step=100, attempt="0123456789abcdef")
SHARD = layout.data_key(NAME, "00000-00.safetensors")
KEYRING = layout.keyring_key(NAME, 2)
ARN = "arn:aws:iam::111122223333:role/strongroom-recovery"
HOUR_MS = 3_600_000
NOW_MS = 1_800_000_000_000


def load(folder: Path, text: str) -> SecurityPolicy:
    path = folder / "strongroom.toml"
    path.write_text(text)
    return SecurityPolicy.load(path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    store = LocalStore(tmp_path / "run")
    store.put(layout.RUN, Run(run="a", created_at_ms=0).encode())
    for key in (
        layout.launch_key(1),
        SHARD,
        layout.data_key(NAME, layout.MANIFEST),
        NAME.commit_key,
    ):
        store.put(key, b"stored")
    return tmp_path / "run"


# --------------------------------------------------------------------------------------------------- refusals


def test_a_policy_file_makes_a_process_one_role(root: Path, tmp_path: Path) -> None:
    policy = load(tmp_path, '[role]\nname = "validator-reader"\nrun = "a"\nlaunch = 3\n')
    assert isinstance(policy.role, Role)
    assert (policy.role.name, policy.role.run_id, policy.role.launch) == ("validator-reader", "a", 3)
    store = open_root(root, policy, Duty.RESTORE)
    assert store.read(SHARD, limit_bytes=100) == b"stored"
    with pytest.raises(
        AccessDeniedError,
        match=r"the role validator-reader may not create COMMIT \(restoring\); nothing was asked",
    ):
        store.put("COMMIT", b"x")
    assert not (root / "COMMIT").exists()


def test_what_is_refused_names_the_roles_that_may(root: Path) -> None:
    trainer = ActAs(name="trainer-writer", run="a")
    with pytest.raises(
        AccessDeniedError, match=r"\[role\] restore, or do it as validator-reader or recovery"
    ):
        trainer.open(root, Duty.RESTORE).read(SHARD, limit_bytes=100)
    with pytest.raises(AccessDeniedError, match=r"may not delete .* \(saving\).*; do it as retention$"):
        trainer.open(root, Duty.SAVE).delete_tree(NAME.folder)


@pytest.mark.parametrize("role", [each.name for each in ROLES if not each.needs_grant])
def test_each_role_is_held_to_its_definition(role: str, root: Path) -> None:
    acting = ActAs(name=role, run="a")
    for duty in Duty:
        store = acting.open(root, duty)
        for operation, ask, key in (
            (Operation.CREATE, lambda on, key: on.put(key, b"x"), layout.launch_key(9)),
            (Operation.CREATE, lambda on, key: on.put(key, b"x"), KEYRING),
            (Operation.READ, lambda on, key: on.read(key, limit_bytes=100), SHARD),
            (Operation.READ, lambda on, key: on.stat(key), NAME.commit_key),
            (Operation.LIST, lambda on, key: on.list_names(key), ""),
            (Operation.DELETE, lambda on, key: on.delete(key), f"{NAME.folder}/gone"),
            (Operation.DELETE, lambda on, key: on.delete(key), layout.RUN),
        ):
            rights = acting.definition.of(duty)
            if duty is Duty.RESTORE and not acting.definition.restores_as_itself:
                assert not acting.may(operation, duty)
                may = False
            else:
                may = rights.may(operation, key)
                assert acting.may(operation, duty) or not may
            if may:
                ask(store, key)
                LocalStore(root).delete(layout.launch_key(9))
                LocalStore(root).delete(KEYRING)
            else:
                with pytest.raises(AccessDeniedError, match=f"the role {role} may not"):
                    ask(store, key)


def test_a_trainer_may_read_only_by_credentials_of_their_own_until_they_are_let_go_of(root: Path) -> None:
    trainer = ActAs(name="trainer-writer", run="a", restore="profile:recovery")
    assert trainer.may(Operation.READ, Duty.RESTORE)
    assert trainer.may(Operation.LIST, Duty.RESTORE)
    assert not trainer.may(Operation.READ, Duty.SAVE)
    assert trainer.may(Operation.CREATE, Duty.SAVE)
    restore, save = trainer.open(root, Duty.RESTORE), trainer.open(root, Duty.SAVE)
    assert restore.read(SHARD, limit_bytes=100) == b"stored"
    trainer.drop(Duty.SAVE)
    assert restore.read(SHARD, limit_bytes=100) == b"stored"
    for _ in range(2):
        trainer.drop(Duty.RESTORE)
        for ask in (lambda: restore.list_names(""), lambda: trainer.open(root, Duty.RESTORE)):
            with pytest.raises(AccessDeniedError, match="were let go of before the first save"):
                ask()
    save.put("launches/000002.json", b"x")


def test_letting_go_means_nothing_where_both_duties_go_by_the_same_credentials(root: Path) -> None:
    for role in (
        ActAs(name="recovery-reader-writer", run="a"),
        ActAs(name="recovery-reader-writer", run="a", save="profile:x", restore="profile:x"),
    ):
        store = role.open(root, Duty.RESTORE)
        role.drop(Duty.RESTORE)
        assert store.read(SHARD, limit_bytes=100) == b"stored"


def test_a_store_of_ones_own_is_limited_too() -> None:
    inner = MemoryStore()
    store = ActAs(name="retention", run="a").open(inner, Duty.SAVE)
    assert unlimited(store) is inner
    store.delete_tree(NAME.folder)
    with pytest.raises(AccessDeniedError):
        store.delete("run.json")


# ------------------------------------------------------------------------------------------------ the section


@pytest.mark.parametrize(
    ("text", "told"),
    (
        ("", r"line 1: \[role\] names no name; name the role"),
        ("name = 7", r"line 2: \[role\] name: expected text, got 7"),
        ('name = "root"', r"line 2: \[role\] name: there is no role 'root'; there are trainer-writer"),
        ('name = "retention"\nrum = "a"', "line 3: the unknown member 'rum'"),
        ('name = "retention"\nrun = "a/*"', r"line 3: \[role\] run: 'a/\*' is not a run id"),
        ('name = "retention"\nrun = 7', r"\[role\] run: expected a run's id"),
        ('name = "retention"\nrun = "env:NOBODY_SETS_THIS"', "the variable NOBODY_SETS_THIS is not set"),
        ('name = "retention"\nrun = "env:a b"', "names no variable"),
        ('name = "retention"\nlaunch = 0', r"\[role\] launch: expected 1 to 999999, got 0"),
        ('name = "retention"\nlaunch = true', r"\[role\] launch: expected 1 to"),
        ('name = "retention"\nlaunch = "3"', r"\[role\] launch: expected a number or env:NAME"),
        ('name = "retention"\nsave = "sso"', r"line 3: \[role\] save: expected 'env', 'profile:NAME'"),
        ('name = "retention"\nsave = "role:me"', "expected 'env'"),
        ('name = "retention"\nsave = 7', "expected 'env'"),
        (f'name = "retention"\nsave = "web-identity:{ARN};token="', "expected 'env'"),
        ('name = "validator-reader"\nrestore = "env"', "saves nothing; name its credentials by save alone"),
        (
            'name = "retention"\ngrant = "g.json"',
            r"line 3: \[role\] grant: the role retention needs no grant",
        ),
        (
            'name = "retention"\napprovers = ["file:a.pub"]',
            r"\[role\] approvers: the role retention needs no",
        ),
        ('name = "break-glass"', r"\[role\] grant: the role break-glass needs one"),
        ('name = "break-glass"\ngrant = "g.json"', "name the keys of 2 approvers at least"),
        ('name = "break-glass"\ngrant = "g.json"\napprovers = [7]', "expected texts, got 7"),
        (
            'name = "break-glass"\ngrant = "g.json"\napprovers = ["file:no.pub"]',
            r"line 4: \[role\] approvers:",
        ),
    ),
    ids=lambda value: str(value)[:40],
)
def test_a_section_that_is_wrong_says_where_and_why(text: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=told):
        load(tmp_path, f"[role]\n{text}\n")


def test_the_platform_says_which_run_and_turn_by_the_environment() -> None:
    environment = {"RUN": "a", "TURN": "12"}
    role = ActAs(name="trainer-writer", run="env:RUN", launch="env:TURN", environment=environment)
    assert (role.run_id, role.launch) == ("a", 12)
    with pytest.raises(ConfigError, match="'1_2'"):
        ActAs(name="trainer-writer", launch="env:TURN", environment={"TURN": "1_2"})


def test_credentials_are_what_their_text_says(tmp_path: Path) -> None:
    for text, expected in (
        ("env", Credentials()),
        ("profile:ci", Credentials(kind="profile", name="ci")),
        (f"role:{ARN}", Credentials(kind="role", name=ARN)),
        (f"web-identity:{ARN}", Credentials(kind="web-identity", name=ARN)),
        (
            f"web-identity:{ARN};token=t",
            Credentials(kind="web-identity", name=ARN, token=tmp_path / "t"),
        ),
    ):
        assert Credentials.of(text, base=tmp_path) == expected


@pytest.mark.parametrize(
    "text", ("profile:nobody-has-this", f"web-identity:{ARN}", f"web-identity:{ARN};token=no")
)
def test_credentials_that_are_not_there_are_told_before_anything_is_asked(
    text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("boto3")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.delenv("AWS_WEB_IDENTITY_TOKEN_FILE", raising=False)
    role = ActAs(name="retention", run="a", save=text, base=tmp_path)
    with pytest.raises(ConfigError, match=r"profile|token"):
        role.open("s3://bucket/runs/a", Duty.SAVE)


@pytest.mark.parametrize(
    ("text", "kind", "told"),
    (
        ("env", ConfigError, "this machine has no AWS credentials"),
        (f"role:{ARN}", StoreUnavailableError, "Could not connect"),
    ),
)
def test_credentials_that_cannot_be_had_say_why(
    text: str, kind: type[Exception], told: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("boto3")
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    if text != "env":
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    monkeypatch.setattr("strongroom_security.roles.credentials._TRIES", 1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{probe.getsockname()[1]}")
        with pytest.raises(kind, match=told):
            ActAs(name="retention", run="a", save=text).open("s3://bucket/runs/a", Duty.SAVE)


def test_credentials_are_fetched_again_before_they_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("boto3")
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    fetched: list[int] = []

    def fetch() -> dict[str, str]:
        fetched.append(1)
        # The first ones are about to run out, and the next hold for an hour.
        seconds = 60 if len(fetched) == 1 else 3600
        until = datetime.now(timezone.utc) + timedelta(seconds=seconds)
        return {
            "access_key": f"key-{len(fetched)}",
            "secret_key": "s",
            "token": "t",
            "expiry_time": until.isoformat(),
        }

    credentials = aws.new_session(whom="a test", fetch=fetch).get_credentials()
    assert fetched == []
    assert [credentials.get_frozen_credentials().access_key for _ in range(3)] == ["key-1", "key-2", "key-2"]


def test_no_credentials_are_fetched_once_they_were_let_go_of() -> None:
    pytest.importorskip("boto3")
    held = Held(Credentials(kind="role", name=ARN), name="test", policy=None, whom="a test")
    credentials = held.session.get_credentials()
    held.drop("it is over")
    with pytest.raises(AccessDeniedError, match="it is over"):
        credentials.get_frozen_credentials()
    for ask in (lambda: held.session, held.check):
        with pytest.raises(AccessDeniedError, match="it is over"):
            ask()


# ----------------------------------------------------------------------------------------------------- grants


@pytest.fixture
def approvers(tmp_path: Path) -> dict[str, FileSigner]:
    """Three who may approve, and their keys' files."""
    found = {}
    for name in ("ann", "bob", "eve"):
        key = ec.generate_private_key(ec.SECP256R1())
        found[name] = FileSigner(key, uri=f"file:{name}.pem")
        (tmp_path / f"{name}.pub").write_bytes(found[name].public_key.pem)
        path = tmp_path / f"{name}.pem"
        path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        path.chmod(0o600)
    return found


def grant(**members: Any) -> Grant:
    usual = {
        "role": "break-glass",
        "run": "a",
        "who": "ann",
        "reason": "the KMS is out of reach",
        "not_before_ms": NOW_MS,
        "not_after_ms": NOW_MS + HOUR_MS,
        "nonce": "0123456789abcdef" * 2,
    }
    return Grant(**{**usual, **members})


def signed(granted: Grant, *signers: FileSigner) -> bytes:
    data = unapproved(granted)
    for signer in signers:
        data = approve(data, "the grant", signer)
    return data


Granted = Callable[..., HeldGrant]


@pytest.fixture
def held(tmp_path: Path, approvers: dict[str, FileSigner]) -> Granted:
    """A policy's grant, from what a file holds."""

    def read(data: bytes, *, by: str = "ann bob", at_ms: int = NOW_MS, run: str | None = "a") -> HeldGrant:
        path = tmp_path / "grant.json"
        path.write_bytes(data)
        keys: list[PublicKey] = [approvers[name].public_key for name in by.split()]
        return HeldGrant(path, keys, role="break-glass", run=run, now_ms=lambda: at_ms)

    return read


def test_a_grant_of_two_approvers_holds_and_its_use_is_told_once(
    held: Granted,
    approvers: dict[str, FileSigner],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grants, "_TOLD", set())
    data = signed(grant(), approvers["ann"], approvers["bob"])
    found = held(data)
    assert found.use is None
    found.check()
    found.check()
    held(data, run=None).check()
    assert found.use is not None
    assert found.use.grant == grant()
    assert found.use.at_ms == NOW_MS
    assert set(found.use.approvers) == {approvers[name].public_key.id for name in ("ann", "bob")}
    (record,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert "ann uses the role break-glass on run a" in record.getMessage()
    assert "the KMS is out of reach" in record.getMessage()


def test_a_grant_that_does_not_hold_is_refused(held: Granted, approvers: dict[str, FileSigner]) -> None:
    ann, bob, eve = (approvers[name] for name in ("ann", "bob", "eve"))
    both = signed(grant(), ann, bob)
    for data, more, told in (
        (unapproved(grant()), {}, "has 0 of 2 approvers' signatures"),
        (signed(grant(), ann), {}, "has 1 of 2"),
        (signed(grant(), ann, ann), {}, "has 1 of 2"),
        (signed(grant(), ann, eve), {}, "has 1 of 2"),
        (both, {"by": "ann"}, "name the keys of 2 approvers"),
        (both, {"by": "ann ann"}, "name the keys of 2 approvers"),
        (both, {"run": "b"}, "is for break-glass on run a, and the policy has break-glass on run b"),
        (both, {"at_ms": NOW_MS - 1}, "holds from 2027-01-15T08:00:00Z on"),
        (both, {"at_ms": NOW_MS + HOUR_MS}, "held until 2027-01-15T09:00:00Z; ask for another one"),
        (b"{}", {}, "grant.json"),
        (b"x" * 70_000, {}, "grant.json"),
    ):
        with pytest.raises(ConfigError, match=told):
            held(data, **more)


def test_a_grant_that_was_changed_holds_no_more(held: Granted, approvers: dict[str, FileSigner]) -> None:
    """Every byte of what was approved counts."""
    import base64
    import json

    document = json.loads(signed(grant(), approvers["ann"], approvers["bob"]))
    longer = grant(not_after_ms=NOW_MS + 2 * HOUR_MS).encode()
    document["payload"] = base64.b64encode(longer).decode()
    with pytest.raises(ConfigError, match="has 0 of 2"):
        held(json.dumps(document).encode())


def test_a_grant_that_ran_out_while_it_was_used_is_refused(
    tmp_path: Path, approvers: dict[str, FileSigner]
) -> None:
    path = tmp_path / "grant.json"
    path.write_bytes(signed(grant(), approvers["ann"], approvers["bob"]))
    now = [NOW_MS]
    keys = [each.public_key for each in approvers.values()]
    found = HeldGrant(path, keys, role="break-glass", run="a", now_ms=lambda: now[0])
    found.check()
    now[0] += HOUR_MS
    with pytest.raises(AccessDeniedError, match="held until"):
        found.check()


@pytest.mark.parametrize(
    ("members", "told"),
    (
        ({"role": "retention"}, "retention needs none"),
        ({"role": "root"}, "there is no role"),
        ({"run": "*"}, "not a run id"),
        ({"who": " "}, "a grant's who"),
        ({"reason": ""}, "a grant's reason"),
        ({"reason": "a\nb"}, "a grant's reason"),
        ({"not_after_ms": NOW_MS}, "at most 24 hours"),
        ({"not_after_ms": NOW_MS + 24 * HOUR_MS + 1}, "at most 24 hours"),
        ({"not_before_ms": -1}, "milliseconds since 1970"),
        ({"nonce": "x"}, "nonce"),
    ),
)
def test_a_grant_says_nothing_that_it_must_not(members: dict[str, Any], told: str) -> None:
    with pytest.raises(FormatError, match=told):
        grant(**members)


def test_a_grant_is_read_as_it_was_written(approvers: dict[str, FileSigner]) -> None:
    data = signed(grant(), approvers["bob"], approvers["ann"])
    everybody = [each.public_key for each in approvers.values()]
    found, good = read_grant(data, "the grant", everybody)
    assert found == grant()
    assert good == signed_by(data, "the grant")
    assert len(good) == 2
    later = grant().encode().replace(b'"format":"0.1"', b'"format":"9.9"')
    with pytest.raises(UnsupportedFormatError, match=r"'9\.9'; this release reads 0\.1"):
        Grant.decode(later, "the grant")


def test_break_glass_by_a_policy_reads_the_run_of_its_grant_and_nothing_else(
    root: Path, tmp_path: Path, approvers: dict[str, FileSigner], monkeypatch: pytest.MonkeyPatch
) -> None:
    import time

    monkeypatch.setattr(grants, "_TOLD", set())
    now_ms = time.time_ns() // 1_000_000
    held_now = grant(not_before_ms=now_ms - 1000, not_after_ms=now_ms + HOUR_MS)
    (tmp_path / "grant.json").write_bytes(signed(held_now, approvers["ann"], approvers["bob"]))
    section = (
        '[role]\nname = "break-glass"\ngrant = "grant.json"\napprovers = ["file:ann.pub", "file:bob.pub"]\n'
    )
    policy = load(tmp_path, section)
    assert policy.role is not None
    assert policy.role.run_id == "a"
    assert policy.grant_use is None
    store = open_root(root, policy, Duty.RESTORE)
    assert store.read(SHARD, limit_bytes=100) == b"stored"
    assert policy.grant_use is not None
    assert policy.grant_use.grant == held_now
    with pytest.raises(AccessDeniedError, match="break-glass may not create"):
        open_root(root, policy, Duty.SAVE).put("x", b"")
    with pytest.raises(
        ConfigError, match=r"line 3: \[role\] grant: the grant .* is for break-glass on run a"
    ):
        load(tmp_path, section + 'run = "b"\n')
