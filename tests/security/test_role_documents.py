"""What the documents of roles say, by an evaluator of policies: what each role may do, and what it may not.

It covers what no local server enforces, encryption contexts and ``s3:if-none-match`` above all.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from iam_evaluator import Request, allows, trusts

from strongroom import layout
from strongroom.errors import ConfigError
from strongroom.layout import CheckpointName
from strongroom.roles import Duty, Operation
from strongroom_security.fields import Context
from strongroom_security.roles import ROLES, definition
from strongroom_security.roles.definitions import LOG_ROLES, LogRole, matches
from strongroom_security.roles.documents import (
    MAX_IDENTITY_CHARS,
    MAX_SESSION_CHARS,
    SESSION_S,
    compact,
    identity_policy,
    log_policy,
    role_settings,
    session_policy,
    trust_policy,
)
from strongroom_security.roles.guardrails import bucket_policy, sign_key_policy, wrap_key_policy
from strongroom_security.roles.rendering import TERRAFORM, render_all, text_of
from strongroom_security.roles.site import RUN_TAG, Oidc, Site, Transition

ACCOUNT = "111122223333"
KEY = f"arn:aws:kms:eu-central-1:{ACCOUNT}:key/1234abcd-12ab-34cd-56ef-1234567890ab"
NEXT_KEY = f"arn:aws:kms:eu-central-1:{ACCOUNT}:key/3234abcd-12ab-34cd-56ef-1234567890ab"
SIGN_KEY = f"arn:aws:kms:eu-central-1:{ACCOUNT}:key/2234abcd-12ab-34cd-56ef-1234567890ab"
RELEASE_KEY = f"arn:aws:kms:eu-central-1:{ACCOUNT}:key/4234abcd-12ab-34cd-56ef-1234567890ab"
OIDC = Oidc(
    provider=f"arn:aws:iam::{ACCOUNT}:oidc-provider/tokens.example/ci",
    audience="sts.amazonaws.com",
    subjects={role.name: f"repo:lab/train:environment:{role.name}" for role in ROLES if not role.needs_grant},
)
SITE = Site(
    bucket="checkpoints",
    run="run-a",
    kms_keys=(KEY, NEXT_KEY),
    sign_key=SIGN_KEY,
    release_key=RELEASE_KEY,
    audit_bucket="checkpoints-audit",
)
ANY_RUN = Site(bucket="checkpoints", kms_keys=(KEY, NEXT_KEY), sign_key=SIGN_KEY, release_key=RELEASE_KEY)

NAME = CheckpointName(launch=1, step=100, attempt="0123456789abcdef")
SHARD = layout.data_key(NAME, "00000-00.safetensors")
MANIFEST = layout.data_key(NAME, layout.MANIFEST)
KEYRING = layout.keyring_key(NAME, 2)
CREATES = {"s3:if-none-match": "*", "s3:ObjectCreationOperation": "true"}

SEGMENT = "20261130T09/0123456789abcdef0123456789abcdef-000001.jsonl"
AUDIT = {"bucket": "checkpoints-audit", "folder": "segments/"}

ALL = {role.name for role in ROLES}
READERS = {"validator-reader", "recovery-reader-writer", "publisher", "break-glass"}
WRITERS = {"trainer-writer", "recovery-reader-writer"}
KEEPERS = {"key-rotator", "key-admin"}
LISTERS = ALL - {"trainer-writer"}


def arn(role: str) -> str:
    return f"arn:aws:iam::{ACCOUNT}:role/strongroom-{role}"


def s3(
    role: str,
    action: str,
    key: str = "",
    *,
    run: str = "run-a",
    site: Site = SITE,
    bucket: str = "checkpoints",
    narrowed: bool = False,
    tags: Mapping[str, str] | None = None,
    folder: str = "runs/",
    **context: str,
) -> bool:
    """Whether a role may do something to a key of a run; to the bucket, where no key is given."""
    resource = f"arn:aws:s3:::{bucket}" + (f"/{folder}{run}/{key}" if key else "")
    return allows(
        Request(
            action=f"s3:{action}",
            resource=resource,
            principal=arn(role),
            context={name.replace("__", ":").replace("_", "-"): value for name, value in context.items()},
            tags=tags or {},
        ),
        identity=[identity_policy(definition(role), site)],
        resource=bucket_policy(SITE, audit=bucket == "checkpoints-audit"),
        session=session_policy(definition(role), SITE) if narrowed else None,
    )


def create(role: str, key: str, **more: Any) -> bool:
    return s3(role, "PutObject", key, s3__if_none_match="*", s3__ObjectCreationOperation="true", **more)


def listing(role: str, run: str = "run-a", **more: Any) -> bool:
    return s3(role, "ListBucket", s3__prefix=f"runs/{run}/", **more)


# The rows of the table: what is done, and which roles may. Every role that is not named may not.
TABLE: dict[str, tuple[Any, set[str]]] = {
    "create a shard": (lambda role: create(role, SHARD), WRITERS),
    "create COMMIT": (lambda role: create(role, NAME.commit_key), WRITERS),
    "create a launch": (lambda role: create(role, layout.launch_key(2)), WRITERS),
    "create a keyring": (lambda role: create(role, KEYRING), WRITERS | KEEPERS),
    "resume an upload": (lambda role: s3(role, "ListMultipartUploadParts", SHARD), WRITERS),
    "give up an upload": (lambda role: s3(role, "AbortMultipartUpload", SHARD), WRITERS | {"retention"}),
    "read a shard": (lambda role: s3(role, "GetObject", SHARD), READERS),
    "read a manifest": (lambda role: s3(role, "GetObject", MANIFEST), ALL - {"trainer-writer"}),
    "read COMMIT": (lambda role: s3(role, "GetObject", NAME.commit_key), ALL - {"trainer-writer"}),
    "read a keyring": (lambda role: s3(role, "GetObject", KEYRING), READERS | KEEPERS),
    "list the run": (listing, LISTERS),
    "list another run": (lambda role: listing(role, "run-b"), set()),
    "list the whole bucket": (lambda role: s3(role, "ListBucket"), set()),
    "list unfinished uploads": (lambda role: s3(role, "ListBucketMultipartUploads"), {"retention"}),
    "read another run": (lambda role: s3(role, "GetObject", SHARD, run="run-b"), set()),
    "write another run": (lambda role: create(role, SHARD, run="run-b"), set()),
    "write a run whose id begins alike": (lambda role: create(role, SHARD, run="run-a2"), set()),
    "write outside of the runs": (lambda role: create(role, SHARD, folder=""), set()),
    "publish": (lambda role: create(role, "model.safetensors", folder="releases/"), {"publisher"}),
    "delete a checkpoint": (lambda role: s3(role, "DeleteObject", SHARD), {"retention"}),
    "delete the run's record": (lambda role: s3(role, "DeleteObject", layout.RUN), set()),
    "delete a version": (lambda role: s3(role, "DeleteObjectVersion", SHARD), set()),
    "overwrite": (
        lambda role: s3(role, "PutObject", SHARD, s3__ObjectCreationOperation="true"),
        set(),
    ),
    "begin an upload": (
        lambda role: s3(role, "PutObject", SHARD, s3__ObjectCreationOperation="false"),
        WRITERS,
    ),
    "open the bucket to the world": (lambda role: s3(role, "PutBucketPolicy"), set()),
    "have lifecycle remove it": (lambda role: s3(role, "PutLifecycleConfiguration"), set()),
    "without TLS": (lambda role: create(role, SHARD, aws__SecureTransport="false"), set()),
    "add to the audit log": (lambda role: create(role, SEGMENT, **AUDIT), ALL),
    "add to the audit log what is about no run": (
        lambda role: create(role, SEGMENT, run="_", **AUDIT),
        ALL,
    ),
    "add to another run's audit log": (lambda role: create(role, SEGMENT, run="run-b", **AUDIT), set()),
    "rewrite the audit log": (
        lambda role: s3(role, "PutObject", SEGMENT, s3__ObjectCreationOperation="true", **AUDIT),
        set(),
    ),
    "sequence the audit log": (
        lambda role: create(role, "checkpoint", run="tlog", bucket="checkpoints-audit", folder=""),
        set(),
    ),
    "read the audit log": (lambda role: s3(role, "GetObject", SEGMENT, **AUDIT), set()),
    "delete of the audit log": (lambda role: s3(role, "DeleteObject", SEGMENT, **AUDIT), set()),
}


@pytest.mark.parametrize("done", TABLE)
def test_each_role_may_do_what_the_table_says_and_nothing_else(done: str) -> None:
    may, expected = TABLE[done]
    assert {role for role in ALL if may(role)} == expected


LOG_TABLE: dict[str, tuple[str, str, set[str]]] = {
    "read a segment": ("GetObject", f"segments/run-a/{SEGMENT}", {"audit-sequencer", "auditor-reader"}),
    "read the tree's head": ("GetObject", "tlog/checkpoint", {"audit-sequencer", "auditor-reader"}),
    "list the log": ("ListBucket", "", {"audit-sequencer", "auditor-reader"}),
    "create a tile": ("PutObject", "tlog/tile/0/000", {"audit-sequencer"}),
    "create a segment": ("PutObject", f"segments/run-a/{SEGMENT}", {"auditor-reader"}),
    "create a segment of no run": ("PutObject", f"segments/_/{SEGMENT}", {"auditor-reader"}),
    "create a plan": ("PutObject", "tlog/plans/7.json", {"audit-sequencer"}),
    "publish a head": ("PutObject", "tlog/checkpoint", {"audit-sequencer"}),
    "delete a segment": ("DeleteObject", f"segments/run-a/{SEGMENT}", set()),
    "delete a version": ("DeleteObjectVersion", "tlog/tile/0/000", set()),
}


def of_the_log(
    role: LogRole, action: str, key: str, *, bucket: str = "checkpoints-audit", **context: str
) -> bool:
    asked = Request(
        action=f"s3:{action}",
        resource=f"arn:aws:s3:::{bucket}" + (f"/{key}" if key else ""),
        principal=arn(role.name),
        context={name.replace("__", ":").replace("_", "-"): value for name, value in context.items()},
    )
    audit = bucket == "checkpoints-audit"
    return allows(asked, identity=[log_policy(role, SITE)], resource=bucket_policy(SITE, audit=audit))


@pytest.mark.parametrize("done", LOG_TABLE)
def test_each_role_of_the_log_may_do_what_the_table_says_and_nothing_else(done: str) -> None:
    action, key, expected = LOG_TABLE[done]
    new = {"s3__if_none_match": "*", "s3__ObjectCreationOperation": "true"}
    assert {role.name for role in LOG_ROLES if of_the_log(role, action, key, **new)} == expected


def test_only_the_trees_head_may_be_replaced() -> None:
    sequencer, reader = LOG_ROLES
    over = {"s3__if_match": "etag", "s3__ObjectCreationOperation": "true"}
    assert not of_the_log(reader, "PutObject", "tlog/checkpoint", **over)
    assert not of_the_log(reader, "PutObject", f"segments/_/{SEGMENT}", **over)
    assert of_the_log(sequencer, "PutObject", "tlog/checkpoint", **over)
    assert not of_the_log(sequencer, "PutObject", "tlog/tile/0/000", **over)
    assert not of_the_log(sequencer, "PutObject", "tlog/plans/7.json", **over)


@pytest.mark.parametrize("role", LOG_ROLES, ids=lambda role: role.name)
def test_the_roles_of_the_log_have_nothing_to_do_with_checkpoints(role: LogRole) -> None:
    assert not of_the_log(role, "GetObject", f"runs/run-a/{SHARD}", bucket="checkpoints")
    assert f"{role.name}.identity.json" in render_all(SITE)
    with pytest.raises(ConfigError, match="give --audit-bucket"):
        log_policy(role, Site(bucket="checkpoints"))


# ------------------------------------------------------------------------------------------------------- keys


def kms(
    role: str,
    action: str,
    *,
    key: str = KEY,
    run: str = "run-a",
    site: Site = SITE,
    narrowed: bool = False,
    tags: Mapping[str, str] | None = None,
    context: Mapping[str, str] | None = None,
) -> bool:
    """Whether a role may have KMS do something, in the context that is really sent."""
    pairs = Context.of(run, NAME).pairs() if context is None else context
    release = key == RELEASE_KEY
    resource = wrap_key_policy(SITE) if key in SITE.kms_keys else sign_key_policy(SITE, release=release)
    asked = Request(
        action=f"kms:{action}",
        resource=key,
        principal=arn(role),
        context={
            **{f"kms:EncryptionContext:{name}": value for name, value in pairs.items()},
            **({"kms:EncryptionContextKeys": list(pairs)} if pairs else {}),
            "kms:MessageType": "DIGEST",
            "kms:SigningAlgorithm": "ECDSA_SHA_256",
        },
        tags=tags or {},
    )
    identity = [identity_policy(definition(role), site)]
    session = session_policy(definition(role), SITE) if narrowed else None
    # A key's policy and an identity's: each has to allow by itself here, so that neither is wider than meant.
    return allows(asked, identity=identity, session=session) and allows(
        asked, identity=identity, resource=resource, session=session, resource_has_to_allow=True
    )


KEY_TABLE: dict[str, tuple[Any, set[str]]] = {
    "wrap": (lambda role: kms(role, "Encrypt"), {*WRITERS, "key-admin"}),
    "unwrap": (lambda role: kms(role, "Decrypt"), {*READERS, "key-admin"}),
    "rewrap from one key": (lambda role: kms(role, "ReEncryptFrom"), KEEPERS),
    "rewrap to the next": (lambda role: kms(role, "ReEncryptTo", key=NEXT_KEY), KEEPERS),
    "wrap for another run": (lambda role: kms(role, "Encrypt", run="run-b"), set()),
    "unwrap of another run": (lambda role: kms(role, "Decrypt", run="run-b"), set()),
    "rewrap of another run": (lambda role: kms(role, "ReEncryptFrom", run="run-b"), set()),
    "unwrap without a context": (lambda role: kms(role, "Decrypt", context={}), set()),
    "unwrap with more in the context": (
        lambda role: kms(role, "Decrypt", context={**Context.of("run-a", NAME).pairs(), "more": "1"}),
        set(),
    ),
    "unwrap what another program wrapped": (
        lambda role: kms(role, "Decrypt", context={"run": "run-a"}),
        set(),
    ),
    "draw a data key": (lambda role: kms(role, "GenerateDataKey"), set()),
    "sign": (lambda role: kms(role, "Sign", key=SIGN_KEY), WRITERS),
    "sign a release": (lambda role: kms(role, "Sign", key=RELEASE_KEY), {"publisher"}),
    "learn the public key": (lambda role: kms(role, "GetPublicKey", key=SIGN_KEY), ALL),
    "change who may use the key": (lambda role: kms(role, "PutKeyPolicy"), set()),
}


@pytest.mark.parametrize("done", KEY_TABLE)
def test_each_role_may_ask_of_keys_what_the_table_says_and_nothing_else(done: str) -> None:
    may, expected = KEY_TABLE[done]
    assert {role for role in ALL if may(role)} == expected


def test_a_context_with_a_file_in_it_is_one_too() -> None:
    pairs = Context.of("run-a", NAME, "00000-00.safetensors").pairs()
    assert kms("trainer-writer", "Encrypt", context=pairs)
    assert not kms("trainer-writer", "Decrypt", context=pairs)


def test_a_key_refuses_another_run_than_the_sessions_tag_by_itself() -> None:
    """Also where an identity's policy is wider than it should be."""
    asked = Request(
        action="kms:Decrypt",
        resource=KEY,
        principal=arn("validator-reader"),
        context={
            "kms:EncryptionContext:run": "run-b",
            "kms:EncryptionContext:strongroom": "v1",
            "kms:EncryptionContextKeys": ["run", "strongroom"],
        },
        tags={RUN_TAG: "run-a"},
    )
    wide = {
        "Version": "2012-10-17",
        "Statement": [{"Effect": "Allow", "Action": "kms:*", "Resource": "*"}],
    }
    assert not allows(asked, identity=[wide], resource=wrap_key_policy(SITE), resource_has_to_allow=True)


