"""What stands, held against what should: every gap is named, and what could not be asked is never fine."""

from __future__ import annotations

import copy
import json
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from s3_identities import ACCOUNT, REGION, Enforcing, enforcing, statement

from strongroom_security.roles import ROLES, definition
from strongroom_security.roles.comparing import Answer, Finding, compare
from strongroom_security.roles.definitions import LOG_ROLES
from strongroom_security.roles.documents import compact, identity_policy, role_settings
from strongroom_security.roles.looking import Looker
from strongroom_security.roles.policies import differences
from strongroom_security.roles.rendering import render_all
from strongroom_security.roles.site import Oidc, Site, Transition

__all__ = ["enforcing"]

KEY = f"arn:aws:kms:{REGION}:{ACCOUNT}:key/1234abcd-12ab-34cd-56ef-1234567890ab"
SITE = Site(bucket="checkpoints", kms_keys=(KEY,), audit_bucket="checkpoints-audit")
ROLE = definition("trainer-writer")


def as_rendered() -> dict[str, Any]:
    """Answers of an account in which everything stands as it was rendered."""
    files = copy.deepcopy(render_all(SITE))
    facts: dict[str, Any] = {
        f"{name} {what}": Answer(value=files[f"{name}.{what}.json"])
        for name in ("bucket", "audit-bucket")
        for what in (
            "versioning",
            "object-lock",
            "public-access-block",
            "encryption",
            "ownership",
            "lifecycle",
            "policy",
        )
    }
    facts[f"key {KEY} policy"] = Answer(value=files["kms-key.policy.json"])
    facts[f"key {KEY} state"] = Answer(value={"KeyState": "Enabled"})
    facts[f"key {KEY} grants"] = Answer(value=[])
    facts["role trainer-writer"] = Answer(
        value={**role_settings(ROLE, SITE), "AssumeRolePolicyDocument": {"Statement": []}}
    )
    facts["role trainer-writer policy"] = Answer(value=files["trainer-writer.identity.json"])
    return facts


def found(facts: dict[str, Any], *, named: bool = True) -> dict[str, Finding]:
    return {each.what: each for each in compare(SITE, [ROLE], facts, named=named)}


def test_what_stands_as_it_was_rendered_has_no_gap() -> None:
    findings = found(as_rendered())
    assert {each.verdict for each in findings.values()} == {"fine"}
    assert len(findings) == 2 * 7 + 3 + 3


LIFECYCLE_EXPIRES = {"ID": "x", "Status": "Enabled", "Filter": {"Prefix": ""}, "Expiration": {"Days": 90}}

