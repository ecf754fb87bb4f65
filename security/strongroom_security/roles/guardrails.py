"""What holds for everybody who reaches a bucket or a key, whatever their own policies allow.

Pure: from names to documents, in the form in which AWS takes them.
"""

from __future__ import annotations

from typing import Any

from strongroom_security.roles.definitions import ROLES
from strongroom_security.roles.documents import (
    KEY_USES,
    context_condition,
    policy,
    signing_condition,
)
from strongroom_security.roles.site import Site

__all__ = [
    "ENCRYPTION",
    "OWNERSHIP",
    "PUBLIC_ACCESS_BLOCK",
    "VERSIONING",
    "bucket_policy",
    "lifecycle",
    "object_lock",
    "sign_key_policy",
    "wrap_key_policy",
]

Json = dict[str, Any]

VERSIONING: Json = {"Status": "Enabled"}
PUBLIC_ACCESS_BLOCK: Json = {
    "BlockPublicAcls": True,
    "BlockPublicPolicy": True,
    "IgnorePublicAcls": True,
    "RestrictPublicBuckets": True,
}
OWNERSHIP: Json = {"Rules": [{"ObjectOwnership": "BucketOwnerEnforced"}]}
"""Access control lists count for nothing."""
ENCRYPTION: Json = {"Rules": [{"ApplyServerSideEncryptionByDefault": {"SSEAlgorithm": "AES256"}}]}
"""The bucket's own key. With one of KMS a multipart upload needs ``kms:Decrypt``, and so would a writer."""

_ADMINISTERS_BUCKET = (
    "s3:DeleteBucket",
    "s3:DeleteBucketPolicy",
    "s3:PutBucketAcl",
    "s3:PutBucketObjectLockConfiguration",
    "s3:PutBucketOwnershipControls",
    "s3:PutBucketPolicy",
    "s3:PutBucketPublicAccessBlock",
    "s3:PutBucketVersioning",
    "s3:PutEncryptionConfiguration",
    "s3:PutLifecycleConfiguration",
    "s3:PutReplicationConfiguration",
)
_ADMINISTERS_KEY = (
    "kms:CancelKeyDeletion",
    "kms:CreateAlias",
    "kms:Delete*",
    "kms:Describe*",
    "kms:Disable*",
    "kms:Enable*",
    "kms:Get*",
    "kms:List*",
    "kms:Put*",
    "kms:Revoke*",
    "kms:ScheduleKeyDeletion",
    "kms:TagResource",
    "kms:UntagResource",
    "kms:Update*",
)


def bucket_policy(site: Site, *, audit: bool = False) -> Json:
    """What is refused in a bucket, to everybody or to all but its administrator.

    Args:
        audit: of the audit log's bucket, in which nothing is deleted.

    Raises:
        ConfigError: nothing says which account.
    """
    bucket = site.bucket_arn(site.audit_bucket if audit else None)
    everything = [bucket, f"{bucket}/*"]
    # Of the log all but the tree's latest head, which is the one object that is replaced.
    folders = ("segments/", "tlog/plans/", "tlog/tile/") if audit else (site.prefix, site.releases)
    written = [f"{bucket}/{each}*" for each in folders]
    return policy(
        [
            _deny("TlsOnly", "s3:*", everything, {"Bool": {"aws:SecureTransport": "false"}}),
            # The second key leaves out what begins an upload and its parts, which create nothing yet
            # (S3 guide, "Enforce conditional writes on buckets").
            _deny(
                "NoOverwrite",
                "s3:PutObject",
                written,
                {"Bool": {"s3:ObjectCreationOperation": "true"}, "Null": {"s3:if-none-match": "true"}},
            ),
            # For its administrator too, who has to change this policy first, where everybody sees it.
            _deny(
                "NoVersionDeletes",
                [
                    "s3:BypassGovernanceRetention",
                    *(["s3:DeleteObject"] if audit else []),
                    "s3:DeleteObjectVersion",
                ],
                [f"{bucket}/*"],
            ),
            _deny(
                "AdministratorAlone",
                list(_ADMINISTERS_BUCKET),
                [bucket],
                {"ArnNotEquals": {"aws:PrincipalArn": site.admin_arn}},
            ),
        ]
    )


def lifecycle(site: Site, *, audit: bool = False) -> Json:
    """What the bucket does by itself: unfinished uploads go, and in time what was deleted.

    Args:
        audit: of the audit log's bucket, from which nothing goes.
    """
    # A role that only writes cannot list what it left unfinished.
    rules: list[Json] = [
        {
            "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1},
            "Filter": {"Prefix": ""},
            "ID": "abort-unfinished-uploads",
            "Status": "Enabled",
        }
    ]
    if not audit:
        rules.append(
            {
                "Expiration": {"ExpiredObjectDeleteMarker": True},
                "Filter": {"Prefix": site.prefix},
                "ID": "forget-deleted-checkpoints",
                "NoncurrentVersionExpiration": {"NoncurrentDays": site.undelete_days},
                "Status": "Enabled",
            }
        )
    if site.transitions and not audit:
        rules.append(
            {
                "Filter": {"Prefix": site.prefix},
                "ID": "store-older-checkpoints-cheaper",
                "Status": "Enabled",
                "Transitions": [
                    {"Days": each.days, "StorageClass": each.storage_class} for each in site.transitions
                ],
            }
        )
    return {"Rules": rules}