# ------------------------------------------------------------------------------------------ tags and sessions


@pytest.mark.parametrize("role", sorted(ALL))
def test_without_a_run_a_role_is_for_the_run_that_its_session_is_tagged_with(role: str) -> None:
    for tags, may in (({RUN_TAG: "run-a"}, True), ({RUN_TAG: "run-b"}, False), ({}, False)):
        if role == "trainer-writer":
            assert create(role, SHARD, site=ANY_RUN, tags=tags) == may
            assert kms(role, "Encrypt", site=ANY_RUN, tags=tags) == may
        else:
            assert listing(role, site=ANY_RUN, tags=tags) == may
            assert s3(role, "GetObject", NAME.commit_key, site=ANY_RUN, tags=tags) == may


@pytest.mark.parametrize("role", sorted(ALL))
def test_a_session_policy_narrows_a_role_of_all_runs_to_one(role: str) -> None:
    tags = {RUN_TAG: "run-b"}
    for done, (may, _) in TABLE.items():
        if "audit" not in done:
            assert may(role) == _narrowed(done, role), done
    assert not create(role, SHARD, run="run-b", site=ANY_RUN, tags=tags, narrowed=True)
    assert not listing(role, "run-b", site=ANY_RUN, tags=tags, narrowed=True)
    assert not kms(role, "Decrypt", run="run-b", site=ANY_RUN, tags=tags, narrowed=True)


