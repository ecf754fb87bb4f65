"""Each role on a server that holds it to its policies: everything that it may and may not do, tried for real.

The documents are those that ``strongroom roles render`` writes. What this server does not know, conditions on
``s3:if-none-match`` and on encryption contexts, is in `test_role_documents`.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import json
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from s3_identities import ACCOUNT, REGION, Enforcing, Identity, enforcing, statement

from strongroom import Checkpointer, layout
from strongroom.errors import AccessDeniedError, ConfigError, NoKeyError
from strongroom.layout import CheckpointName
from strongroom.roles import Duty, Operation
from strongroom.stores.limited import unlimited
from strongroom_cli.main import main
from strongroom_security import ActAs, Seal, SecurityPolicy
from strongroom_security.fields import Context
from strongroom_security.recipients.aws_kms import AwsKms
from strongroom_security.recipients.file import create_key_file
from strongroom_security.roles import ROLES, definition
from strongroom_security.roles.documents import (
    compact,
    identity_policy,
    role_settings,
    session_policy,
    trust_policy,
)
from strongroom_security.roles.guardrails import bucket_policy
from strongroom_security.roles.site import Oidc, Site
from strongroom_security.secret import Secret

__all__ = ["enforcing"]

NAME = CheckpointName(launch=1, step=100, attempt="0123456789abcdef")
SHARD = layout.data_key(NAME, "00000-00.safetensors")
MANIFEST = layout.data_key(NAME, layout.MANIFEST)
KEYRING = layout.keyring_key(NAME, 1)
STORED = (layout.RUN, layout.launch_key(1), SHARD, MANIFEST, KEYRING, NAME.commit_key)

ALL = {role.name for role in ROLES}
READERS = {"validator-reader", "recovery-reader-writer", "publisher", "break-glass"}
WRITERS = {"trainer-writer", "recovery-reader-writer"}
KEEPERS = {"key-rotator", "key-admin"}


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A bucket with two runs in it, under the guardrails; and who acts there."""

    server: Enforcing
    site: Site
    versions: Mapping[str, str]

    def identity(self, role: str) -> Identity:
        """A session of a role, with the identity policy that is rendered for it."""
        arn = self.server.role()
        self.server.client("iam").put_role_policy(
            RoleName=arn.rpartition("/")[2],
            PolicyName="rendered",
            PolicyDocument=compact(identity_policy(definition(role), self.site)),
        )
        return self.assume(arn)

    def taken_up(self, *statements: Mapping[str, Any]) -> str:
        """A role that anybody of the account takes up with the tag of a run, as clients here do."""
        trusted = statement(
            ["sts:AssumeRole", "sts:TagSession"], None, Principal={"AWS": f"arn:aws:iam::{ACCOUNT}:root"}
        )
        return self.server.role(*statements, trust={"Version": "2012-10-17", "Statement": [trusted]})

    def assume(self, arn: str, session: str | None = None) -> Identity:
        """A session of a role, narrowed by the policy that is given."""
        narrowed = json.loads(session)["Statement"] if session else []
        return self.server.assume(arn, *narrowed)

    def uri(self, run: str = "run-a") -> str:
        return f"s3://{self.site.bucket}/runs/{run}"


def without_tls(policy: dict[str, Any]) -> str:
    """The rendered bucket policy but for the demand of TLS, which this server does not speak."""
    kept = [each for each in policy["Statement"] if each["Sid"] != "TlsOnly"]
    assert len(kept) == len(policy["Statement"]) - 1
    return compact({**policy, "Statement": kept})


@pytest.fixture(scope="module")
def stage(enforcing: Enforcing) -> Stage:
    bucket = enforcing.bucket(versioned=True)
    site = Site(bucket=bucket, run="run-a", account=ACCOUNT)
    s3, versions = enforcing.client("s3"), {}
    for run in ("run-a", "run-b"):
        for key in STORED:
            versions[f"{run}/{key}"] = s3.put_object(Bucket=bucket, Key=f"runs/{run}/{key}", Body=b"stored")[
                "VersionId"
            ]
    s3.put_bucket_policy(Bucket=bucket, Policy=without_tls(bucket_policy(site)))
    return Stage(server=enforcing, site=site, versions=versions)


