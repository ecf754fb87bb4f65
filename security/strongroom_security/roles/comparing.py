"""What stands, held against what should: every difference named, with what to do about it.

Pure. What could not be asked is ``unknown``, and never fine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

from strongroom_security.roles import guardrails
from strongroom_security.roles.definitions import Definition, LogRole
from strongroom_security.roles.documents import SESSION_S, policy_of, trust_policy
from strongroom_security.roles.policies import differences
from strongroom_security.roles.site import Site
from strongroom_security.roles.trusting import gap_of_trust

__all__ = ["Answer", "Facts", "Finding", "Verdict", "compare"]

Json = Any
Verdict = Literal["fine", "gap", "unknown"]

_ASLEEP: Final = ("GLACIER", "DEEP_ARCHIVE")
"""Classes of storage out of which an object has to be restored before it can be read."""

_RENDERED: Final = "put the document of 'strongroom roles render' in its place"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one question came to.

    Attributes:
        value: the answer; None: there is no such thing.
        unknown: why there was no answer; None: there was.
    """

    value: Json = None
    unknown: str | None = None


Facts = Mapping[str, Answer]
"""Answers by what was asked, as ``bucket versioning`` or ``role retention``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        what: which.
        found: how it stands.
        advice: what to do; empty where it is fine.
    """

    verdict: Verdict
    what: str
    found: str
    advice: str = ""

    def to_json(self) -> dict[str, str]:
        return {"verdict": self.verdict, "what": self.what, "found": self.found, "advice": self.advice}


def compare(site: Site, roles: Sequence[Definition | LogRole], facts: Facts, *, named: bool) -> list[Finding]:
    """Everything that was looked at, in a fixed order.

    Args:
        roles: those that were looked at.
        facts: the answers, by `Facts`' names.
        named: the roles were asked for, so that one that is not there is a gap.

    Raises:
        ConfigError: nothing says which account.
    """
    findings = _bucket(site, facts, "bucket")
    if site.audit_bucket is not None:
        findings += _bucket(site, facts, "audit-bucket", audit=True)
    keys = [(key, guardrails.wrap_key_policy(site)) for key in site.kms_keys]
    if site.sign_key is not None:
        keys.append((site.sign_key, guardrails.sign_key_policy(site)))
    if site.release_key is not None:
        keys.append((site.release_key, guardrails.sign_key_policy(site, release=True)))
    for key, expected in keys:
        findings += [
            _judge(f"key {key} policy", facts, partial(_policy_of, expected)),
            _judge(f"key {key} state", facts, _key_state),
            _judge(f"key {key} grants", facts, _key_grants),
        ]
    for role in roles:
        findings += _role(site, role, facts, named)
    return findings


def _judge(what: str, facts: Facts, problem_of: Callable[[Json], tuple[str, str] | None]) -> Finding:
    answer = facts.get(what, Answer(unknown="it was not asked"))
    if answer.unknown is not None:
        return Finding(
            verdict="unknown",
            what=what,
            found=answer.unknown,
            advice="look again as an identity that may ask for it",
        )
    problem = problem_of(answer.value)
    if problem is None:
        return Finding(verdict="fine", what=what, found="as it should be")
    return Finding(verdict="gap", what=what, found=problem[0], advice=problem[1])


# ---------------------------------------------------------------------------------------------------- buckets


def _bucket(site: Site, facts: Facts, name: str, *, audit: bool = False) -> list[Finding]:
    return [
        _judge(f"{name} versioning", facts, _versioning),
        _judge(
            f"{name} object-lock",
            facts,
            lambda value: _object_lock(value, guardrails.object_lock(site, audit=audit)),
        ),
        _judge(f"{name} public-access-block", facts, _public_access),
        _judge(f"{name} encryption", facts, _encryption),
        _judge(f"{name} ownership", facts, _ownership),
        _judge(f"{name} lifecycle", facts, lambda value: _lifecycle(value, site, audit)),
        _judge(
            f"{name} policy", facts, lambda value: _policy(value, guardrails.bucket_policy(site, audit=audit))
        ),
    ]


