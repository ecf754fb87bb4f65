"""The policies of AWS that a role comes to: its identity's, one run's session's, and who may take it up.

Pure: from definitions and names to documents. Encryption contexts are as `strongroom_security.fields.Context`
spells them, and the calls of the key service those that recipients and signers make. What holds for everybody
is `strongroom_security.roles.guardrails`'.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from strongroom import canonical
from strongroom.errors import ConfigError
from strongroom.roles import Duty
from strongroom_security.fields import Context
from strongroom_security.roles.definitions import Definition, LogRole, Rights
from strongroom_security.roles.site import RUN_TAG, Site

__all__ = [
    "CONTEXT_KEYS",
    "KEY_USES",
    "MAX_IDENTITY_CHARS",
    "MAX_SESSION_CHARS",
    "SESSION_S",
    "compact",
    "context_condition",
    "identity_policy",
    "log_policy",
    "policy",
    "policy_of",
    "role_settings",
    "session_policy",
    "signing_condition",
    "trust_policy",
]

SESSION_S: Final = 3600
"""The longest session of a role: one hour."""

MAX_SESSION_CHARS: Final = 2048
"""Of a session policy (AWS STS API reference, AssumeRole)."""
MAX_IDENTITY_CHARS: Final = 6144
"""Of a managed policy (IAM quotas)."""

CONTEXT_KEYS: Final = tuple(
    Context(run="r", launch=1, step=0, attempt="0" * 16, path="00000-00.safetensors").pairs()
)
"""The names in an encryption context, as they are sent."""

KEY_USES: Final = ("kms:Decrypt", "kms:Encrypt", "kms:GenerateDataKey*", "kms:ReEncrypt*")
"""Everything that a key which wraps can be asked for in the name of a context."""

_VERSION: Final = Context(run="r", launch=1, step=0, attempt="0" * 16).pairs()["strongroom"]

_SEGMENTS: Final = "segments"
_NO_RUN: Final = "_"
"""Where segments are, as `strongroom_security.auditlog.format.lines.segment_key` spells it."""

Json = dict[str, Any]


def policy(statements: Sequence[Json]) -> Json:
    """Statements as a policy."""
    return {"Version": "2012-10-17", "Statement": list(statements)}


def compact(document: Json) -> str:
    """A policy's text as it is sent: without spaces, which some servers do not decode in a form."""
    return canonical.encode(document).decode("utf-8")


def identity_policy(role: Definition, site: Site) -> Json:
    """What a role's identity may do, and what it may not whatever else it is given.

    Raises:
        ConfigError: it is longer than IAM takes.
    """
    rights = role.rights
    keys = _keys(rights, site, wraps=site.kms_keys, signs=_signs(role, rights, site))
    statements = [*_storage(role, rights, site), *keys, *_never(role, site)]
    return _short_enough(policy(statements), MAX_IDENTITY_CHARS, f"the identity policy of {role.name}")


def policy_of(role: Definition | LogRole, site: Site) -> Json:
    """`identity_policy`, or `log_policy`."""
    return log_policy(role, site) if isinstance(role, LogRole) else identity_policy(role, site)


def log_policy(role: LogRole, site: Site) -> Json:
    """What the identity of one of the log's roles may do: in the log's bucket, and nothing with checkpoints.

    Raises:
        ConfigError: no bucket of the log is named, or the policy is longer than IAM takes.
    """
    if site.audit_bucket is None:
        raise ConfigError(f"the role {role.name} is of the audit log; give --audit-bucket")
    log = site.bucket_arn(site.audit_bucket)
    never = ["s3:BypassGovernanceRetention", "s3:DeleteObject", "s3:DeleteObjectVersion", "s3:PutObjectAcl"]
    statements = [
        _allow("Read", "s3:GetObject", [f"{log}/*"]),
        _allow("List", "s3:ListBucket", [log]),
        {
            "Sid": "Never",
            "Effect": "Deny",
            "Action": sorted(never if role.create else [*never, "s3:PutObject"]),
            "Resource": f"{log}/*",
        },
        {
            "Sid": "NoCheckpoints",
            "Effect": "Deny",
            "Action": "s3:*",
            "Resource": [site.bucket_arn(), f"{site.bucket_arn()}/*"],
        },
    ]
    if role.create:
        statements.insert(0, _allow("Create", "s3:PutObject", [f"{log}/{each}" for each in role.create]))
    return _short_enough(policy(statements), MAX_IDENTITY_CHARS, f"the identity policy of {role.name}")