def was_denied(call: Callable[..., Any], **parameters: Any) -> bool:
    from botocore.exceptions import ClientError

    try:
        call(**parameters)
    except ClientError as error:
        if error.response["Error"]["Code"] in ("AccessDenied", "AccessDeniedException", "403"):
            return True
        if error.response["Error"]["Code"] in ("PreconditionFailed", "NoSuchUpload"):
            return False
        raise
    return False


def upload(s3: Any, on: Stage) -> bool:
    """Begin an upload, send a part, list it and give it up; whether any of it was denied."""
    where = {"Bucket": on.site.bucket, "Key": f"runs/run-a/{layout.data_key(NAME, 'large')}"}
    begun: dict[str, Any] = {}
    if was_denied(lambda **asked: begun.update(s3.create_multipart_upload(**asked)), **where):
        return True
    part = {**where, "UploadId": begun["UploadId"]}
    return (
        was_denied(s3.upload_part, **part, PartNumber=1, Body=b"part")
        or was_denied(s3.list_parts, **part)
        or was_denied(s3.abort_multipart_upload, **part)
    )


# Each row: what is done, and which roles may. Every role that is not named is denied by the server.
ROWS: dict[str, tuple[Callable[[Any, Stage], bool], set[str]]] = {
    "create a shard": (lambda s3, on: put(s3, on, layout.data_key(NAME, "00001-00.safetensors")), WRITERS),
    "create COMMIT": (lambda s3, on: put(s3, on, NAME.commit_key), WRITERS),
    "create a launch": (lambda s3, on: put(s3, on, layout.launch_key(2)), WRITERS),
    "create a keyring": (lambda s3, on: put(s3, on, layout.keyring_key(NAME, 2)), WRITERS | KEEPERS),
    "give up an upload": (upload, WRITERS),
    "read a shard": (lambda s3, on: get(s3, on, SHARD), READERS),
    "look at a shard": (lambda s3, on: head(s3, on, SHARD), READERS),
    "read a manifest": (lambda s3, on: get(s3, on, MANIFEST), ALL - {"trainer-writer"}),
    "read COMMIT": (lambda s3, on: get(s3, on, NAME.commit_key), ALL - {"trainer-writer"}),
    "read a keyring": (lambda s3, on: get(s3, on, KEYRING), READERS | KEEPERS),
    "list the run": (lambda s3, on: listing(s3, on, "runs/run-a/"), ALL - {"trainer-writer"}),
    "list another run": (lambda s3, on: listing(s3, on, "runs/run-b/"), set()),
    "list the whole bucket": (lambda s3, on: listing(s3, on, ""), set()),
    "read another run's shard": (lambda s3, on: get(s3, on, SHARD, "run-b"), set()),
    "read another run's COMMIT": (lambda s3, on: get(s3, on, NAME.commit_key, "run-b"), set()),
    "write another run": (lambda s3, on: put(s3, on, SHARD, "run-b"), set()),
    "write a run whose id begins alike": (lambda s3, on: put(s3, on, SHARD, "run-a2"), set()),
    "write outside of the runs": (lambda s3, on: put(s3, on, SHARD, "run-a", folder="other/"), set()),
    "publish": (lambda s3, on: put(s3, on, "model", folder="releases/"), {"publisher"}),
    "delete the run's record": (lambda s3, on: delete(s3, on, layout.RUN), set()),
    "delete another run's checkpoint": (lambda s3, on: delete(s3, on, SHARD, "run-b"), set()),
    "delete a version": (
        lambda s3, on: was_denied(
            s3.delete_object,
            Bucket=on.site.bucket,
            Key=f"runs/run-a/{SHARD}",
            VersionId=on.versions[f"run-a/{SHARD}"],
        ),
        set(),
    ),
    "open the bucket to the world": (
        lambda s3, on: was_denied(s3.put_bucket_policy, Bucket=on.site.bucket, Policy="{}"),
        set(),
    ),
    "have lifecycle remove it": (
        lambda s3, on: was_denied(
            s3.put_bucket_lifecycle_configuration,
            Bucket=on.site.bucket,
            LifecycleConfiguration={
                "Rules": [
                    {"ID": "all", "Status": "Enabled", "Filter": {"Prefix": ""}, "Expiration": {"Days": 1}}
                ]
            },
        ),
        set(),
    ),
    "list unfinished uploads": (
        lambda s3, on: was_denied(s3.list_multipart_uploads, Bucket=on.site.bucket, Prefix="runs/run-a/"),
        {"retention"},
    ),
    "delete a checkpoint": (lambda s3, on: delete(s3, on, layout.data_key(NAME, "gone")), {"retention"}),
}


