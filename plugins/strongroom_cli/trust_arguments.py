"""The arguments of ``strongroom trust`` and ``strongroom floor``: a usage error waits for no cryptography."""

from __future__ import annotations

import argparse
import re
from datetime import datetime, timezone
from typing import Any

__all__ = ["add_floor", "add_trust"]


def add_trust(commands: Any) -> None:
    """Add the command and its verbs.

    Args:
        commands: what `argparse` adds commands to.
    """
    text = "whose signatures are trusted, and until when: show and change a list of keys"
    trust = commands.add_parser("trust", help=text, description=f"{text[0].upper()}{text[1:]}.")
    verbs = trust.add_subparsers(dest="verb", metavar="VERB", required=True)

    show = _verb(verbs, "show", "show a list, and whose signatures it has")
    show.add_argument(
        "--root",
        metavar="KEY",
        action="append",
        help="a root's public key, as file:root.pub, to verify the list by; may be repeated",
    )
    show.add_argument(
        "--threshold", metavar="N", type=_number, default=1, help="roots that must have signed (default: 1)"
    )

    _add_policy(show)

    init = _verb(verbs, "init", "begin a list, in a file that did not exist")
    _add_policy(init)
    _add_signing(init)

    add = _verb(verbs, "add-key", "list a key, or with --replace change its name and window")
    add.add_argument(
        "--public", metavar="KEY", required=True, help="a public key: a PEM file, or as file:PATH"
    )
    add.add_argument("--name", metavar="NAME", required=True, help="whose it is, for people")
    add.add_argument(
        "--not-before", metavar="TIME", type=_time, help="what it signed before is not good, by ISO 8601, UTC"
    )
    add.add_argument("--not-after", metavar="TIME", type=_time, help="what it signs from then on is not good")
    add.add_argument("--replace", action="store_true", help="where the key is listed already")
    _add_policy(add)
    _add_signing(add)

    revoke = _verb(verbs, "revoke", "trust a key no more, whatever time its signatures tell")
    revoke.add_argument(
        "key", metavar="KEYID", help="the key's id or an authority's, or file:PATH of the key"
    )
    revoke.add_argument("--reason", metavar="TEXT", required=True, help="for people")
    revoke.add_argument(
        "--up-to",
        metavar="ROOT:STEP",
        action="append",
        default=[],
        help="a checkpoint that stays good, with all it came from; may be repeated",
    )
    revoke.add_argument("--replace", action="store_true", help="where the key is revoked already")
    _add_policy(revoke)
    _add_signing(revoke)

    renew = _verb(verbs, "renew", "issue the same list again, with another expiry")
    _add_policy(renew)
    _add_signing(renew)

    sign = _verb(verbs, "sign", "add a root's signature to the list as it is")
    _add_policy(sign)
    _add_roots(sign)


def add_floor(commands: Any) -> None:
    """Add the command and its verbs.

    Args:
        commands: what `argparse` adds commands to.
    """
    text = "what an old copy of a run is told by: show the policy's floor, and have it forget a run"
    floor = commands.add_parser("floor", help=text, description=f"{text[0].upper()}{text[1:]}.")
    verbs = floor.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, does in (
        ("show", "show which root is whose, how far each run had come, and the lists of trusted keys"),
        ("forget", "remember nothing of a run any more, nor that roots were its"),
    ):
        verb = verbs.add_parser(name, help=does, description=f"{does[0].upper()}{does[1:]}.")
        if name == "forget":
            verb.add_argument("run", metavar="RUN", help="the run's id, as show lists it")
        verb.add_argument("--json", action="store_true", help="one JSON object, for programs")
        verb.add_argument(
            "--security",
            metavar="FILE",
            help="the policy file (default: the one that the variable STRONGROOM_CONFIG names)",
        )


def _verb(verbs: Any, name: str, text: str) -> argparse.ArgumentParser:
    verb: argparse.ArgumentParser = verbs.add_parser(
        name, help=text, description=f"{text[0].upper()}{text[1:]}."
    )
    verb.add_argument("file", metavar="FILE", help="the list, as trust.json")
    verb.add_argument("--json", action="store_true", help="one JSON object, for programs")
    return verb


def _add_policy(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--security",
        metavar="FILE",
        help="the policy file: by its floor an older list is refused, by it --up-to is verified, and by its "
        "[audit] this is put on record (default: as STRONGROOM_CONFIG says)",
    )


def _add_signing(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--expires",
        metavar="TIME",
        type=_expiry,
        help="when there is to be a newer list, by ISO 8601, UTC; 'never' (default: as it was)",
    )
    _add_roots(verb)


def _add_roots(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--root-key",
        metavar="KEY",
        action="append",
        required=True,
        help="a root who signs, as file:root.pem; may be repeated",
    )
    verb.add_argument("--passphrase", metavar="SOURCE", help="of an encrypted key: env:NAME or file:PATH")


def _time(text: str) -> int:
    """Milliseconds since the epoch of a day or a moment, UTC where it does not say."""
    try:
        moment = datetime.fromisoformat(re.sub(r"[zZ]$", "+00:00", text))
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=timezone.utc)
        found = int(moment.timestamp() * 1000)
    except (ValueError, OverflowError):
        found = -1
    if found < 0:
        raise argparse.ArgumentTypeError(
            f"{text!r:.40} is no day or moment, as 2027-01-31 or 2027-01-31T12:00Z"
        )
    return found


def _expiry(text: str) -> int:
    """As `_time`; -1 for never."""
    return -1 if text == "never" else _time(text)


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 4 and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"{text!r:.40} is not a number from 1 to 999")
    return int(text)
