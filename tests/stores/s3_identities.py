"""A local server that holds every caller to its policies: ministack with ``AUTH=true``.

It runs S3, IAM, STS and KMS in a process of its own, on a loopback port. Signatures are verified; identity,
session and bucket policies are enforced for users and roles, but not for the root credentials. It knows no
condition on ``kms:EncryptionContext`` or ``s3:if-none-match``.

Import the fixture that a module uses: ``from s3_identities import enforcing``.
"""

from __future__ import annotations

import contextlib
import functools
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from s3_servers import REGION, cannot, start_ministack

__all__ = [
    "ACCOUNT",
    "REGION",
    "Enforcing",
    "Identity",
    "document",
    "enforcing",
    "start_enforcing",
    "statement",
]

ACCOUNT = "000000000000"
"""The account that ministack keeps everything in."""

_RUNNING: list[Enforcing] = []
"""One server for all modules that import the fixture."""


@functools.cache
def _loader() -> Any:
    from botocore.loaders import Loader

    return Loader()


def _botocore_session() -> Any:
    """A session that shares what was read of the services' models: reading them takes longer than a test."""
    from botocore.session import get_session

    session = get_session()
    session.register_component("data_loader", _loader())
    return session


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Credentials, and who they belong to."""

    name: str
    access_key: str
    secret_key: str = field(repr=False)
    token: str | None = field(default=None, repr=False)

    def session(self) -> Any:
        """boto3's session by these credentials and nothing of the environment's."""
        import boto3

        return boto3.Session(
            botocore_session=_botocore_session(),
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            aws_session_token=self.token,
            region_name=REGION,
        )


@dataclass(frozen=True, kw_only=True)
class Enforcing:
    """A running server, and what its administrator does."""

    address: str
    root: Identity

    def client(self, service: str, identity: Identity | None = None) -> Any:
        """boto3's client of a service; without an identity, by the root credentials, which may do all."""
        from botocore.config import Config

        return (
            (identity or self.root)
            .session()
            .client(
                service,
                endpoint_url=self.address,
                config=Config(
                    s3={"addressing_style": "path"},
                    retries={"total_max_attempts": 1},
                    request_checksum_calculation="when_required",
                ),
            )
        )

    def bucket(self, *, versioned: bool = False) -> str:
        """A new bucket; its name."""
        name = f"runs-{secrets.token_hex(6)}"
        self.client("s3").create_bucket(Bucket=name)
        if versioned:
            self.client("s3").put_bucket_versioning(
                Bucket=name, VersioningConfiguration={"Status": "Enabled"}
            )
        return name

    def user(self, *statements: Mapping[str, Any]) -> Identity:
        """A new user with one inline policy of these statements."""
        name, iam = f"user-{secrets.token_hex(6)}", self.client("iam")
        iam.create_user(UserName=name)
        if statements:
            iam.put_user_policy(UserName=name, PolicyName="only", PolicyDocument=document(statements))
        made = iam.create_access_key(UserName=name)["AccessKey"]
        return Identity(name=name, access_key=made["AccessKeyId"], secret_key=made["SecretAccessKey"])

    def role(self, *statements: Mapping[str, Any], trust: Mapping[str, Any] | None = None) -> str:
        """A new role with one inline policy of these statements; its ARN.

        Args:
            trust: its trust policy; by default every identity of the account may assume it.
        """
        name, iam = f"role-{secrets.token_hex(6)}", self.client("iam")
        usual = statement("sts:AssumeRole", None, Principal={"AWS": f"arn:aws:iam::{ACCOUNT}:root"})
        made = iam.create_role(
            RoleName=name, AssumeRolePolicyDocument=json.dumps(trust) if trust else document([usual])
        )
        if statements:
            iam.put_role_policy(RoleName=name, PolicyName="only", PolicyDocument=document(statements))
        return str(made["Role"]["Arn"])

    def assume(
        self, role: str, *session_statements: Mapping[str, Any], by: Identity | None = None
    ) -> Identity:
        """A session of a role, narrowed by a session policy where one is given.

        Args:
            by: who assumes it; by default a new user who may do nothing else.
        """
        by = by or self.user(statement("sts:AssumeRole", role))
        narrowed = {"Policy": document(session_statements)} if session_statements else {}
        given = self.client("sts", by).assume_role(
            RoleArn=role, RoleSessionName="test", DurationSeconds=3600, **narrowed
        )["Credentials"]
        return Identity(
            name=role,
            access_key=given["AccessKeyId"],
            secret_key=given["SecretAccessKey"],
            token=given["SessionToken"],
        )


def statement(
    actions: str | Sequence[str], resource: str | Sequence[str] | None, **members: Any
) -> dict[str, Any]:
    """One statement of a policy; it allows unless ``Effect`` says otherwise."""
    made: dict[str, Any] = {"Effect": "Allow", "Action": actions}
    if resource is not None:
        made["Resource"] = resource
    return made | members


def document(statements: Sequence[Mapping[str, Any]]) -> str:
    """A policy as the services take it.

    Without spaces: some servers do not decode the ``+`` that they become in a form's body.
    """
    return json.dumps({"Version": "2012-10-17", "Statement": list(statements)}, separators=(",", ":"))


@contextlib.contextmanager
def start_enforcing() -> Iterator[Enforcing]:
    """The server, for as long as the context lasts."""
    # Here, so that the module imports where boto3 is missing.
    from botocore.exceptions import ClientError

    root = Identity(name="root", access_key="test", secret_key="test")  # noqa: S106 - ministack's own
    environment = {
        "AUTH": "true",
        "SERVICES": "s3,iam,sts,kms",
        "AWS_ACCESS_KEY_ID": root.access_key,
        "AWS_SECRET_ACCESS_KEY": root.secret_key,
        "MINISTACK_ACCOUNT_ID": ACCOUNT,
        "MINISTACK_REGION": REGION,
    }
    with start_ministack(environment=environment) as server:
        # A release that does not know the variable would find every denial missing, test by test.
        made = Enforcing(address=server.endpoint_url, root=root)
        stranger = Identity(name="stranger", access_key="unknown", secret_key="unknown")  # noqa: S106
        try:
            made.client("s3", stranger).list_buckets()
        except ClientError:
            yield made
            return
    cannot("this ministack lets everybody do everything; pip install 'ministack>=1.5'")


@pytest.fixture(scope="session")
def enforcing() -> Iterator[Enforcing]:
    """A server that enforces policies; one for all modules."""
    if _RUNNING:
        yield _RUNNING[0]
        return
    with start_enforcing() as server:
        _RUNNING.append(server)
        try:
            yield server
        finally:
            _RUNNING.remove(server)