def put(s3: Any, on: Stage, key: str, run: str = "run-a", *, folder: str = "runs/") -> bool:
    return was_denied(
        s3.put_object, Bucket=on.site.bucket, Key=f"{folder}{run}/{key}", Body=b"new", IfNoneMatch="*"
    )


def get(s3: Any, on: Stage, key: str, run: str = "run-a") -> bool:
    return was_denied(s3.get_object, Bucket=on.site.bucket, Key=f"runs/{run}/{key}")


def head(s3: Any, on: Stage, key: str) -> bool:
    return was_denied(s3.head_object, Bucket=on.site.bucket, Key=f"runs/run-a/{key}")


def listing(s3: Any, on: Stage, prefix: str) -> bool:
    return was_denied(s3.list_objects_v2, Bucket=on.site.bucket, Prefix=prefix)


def delete(s3: Any, on: Stage, key: str, run: str = "run-a") -> bool:
    return was_denied(s3.delete_object, Bucket=on.site.bucket, Key=f"runs/{run}/{key}")


@pytest.mark.parametrize("role", sorted(ALL))
def test_a_role_may_do_what_its_policy_says_and_is_denied_all_else(stage: Stage, role: str) -> None:
    s3 = stage.server.client("s3", stage.identity(role))
    allowed = {done for done, (denied, _) in ROWS.items() if not denied(s3, stage)}
    assert allowed == {done for done, (_, who) in ROWS.items() if role in who}


@pytest.mark.parametrize("role", ("trainer-writer", "validator-reader", "recovery-reader-writer"))
def test_a_session_policy_narrows_a_broad_role_to_one_run_and_one_duty(stage: Stage, role: str) -> None:
    broad = stage.server.role(statement("s3:*", "*"))
    session = compact(session_policy(definition(role), stage.site))
    s3 = stage.server.client("s3", stage.assume(broad, session))
    allowed = {done for done, (denied, _) in ROWS.items() if not denied(s3, stage)}
    assert allowed == {done for done, (_, who) in ROWS.items() if role in who}


def test_the_guardrails_hold_whoever_may_do_everything_else(stage: Stage) -> None:
    s3 = stage.server.client("s3", stage.assume(stage.server.role(statement("s3:*", "*"))))
    assert not get(s3, stage, SHARD)
    for done in ("delete a version", "open the bucket to the world", "have lifecycle remove it"):
        assert ROWS[done][0](s3, stage), done


def test_without_tls_everything_is_denied(stage: Stage, enforcing: Enforcing) -> None:
    """The whole policy as it is rendered; this server is asked in clear."""
    bucket = enforcing.bucket()
    site = Site(bucket=bucket, account=ACCOUNT)
    broad = enforcing.client("s3", stage.assume(enforcing.role(statement("s3:*", "*"))))
    assert not was_denied(broad.put_object, Bucket=bucket, Key="runs/a/x", Body=b"")
    enforcing.client("s3").put_bucket_policy(Bucket=bucket, Policy=compact(bucket_policy(site)))
    assert was_denied(broad.get_object, Bucket=bucket, Key="runs/a/x")


# ------------------------------------------------------------------------------------------------------- keys


@pytest.fixture(scope="module")
def key(enforcing: Enforcing) -> str:
    return str(enforcing.client("kms").create_key()["KeyMetadata"]["Arn"])


def without_contexts(policy: dict[str, Any]) -> str:
    """This server knows no condition on an encryption context, and takes one for unmet."""
    said = copy.deepcopy(policy)
    for each in said["Statement"]:
        if each["Sid"] == "Keys":
            del each["Condition"]
    unknown = ("NeverForAnotherRun", "NeverWithoutARun")
    return compact({**said, "Statement": [each for each in said["Statement"] if each["Sid"] not in unknown]})


