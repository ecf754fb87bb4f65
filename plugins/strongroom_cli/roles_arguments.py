"""The arguments of ``strongroom roles``: a usage error waits for no cryptography and no boto3."""

from __future__ import annotations

import argparse
from typing import Any, Final

__all__ = ["ROLE_NAMES", "add_roles"]

ROLE_NAMES: Final = (
    "trainer-writer",
    "validator-reader",
    "recovery-reader-writer",
    "publisher",
    "key-rotator",
    "key-admin",
    "retention",
    "break-glass",
    "audit-sequencer",
    "auditor-reader",
)
"""The last two are of the audit log, and of no run."""


def add_roles(commands: Any) -> None:
    """Add the command and its verbs.

    Args:
        commands: what `argparse` adds commands to.
    """
    text = "who may do what: write the policies of AWS, hold what stands against them, grant break-glass"
    roles = commands.add_parser("roles", help=text, description=f"{text[0].upper()}{text[1:]}.")
    verbs = roles.add_subparsers(dest="verb", metavar="VERB", required=True)

    render = _verb(verbs, "render", "write the policies of roles, buckets and keys, for review and Terraform")
    which = render.add_mutually_exclusive_group(required=True)
    which.add_argument("--role", metavar="NAME", choices=ROLE_NAMES, help=f"one of {', '.join(ROLE_NAMES)}")
    which.add_argument("--all", action="store_true", help="every role, and what holds for buckets and keys")
    _add_site(render)
    render.add_argument(
        "--out", metavar="DIR", help="a file for each document (default: all of them on standard output)"
    )

    check = _verb(verbs, "check", "compare a live bucket, key and roles with what should be")
    check.add_argument(
        "--role",
        metavar="NAME",
        choices=ROLE_NAMES,
        action="append",
        help="a role to look at; may be repeated (default: those that stand in the account)",
    )
    _add_site(check)
    check.add_argument("--profile", metavar="NAME", help="whose credentials look (default: this process's)")

    grant = _verb(verbs, "grant", "begin a grant of break-glass, which two people then approve")
    grant.add_argument("file", metavar="FILE", help="the grant, a new file, as grant.json")
    grant.add_argument("--role", metavar="NAME", choices=("break-glass",), default="break-glass")
    grant.add_argument("--run", metavar="RUN", required=True, help="the run's id")
    grant.add_argument("--who", metavar="NAME", required=True, help="who takes the role up")
    grant.add_argument("--reason", metavar="TEXT", required=True, help="why, for people")
    grant.add_argument(
        "--hours", metavar="N", type=_hours, default=1, help="for how long (1 to 24; default: 1)"
    )
    grant.add_argument("--approver", metavar="KEY", help="sign it at once, as file:a.pem")
    grant.add_argument("--passphrase", metavar="SOURCE", help="of an encrypted key: env:NAME or file:PATH")

    approve = _verb(verbs, "approve", "show a grant, and with --key sign it")
    approve.add_argument("file", metavar="FILE", help="the grant")
    approve.add_argument("--key", metavar="KEY", help="who approves, as file:a.pem (default: only show it)")
    approve.add_argument("--passphrase", metavar="SOURCE", help="of an encrypted key: env:NAME or file:PATH")


def _verb(verbs: Any, name: str, text: str) -> argparse.ArgumentParser:
    verb: argparse.ArgumentParser = verbs.add_parser(
        name, help=text, description=f"{text[0].upper()}{text[1:]}."
    )
    verb.add_argument("--json", action="store_true", help="one JSON object, for programs")
    verb.add_argument(
        "--security",
        metavar="FILE",
        help="the policy file, by whose [audit] this is put on record (default: as STRONGROOM_CONFIG says)",
    )
    return verb


def _add_site(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--bucket", metavar="NAME", required=True, help="of the checkpoints")
    verb.add_argument("--prefix", metavar="PREFIX", default="runs/", help="of the runs (default: runs/)")
    verb.add_argument(
        "--run", metavar="RUN", help="one run (default: the one that a session's tag strongroom-run names)"
    )
    verb.add_argument("--account", metavar="ID", help="12 digits (default: as in a key's ARN)")
    verb.add_argument("--partition", metavar="NAME", default="aws", help="aws (the default), aws-cn, ...")
    verb.add_argument(
        "--kms-key",
        metavar="ARN",
        action="append",
        default=[],
        help="that wraps; may be repeated while keyrings move from one key to the next",
    )
    verb.add_argument("--sign-key", metavar="ARN", help="that signs checkpoints")
    verb.add_argument("--release-key", metavar="ARN", help="that signs what is published")
    verb.add_argument("--audit-bucket", metavar="NAME", help="of the audit log")
    verb.add_argument(
        "--admin", metavar="ARN", help="of the role that alone changes bucket and keys (default: ...-admin)"
    )
    verb.add_argument(
        "--role-prefix", metavar="TEXT", default="strongroom-", help="of the roles' names (strongroom-)"
    )
    verb.add_argument("--releases", metavar="PREFIX", default="releases/", help="of what is published")
    verb.add_argument("--oidc-provider", metavar="ARN", help="whose tokens roles are taken up by")
    verb.add_argument("--audience", metavar="TEXT", help="the token's aud")
    verb.add_argument(
        "--subject",
        metavar="ROLE=SUB",
        action="append",
        default=[],
        help="the sub, whole, of the token that takes a role up; may be repeated, each role has another one "
        "(SUB alone is for a single --role)",
    )
    verb.add_argument(
        "--lock-days", metavar="N", type=int, default=7, help="no version goes before (default: 7)"
    )
    verb.add_argument(
        "--audit-lock-days", metavar="N", type=int, default=365, help="of the audit log (default: 365)"
    )
    verb.add_argument(
        "--undelete-days",
        metavar="N",
        type=int,
        default=30,
        help="what was deleted can be had back for (default: 30)",
    )
    verb.add_argument(
        "--transition",
        metavar="DAYS:CLASS",
        action="append",
        default=[],
        help="checkpoints of that age go to a cheaper class, as 90:GLACIER_IR; may be repeated",
    )


def _hours(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:4]) <= 24):
        raise argparse.ArgumentTypeError(f"{text!r:.40} is not a number from 1 to 24")
    return int(text)
