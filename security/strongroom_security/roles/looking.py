"""Asks AWS how a bucket, keys and roles stand. It only reads, and judges nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import unquote

from strongroom_security import aws
from strongroom_security.roles.comparing import Answer
from strongroom_security.roles.definitions import Definition, LogRole
from strongroom_security.roles.site import Site

__all__ = ["Looker"]

_WHOM: Final = "strongroom roles check"
_CONNECT_S: Final = 5.0
_READ_S: Final = 15.0
_TRIES: Final = 4

_ABSENT: Final = frozenset(
    {
        "NoSuchBucketPolicy",
        "NoSuchEntity",
        "NoSuchLifecycleConfiguration",
        "NoSuchPublicAccessBlockConfiguration",
        "ObjectLockConfigurationNotFoundError",
        "OwnershipControlsNotFoundError",
        "ServerSideEncryptionConfigurationNotFoundError",
    }
)
"""What S3 and IAM answer where there is no such thing (their API references)."""

_OF_A_BUCKET: Final = {
    "versioning": ("get_bucket_versioning", None),
    "object-lock": ("get_object_lock_configuration", "ObjectLockConfiguration"),
    "public-access-block": ("get_public_access_block", "PublicAccessBlockConfiguration"),
    "encryption": ("get_bucket_encryption", "ServerSideEncryptionConfiguration"),
    "ownership": ("get_bucket_ownership_controls", "OwnershipControls"),
    "lifecycle": ("get_bucket_lifecycle_configuration", None),
    "policy": ("get_bucket_policy", "Policy"),
}
"""Each question: the operation, and the member of its answer; None: the answer itself."""


class Looker:
    """Asks by one identity.

    Args:
        profile: whose credentials; None: those that boto3 finds in this process.

    Raises:
        ConfigError: boto3 is not installed, or there is no such profile.
    """

    def __init__(self, *, profile: str | None = None) -> None:
        self._session = aws.new_session(whom=_WHOM, profile=profile)

    def look(self, site: Site, roles: Sequence[Definition | LogRole]) -> dict[str, Answer]:
        """Every answer, by the names of `strongroom_security.roles.comparing.Facts`."""
        facts: dict[str, Answer] = {}
        s3 = self._client("s3")
        for name, bucket in (("bucket", site.bucket), ("audit-bucket", site.audit_bucket)):
            if bucket is not None:
                for what, (operation, member) in _OF_A_BUCKET.items():
                    answer = _ask(s3, operation, {"Bucket": bucket}, member)
                    facts[f"{name} {what}"] = _parsed(answer) if what == "policy" else answer
        for key in (*site.kms_keys, site.sign_key, site.release_key):
            if key is not None:
                kms = self._client("kms", region=key.split(":")[3])
                asked = {"KeyId": key, "PolicyName": "default"}
                facts[f"key {key} policy"] = _parsed(_ask(kms, "get_key_policy", asked, "Policy"))
                facts[f"key {key} state"] = _ask(kms, "describe_key", {"KeyId": key}, "KeyMetadata")
                facts[f"key {key} grants"] = _listed(kms, "list_grants", {"KeyId": key}, "Grants")
        iam = self._client("iam")
        for role in roles:
            name = f"{site.role_prefix}{role.name}"
            found = _ask(iam, "get_role", {"RoleName": name}, "Role")
            if found.value is not None:
                trust = _document(found.value.get("AssumeRolePolicyDocument"))
                found = Answer(value={**found.value, "AssumeRolePolicyDocument": trust})
                facts[f"role {role.name} policy"] = _policies(iam, name)
            facts[f"role {role.name}"] = found
        return facts

    def _client(self, service: str, *, region: str | None = None) -> Any:
        return aws.client(
            self._session,
            service,
            whom=_WHOM,
            connect_s=_CONNECT_S,
            read_s=_READ_S,
            region=region,
        )


def _ask(client: Any, operation: str, parameters: Mapping[str, Any], member: str | None) -> Answer:
    answer, failure = aws.repeatedly(getattr(client, operation), parameters, whom=_WHOM, tries=_TRIES)
    if failure is None:
        return Answer(value=answer.get(member) if member is not None else answer)
    return Answer() if failure.code in _ABSENT else Answer(unknown=f"{operation}: {failure.reason}")


def _policies(iam: Any, name: str) -> Answer:
    """All that a role's policies say together, as one document."""
    statements: list[Any] = []
    inline = _listed(iam, "list_role_policies", {"RoleName": name}, "PolicyNames")
    attached = _listed(iam, "list_attached_role_policies", {"RoleName": name}, "AttachedPolicies")
    for listed in (inline, attached):
        if listed.unknown is not None:
            return listed
    documents = [
        _ask(iam, "get_role_policy", {"RoleName": name, "PolicyName": each}, "PolicyDocument")
        for each in inline.value
    ]
    for each in attached.value:
        policy = _ask(iam, "get_policy", {"PolicyArn": each["PolicyArn"]}, "Policy")
        if policy.value is None:
            return policy if policy.unknown is not None else Answer(unknown="a policy went while it was read")
        asked = {"PolicyArn": each["PolicyArn"], "VersionId": policy.value["DefaultVersionId"]}
        version = _ask(iam, "get_policy_version", asked, "PolicyVersion")
        documents.append(version if version.value is None else Answer(value=version.value["Document"]))
    for document in documents:
        if document.value is None:
            return Answer(unknown=document.unknown or "a policy went while it was read")
        said = _document(document.value).get("Statement", [])
        statements += said if isinstance(said, list) else [said]
    return Answer(value={"Statement": statements} if documents else None)


def _listed(client: Any, operation: str, parameters: Mapping[str, Any], member: str) -> Answer:
    """All pages of a list, as IAM and KMS each spell them."""
    found: list[Any] = []
    more: dict[str, Any] = {}
    while True:
        answer = _ask(client, operation, {**parameters, **more}, None)
        if answer.value is None:
            return answer if answer.unknown is not None else Answer(unknown="it went while it was read")
        found += answer.value.get(member, [])
        if not (answer.value.get("IsTruncated") or answer.value.get("Truncated")):
            return Answer(value=found)
        marker = answer.value.get("Marker") or answer.value.get("NextMarker")
        if not marker:
            return Answer(unknown=f"{operation}: there is more, and nothing says how to ask for it")
        more = {"Marker": marker}


def _parsed(answer: Answer) -> Answer:
    if answer.value is None:
        return answer
    try:
        return Answer(value=_document(answer.value))
    except ValueError:
        return Answer(unknown="the policy is not JSON")


def _document(value: Any) -> Any:
    """A policy, which boto3 hands over as an object and some services as its text."""
    if not isinstance(value, str):
        return value
    return json.loads(value if value.lstrip().startswith("{") else unquote(value))