@pytest.mark.parametrize("role", sorted(ALL))
def test_a_role_may_ask_of_the_key_what_its_policy_says(stage: Stage, key: str, role: str) -> None:
    site = Site(bucket=stage.site.bucket, run="run-a", account=ACCOUNT, kms_keys=(key,))
    arn = stage.server.role()
    stage.server.client("iam").put_role_policy(
        RoleName=arn.rpartition("/")[2],
        PolicyName="rendered",
        PolicyDocument=without_contexts(identity_policy(definition(role), site)),
    )
    kms = stage.server.client("kms", stage.assume(arn))
    context = Context.of("run-a", NAME).pairs()
    blob = stage.server.client("kms").encrypt(KeyId=key, Plaintext=b"k" * 32, EncryptionContext=context)[
        "CiphertextBlob"
    ]
    wraps = not was_denied(kms.encrypt, KeyId=key, Plaintext=b"k" * 32, EncryptionContext=context)
    unwraps = not was_denied(kms.decrypt, KeyId=key, CiphertextBlob=blob, EncryptionContext=context)
    rights = definition(role).rights
    assert (wraps, unwraps) == (rights.wraps, rights.unwraps)
    assert was_denied(kms.generate_data_key, KeyId=key, KeySpec="AES_256")


# ------------------------------------------------------------------------------------- [role], and the server


@pytest.fixture
def job(enforcing: Enforcing, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Identity], None]:
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


def test_a_trainer_restores_by_other_credentials_which_it_lets_go_of(
    stage: Stage, job: Callable[[Identity], None]
) -> None:
    """Both roles are broader than they should be: a session's policy narrows each to its run and duty."""
    broad = stage.taken_up(statement(["s3:*", "kms:*"], "*"))
    job(stage.server.user(statement(["sts:AssumeRole", "sts:TagSession"], "*")))
    other = stage.taken_up(statement(["s3:*", "kms:*"], "*"))
    role = ActAs(name="trainer-writer", run="run-a", save=f"role:{broad}", restore=f"role:{other}")
    restore, save = role.open(stage.uri(), Duty.RESTORE), role.open(stage.uri(), Duty.SAVE)
    assert restore.read(NAME.commit_key, limit_bytes=100) == b"stored"
    key = layout.data_key(NAME, f"{secrets.token_hex(4)}.json")
    assert save.put_if_absent(key, b"new")

    # By itself, before the server is asked; and the server too, had the client not.
    for done in (
        lambda: save.read(NAME.commit_key, limit_bytes=100),
        lambda: unlimited(save).read(NAME.commit_key, limit_bytes=100),
        lambda: save.list_names(""),
        lambda: unlimited(save).list_names(""),
        lambda: restore.put(layout.launch_key(7), b"x"),
        lambda: unlimited(restore).put(layout.launch_key(7), b"x"),
        lambda: save.delete(key),
        lambda: unlimited(save).delete(key),
    ):
        with pytest.raises(AccessDeniedError):
            done()

    reader, beneath = restore.open_reader(SHARD), unlimited(restore)
    role.drop(Duty.RESTORE)
    for done in (
        lambda: restore.read(NAME.commit_key, limit_bytes=100),
        lambda: reader.read_into(0, memoryview(bytearray(4))),
        lambda: role.open(stage.uri(), Duty.RESTORE),
        lambda: role.session(Duty.RESTORE),
    ):
        with pytest.raises(AccessDeniedError, match="let go of before the first save"):
            done()
    assert beneath is not None
    assert save.put_if_absent(layout.data_key(NAME, f"{secrets.token_hex(4)}.json"), b"new")


def test_another_runs_root_is_no_root_of_a_role_that_is_narrowed(
    stage: Stage, job: Callable[[Identity], None]
) -> None:
    broad = stage.server.role(statement("s3:*", "*"))
    job(stage.server.user(statement(["sts:AssumeRole", "sts:TagSession"], "*")))
    role = ActAs(name="validator-reader", run="run-a", save=f"role:{broad}")
    with pytest.raises(ConfigError, match=r"the role validator-reader is for the run run-a"):
        role.open(stage.uri("run-b"), Duty.RESTORE)