def _narrowed(done: str, role: str) -> bool:
    """The same row, in a session that is narrowed to the very run."""
    with pytest.MonkeyPatch.context() as patch:
        original = s3
        patch.setitem(globals(), "s3", lambda *given, **more: original(*given, **{**more, "narrowed": True}))
        return bool(TABLE[done][0](role))


@pytest.mark.parametrize(("role", "duty"), tuple(itertools.product(sorted(ALL), Duty)))
def test_a_session_for_one_duty_allows_no_more_than_that_duty(role: str, duty: Duty) -> None:
    allowed = json.dumps(session_policy(definition(role), SITE, duty))
    rights = definition(role).of(duty)
    for action, is_allowed in (
        ("s3:GetObject", bool(rights.read)),
        ("s3:ListBucket", rights.lists),
        ("s3:DeleteObject", bool(rights.delete)),
        ("kms:Decrypt", rights.unwraps),
        ("kms:Encrypt", rights.wraps),
    ):
        assert (f'"{action}"' in allowed) == is_allowed, action


# --------------------------------------------------------------------------------------------- the documents


def test_the_bucket_has_its_administrator_alone_changed() -> None:
    admin = Request(action="s3:PutBucketPolicy", resource="arn:aws:s3:::checkpoints", principal=arn("admin"))
    other = Request(action="s3:PutBucketPolicy", resource="arn:aws:s3:::checkpoints", principal=arn("other"))
    wide = [{"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]}]
    assert allows(admin, identity=wide, resource=bucket_policy(SITE))
    assert not allows(other, identity=wide, resource=bucket_policy(SITE))
    version = Request(
        action="s3:DeleteObjectVersion",
        resource="arn:aws:s3:::checkpoints/runs/run-a/COMMIT",
        principal=arn("admin"),
    )
    assert not allows(version, identity=wide, resource=bucket_policy(SITE))


def test_a_writer_that_may_overwrite_by_its_own_policy_is_stopped_by_the_buckets() -> None:
    wide = [{"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]}]
    overwrite = Request(
        action="s3:PutObject",
        resource=f"arn:aws:s3:::checkpoints/runs/run-a/{NAME.commit_key}",
        principal=arn("other"),
        context={"s3:ObjectCreationOperation": "true"},
    )
    assert allows(overwrite, identity=wide)
    assert not allows(overwrite, identity=wide, resource=bucket_policy(SITE))


def test_a_role_never_does_what_it_must_not_whatever_another_policy_gives_it() -> None:
    wide = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}]}
    for role in ROLES:
        rights = role.rights
        for action, resource, may in (
            ("s3:GetObject", f"arn:aws:s3:::checkpoints/runs/run-b/{SHARD}", bool(rights.read)),
            ("s3:ListBucket", "arn:aws:s3:::checkpoints", rights.lists),
            ("s3:DeleteObject", f"arn:aws:s3:::checkpoints/runs/run-b/{SHARD}", bool(rights.delete)),
            ("s3:DeleteObjectVersion", f"arn:aws:s3:::checkpoints/runs/run-b/{SHARD}", False),
            ("kms:Decrypt", KEY, rights.unwraps),
            ("kms:Encrypt", KEY, rights.wraps),
            # Nothing is said of what is not the checkpoints': a job's own data, say.
            ("s3:GetObject", "arn:aws:s3:::data/batch", True),
        ):
            named = {"kms:EncryptionContext:run": "run-a"} if action.startswith("kms:") else {}
            asked = Request(action=action, resource=resource, principal=arn(role.name), context=named)
            assert allows(asked, identity=[identity_policy(role, SITE), wide]) == may, (role.name, action)


@pytest.mark.parametrize("site", (SITE, ANY_RUN), ids=("one run", "the tag's run"))
@pytest.mark.parametrize("role", sorted(ALL))
def test_a_key_that_allows_a_role_by_itself_is_still_asked_for_one_run_alone(role: str, site: Site) -> None:
    """A key's policy that names a role needs nothing of the role's own; so the role's own has to deny."""
    identity = [identity_policy(definition(role), site)]
    tags = {} if site.run else {RUN_TAG: "run-a"}
    for action in ("kms:Encrypt", "kms:Decrypt", "kms:ReEncryptFrom"):
        for run, tagged, may in (
            ("run-a", tags, True),
            ("run-b", tags, False),
            ("run-a", {}, bool(site.run)),
        ):
            pairs = Context.of(run, NAME).pairs()
            asked = Request(
                action=action,
                resource=KEY,
                principal=arn(role),
                context={
                    **{f"kms:EncryptionContext:{name}": value for name, value in pairs.items()},
                    "kms:EncryptionContextKeys": list(pairs),
                },
                tags=tagged,
            )
            key = wrap_key_policy(site)
            by_key = allows(asked, identity=[], resource=key, resource_has_to_allow=True)
            found = allows(asked, identity=identity, resource=key, resource_has_to_allow=True)
            assert found == (by_key and may), (action, run, tagged)


@pytest.mark.parametrize("policy", (wrap_key_policy(SITE), sign_key_policy(SITE)), ids=("wraps", "signs"))
def test_nobody_gives_a_keys_rights_away_by_a_grant_of_kms(policy: Any) -> None:
    wide = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "kms:*", "Resource": "*"}]}
    for who in ("admin", "trainer-writer"):
        asked = Request(action="kms:CreateGrant", resource=KEY, principal=arn(who))
        assert not allows(asked, identity=[wide], resource=policy)
    may = Request(action="kms:PutKeyPolicy", resource=KEY, principal=arn("admin"))
    assert allows(may, identity=[], resource=policy, resource_has_to_allow=True)
    allowed = [each for each in policy["Statement"] if each["Effect"] == "Allow"]
    assert "kms:Create*" not in json.dumps(allowed)
    assert "CreateGrant" not in json.dumps(allowed)