GAPS: dict[str, tuple[str, Any, str]] = {
    "versioning was never turned on": ("bucket versioning", {}, "versioning is never turned on"),
    "versioning is suspended": ("bucket versioning", {"Status": "Suspended"}, "versioning is Suspended"),
    "no lock": ("bucket object-lock", None, "no default retention"),
    "a lock without a retention": (
        "bucket object-lock",
        {"ObjectLockEnabled": "Enabled"},
        "no default retention",
    ),
    "too short a lock": (
        "bucket object-lock",
        {"Rule": {"DefaultRetention": {"Mode": "GOVERNANCE", "Days": 1}}},
        "GOVERNANCE for 1 days",
    ),
    "an audit log that somebody may unlock": (
        "audit-bucket object-lock",
        {"Rule": {"DefaultRetention": {"Mode": "GOVERNANCE", "Years": 9}}},
        "GOVERNANCE for 3285 days",
    ),
    "public access": ("bucket public-access-block", None, "not blocked: BlockPublicAcls, BlockPublicPolicy"),
    "half of public access": (
        "bucket public-access-block",
        {"BlockPublicAcls": True, "BlockPublicPolicy": True, "IgnorePublicAcls": True},
        "not blocked: RestrictPublicBuckets",
    ),
    "no encryption": ("bucket encryption", None, "no default encryption"),
    "encryption by KMS": (
        "bucket encryption",
        {"Rules": [{"ApplyServerSideEncryptionByDefault": {"SSEAlgorithm": "aws:kms"}}]},
        "default encryption is aws:kms",
    ),
    "lists of access": (
        "bucket ownership",
        {"Rules": [{"ObjectOwnership": "ObjectWriter"}]},
        "ownership is ObjectWriter",
    ),
    "no lifecycle": ("bucket lifecycle", None, "unfinished uploads are not removed"),
    "a lifecycle for something else": (
        "bucket lifecycle",
        {
            "Rules": [
                {
                    "ID": "x",
                    "Status": "Enabled",
                    "Filter": {"Prefix": "other/"},
                    "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1},
                }
            ]
        },
        "unfinished uploads are not removed",
    ),
    "a lifecycle that is turned off": (
        "bucket lifecycle",
        {
            "Rules": [
                {
                    "ID": "x",
                    "Status": "Disabled",
                    "Filter": {"Prefix": ""},
                    "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1},
                }
            ]
        },
        "unfinished uploads are not removed",
    ),
    "a lifecycle that removes checkpoints": (
        "bucket lifecycle",
        {"Rules": [LIFECYCLE_EXPIRES]},
        "the rule 'x' expires what stands",
    ),
    "a lifecycle that removes some of them": (
        "bucket lifecycle",
        {"Rules": [{**LIFECYCLE_EXPIRES, "Filter": {"And": {"Prefix": "runs/a/", "Tags": []}}}]},
        "the rule 'x' expires what stands",
    ),
    "what is deleted is gone at once": (
        "bucket lifecycle",
        {
            "Rules": [
                {
                    "ID": "x",
                    "Status": "Enabled",
                    "Filter": {"Prefix": "runs/"},
                    "NoncurrentVersionExpiration": {"NoncurrentDays": 1},
                }
            ]
        },
        "the rule 'x' removes deleted versions after 1 days",
    ),
    "a lifecycle after which a restore takes hours": (
        "bucket lifecycle",
        {
            "Rules": [
                {
                    "ID": "x",
                    "Status": "Enabled",
                    "Filter": {"Prefix": ""},
                    "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1},
                    "Transitions": [{"Days": 1, "StorageClass": "DEEP_ARCHIVE"}],
                }
            ]
        },
        "the rule 'x' moves what stands to DEEP_ARCHIVE (after 1 days)",
    ),
    "a key that is to be deleted": (
        f"key {KEY} state",
        {"KeyState": "PendingDeletion"},
        "the key is PendingDeletion",
    ),
    "a key whose rights were given away": (
        f"key {KEY} grants",
        [{"GranteePrincipal": "arn:aws:iam::111122223333:role/dev", "Operations": ["Decrypt"]}],
        "arn:aws:iam::111122223333:role/dev (Decrypt)",
    ),
    "no bucket policy": ("bucket policy", None, "there is none"),
    "a role that is not there": ("role trainer-writer", None, "there is no role strongroom-trainer-writer"),
    "a role without policies": ("role trainer-writer policy", None, "there is none"),
}


@pytest.mark.parametrize("gap", GAPS)
def test_each_gap_is_named_with_what_to_do(gap: str) -> None:
    what, value, told = GAPS[gap]
    findings = found({**as_rendered(), what: Answer(value=value)})
    assert findings[what].verdict == "gap"
    assert told in findings[what].found
    assert findings[what].advice
    assert [each.what for each in findings.values() if each.verdict == "gap"] == [what]


def drifted(what: str, change: Callable[[list[Any]], None]) -> Finding:
    facts = as_rendered()
    change(facts[what].value["Statement"])
    return found(facts)[what]