def test_a_role_that_may_not_be_taken_up_is_told_when_the_root_is_opened(
    stage: Stage, job: Callable[[Identity], None]
) -> None:
    broad = stage.server.role(statement("s3:*", "*"))
    job(stage.server.user())
    role = ActAs(name="validator-reader", run="run-a", save=f"role:{broad}")
    with pytest.raises(AccessDeniedError, match=r"cannot be had: AccessDenied"):
        role.open(stage.uri(), Duty.RESTORE)


def test_a_key_is_asked_by_the_credentials_of_each_duty(
    stage: Stage, key: str, job: Callable[[Identity], None]
) -> None:
    """Sealing by the role for saving, opening by that for restoring, until that one is let go of."""
    wraps = stage.server.role(statement("kms:Encrypt", key))
    opens = stage.server.role(statement("kms:Decrypt", key))
    job(stage.server.user(statement(["sts:AssumeRole", "sts:TagSession"], "*")))
    recipient = AwsKms(key)
    policy = SecurityPolicy(
        seal=Seal(recipients=[recipient]),
        # Without a run the session is not narrowed: this server knows no condition on the context.
        role=ActAs(name="trainer-writer", save=f"role:{wraps}", restore=f"role:{opens}"),
    )
    context = Context.of("run-a", NAME)
    wrapped = recipient.wrap(Secret(b"k" * 32), context, within_s=20)
    assert recipient.unwrap(wrapped, context, within_s=20).reveal() == b"k" * 32
    assert policy.role is not None
    policy.role.drop(Duty.RESTORE)
    with pytest.raises(NoKeyError, match="let go of before the first save"):
        recipient.unwrap(wrapped, context, within_s=20)
    assert recipient.wrap(Secret(b"k" * 32), context, within_s=20)


# ------------------------------------------------------------------------------------------------------- OIDC


def token(**claims: Any) -> str:
    """A token as an identity provider makes it; this server does not look at its signature."""

    def encoded(value: Any) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()

    return f"{encoded({'alg': 'RS256', 'typ': 'JWT'})}.{encoded(claims)}.{encoded('signature')}"


@pytest.fixture
def federated(stage: Stage) -> Iterator[tuple[str, Oidc]]:
    """A role that is taken up by a token, with the documents that are rendered for it; and whose."""
    iam = stage.server.client("iam")
    host = f"tokens-{secrets.token_hex(4)}.example"
    provider = iam.create_open_id_connect_provider(
        Url=f"https://{host}", ClientIDList=["sts.amazonaws.com"], ThumbprintList=["0" * 40]
    )["OpenIDConnectProviderArn"]
    subjects = {"validator-reader": "repo:lab/train:main", "trainer-writer": "repo:lab/train:trainer"}
    oidc = Oidc(provider=provider, audience="sts.amazonaws.com", subjects=subjects)
    site = Site(
        bucket=stage.site.bucket,
        run="run-a",
        account=ACCOUNT,
        oidc=oidc,
        role_prefix=f"{secrets.token_hex(4)}-",
    )
    role = definition("validator-reader")
    settings = role_settings(role, site)
    trust = trust_policy(role, site)
    assert trust is not None
    iam.create_role(**settings, AssumeRolePolicyDocument=compact(trust))
    iam.put_role_policy(
        RoleName=settings["RoleName"],
        PolicyName="rendered",
        PolicyDocument=compact(identity_policy(role, site)),
    )
    yield site.role_arn(role.name), oidc
    with contextlib.suppress(Exception):
        iam.delete_open_id_connect_provider(OpenIDConnectProviderArn=provider)


def test_a_role_is_taken_up_by_one_jobs_token_and_by_no_other(
    stage: Stage, federated: tuple[str, Oidc], job: Callable[[Identity], None], tmp_path: Path
) -> None:
    arn, oidc = federated
    job(stage.server.user())
    usual = {
        "iss": f"https://{oidc.issuer}",
        "sub": oidc.subjects["validator-reader"],
        "aud": oidc.audience,
        "exp": 4_000_000_000,
    }
    path = tmp_path / "token"
    trainer = {"sub": oidc.subjects["trainer-writer"]}
    for wrong in (
        trainer,
        {"sub": "repo:lab/other:main"},
        {"aud": "another"},
        {"sub": "repo:lab/train:main2"},
    ):
        path.write_text(token(**{**usual, **wrong}))
        role = ActAs(name="validator-reader", run="run-a", save=f"web-identity:{arn};token={path}")
        with pytest.raises(AccessDeniedError, match="cannot be had"):
            role.open(stage.uri(), Duty.RESTORE)
    path.write_text(token(**usual))
    role = ActAs(name="validator-reader", run="run-a", save=f"web-identity:{arn};token={path}")
    store = role.open(stage.uri(), Duty.RESTORE)
    assert store.read(NAME.commit_key, limit_bytes=100) == b"stored"
    assert role.may(Operation.READ, Duty.RESTORE)