def test_a_session_of_a_grant_allows_nothing_after_its_end() -> None:
    session = session_policy(definition("break-glass"), SITE, ends_at="2026-11-30T10:00:00+00:00")
    assert len(compact(session)) <= MAX_SESSION_CHARS
    for action, resource, context in (
        ("s3:GetObject", f"arn:aws:s3:::checkpoints/runs/run-a/{SHARD}", {}),
        ("s3:ListBucket", "arn:aws:s3:::checkpoints", {"s3:prefix": "runs/run-a/"}),
        ("kms:Decrypt", KEY, {"kms:EncryptionContext:run": "run-a"}),
    ):
        for at, may in (("2026-11-30T09:59:59+00:00", True), ("2026-11-30T10:00:00+00:00", False)):
            asked = Request(
                action=action,
                resource=resource,
                principal=arn("break-glass"),
                context={**context, "aws:CurrentTime": at},
            )
            wide = {
                "Version": "2012-10-17",
                "Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}],
            }
            assert allows(asked, identity=[wide], session=session) == may, (action, at)


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_policies_are_short_enough_for_aws_and_the_same_each_time(role: Any) -> None:
    longest = Site(
        bucket="b" * 63,
        run="r" * 40,
        kms_keys=(KEY, NEXT_KEY),
        sign_key=SIGN_KEY,
        release_key=RELEASE_KEY,
        audit_bucket="a" * 63,
    )
    assert len(compact(identity_policy(role, longest))) <= MAX_IDENTITY_CHARS
    assert len(compact(session_policy(role, longest))) <= MAX_SESSION_CHARS
    assert " " not in compact(session_policy(role, SITE))
    assert text_of(identity_policy(role, SITE)) == text_of(identity_policy(role, SITE))