@pytest.mark.parametrize(
    "what", ("bucket policy", "audit-bucket policy", f"key {KEY} policy", "role trainer-writer policy")
)
def test_a_policy_that_drifted_is_told_by_what_it_lacks_and_what_it_allows(what: str) -> None:
    first = as_rendered()[what].value["Statement"][0]["Sid"]
    assert drifted(what, lambda standing: standing.pop(0)).found == f"lacks {first}"

    wide = {"Effect": "Allow", "Principal": "*", "Action": "s3:GetObject", "Resource": "*"}
    assert drifted(what, lambda standing: standing.append(wide)).found == "allows besides: ['s3:GetObject']"

    def weaken(standing: list[Any]) -> None:
        standing[0]["Condition"] = {"Bool": {"aws:SecureTransport": "true"}}

    assert first in drifted(what, weaken).found
    # What is denied besides does no harm, and neither does another spelling.
    denied = {**wide, "Effect": "Deny"}
    assert drifted(what, lambda standing: standing.append(denied)).verdict == "fine"
    assert drifted(what, lambda standing: standing.reverse()).verdict == "fine"


def test_a_policy_says_the_same_however_it_is_spelled() -> None:
    one = {
        "Statement": {
            "Sid": "a",
            "Effect": "Deny",
            "Principal": {"AWS": ["*"]},
            "Action": ["s3:PutObject"],
            "Resource": ["arn:aws:s3:::b"],
            "Condition": {"Bool": {"aws:SecureTransport": [False]}},
        }
    }
    other = {
        "Statement": [
            {
                "Effect": "Deny",
                "Principal": "*",
                "Action": "S3:putobject",
                "Resource": "arn:aws:s3:::b",
                "Condition": {"Bool": {"AWS:securetransport": "false"}},
            }
        ]
    }
    assert differences(one, other) == ([], [])


@pytest.mark.parametrize("what", sorted(as_rendered()))
def test_what_could_not_be_asked_is_unknown_and_never_fine(what: str) -> None:
    for facts in (
        {**as_rendered(), what: Answer(unknown="AccessDenied: no")},
        {name: each for name, each in as_rendered().items() if name != what},
    ):
        assert found(facts)[what].verdict == "unknown"


def test_a_role_that_nobody_asked_for_and_that_is_not_there_is_no_gap() -> None:
    facts = {**as_rendered(), "role trainer-writer": Answer()}
    assert not [what for what in found(facts, named=False) if what.startswith("role")]


ISSUER = "tokens.example"
PROVIDER = {"Federated": f"arn:aws:iam::{ACCOUNT}:oidc-provider/{ISSUER}"}
AUD = {f"{ISSUER}:aud": "sts.amazonaws.com"}
SUB = {f"{ISSUER}:sub": "job"}
ROOT = {"AWS": f"arn:aws:iam::{ACCOUNT}:root"}


def by_token(**condition: Any) -> dict[str, Any]:
    return {"Principal": PROVIDER, "Action": "sts:AssumeRoleWithWebIdentity", "Condition": condition}