def session_policy(
    role: Definition, site: Site, duty: Duty | None = None, *, ends_at: str | None = None
) -> Json:
    """What narrows a session to one run, however broad the role that is taken up: to allow, both have to.

    Args:
        duty: what the session is for; None: for all that the role does.
        ends_at: from when on it allows nothing, as ``2026-11-30T10:00:00Z``; None: it ends with the session.

    Raises:
        ConfigError: no run is named, or it is longer than STS takes.
    """
    if site.run is None:
        raise ConfigError("a session policy is for one run; give --run")
    rights = role.rights if duty is None else role.of(duty)
    allowed = [*_storage(role, rights, site), *_session_keys(role, rights, site)]
    statements = [{name: each for name, each in one.items() if name != "Sid"} for one in allowed]
    if ends_at is not None:
        ends = {"DateLessThan": {"aws:CurrentTime": ends_at}}
        statements = [{**each, "Condition": {**each.get("Condition", {}), **ends}} for each in statements]
    return _short_enough(policy(statements), MAX_SESSION_CHARS, f"the session policy of {role.name}")


def trust_policy(role: Definition | LogRole, site: Site) -> Json | None:
    """Who may take a role up; None: that is the platform's to say.

    Raises:
        ConfigError: nothing says which account.
    """
    if isinstance(role, Definition) and role.needs_grant:
        # People, each with a second factor that is fresh. Whose grant it is, the client holds them to.
        people = {"AWS": f"arn:{site.partition}:iam::{site.known_account}:root"}
        factor: Json = {
            "Bool": {"aws:MultiFactorAuthPresent": "true"},
            "NumericLessThan": {"aws:MultiFactorAuthAge": str(SESSION_S)},
        }
        # A client tags the session with the grant's run (`strongroom_security.roles.credentials`).
        return policy(
            _taken_up("PeopleWithASecondFactor", people, "sts:AssumeRole", factor, site, is_tagged=True)
        )
    subject = None if site.oidc is None else site.oidc.subjects.get(role.name)
    if site.oidc is None or subject is None:
        return None
    issuer = site.oidc.issuer
    condition: Json = {"StringEquals": {f"{issuer}:aud": site.oidc.audience, f"{issuer}:sub": subject}}
    action, job = "sts:AssumeRoleWithWebIdentity", {"Federated": site.oidc.provider}
    # What is of the log is of no run, and goes by no tag.
    is_tagged = site.run is None and isinstance(role, Definition)
    return policy(_taken_up("OneJobByItsToken", job, action, condition, site, is_tagged=is_tagged))


def _taken_up(
    sid: str, principal: Json, action: str, condition: Json, site: Site, *, is_tagged: bool
) -> list[Json]:
    """Who may take a role up under which conditions; and with which tag, where sessions have one."""
    taken_up: Json = {
        "Sid": sid,
        "Effect": "Allow",
        "Principal": principal,
        "Action": action,
        "Condition": condition,
    }
    if not is_tagged:
        return [taken_up]
    tag = f"aws:RequestTag/{RUN_TAG}"
    if site.run is None:
        # The policies go by the tag. A session without one could do nothing, and is refused to begin with.
        taken_up["Condition"] = {**condition, "Null": {tag: "false"}}
        tagged: Json = condition
    else:
        tagged = {**condition, "StringEquals": {**condition.get("StringEquals", {}), tag: site.run}}
    return [
        taken_up,
        {
            "Sid": "TaggedWithItsRun",
            "Effect": "Allow",
            "Principal": principal,
            "Action": "sts:TagSession",
            "Condition": {**tagged, "ForAllValues:StringEquals": {"aws:TagKeys": [RUN_TAG]}},
        },
    ]