def test_a_policy_that_would_be_too_long_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"session policy of key-rotator has \d+ characters, and AWS takes 2048"
    ):
        session_policy(definition("key-rotator"), Site(bucket="b" * 63, run="r" * 128))


def test_a_session_policy_is_for_one_run() -> None:
    with pytest.raises(ConfigError, match="give --run"):
        session_policy(definition("retention"), ANY_RUN)


def test_a_role_is_taken_up_by_one_jobs_token_for_an_hour() -> None:
    site = Site(bucket="checkpoints", run="run-a", account=ACCOUNT, oidc=OIDC)
    trust = trust_policy(definition("trainer-writer"), site)
    assert trust is not None
    (statement,) = trust["Statement"]
    assert statement["Principal"] == {"Federated": OIDC.provider}
    assert statement["Action"] == "sts:AssumeRoleWithWebIdentity"
    assert statement["Condition"]["StringEquals"] == {
        "tokens.example/ci:aud": "sts.amazonaws.com",
        "tokens.example/ci:sub": "repo:lab/train:environment:trainer-writer",
    }
    assert role_settings(definition("trainer-writer"), site)["MaxSessionDuration"] == SESSION_S == 3600
    # Where policies go by the session's tag, a token without it is refused.
    tagged = trust_policy(
        definition("trainer-writer"), Site(bucket="checkpoints", account=ACCOUNT, oidc=OIDC)
    )
    assert tagged is not None
    assert tagged["Statement"][0]["Condition"]["Null"] == {f"aws:RequestTag/{RUN_TAG}": "false"}
    assert tagged["Statement"][1]["Action"] == "sts:TagSession"


