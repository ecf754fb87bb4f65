"""Where a run's checkpoints, keys and roles are: names of AWS, each checked before a document holds it.

A name that holds a wildcard or a policy variable would widen every document that it stands in, so there is no
way to give one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from strongroom.errors import ConfigError, FormatError
from strongroom.manifest import check_run_id
from strongroom_security.roles.definitions import Definition, any_role

__all__ = ["RUN_TAG", "Oidc", "Site", "Transition"]

RUN_TAG: Final = "strongroom-run"
"""The session tag that says which run a role was taken up for."""

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PREFIX = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.=-]*/)+")
_PARTITION = re.compile(r"aws(-[a-z]+)*")
_ACCOUNT = re.compile(r"[0-9]{12}")
_KEY = re.compile(r"arn:(aws[a-z-]*):kms:([a-z0-9-]+):([0-9]{12}):key/[A-Za-z0-9-]{1,64}")
_ROLE = re.compile(r"arn:aws[a-z-]*:iam::[0-9]{12}:role/[A-Za-z0-9+=,.@_/-]{1,512}")
_PROVIDER = re.compile(r"arn:aws[a-z-]*:iam::[0-9]{12}:oidc-provider/([A-Za-z0-9][A-Za-z0-9./_:-]{0,254})")
_ROLE_PREFIX = re.compile(r"[A-Za-z0-9+=,.@_-]{0,40}")
_CLAIM = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/@=,+-]{0,254}")
_CLASSES: Final = (
    "STANDARD_IA",
    "ONEZONE_IA",
    "INTELLIGENT_TIERING",
    "GLACIER_IR",
    "GLACIER",
    "DEEP_ARCHIVE",
)
_MAX_DAYS: Final = 36_500


@dataclass(frozen=True, slots=True, kw_only=True)
class Oidc:
    """Whose tokens roles are taken up by.

    Attributes:
        provider: the ARN of the identity provider in IAM.
        audience: the token's ``aud``.
        subjects: of each role the token's ``sub``, whole: one job's identity. A role that is not named has
            a trust policy that is the platform's own.

    Raises:
        ConfigError: a value is none, or two roles have one subject: whoever has its token has both.
    """

    provider: str
    audience: str
    subjects: Mapping[str, str]

    def __post_init__(self) -> None:
        _check(_PROVIDER, self.provider, "--oidc-provider", "arn:aws:iam::ACCOUNT:oidc-provider/HOST")
        _check(_CLAIM, self.audience, "--audience", "one audience, as sts.amazonaws.com")
        whose: dict[str, str] = {}
        for role, subject in self.subjects.items():
            named = any_role(role)
            if isinstance(named, Definition) and named.needs_grant:
                raise ConfigError(f"--subject: {role} is taken up by people, and by no token; leave it out")
            _check(_CLAIM, subject, "--subject", "one job's subject, whole")
            if subject in whose:
                raise ConfigError(
                    f"--subject: {whose[subject]} and {role} have the one subject {subject!r}, so that a "
                    f"token of either takes up both; give each role a subject of its own"
                )
            whose[subject] = role

    @property
    def issuer(self) -> str:
        """What condition keys of this provider begin with."""
        return self.provider.partition("oidc-provider/")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """Checkpoints of a given age go to a cheaper class of storage."""

    days: int
    storage_class: str

    def __post_init__(self) -> None:
        _check_days("--transition", self.days)
        if self.storage_class not in _CLASSES:
            raise ConfigError(
                f"--transition: {self.storage_class!r:.40} is none of {', '.join(_CLASSES)}; give DAYS:CLASS"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What the documents are about.

    Attributes:
        bucket: of the checkpoints.
        prefix: under which each run has a folder that is named by its id; ends in ``/``.
        run: the one run that roles are for; None: the one that the session's tag `RUN_TAG` names.
        account: 12 digits; None: as the key says, else unknown.
        partition: ``aws``, ``aws-cn``, ...
        kms_keys: ARNs of the keys that wrap; several while keyrings move from one to the next.
        sign_key: the ARN of the key that signs checkpoints.
        release_key: the ARN of the key that signs what is published.
        audit_bucket: of the audit log.
        admin: the ARN of the role that alone changes bucket and keys; None: ``PREFIXadmin``.
        role_prefix: what the roles' names in IAM begin with.
        releases: the prefix of what is published.
        oidc: whose tokens roles are taken up by; None: trust policies are the platform's own.
        lock_days: for which a version of a checkpoint cannot be removed.
        audit_lock_days: likewise of the audit log, by anyone.
        undelete_days: for which a deleted checkpoint can be had back.
        transitions: to cheaper classes of storage.
    """

    bucket: str
    prefix: str = "runs/"
    run: str | None = None
    account: str | None = None
    partition: str = "aws"
    kms_keys: tuple[str, ...] = ()
    sign_key: str | None = None
    release_key: str | None = None
    audit_bucket: str | None = None
    admin: str | None = None
    role_prefix: str = "strongroom-"
    releases: str = "releases/"
    oidc: Oidc | None = None
    lock_days: int = 7
    audit_lock_days: int = 365
    undelete_days: int = 30
    transitions: tuple[Transition, ...] = ()

    def __post_init__(self) -> None:
        for option, bucket in (("--bucket", self.bucket), ("--audit-bucket", self.audit_bucket)):
            if bucket is not None:
                _check(_BUCKET, bucket, option, "a bucket's name: 3 to 63 of a-z, 0-9, '.' and '-'")
        if self.bucket == self.audit_bucket:
            raise ConfigError("--audit-bucket: the log belongs in a bucket of its own, got the checkpoints'")
        for option, prefix in (("--prefix", self.prefix), ("--releases", self.releases)):
            _check(_PREFIX, prefix, option, "folders, as runs/, without wildcards; it ends in '/'")
        if self.prefix.startswith(self.releases) or self.releases.startswith(self.prefix):
            raise ConfigError(f"--releases {self.releases} and --prefix {self.prefix} lie in one another")
        if self.run is not None:
            try:
                check_run_id(self.run)
            except FormatError as error:
                raise ConfigError(f"--run: {error}") from None
        _check(_PARTITION, self.partition, "--partition", "aws, aws-cn or aws-us-gov")
        for option, key in (
            *(("--kms-key", key) for key in self.kms_keys),
            ("--sign-key", self.sign_key),
            ("--release-key", self.release_key),
        ):
            if key is not None:
                _check(_KEY, key, option, "a key's ARN, arn:aws:kms:REGION:ACCOUNT:key/ID, and no alias")
        if {self.sign_key, self.release_key} & set(self.kms_keys):
            raise ConfigError("--kms-key wraps and --sign-key signs; one key cannot do both")
        keys = [key for key in (*self.kms_keys, self.sign_key) if key is not None]
        if self.account is None and keys:
            object.__setattr__(self, "account", keys[0].split(":")[4])
        if self.account is not None:
            _check(_ACCOUNT, self.account, "--account", "an account's 12 digits")
        if self.admin is not None:
            _check(_ROLE, self.admin, "--admin", "a role's ARN, arn:aws:iam::ACCOUNT:role/NAME")
        _check(_ROLE_PREFIX, self.role_prefix, "--role-prefix", "up to 40 characters of a role's name")
        for option, days in (
            ("--lock-days", self.lock_days),
            ("--audit-lock-days", self.audit_lock_days),
            ("--undelete-days", self.undelete_days),
        ):
            _check_days(option, days)
        ages = [each.days for each in self.transitions]
        if ages != sorted(set(ages)):
            raise ConfigError("--transition: give each age once, the youngest first")

    @property
    def run_or_tag(self) -> str:
        """The run as policies say it: its id, or what the session's tag holds."""
        return self.run if self.run is not None else f"${{aws:PrincipalTag/{RUN_TAG}}}"

    def bucket_arn(self, bucket: str | None = None) -> str:
        """The ARN of a bucket; by default that of the checkpoints."""
        return f"arn:{self.partition}:s3:::{bucket or self.bucket}"

    def role_arn(self, name: str) -> str:
        """The ARN of a role in IAM, by its name here.

        Raises:
            ConfigError: nothing says which account.
        """
        return f"arn:{self.partition}:iam::{self.known_account}:role/{self.role_prefix}{name}"

    @property
    def admin_arn(self) -> str:
        """Who alone changes bucket and keys."""
        return self.admin or self.role_arn("admin")

    @property
    def known_account(self) -> str:
        if self.account is None:
            raise ConfigError("nothing says which account the roles are in; give --account, or a key's ARN")
        return self.account


def _check(pattern: re.Pattern[str], value: str, option: str, expected: str) -> None:
    if not pattern.fullmatch(value):
        raise ConfigError(f"{option}: expected {expected}; got {value!r:.100}")


def _check_days(option: str, days: int) -> None:
    if type(days) is not int or not 1 <= days <= _MAX_DAYS:
        raise ConfigError(f"{option}: expected 1 to {_MAX_DAYS} days, got {days!r:.20}")
