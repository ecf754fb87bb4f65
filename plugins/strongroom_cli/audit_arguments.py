"""The arguments of ``strongroom audit``: a usage error waits for no cryptography and no boto3."""

from __future__ import annotations

import argparse
import re
from datetime import datetime, timezone
from typing import Any, Final

from strongroom.auditing import Action, Outcome
from strongroom_cli.audit_alerts import add_alerts
from strongroom_cli.audit_flush import add_flush
from strongroom_cli.audit_prove import add_prove
from strongroom_cli.audit_reconcile import add_reconcile
from strongroom_cli.audit_sequence import add_sequence, add_sink, duration_s

__all__ = ["READS", "WRITES", "add_audit", "add_index", "moment"]

READS: Final = "reads"
WRITES: Final = "writes"

_ACTIONS: Final = frozenset(each.value for each in Action) | {READS, WRITES}
_OUTCOMES: Final = frozenset(each.value for each in Outcome)
_LIMIT: Final = 100

_AGO: Final = re.compile(r"[0-9]{1,9}(ms|s|m|h|d)")

_NOW: Final = "now"


def add_audit(commands: Any) -> None:
    """Add the command and its verbs.

    Args:
        commands: what `argparse` adds commands to.
    """
    text = "the audit log: who touched which checkpoint, and whether the log is as it was written"
    audit = commands.add_parser("audit", help=text, description=f"{text[0].upper()}{text[1:]}.")
    verbs = audit.add_subparsers(dest="verb", metavar="VERB", required=True)
    _add_verify(verbs)
    _add_query(verbs)
    _add_show(verbs)
    add_sequence(verbs)
    add_prove(verbs)
    add_flush(verbs)
    add_reconcile(verbs)
    add_alerts(verbs)


def add_index(verb: argparse.ArgumentParser) -> None:
    """Add what every verb takes that asks the index."""
    verb.add_argument(
        "--index", metavar="FILE", help="the index, which can be built again (default: in this user's cache)"
    )
    verb.add_argument(
        "--no-refresh", action="store_true", help="ask the index as it is; nothing is read of the log"
    )
    verb.add_argument(
        "--log-key",
        metavar="VKEY",
        action="append",
        default=[],
        help="who must have signed the log's tree, as keygen printed it; may be repeated (default: anybody)",
    )
    verb.add_argument("--origin", metavar="NAME", help="the log's name (default: the first key's)")
    verb.add_argument(
        "--signer",
        metavar="KEY",
        action="append",
        default=[],
        help="a public key whose word on writers counts, as file:audit.pub; may be repeated (default: the "
        "policy's)",
    )


def moment(text: str) -> tuple[str, int]:
    """A moment: ``24h``, so long ago; or by ISO 8601, in UTC where it names no zone.

    Returns:
        ``"now"`` and the ms before it, or ``"at"`` and the ms since the epoch.
    """
    if _AGO.fullmatch(text):
        return _NOW, round(duration_s(text) * 1000)
    try:
        at = datetime.fromisoformat(f"{text[:-1]}+00:00" if text[-1:] in "zZ" and len(text) > 1 else text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r:.60} is no moment; write 24h, 30m or 7d, or a time as 2026-11-30T09:00"
        ) from None
    at = at if at.tzinfo is not None else at.replace(tzinfo=timezone.utc)
    return "at", round(at.timestamp() * 1000)