def test_break_glass_is_taken_up_with_a_second_factor() -> None:
    trust = trust_policy(definition("break-glass"), SITE)
    assert trust is not None
    for statement in trust["Statement"]:
        assert statement["Condition"]["Bool"] == {"aws:MultiFactorAuthPresent": "true"}
        assert statement["Condition"]["NumericLessThan"] == {"aws:MultiFactorAuthAge": "3600"}


def take_up(trust: Any, *, run: str | None, age_s: int = 60) -> bool:
    """Whether somebody of the account may take a role up, with a second factor, and a tag of a run."""
    context = {"aws:MultiFactorAuthPresent": "true", "aws:MultiFactorAuthAge": str(age_s)}
    if run is not None:
        context[f"aws:RequestTag/{RUN_TAG}"] = run
    asked = Request(
        action="sts:AssumeRole",
        resource=arn("break-glass"),
        principal=f"arn:aws:iam::{ACCOUNT}:user/carol",
        context=context,
    )
    return trusts(trust, asked)


def test_break_glass_works_without_a_run_and_with_one() -> None:
    """A client tags the session with the run of its grant; without a run in the documents it has to."""
    role = definition("break-glass")
    any_run, one_run = trust_policy(role, ANY_RUN), trust_policy(role, SITE)
    assert take_up(any_run, run="run-a")
    assert not take_up(any_run, run=None)
    assert not take_up(any_run, run="run-a", age_s=4000)
    assert take_up(one_run, run="run-a")
    assert take_up(one_run, run=None)
    assert not take_up(one_run, run="run-b")
    tags = {RUN_TAG: "run-a"}
    assert s3("break-glass", "GetObject", SHARD, site=ANY_RUN, tags=tags)
    assert not s3("break-glass", "GetObject", SHARD, run="run-b", site=ANY_RUN, tags=tags)
    assert kms("break-glass", "Decrypt", site=ANY_RUN, tags=tags)