def role_settings(role: Definition | LogRole, site: Site) -> Json:
    """How a role stands in IAM, but for its policies."""
    return {
        "Description": f"Strongroom: {role.does}",
        "MaxSessionDuration": SESSION_S,
        "RoleName": f"{site.role_prefix}{role.name}",
    }


# ---------------------------------------------------------------------------------------------------- storage


def _storage(role: Definition, rights: Rights, site: Site) -> list[Json]:
    run = f"{site.bucket_arn()}/{site.prefix}{site.run_or_tag}/"
    statements: list[Json] = []
    if rights.create:
        # CreateMultipartUpload, UploadPart and CompleteMultipartUpload are PutObject's, too.
        statements.append(_allow("Create", "s3:PutObject", [run + each for each in rights.create]))
        if "*" in rights.create:
            actions = ["s3:AbortMultipartUpload", "s3:ListMultipartUploadParts"]
            statements.append(_allow("ResumeUploads", actions, [f"{run}*"]))
    if rights.read:
        statements.append(_allow("Read", "s3:GetObject", [run + each for each in rights.read]))
    if rights.delete:
        # In a versioned bucket it puts a marker in front of the versions, and removes none.
        statements.append(
            _allow(
                "Delete",
                ["s3:DeleteObject", "s3:AbortMultipartUpload"],
                [run + each for each in rights.delete],
            )
        )
    if rights.lists:
        statements.append(
            _allow(
                "List",
                "s3:ListBucket",
                [site.bucket_arn()],
                {"StringLike": {"s3:prefix": f"{site.prefix}{site.run_or_tag}/*"}},
            )
        )
        if rights.delete:
            # S3 has no condition on the prefix for it: who clears away what was left unfinished sees names
            # of other runs' unfinished uploads, too.
            statements.append(_allow("ListUploads", "s3:ListBucketMultipartUploads", [site.bucket_arn()]))
    if role.releases:
        released = f"{site.bucket_arn()}/{site.releases}{site.run_or_tag}/*"
        statements.append(_allow("Publish", ["s3:PutObject", "s3:AbortMultipartUpload"], [released]))
    if role.audits and site.audit_bucket is not None:
        # What is about no run, as a list of several, goes beside what is about this one.
        log = f"{site.bucket_arn(site.audit_bucket)}/{_SEGMENTS}"
        statements.append(
            _allow("Audit", "s3:PutObject", [f"{log}/{site.run_or_tag}/*", f"{log}/{_NO_RUN}/*"])
        )
    return statements


def _never(role: Definition, site: Site) -> list[Json]:
    """What the role must not do in these buckets and by these keys, whatever another policy gives it."""
    rights = role.rights
    actions = ["s3:BypassGovernanceRetention", "s3:DeleteObjectVersion", "s3:PutObjectAcl"]
    if not rights.create and not role.releases:
        actions.append("s3:PutObject")
    if not rights.read:
        actions += ["s3:GetObject", "s3:GetObjectVersion"]
    if not rights.delete:
        actions.append("s3:DeleteObject")
    if not rights.lists:
        actions += ["s3:ListBucket", "s3:ListBucketVersions"]
    if not rights.delete:
        actions.append("s3:ListBucketMultipartUploads")
    statements = [
        {
            "Sid": "Never",
            "Effect": "Deny",
            "Action": sorted(actions),
            "Resource": [site.bucket_arn(), f"{site.bucket_arn()}/*"],
        }
    ]
    denied = [
        action
        for action, is_used in (
            ("kms:Decrypt", rights.unwraps),
            ("kms:Encrypt", rights.wraps),
            ("kms:ReEncrypt*", rights.rewraps),
        )
        if not is_used
    ]
    if site.kms_keys and denied:
        statements.append(
            {
                "Sid": "NeverByTheKey",
                "Effect": "Deny",
                "Action": denied,
                "Resource": _one_or_all(list(site.kms_keys)),
            }
        )
    if site.kms_keys and (rights.wraps or rights.unwraps or rights.rewraps):
        statements += _never_for_another_run(site)
    return statements


