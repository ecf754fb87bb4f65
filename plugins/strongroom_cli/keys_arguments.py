"""The arguments of ``strongroom keys``, apart from its work: a usage error waits for no cryptography."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any, Final

__all__ = ["add_keys"]

KINDS: Final = ("file", "hpke-x25519", "hpke-p256", "hpke-mlkem768-x25519", "sign-p256", "sign-p384")

_WORKERS: Final = 8
_MAX_WORKERS: Final = 256


def add_keys(
    commands: Any,
    command: Callable[[Any, str, str], argparse.ArgumentParser],
    natural: Callable[[str], int],
) -> None:
    """Add the command and its verbs.

    Args:
        commands: what `argparse` adds commands to.
        command: adds one that takes a run, as all commands do it.
        natural: the type of a number.
    """
    text = "who can open a run's checkpoints: list and change it, and make keys"
    keys = commands.add_parser("keys", help=text, description=f"{text[0].upper()}{text[1:]}.")
    verbs = keys.add_subparsers(dest="verb", metavar="VERB", required=True)

    init = verbs.add_parser(
        "init",
        help="make a key, in files that did not exist",
        description="Make a key in files that did not exist. A key file opens every checkpoint that was "
        "sealed to it: keep a copy where the checkpoints are not.",
    )
    init.add_argument(
        "path", metavar="PATH", help="of the key file; of a pair without its endings, .key and .pub"
    )
    init.add_argument(
        "--kind",
        choices=KINDS,
        default=KINDS[0],
        help=f"file and hpke-... seal and open, sign-... sign (default: {KINDS[0]})",
    )
    init.add_argument(
        "--passphrase", metavar="SOURCE", help="encrypt a key that signs: env:NAME or file:PATH"
    )
    init.add_argument("--json", action="store_true", help="one JSON object, for programs")
    init.add_argument(
        "--security",
        metavar="FILE",
        help="the policy file, by whose [audit] this is put on record (default: as STRONGROOM_CONFIG says)",
    )

    listed = command(verbs, "list", "list keyrings, and who can open by them")
    _add_step(listed, natural)

    rotate = command(verbs, "rotate", "make the policy's recipients those who can open")
    _add_step(rotate, natural)
    rotate.add_argument(
        "--to",
        metavar="RECIPIENT",
        action="append",
        help="these instead of the policy's recipients, as file:PATH; may be repeated",
    )
    rotate.add_argument(
        "--new-checkpoint-key",
        action="store_true",
        help="draw each checkpoint's key anew, and wrap its files' keys under it",
    )
    rotate.add_argument(
        "--again",
        action="store_true",
        help="have key services wrap anew what they have wrapped, under their keys' newest version",
    )
    rotate.add_argument(
        "--since",
        metavar="MS",
        type=_milliseconds,
        help="go on with a rotation of either kind: it began at MS milliseconds since the epoch",
    )
    _add_rotation(rotate, natural)

    add = command(verbs, "add-recipient", "let one more open")
    add.add_argument("recipient", metavar="RECIPIENT", help="as in the policy: file:PATH, hpke:PATH, ...")
    _add_step(add, natural)
    _add_rotation(add, natural)

    remove = command(verbs, "remove-recipient", "let one open no more")
    remove.add_argument(
        "recipient", metavar="RECIPIENT_OR_ID", help="as in the policy, or an id of a keyring"
    )
    _add_step(remove, natural)
    _add_rotation(remove, natural)


def _add_step(parser: argparse.ArgumentParser, natural: Callable[[str], int]) -> None:
    parser.add_argument("step", metavar="STEP", nargs="?", type=natural, help="default: every checkpoint")


def _add_rotation(parser: argparse.ArgumentParser, natural: Callable[[str], int]) -> None:
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="have key services open what was made, too: one call more a service and checkpoint",
    )
    parser.add_argument(
        "--remove-old",
        action="store_true",
        help="remove the generations before the newest one, once that was opened (implies --verify for it)",
    )
    parser.add_argument("--rate", metavar="N", type=_rate, help="at most N calls to key services a second")
    parser.add_argument(
        "--workers",
        metavar="N",
        type=_workers,
        default=_WORKERS,
        help=f"checkpoints at once (default: {_WORKERS})",
    )


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not 0 < rate < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r:.40} is not a number above 0")
    return rate


def _workers(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 4 and 1 <= int(text) <= _MAX_WORKERS):
        raise argparse.ArgumentTypeError(f"{text!r:.40} is not a number from 1 to {_MAX_WORKERS}")
    return int(text)


def _milliseconds(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 15):
        raise argparse.ArgumentTypeError(f"{text!r:.40} is not a number of milliseconds")
    return int(text)
