"""``strongroom audit reconcile``: its arguments; the work is `reconciled`'s, imported when it is asked."""

from __future__ import annotations

import argparse
from typing import Any, Final

from strongroom_cli.audit_sequence import add_sink, duration_s

__all__ = ["add_reconcile", "run"]

_KINDS: Final = ("auto", "access-log", "cloudtrail")


def add_reconcile(verbs: Any) -> None:
    """Add ``reconcile``."""
    # Here: that module adds this verb.
    from strongroom_cli.audit_arguments import add_index, moment

    reconcile = verbs.add_parser(
        "reconcile",
        help="find reads, writes and unwrapped keys that went round the log",
        description="Hold what S3 and KMS say was done to a run against what the log says. Exit status: "
        "0 all is accounted for, 1 something went round the log, 4 something could not be read, or no log "
        "tells of this root, and what it says is not known.",
    )
    reconcile.add_argument("root", metavar="ROOT", help="the run: a folder, or a file:// or s3:// URI")
    reconcile.add_argument(
        "--from",
        dest="places",
        metavar="PLACE",
        nargs="+",
        required=True,
        help="logs: files, folders with all that is in them, or s3://BUCKET/PREFIX; packed by gzip or not",
    )
    reconcile.add_argument(
        "--kind", choices=_KINDS, default="auto", help="what the logs are (default: looked at, file by file)"
    )
    reconcile.add_argument("--run", metavar="RUN", help="the run's id (default: read from the root)")
    reconcile.add_argument(
        "--since", metavar="WHEN", type=moment, help="24h, 30m, 7d; or a time by ISO 8601 (default: all)"
    )
    reconcile.add_argument(
        "--window",
        metavar="TIME",
        type=duration_s,
        default=900.0,
        help="how far an access may lie outside of an operation's events (default: 15m)",
    )
    reconcile.add_argument(
        "--settled",
        metavar="TIME",
        type=duration_s,
        default=7200.0,
        help="what is younger is left open, since logs and events arrive late (default: 2h)",
    )
    reconcile.add_argument(
        "--kms-key",
        metavar="KEY",
        action="append",
        default=[],
        help="an ARN or id of a key of which every use counts, signing too; may be repeated",
    )
    reconcile.add_argument(
        "--expected",
        metavar="ARN",
        action="append",
        default=[],
        help="an identity that is expected to come without events, such as a backup's; may be repeated",
    )
    reconcile.add_argument(
        "--no-commits", action="store_true", help="do not look whether the root's commits are on record"
    )
    add_sink(reconcile)
    add_index(reconcile)
    reconcile.add_argument("--json", action="store_true", help="one JSON object, for programs")


def run(options: argparse.Namespace) -> int:
    """Carry the command out; the exit status."""
    from strongroom_cli import reconciled

    return reconciled.run(options)