OPEN: dict[str, tuple[dict[str, Any], str]] = {
    "everybody": ({"Principal": "*"}, "anybody may take it up"),
    "everybody in AWS": ({"Principal": {"AWS": "*"}}, "anybody may take it up"),
    "everybody but one": ({"NotPrincipal": ROOT}, "lets in all others"),
    "another account": (
        {"Principal": {"AWS": "arn:aws:iam::999999999999:root"}},
        "the account 999999999999 may take it up",
    ),
    "another account's role": (
        {"Principal": {"AWS": "arn:aws:iam::999999999999:role/x"}},
        "the account 999999999999 may take it up",
    ),
    "another account by its number": ({"Principal": {"AWS": "999999999999"}}, "the account 999999999999"),
    "somebody who is gone": ({"Principal": {"AWS": "AROAEXAMPLE"}}, "AROAEXAMPLE may take it up"),
    "the whole account": ({"Principal": ROOT}, f"the whole account {ACCOUNT} may take it up"),
    "no subject": (by_token(StringEquals=AUD), "any token of its provider takes it up"),
    "no audience": (by_token(StringEquals=SUB), "for any audience takes it up"),
    "a subject that is like anything": (
        by_token(StringEquals=AUD, StringLike={f"{ISSUER}:sub": "*"}),
        "any token",
    ),
    "a subject that is like many": (
        by_token(StringEquals=AUD, StringLike={f"{ISSUER}:sub": ["job", "repo:lab/*"]}),
        "any token",
    ),
    "any subject but one": (
        by_token(StringEquals=AUD, StringNotEquals={f"{ISSUER}:sub": "nobody"}),
        "any token",
    ),
    "a subject that is there": (by_token(StringEquals=AUD, Null={f"{ISSUER}:sub": "false"}), "any token"),
    "a subject, if there is one": (by_token(StringEquals=AUD, StringEqualsIfExists=SUB), "any token"),
    "all subjects of none": (
        by_token(**{"StringEquals": AUD, "ForAllValues:StringEquals": SUB}),
        "any token",
    ),
    "another provider's subject": (
        by_token(StringEquals={**AUD, "other.example:sub": "job"}),
        "any token",
    ),
}


@pytest.mark.parametrize("trust", OPEN)
def test_a_role_that_anybody_takes_up_is_a_gap(trust: str) -> None:
    said, told = OPEN[trust]
    facts = as_rendered()
    statement = {"Effect": "Allow", "Action": "sts:AssumeRole", **said}
    facts["role trainer-writer"].value["AssumeRolePolicyDocument"] = {"Statement": [statement]}
    finding = found(facts)["role trainer-writer trust"]
    assert finding.verdict == "gap"
    assert told in finding.found
    assert finding.advice


@pytest.mark.parametrize(
    "trust",
    (
        by_token(StringEquals={**AUD, **SUB}),
        by_token(StringEquals={f"{ISSUER}:AUD": ["a", "b"]}, StringLike=SUB),
        {"Principal": {"AWS": f"arn:aws:iam::{ACCOUNT}:role/platform"}, "Action": "sts:AssumeRole"},
        {"Principal": ROOT, "Condition": {"Bool": {"aws:MultiFactorAuthPresent": "true"}}},
        {"Principal": {"Service": "ec2.amazonaws.com"}},
        {
            "Principal": {"Federated": f"arn:aws:iam::{ACCOUNT}:saml-provider/staff"},
            "Condition": {
                "StringEquals": {"SAML:sub": "ann", "SAML:aud": "https://signin.aws.amazon.com/saml"}
            },
        },
    ),
    ids=("a token", "one of several audiences", "a role", "a second factor", "a service", "SAML"),
)
def test_a_platforms_own_trust_that_names_who_may_is_fine(trust: dict[str, Any]) -> None:
    facts = as_rendered()
    facts["role trainer-writer"].value["AssumeRolePolicyDocument"] = {
        "Statement": {"Effect": "Allow", "Action": "sts:AssumeRole", **trust}
    }
    assert found(facts)["role trainer-writer trust"].verdict == "fine"


def test_a_permissions_boundary_is_not_looked_at_and_unknown() -> None:
    facts = as_rendered()
    arn = f"arn:aws:iam::{ACCOUNT}:policy/boundary"
    facts["role trainer-writer"].value["PermissionsBoundary"] = {"PermissionsBoundaryArn": arn}
    finding = found(facts)["role trainer-writer boundary"]
    assert finding.verdict == "unknown"
    assert arn in finding.found


def test_a_class_of_storage_that_was_asked_for_is_fine() -> None:
    site = Site(
        bucket="checkpoints", account=ACCOUNT, transitions=(Transition(days=90, storage_class="GLACIER"),)
    )
    rules = render_all(site)["bucket.lifecycle.json"]

    def look() -> str:
        facts = {"bucket lifecycle": Answer(value=rules)}
        return {each.what: each.verdict for each in compare(site, [], facts, named=True)}["bucket lifecycle"]

    assert look() == "fine"
    rules["Rules"][2]["Transitions"][0]["Days"] = 30
    assert look() == "gap"