def _versioning(value: Json) -> tuple[str, str] | None:
    status = (value or {}).get("Status", "never turned on")
    if status == "Enabled":
        return None
    return (
        f"versioning is {status}",
        "turn it on: without it a delete is final, and Object Lock cannot be had",
    )


def _object_lock(value: Json, expected: Json) -> tuple[str, str] | None:
    kept = ((value or {}).get("Rule") or {}).get("DefaultRetention") or {}
    wanted = expected["Rule"]["DefaultRetention"]
    if not kept:
        return (
            "no default retention",
            f"set {wanted['Mode']} for {wanted['Days']} days: until then nobody removes a version",
        )
    days = kept.get("Days", 0) or 365 * kept.get("Years", 0)
    # COMPLIANCE holds everybody, GOVERNANCE all but those who may bypass it.
    is_weaker = wanted["Mode"] == "COMPLIANCE" and kept.get("Mode") != "COMPLIANCE"
    if is_weaker or days < wanted["Days"]:
        return (
            f"{kept.get('Mode')} for {days} days",
            f"set {wanted['Mode']} for at least {wanted['Days']} days",
        )
    return None


def _public_access(value: Json) -> tuple[str, str] | None:
    off = [name for name in guardrails.PUBLIC_ACCESS_BLOCK if not (value or {}).get(name)]
    if not off:
        return None
    return f"not blocked: {', '.join(off)}", "turn all four on: one wrong policy makes checkpoints public"


def _encryption(value: Json) -> tuple[str, str] | None:
    rules = (value or {}).get("Rules") or [{}]
    algorithm = (rules[0].get("ApplyServerSideEncryptionByDefault") or {}).get("SSEAlgorithm")
    if algorithm == "AES256":
        return None
    if algorithm is None:
        return "no default encryption", "set AES256 (SSE-S3), beneath Strongroom's own sealing"
    return (
        f"default encryption is {algorithm}",
        "set AES256 (SSE-S3): a key of KMS makes each multipart upload need kms:Decrypt, as no writer should",
    )


def _ownership(value: Json) -> tuple[str, str] | None:
    rules = (value or {}).get("Rules") or [{}]
    if rules[0].get("ObjectOwnership") == "BucketOwnerEnforced":
        return None
    return (
        f"object ownership is {rules[0].get('ObjectOwnership')}",
        "set BucketOwnerEnforced: access control lists then count for nothing",
    )


def _lifecycle(value: Json, site: Site, audit: bool) -> tuple[str, str] | None:
    rules = [rule for rule in (value or {}).get("Rules") or [] if rule.get("Status") == "Enabled"]
    prefix = "" if audit else site.prefix
    for rule in rules:
        if not _overlaps(rule, prefix):
            continue
        expiration = rule.get("Expiration") or {}
        if "Days" in expiration or "Date" in expiration:
            return (
                f"the rule {rule.get('ID')!r} expires what stands",
                "take its Expiration out: lifecycle removes committed checkpoints, and no policy stops it",
            )
        noncurrent = (rule.get("NoncurrentVersionExpiration") or {}).get("NoncurrentDays")
        if noncurrent is not None and (audit or noncurrent < site.undelete_days):
            return (
                f"the rule {rule.get('ID')!r} removes deleted versions after {noncurrent} days",
                "take it out" if audit else f"keep them for at least {site.undelete_days} days",
            )
        if (problem := _transition(rule, site, audit)) is not None:
            return problem
    for rule in rules:
        days = (rule.get("AbortIncompleteMultipartUpload") or {}).get("DaysAfterInitiation")
        if days is not None and days <= 1 and _covers(rule, prefix):
            return None
    return (
        "unfinished uploads are not removed after a day",
        "add the rule abort-unfinished-uploads: a role that only writes cannot list what it left",
    )


