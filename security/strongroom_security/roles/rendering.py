"""All documents of a site, each as a file of a stable name; and Terraform's, which refers to them.

Pure: what is written is the same, byte for byte, for the same arguments, so that a review sees what changed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from strongroom_security.roles import guardrails
from strongroom_security.roles.definitions import LOG_ROLES, ROLES, Definition, LogRole
from strongroom_security.roles.documents import (
    SESSION_S,
    policy_of,
    role_settings,
    session_policy,
    trust_policy,
)
from strongroom_security.roles.site import Site

__all__ = ["TERRAFORM", "render_all", "render_role", "text_of"]

TERRAFORM: Final = "main.tf.json"

Json = dict[str, Any]


def text_of(document: Json) -> str:
    """A document as its file has it: for reviewers."""
    return json.dumps(document, indent=2, ensure_ascii=True, allow_nan=False) + "\n"


def render_role(role: Definition | LogRole, site: Site) -> dict[str, Json]:
    """The documents of one role, of runs or of the log: file's name -> document.

    Raises:
        ConfigError: a document would be longer than AWS takes, or nothing says which account.
    """
    files = {
        f"{role.name}.identity.json": policy_of(role, site),
        f"{role.name}.role.json": role_settings(role, site),
    }
    if site.run is not None and isinstance(role, Definition):
        files[f"{role.name}.session.json"] = session_policy(role, site)
    if isinstance(role, LogRole) or not role.needs_grant or site.account is not None:
        trust = trust_policy(role, site)
        if trust is not None:
            files[f"{role.name}.trust.json"] = trust
    return files


def render_all(site: Site, roles: Sequence[Definition] = ROLES) -> dict[str, Json]:
    """Every document: of each role, the buckets and the keys, and Terraform's.

    Raises:
        ConfigError: as `render_role`.
    """
    files: dict[str, Json] = {}
    for role in roles:
        files |= render_role(role, site)
    files |= _bucket_files(site, "bucket")
    if site.audit_bucket is not None:
        files |= _bucket_files(site, "audit-bucket", audit=True)
        for each in LOG_ROLES:
            files |= render_role(each, site)
    if site.kms_keys:
        files["kms-key.policy.json"] = guardrails.wrap_key_policy(site)
    if site.sign_key is not None:
        files["sign-key.policy.json"] = guardrails.sign_key_policy(site)
    if site.release_key is not None:
        files["release-key.policy.json"] = guardrails.sign_key_policy(site, release=True)
    files[TERRAFORM] = _terraform(site, roles, files)
    return files


def _bucket_files(site: Site, name: str, *, audit: bool = False) -> dict[str, Json]:
    return {
        f"{name}.policy.json": guardrails.bucket_policy(site, audit=audit),
        f"{name}.lifecycle.json": guardrails.lifecycle(site, audit=audit),
        f"{name}.object-lock.json": guardrails.object_lock(site, audit=audit),
        f"{name}.public-access-block.json": guardrails.PUBLIC_ACCESS_BLOCK,
        f"{name}.versioning.json": guardrails.VERSIONING,
        f"{name}.encryption.json": guardrails.ENCRYPTION,
        f"{name}.ownership.json": guardrails.OWNERSHIP,
    }


# -------------------------------------------------------------------------------------------------- Terraform


def _terraform(site: Site, roles: Sequence[Definition], files: dict[str, Json]) -> Json:
    resources: dict[str, Json] = {}

    def add(kind: str, label: str, **members: Any) -> None:
        resources.setdefault(kind, {})[label] = members

    for role in (*roles, *(LOG_ROLES if site.audit_bucket is not None else ())):
        label = role.name.replace("-", "_")
        name = f"{site.role_prefix}{role.name}"
        add(
            "aws_iam_policy",
            label,
            name=name,
            description=role_settings(role, site)["Description"],
            policy=_file(f"{role.name}.identity.json"),
        )
        if f"{role.name}.trust.json" in files:
            add(
                "aws_iam_role",
                label,
                name=name,
                max_session_duration=SESSION_S,
                assume_role_policy=_file(f"{role.name}.trust.json"),
            )
            add(
                "aws_iam_role_policy_attachment",
                label,
                role=f"${{aws_iam_role.{label}.name}}",
                policy_arn=f"${{aws_iam_policy.{label}.arn}}",
            )
    _bucket_resources(add, site, "bucket", site.bucket)
    if site.audit_bucket is not None:
        _bucket_resources(add, site, "audit-bucket", site.audit_bucket, audit=True)
    # A key's policy that names a role is refused before that role is there.
    made = [f"aws_iam_role.{label}" for label in resources.get("aws_iam_role", {})]
    after_roles = {"depends_on": made} if made else {}
    for name, keys in (
        ("kms-key", site.kms_keys),
        ("sign-key", () if site.sign_key is None else (site.sign_key,)),
        ("release-key", () if site.release_key is None else (site.release_key,)),
    ):
        for number, key in enumerate(keys, 1):
            label = name.replace("-", "_") + ("" if number == 1 else f"_{number}")
            add("aws_kms_key_policy", label, key_id=key, policy=_file(f"{name}.policy.json"), **after_roles)
    return {
        "resource": {kind: resources[kind] for kind in sorted(resources)},
        "terraform": {"required_providers": {"aws": {"source": "hashicorp/aws", "version": ">= 5.40"}}},
    }


def _bucket_resources(add: Any, site: Site, name: str, bucket: str, *, audit: bool = False) -> None:
    label = name.replace("-", "_")
    add("aws_s3_bucket_versioning", label, bucket=bucket, versioning_configuration=[{"status": "Enabled"}])
    add(
        "aws_s3_bucket_public_access_block",
        label,
        bucket=bucket,
        block_public_acls=True,
        block_public_policy=True,
        ignore_public_acls=True,
        restrict_public_buckets=True,
    )
    add(
        "aws_s3_bucket_ownership_controls",
        label,
        bucket=bucket,
        rule=[{"object_ownership": "BucketOwnerEnforced"}],
    )
    add(
        "aws_s3_bucket_server_side_encryption_configuration",
        label,
        bucket=bucket,
        rule=[{"apply_server_side_encryption_by_default": [{"sse_algorithm": "AES256"}]}],
    )
    kept = guardrails.object_lock(site, audit=audit)["Rule"]["DefaultRetention"]
    add(
        "aws_s3_bucket_object_lock_configuration",
        label,
        bucket=bucket,
        rule=[{"default_retention": [{"mode": kept["Mode"], "days": kept["Days"]}]}],
        depends_on=[f"aws_s3_bucket_versioning.{label}"],
    )
    rules = guardrails.lifecycle(site, audit=audit)["Rules"]
    add(
        "aws_s3_bucket_lifecycle_configuration",
        label,
        bucket=bucket,
        rule=[_lifecycle_rule(each) for each in rules],
        depends_on=[f"aws_s3_bucket_versioning.{label}"],
    )
    add(
        "aws_s3_bucket_policy",
        label,
        bucket=bucket,
        policy=_file(f"{name}.policy.json"),
        # Last: from then on the administrator alone changes the rest.
        depends_on=[
            f"aws_s3_bucket_{each}.{label}"
            for each in (
                "lifecycle_configuration",
                "object_lock_configuration",
                "ownership_controls",
                "public_access_block",
                "server_side_encryption_configuration",
                "versioning",
            )
        ],
    )


def _lifecycle_rule(rule: Json) -> Json:
    said: Json = {
        "id": rule["ID"],
        "status": rule["Status"],
        "filter": [{"prefix": rule["Filter"]["Prefix"]}],
    }
    if "AbortIncompleteMultipartUpload" in rule:
        days = rule["AbortIncompleteMultipartUpload"]["DaysAfterInitiation"]
        said["abort_incomplete_multipart_upload"] = [{"days_after_initiation": days}]
    if "Expiration" in rule:
        said["expiration"] = [{"expired_object_delete_marker": True}]
    if "NoncurrentVersionExpiration" in rule:
        days = rule["NoncurrentVersionExpiration"]["NoncurrentDays"]
        said["noncurrent_version_expiration"] = [{"noncurrent_days": days}]
    if "Transitions" in rule:
        said["transition"] = [
            {"days": each["Days"], "storage_class": each["StorageClass"]} for each in rule["Transitions"]
        ]
    return said


def _file(name: str) -> str:
    return f'${{file("${{path.module}}/{name}")}}'