def object_lock(site: Site, *, audit: bool = False) -> Json:
    """For how long no version can be removed.

    Args:
        audit: of the audit log's bucket, where nobody at all can lift it.
    """
    kept = (
        {"Mode": "COMPLIANCE", "Days": site.audit_lock_days}
        if audit
        else {"Mode": "GOVERNANCE", "Days": site.lock_days}
    )
    return {"ObjectLockEnabled": "Enabled", "Rule": {"DefaultRetention": kept}}


def wrap_key_policy(site: Site) -> Json:
    """Who may use the key that wraps, for what, and never without a context that says for which run.

    It names no run: one key serves many. What it allows a role it allows without the role's own policy, so
    that the run is bound by what is denied: here whatever the session's tag contradicts, and by each role's
    identity policy whatever is not for its run. Nobody gives the key's rights away by a grant of KMS, which
    would hold beside all policies.

    Raises:
        ConfigError: nothing says which account.
    """
    bound = context_condition(site)
    named: Json = {
        "StringEquals": {
            "kms:EncryptionContext:strongroom": bound["StringEquals"]["kms:EncryptionContext:strongroom"]
        },
        "Null": {"kms:EncryptionContext:run": "false"},
        "ForAllValues:StringEquals": bound["ForAllValues:StringEquals"],
    }
    uses = list(KEY_USES)
    statements = [_administers(site), _never_by_grant()]
    for sid, actions, does in (
        ("Wrap", ["kms:Encrypt"], "wraps"),
        ("Unwrap", ["kms:Decrypt"], "unwraps"),
        ("Rewrap", ["kms:ReEncryptFrom", "kms:ReEncryptTo"], "rewraps"),
    ):
        users = [site.role_arn(role.name) for role in ROLES if getattr(role.rights, does)]
        statements.append(_let(sid, users, actions, named))
    writers = [site.role_arn(role.name) for role in ROLES if role.rights.wraps and not role.rights.unwraps]
    statements += [
        {
            "Sid": "NeverWithoutARun",
            "Effect": "Deny",
            "Principal": {"AWS": "*"},
            "Action": uses,
            "Resource": "*",
            "Condition": {"Null": {"kms:EncryptionContext:run": "true"}},
        },
        {
            "Sid": "NeverForAnotherRun",
            "Effect": "Deny",
            "Principal": {"AWS": "*"},
            "Action": uses,
            "Resource": "*",
            "Condition": {
                "Null": {"aws:PrincipalTag/strongroom-run": "false"},
                "StringNotEquals": {"kms:EncryptionContext:run": "${aws:PrincipalTag/strongroom-run}"},
            },
        },
        {
            "Sid": "WritersNeverUnwrap",
            "Effect": "Deny",
            "Principal": {"AWS": writers[0] if len(writers) == 1 else writers},
            "Action": ["kms:Decrypt", "kms:ReEncrypt*"],
            "Resource": "*",
        },
    ]
    return policy(statements)


def sign_key_policy(site: Site, *, release: bool = False) -> Json:
    """Who may sign, and who may learn the public key.

    Args:
        release: of the key for what is published.

    Raises:
        ConfigError: nothing says which account.
    """
    signers = [
        site.role_arn(role.name) for role in ROLES if (role.releases if release else role.rights.signs)
    ]
    readers = [site.role_arn(role.name) for role in ROLES if role.rights.signs or role.rights.read]
    return policy(
        [
            _administers(site),
            _never_by_grant(),
            _let("Sign", signers, ["kms:Sign"], signing_condition()),
            _let("Verify", readers, ["kms:GetPublicKey"]),
        ]
    )


def _administers(site: Site) -> Json:
    # The account itself as well: a key whose only administrator was removed is lost.
    account = f"arn:{site.partition}:iam::{site.known_account}:root"
    return _let("Administer", sorted({account, site.admin_arn}), list(_ADMINISTERS_KEY))


def _never_by_grant() -> Json:
    # Not even to the services of AWS: none uses these keys.
    return {
        "Sid": "NeverByGrant",
        "Effect": "Deny",
        "Principal": {"AWS": "*"},
        "Action": ["kms:CreateGrant"],
        "Resource": "*",
    }


def _let(sid: str, principals: list[str], actions: list[str], condition: Json | None = None) -> Json:
    statement: Json = {
        "Sid": sid,
        "Effect": "Allow",
        "Principal": {"AWS": principals[0] if len(principals) == 1 else principals},
        "Action": actions[0] if len(actions) == 1 else actions,
        "Resource": "*",
    }
    return statement if condition is None else {**statement, "Condition": condition}


def _deny(sid: str, actions: str | list[str], resources: list[str], condition: Json | None = None) -> Json:
    statement: Json = {
        "Sid": sid,
        "Effect": "Deny",
        "Principal": "*",
        "Action": actions,
        "Resource": resources[0] if len(resources) == 1 else resources,
    }
    return statement if condition is None else {**statement, "Condition": condition}