def _add_verify(verbs: Any) -> None:
    verify = _verb(
        verbs,
        "verify",
        "find out whether the log is as it was written, and where it is not",
        "Exit status: 0 nothing is wrong, 1 somebody has changed it, or vouches for a writer without being "
        "trusted, 3 there is no log, or nothing of that run, 4 it could not be read. What is unproven is "
        "told, and is no failure.",
    )
    verify.add_argument(
        "--against",
        metavar="FILE",
        help="a signed head of the log's tree that was kept elsewhere: the tree must have grown from it",
    )
    verify.add_argument(
        "--log-key",
        metavar="VKEY",
        action="append",
        default=[],
        help="who must have signed the tree's checkpoint, as keygen printed it; may be repeated",
    )
    verify.add_argument("--origin", metavar="NAME", help="the log's name (default: the first key's)")
    verify.add_argument(
        "--witness-key", metavar="VKEY", action="append", default=[], help="a witness's key; may be repeated"
    )
    verify.add_argument(
        "--witnesses", metavar="N", type=_natural, help="how many of them must have cosigned (default: all)"
    )
    verify.add_argument(
        "--signer",
        metavar="KEY",
        action="append",
        default=[],
        help="a public key whose word on writers counts, as file:audit.pub, in place of the policy's; may be "
        "repeated: name those that vouched before as well",
    )
    verify.add_argument("--run", metavar="RUN", help="look at one run's segments alone")
    verify.add_argument(
        "--allow-uncertified", action="store_true", help="let writers pass for which nobody vouches"
    )


def _add_query(verbs: Any) -> None:
    query = _verb(
        verbs,
        "query",
        "ask who read a checkpoint, and what happened to a run",
        "The newest first. An operation is one row: what was intended, and how it ended.",
    )
    which = query.add_mutually_exclusive_group()
    which.add_argument(
        "--checkpoint",
        metavar=("ROOT", "STEP"),
        nargs=2,
        help="who read this one (ROOT: the run's folder or URI, or its id); --action asks for more",
    )
    which.add_argument("--run", metavar="RUN", help="what happened to this one, by its id or its root")
    query.add_argument("--launch", metavar="N", type=_natural, help="of this launch alone")
    query.add_argument(
        "--since", metavar="WHEN", type=moment, help="24h, 30m, 7d; or a time by ISO 8601, in UTC"
    )
    query.add_argument("--until", metavar="WHEN", type=moment, help="likewise")
    query.add_argument("--actor", metavar="TEXT", help="a user, a host, or (a part of) an identity's ARN")
    query.add_argument("--host", metavar="NAME", help="where it was done")
    query.add_argument("--role", metavar="NAME", help="of the policy that it was done by")
    query.add_argument(
        "--action", metavar="LIST", type=_actions, help=f"{READS}, {WRITES}, or such as restore,remove"
    )
    query.add_argument("--outcome", metavar="LIST", type=_outcomes, help="such as denied,failure")
    query.add_argument(
        "--limit", metavar="N", type=_natural, default=_LIMIT, help=f"rows; 0: all (default: {_LIMIT})"
    )
    query.add_argument("--all", action="store_true", help="a row for every event, and of every action")
    query.add_argument("--csv", metavar="FILE", help="write the rows to a new file instead")
    add_index(query)


def _add_show(verbs: Any) -> None:
    show = _verb(verbs, "show", "show one event, all of it, as it stands in the log", "")
    show.add_argument("event", metavar="EVENT", help="WRITER-SEQ, the event's metadata.uid")
    add_index(show)


def _verb(verbs: Any, name: str, text: str, more: str) -> argparse.ArgumentParser:
    verb: argparse.ArgumentParser = verbs.add_parser(
        name, help=text, description=f"{text[0].upper()}{text[1:]}. {more}".strip()
    )
    add_sink(verb)
    verb.add_argument("--json", action="store_true", help="one JSON object, for programs")
    return verb


def _actions(text: str) -> frozenset[str]:
    return _several(text, _ACTIONS, "an action")


def _outcomes(text: str) -> frozenset[str]:
    return _several(text, _OUTCOMES, "an outcome")


def _several(text: str, known: frozenset[str], what: str) -> frozenset[str]:
    names = frozenset(filter(None, text.split(",")))
    wrong = sorted(names - known)
    if wrong or not names:
        raise argparse.ArgumentTypeError(
            f"{(wrong or [text])[0]!r:.60} is not {what}; there are {', '.join(sorted(known))}"
        )
    return names


def _natural(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 12:
        raise argparse.ArgumentTypeError(f"{text!r:.40} is not a number from 0 to 999999999999")
    return int(text)