def _never_for_another_run(site: Site) -> list[Json]:
    """A key's policy that names a role is enough without the role's own, so that this has to deny."""
    named = "kms:EncryptionContext:run"
    conditions: dict[str, Json] = {
        "NeverForAnotherRun": {"StringNotEquals": {named: site.run_or_tag}},
        "NeverWithoutARun": {"Null": {named: "true"}},
    }
    if site.run is None:
        # With a variable that is not there AWS takes the first of these for no statement at all.
        conditions["NeverWithoutATag"] = {"Null": {f"aws:PrincipalTag/{RUN_TAG}": "true"}}
    return [
        {
            "Sid": sid,
            "Effect": "Deny",
            "Action": list(KEY_USES),
            "Resource": _one_or_all(list(site.kms_keys)),
            "Condition": condition,
        }
        for sid, condition in conditions.items()
    ]


# ----------------------------------------------------------------------------------------------- key services


def context_condition(site: Site) -> Json:
    """What an encryption context has to be: one run's, and of the names that are sent."""
    return {
        "StringEquals": {
            "kms:EncryptionContext:run": site.run_or_tag,
            "kms:EncryptionContext:strongroom": _VERSION,
        },
        "ForAllValues:StringEquals": {"kms:EncryptionContextKeys": sorted(CONTEXT_KEYS)},
    }


def signing_condition() -> Json:
    """How the signers here sign: a hash, by ECDSA."""
    return {
        "StringEquals": {
            "kms:MessageType": "DIGEST",
            "kms:SigningAlgorithm": ["ECDSA_SHA_256", "ECDSA_SHA_384"],
        }
    }


def _signs(role: Definition, rights: Rights, site: Site) -> tuple[str, ...]:
    keys = ((site.sign_key, rights.signs), (site.release_key, role.releases))
    return tuple(key for key, is_used in keys if key is not None and is_used)


def _keys(
    rights: Rights, site: Site, *, wraps: tuple[str, ...], signs: tuple[str, ...], verifies: str | None = None
) -> list[Json]:
    statements = []
    used = [
        *(["kms:Decrypt"] if rights.unwraps else []),
        *(["kms:Encrypt"] if rights.wraps else []),
        *(["kms:ReEncryptFrom", "kms:ReEncryptTo"] if rights.rewraps else []),
    ]
    if used and wraps:
        statements.append(_allow("Keys", _one_or_all(used), list(wraps), context_condition(site)))
    if signs:
        statements.append(_allow("Sign", "kms:Sign", list(signs), signing_condition()))
    # Whoever reads verifies, and whoever signs asks which key it is that signs.
    asked = {key: None for key in (verifies or site.sign_key,) if key is not None and rights.read}
    asked |= dict.fromkeys(signs)
    if asked:
        statements.append(_allow("PublicKeys", "kms:GetPublicKey", list(asked)))
    return statements


def _session_keys(role: Definition, rights: Rights, site: Site) -> list[Json]:
    """By which keys, and how, is the identity policy's to say: a session is narrowed to the run's context."""
    signs = ("*",) if rights.signs or role.releases else ()
    statements = _keys(rights, site, wraps=("*",), signs=signs, verifies="*")
    for statement in statements:
        condition = statement.pop("Condition", {})
        if "kms:EncryptionContext:run" in condition.get("StringEquals", {}):
            statement["Condition"] = {"StringEquals": {"kms:EncryptionContext:run": site.run_or_tag}}
    return statements


def _allow(sid: str, actions: str | list[str], resources: list[str], condition: Json | None = None) -> Json:
    statement: Json = {
        "Sid": sid,
        "Effect": "Allow",
        "Action": actions,
        "Resource": _one_or_all(resources),
    }
    return statement if condition is None else {**statement, "Condition": condition}


def _one_or_all(names: list[str]) -> str | list[str]:
    return names[0] if len(names) == 1 else names


def _short_enough(document: Json, most: int, what: str) -> Json:
    length = len(compact(document))
    if length > most:
        raise ConfigError(
            f"{what} has {length} characters, and AWS takes {most}; shorten --run, --prefix or --bucket"
        )
    return document