def test_a_session_of_more_than_an_hour_is_a_gap() -> None:
    facts = as_rendered()
    facts["role trainer-writer"].value["MaxSessionDuration"] = 7200
    assert found(facts)["role trainer-writer session"].found == "a session lasts up to 7200 s"


# --------------------------------------------------------------------------------------------- a live account


@pytest.fixture
def at_server(enforcing: Enforcing, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Enforcing:
    """This process reaches the server, as its administrator."""
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    monkeypatch.delenv("AWS_SESSION_TOKEN", raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", enforcing.address)
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", enforcing.root.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", enforcing.root.secret_key)
    return enforcing


def apply(server: Enforcing, site: Site) -> None:
    """What Terraform would do."""
    files, s3, iam = render_all(site), server.client("s3"), server.client("iam")
    s3.create_bucket(Bucket=site.bucket, ObjectLockEnabledForBucket=True)
    where = {"Bucket": site.bucket}
    s3.put_bucket_versioning(**where, VersioningConfiguration=files["bucket.versioning.json"])
    s3.put_object_lock_configuration(**where, ObjectLockConfiguration=files["bucket.object-lock.json"])
    s3.put_public_access_block(
        **where, PublicAccessBlockConfiguration=files["bucket.public-access-block.json"]
    )
    s3.put_bucket_encryption(**where, ServerSideEncryptionConfiguration=files["bucket.encryption.json"])
    s3.put_bucket_ownership_controls(**where, OwnershipControls=files["bucket.ownership.json"])
    s3.put_bucket_lifecycle_configuration(**where, LifecycleConfiguration=files["bucket.lifecycle.json"])
    s3.put_bucket_policy(**where, Policy=compact(files["bucket.policy.json"]))
    for role in ROLES:
        settings = role_settings(role, site)
        iam.create_role(**settings, AssumeRolePolicyDocument=compact(files[f"{role.name}.trust.json"]))
        made = iam.create_policy(
            PolicyName=settings["RoleName"], PolicyDocument=compact(files[f"{role.name}.identity.json"])
        )
        iam.attach_role_policy(RoleName=settings["RoleName"], PolicyArn=made["Policy"]["Arn"])
    for key in site.kms_keys:
        server.client("kms").put_key_policy(
            KeyId=key, PolicyName="default", Policy=compact(files["kms-key.policy.json"])
        )


def test_an_account_is_fine_once_the_documents_stand_and_each_drift_is_seen(at_server: Enforcing) -> None:
    server = at_server
    key = str(server.client("kms").create_key()["KeyMetadata"]["Arn"])
    site = Site(
        bucket=f"live-{secrets.token_hex(6)}",
        kms_keys=(key,),
        account=ACCOUNT,
        role_prefix=f"live-{secrets.token_hex(4)}-",
        oidc=Oidc(
            provider=f"arn:aws:iam::{ACCOUNT}:oidc-provider/tokens.example",
            audience="sts.amazonaws.com",
            subjects={role.name: f"job-{role.name}" for role in ROLES if not role.needs_grant},
        ),
    )

    def look() -> dict[str, Finding]:
        facts = Looker().look(site, ROLES)
        return {each.what: each for each in compare(site, ROLES, facts, named=True)}

    before = look()
    assert {each.verdict for what, each in before.items() if what.startswith("role")} == {"gap"}
    assert {each.verdict for what, each in before.items() if what.startswith("bucket")} == {"unknown"}
    apply(server, site)
    after = look()
    assert {what: each.found for what, each in after.items() if each.verdict != "fine"} == {}
    assert len(after) == 7 + 3 + 3 * len(ROLES)

    s3, iam = server.client("s3"), server.client("iam")
    s3.put_bucket_versioning(Bucket=site.bucket, VersioningConfiguration={"Status": "Enabled"})
    s3.delete_public_access_block(Bucket=site.bucket)
    s3.delete_bucket_lifecycle(Bucket=site.bucket)
    s3.delete_bucket_policy(Bucket=site.bucket)
    for _ in range(2):
        server.client("kms").create_grant(
            KeyId=key, GranteePrincipal=f"arn:aws:iam::{ACCOUNT}:user/dev", Operations=["Decrypt"]
        )
    iam.put_role_policy(
        RoleName=f"{site.role_prefix}trainer-writer",
        PolicyName="just-for-now",
        PolicyDocument=json.dumps(
            {"Version": "2012-10-17", "Statement": [statement("s3:*", "*", Sid="JustForNow")]}
        ),
    )
    drift = {what: each.found for what, each in look().items() if each.verdict == "gap"}
    assert set(drift) == {
        "bucket public-access-block",
        "bucket lifecycle",
        "bucket policy",
        "role trainer-writer policy",
        f"key {key} grants",
    }
    assert "user/dev (Decrypt)" in drift[f"key {key} grants"]
    assert drift["role trainer-writer policy"] == "allows besides: JustForNow"


def test_who_may_not_look_is_told_what_is_unknown(
    at_server: Enforcing, monkeypatch: pytest.MonkeyPatch
) -> None:
    nobody = at_server.user()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", nobody.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", nobody.secret_key)
    site = Site(bucket=at_server.bucket(), account=ACCOUNT)
    findings = compare(site, ROLES, Looker().look(site, ROLES), named=False)
    assert {each.verdict for each in findings} == {"unknown"}
    assert len(findings) == 7 + len(ROLES)
    assert all("AccessDenied" in each.found for each in findings)