# ------------------------------------------------------------------------------------------------ a whole run


def test_a_run_is_saved_read_rotated_and_thinned_out_each_by_the_role_for_it(
    stage: Stage, job: Callable[[Identity], None], tmp_path: Path
) -> None:
    """By the rendered policies alone: no process has a right that its role does not have."""
    create_key_file(tmp_path / "kek.key")
    create_key_file(tmp_path / "next.key")
    run = f"run-{secrets.token_hex(4)}"
    site = Site(bucket=stage.site.bucket, run=run, account=ACCOUNT)
    uri = f"s3://{site.bucket}/runs/{run}"

    def make(name: str) -> str:
        arn = stage.taken_up()
        stage.server.client("iam").put_role_policy(
            RoleName=arn.rpartition("/")[2],
            PolicyName="rendered",
            PolicyDocument=compact(identity_policy(definition(name), site)),
        )
        return arn

    def become(name: str, launch: int | None = None) -> SecurityPolicy:
        job(stage.assume(make(name)))
        return SecurityPolicy(
            seal=Seal(recipients=["file:kek.key"], base=tmp_path),
            role=ActAs(name=name, run=run, launch=launch),
        )

    with Checkpointer(uri, security=become("trainer-writer", 1)) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"weights": torch.full((4,), float(step))}).result()
    with Checkpointer(uri, security=become("validator-reader")) as checkpointer:
        restored = checkpointer.restore({"weights": torch.zeros(4)})
        assert restored is not None
        assert restored.state["weights"].tolist() == [2.0] * 4
        with pytest.raises(AccessDeniedError, match="validator-reader may not create"):
            checkpointer.save(3, {"weights": torch.zeros(4)}).result()
    with Checkpointer(uri, security=become("recovery-reader-writer", 2)) as checkpointer:
        checkpointer.restore({"weights": torch.zeros(4)})
        checkpointer.save(3, {"weights": torch.zeros(4)}).result()

    # The job itself may do nothing but take the two roles up.
    job(stage.server.user(statement(["sts:AssumeRole", "sts:TagSession"], "*")))
    save, restore = make("trainer-writer"), make("recovery-reader-writer")
    resumes = SecurityPolicy(
        seal=Seal(recipients=["file:kek.key"], base=tmp_path),
        role=ActAs(name="trainer-writer", run=run, launch=3, save=f"role:{save}", restore=f"role:{restore}"),
    )
    with Checkpointer(uri, security=resumes) as checkpointer:
        assert checkpointer.restore({"weights": torch.ones(4)}).step == 3
        checkpointer.save(4, {"weights": torch.full((4,), 4.0)}).result()
        with pytest.raises(AccessDeniedError, match="do it before the first save, or as recovery"):
            checkpointer.restore({"weights": torch.ones(4)})
        checkpointer.save(5, {"weights": torch.full((4,), 5.0)}).result()

    def command(name: str, *arguments: str) -> int:
        become(name)
        policy = tmp_path / "strongroom.toml"
        policy.write_text(
            f'[seal]\nrecipients = ["file:next.key"]\nidentities = ["file:kek.key"]\n\n'
            f'[role]\nname = "{name}"\nrun = "{run}"\n'
        )
        return main([*arguments, "--security", str(policy)])

    assert command("key-admin", "keys", "rotate", uri) == 0
    assert command("retention", "gc", uri, "--keep-last", "1") == 0
    assert command("validator-reader", "verify", uri) == 0
    assert command("validator-reader", "keys", "rotate", uri, "--again") != 0
    assert command("trainer-writer", "ls", uri) == 4