def _transition(rule: Json, site: Site, audit: bool) -> tuple[str, str] | None:
    asked = [] if audit else [(each.days, each.storage_class) for each in site.transitions]
    for each in rule.get("Transitions") or []:
        days, storage_class = each.get("Days"), each.get("StorageClass")
        is_asked = days is not None and any(days >= at and storage_class == kind for at, kind in asked)
        if storage_class in _ASLEEP and not is_asked:
            when = each.get("Date") if days is None else f"after {days} days"
            return (
                f"the rule {rule.get('ID')!r} moves what stands to {storage_class} ({when})",
                "take it out, or name it by --transition: reading it again takes hours, and a request first",
            )
    return None


def _prefix_of(rule: Json) -> str:
    filtered = rule.get("Filter") or {}
    return str(filtered.get("Prefix", (filtered.get("And") or {}).get("Prefix", rule.get("Prefix") or "")))


def _overlaps(rule: Json, prefix: str) -> bool:
    own = _prefix_of(rule)
    return own.startswith(prefix) or prefix.startswith(own)


def _covers(rule: Json, prefix: str) -> bool:
    filtered = rule.get("Filter") or {}
    return prefix.startswith(_prefix_of(rule)) and not any(name in filtered for name in ("Tag", "And"))


# ------------------------------------------------------------------------------------------------------- keys


def _key_state(value: Json) -> tuple[str, str] | None:
    state = (value or {}).get("KeyState")
    if state == "Enabled":
        return None
    return f"the key is {state}", "enable it, or cancel its deletion: no sealed checkpoint opens without it"


def _key_grants(value: Json) -> tuple[str, str] | None:
    if not value:
        return None
    named = [f"{each.get('GranteePrincipal')} ({', '.join(each.get('Operations') or [])})" for each in value]
    return (
        f"grants of KMS: {'; '.join(sorted(named))}",
        "revoke them (aws kms revoke-grant): a grant holds beside all policies, for any run",
    )


# ------------------------------------------------------------------------------------------------------ roles


def _role(site: Site, role: Definition | LogRole, facts: Facts, named: bool) -> list[Finding]:
    what = f"role {role.name}"
    answer = facts.get(what, Answer(unknown="it was not asked"))
    if answer.unknown is None and answer.value is None:
        if not named:
            return []
        told = f"there is no role {site.role_prefix}{role.name}"
        return [Finding(verdict="gap", what=what, found=told, advice="make it, as roles render writes it")]
    if answer.unknown is not None:
        return [_judge(what, facts, lambda _: None)]
    findings = [
        _judge(f"{what} policy", facts, lambda value: _policy(value, policy_of(role, site))),
        _judge(f"{what} session", {f"{what} session": answer}, _session),
    ]
    expected = trust_policy(role, site)
    held = Answer(value=answer.value.get("AssumeRolePolicyDocument"))
    trusted = {f"{what} trust": held}
    if expected is not None:
        findings.append(_judge(f"{what} trust", trusted, lambda value: _policy(value, expected)))
    else:
        findings.append(
            _judge(f"{what} trust", trusted, lambda value: gap_of_trust(value, account=site.account))
        )
    boundary = (answer.value.get("PermissionsBoundary") or {}).get("PermissionsBoundaryArn")
    if boundary is not None:
        told = f"it has the permissions boundary {boundary}, which is not looked at"
        advice = "see that it leaves the role what its policy allows; it gives nothing by itself"
        findings.append(Finding(verdict="unknown", what=f"{what} boundary", found=told, advice=advice))
    return findings


def _session(value: Json) -> tuple[str, str] | None:
    seconds = value.get("MaxSessionDuration", SESSION_S)
    if seconds <= SESSION_S:
        return None
    return f"a session lasts up to {seconds} s", f"set the role's MaxSessionDuration to {SESSION_S}"


# --------------------------------------------------------------------------------------------------- policies


def _policy(value: Json, expected: Json) -> tuple[str, str] | None:
    if value is None:
        return "there is none", _RENDERED
    missing, besides = differences(value, expected)
    told = [
        *(["lacks " + ", ".join(missing)] if missing else []),
        *(["allows besides: " + "; ".join(besides)] if besides else []),
    ]
    return (" and ".join(told), _RENDERED) if told else None


def _policy_of(expected: Json, value: Json) -> tuple[str, str] | None:
    return _policy(value, expected)