def test_each_role_is_taken_up_by_another_subject() -> None:
    site = Site(bucket="checkpoints", run="run-a", account=ACCOUNT, oidc=OIDC)
    for role, subject in OIDC.subjects.items():
        for other in ROLES:
            asked = Request(
                action="sts:AssumeRoleWithWebIdentity",
                resource=arn(other.name),
                principal=OIDC.provider,
                context={"tokens.example/ci:aud": OIDC.audience, "tokens.example/ci:sub": subject},
            )
            trust = trust_policy(other, site)
            assert trust is not None
            assert trusts(trust, asked) == (other.name == role)
    only = Oidc(provider=OIDC.provider, audience=OIDC.audience, subjects={"retention": "cron"})
    without = Site(bucket="checkpoints", run="run-a", account=ACCOUNT, oidc=only)
    assert trust_policy(definition("retention"), without) is not None
    assert trust_policy(definition("trainer-writer"), without) is None


def test_terraform_refers_to_files_that_are_written() -> None:
    site = Site(
        **{name: getattr(SITE, name) for name in SITE.__dataclass_fields__ if name != "oidc"}, oidc=OIDC
    )
    files = render_all(site)
    said = text_of(files[TERRAFORM])
    named = {part.partition("}/")[2].partition('\\"')[0] for part in said.split("file(")[1:]}
    assert named
    assert named <= set(files)
    kinds = files[TERRAFORM]["resource"]
    assert set(kinds) == {
        "aws_iam_policy",
        "aws_iam_role",
        "aws_iam_role_policy_attachment",
        "aws_kms_key_policy",
        "aws_s3_bucket_lifecycle_configuration",
        "aws_s3_bucket_object_lock_configuration",
        "aws_s3_bucket_ownership_controls",
        "aws_s3_bucket_policy",
        "aws_s3_bucket_public_access_block",
        "aws_s3_bucket_server_side_encryption_configuration",
        "aws_s3_bucket_versioning",
    }
    named = {f"{kind}.{label}" for kind, labelled in kinds.items() for label in labelled}
    after = [set(each.get("depends_on", ())) for labelled in kinds.values() for each in labelled.values()]
    assert set().union(*after) <= named
    assert len(kinds["aws_s3_bucket_policy"]["bucket"]["depends_on"]) == 6
    assert len(kinds["aws_iam_role"]) == len(ROLES)
    assert len(kinds["aws_iam_policy"]) == len(ROLES) + len(LOG_ROLES)
    assert kinds["aws_kms_key_policy"]["kms_key_2"]["key_id"] == NEXT_KEY


def test_terraform_makes_the_roles_of_the_log_where_somebody_takes_them_up() -> None:
    subjects = {role.name: f"job-{role.name}" for role in LOG_ROLES}
    oidc = Oidc(provider=OIDC.provider, audience=OIDC.audience, subjects=subjects)
    site = Site(bucket="checkpoints", audit_bucket="checkpoints-audit", account=ACCOUNT, oidc=oidc)
    files = render_all(site)
    roles = files[TERRAFORM]["resource"]["aws_iam_role"]
    assert {"audit_sequencer", "auditor_reader"} <= set(roles)
    for role in LOG_ROLES:
        trust = files[f"{role.name}.trust.json"]
        # No run, no tag.
        assert [each["Action"] for each in trust["Statement"]] == ["sts:AssumeRoleWithWebIdentity"]
        assert "Null" not in trust["Statement"][0]["Condition"]
    without = render_all(Site(bucket="checkpoints", account=ACCOUNT))
    assert "audit_sequencer" not in without[TERRAFORM]["resource"]["aws_iam_policy"]