def test_an_identity_policy_is_what_the_role_is_compared_with() -> None:
    """Of the run that a role is rendered for, and not of any other."""
    facts = as_rendered()
    facts["role trainer-writer policy"] = Answer(
        value=identity_policy(ROLE, Site(bucket="checkpoints", run="run-a", kms_keys=(KEY,)))
    )
    assert "lacks Create" in found(facts)["role trainer-writer policy"].found


def test_the_roles_of_the_log_are_compared_too(at_server: Enforcing) -> None:
    site = Site(
        bucket=f"live-{secrets.token_hex(6)}",
        audit_bucket=f"live-{secrets.token_hex(6)}-audit",
        account=ACCOUNT,
        role_prefix=f"live-{secrets.token_hex(4)}-",
        oidc=Oidc(
            provider=f"arn:aws:iam::{ACCOUNT}:oidc-provider/tokens.example",
            audience="sts.amazonaws.com",
            subjects={role.name: f"job-{role.name}" for role in LOG_ROLES},
        ),
    )

    def look() -> dict[str, str]:
        found = compare(site, LOG_ROLES, Looker().look(site, LOG_ROLES), named=True)
        return {each.what: each.verdict for each in found if each.what.startswith("role")}

    assert look() == {"role audit-sequencer": "gap", "role auditor-reader": "gap"}
    files, iam = render_all(site), at_server.client("iam")
    for role in LOG_ROLES:
        settings = role_settings(role, site)
        iam.create_role(**settings, AssumeRolePolicyDocument=compact(files[f"{role.name}.trust.json"]))
        iam.put_role_policy(
            RoleName=settings["RoleName"],
            PolicyName="own",
            PolicyDocument=compact(files[f"{role.name}.identity.json"]),
        )
    assert set(look().values()) == {"fine"}
    # A reader that may write, as the sequencer may.
    iam.put_role_policy(
        RoleName=f"{site.role_prefix}auditor-reader",
        PolicyName="own",
        PolicyDocument=compact(files["audit-sequencer.identity.json"]),
    )
    assert look()["role auditor-reader policy"] == "gap"