def test_lifecycle_removes_what_was_left_and_never_what_stands() -> None:
    rules = render_all(
        Site(
            bucket="checkpoints",
            account=ACCOUNT,
            transitions=(Transition(days=90, storage_class="GLACIER_IR"),),
        )
    )["bucket.lifecycle.json"]["Rules"]
    assert rules[0]["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 1}
    assert not any("Days" in rule.get("Expiration", {}) for rule in rules)
    assert rules[2]["Transitions"] == [{"Days": 90, "StorageClass": "GLACIER_IR"}]


@pytest.mark.parametrize(
    ("members", "told"),
    (
        ({"bucket": "Upper"}, "--bucket: expected a bucket's name"),
        ({"bucket": "any*"}, "--bucket"),
        ({"prefix": "runs/*/"}, "--prefix"),
        ({"prefix": "runs"}, "--prefix"),
        ({"prefix": "/runs/"}, "--prefix"),
        ({"prefix": "runs/../"}, "--prefix"),
        ({"prefix": "${aws:username}/"}, "--prefix"),
        ({"run": "*"}, "--run"),
        ({"run": "run-?"}, "--run"),
        ({"run": "${aws:PrincipalTag/x}"}, "--run"),
        ({"run": "a/b"}, "--run"),
        ({"account": "12"}, "--account"),
        ({"kms_keys": ("alias/mine",)}, "--kms-key"),
        ({"kms_keys": (KEY.replace("1234abcd", "*"),)}, "--kms-key"),
        ({"sign_key": KEY, "kms_keys": (KEY,)}, "one key cannot do both"),
        ({"admin": "arn:aws:iam::111122223333:user/me"}, "--admin"),
        ({"role_prefix": "a*"}, "--role-prefix"),
        ({"audit_bucket": "checkpoints"}, "a bucket of its own"),
        ({"releases": "runs/out/"}, "lie in one another"),
        ({"lock_days": 0}, "--lock-days"),
        (
            {
                "transitions": (
                    Transition(days=9, storage_class="GLACIER"),
                    Transition(days=9, storage_class="GLACIER"),
                )
            },
            "each age once",
        ),
    ),
    ids=lambda value: str(value)[:50],
)
def test_a_name_that_is_none_or_would_widen_a_policy_is_refused(members: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Site(**{"bucket": "checkpoints", **members})


@pytest.mark.parametrize(
    ("members", "told"),
    (
        ({"provider": "https://tokens.example"}, "--oidc-provider"),
        ({"audience": "*"}, "--audience"),
        ({"subjects": {"retention": "repo:lab/*"}}, "--subject"),
        ({"subjects": {"retention": "a", "publisher": "a"}}, "a token of either takes up both"),
        ({"subjects": {"break-glass": "a"}}, "taken up by people"),
        ({"subjects": {"root": "a"}}, "there is no role"),
    ),
)
def test_whose_tokens_count_is_said_without_wildcards(members: Any, told: str) -> None:
    usual = {"provider": OIDC.provider, "audience": OIDC.audience, "subjects": OIDC.subjects}
    with pytest.raises(ConfigError, match=told):
        Oidc(**{**usual, **members})


def test_what_needs_an_account_says_so() -> None:
    with pytest.raises(ConfigError, match="give --account"):
        render_all(Site(bucket="checkpoints"))


# ------------------------------------------------------------------------------------------------ definitions


@given(st.text(alphabet="ab/*.", max_size=8), st.text(alphabet="ab/.", max_size=8))
def test_a_pattern_matches_as_it_does_in_a_policy(pattern: str, key: str) -> None:
    from iam_evaluator import _like

    assert matches(pattern, key) == _like(pattern, key)


def test_a_client_refuses_just_what_the_documents_do() -> None:
    """The rules of the client and the policies come from the same data; here they meet again."""
    for role in ROLES:
        for operation, action in (
            (Operation.CREATE, "PutObject"),
            (Operation.READ, "GetObject"),
            (Operation.DELETE, "DeleteObject"),
        ):
            for key in (SHARD, MANIFEST, KEYRING, NAME.commit_key, layout.RUN, layout.launch_key(1)):
                context = CREATES if operation is Operation.CREATE else {}
                by_policy = allows(
                    Request(
                        action=f"s3:{action}",
                        resource=f"arn:aws:s3:::checkpoints/runs/run-a/{key}",
                        principal=arn(role.name),
                        context=context,
                    ),
                    identity=[identity_policy(role, SITE)],
                    resource=bucket_policy(SITE),
                )
                assert role.rights.may(operation, key) == by_policy, (role.name, operation, key)


def test_there_is_no_role_of_another_name() -> None:
    with pytest.raises(ConfigError, match="there is no role 'root'; there are trainer-writer"):
        definition("root")
