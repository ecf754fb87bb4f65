"""``strongroom audit prove``: write a file that shows one event to be in the log, to whoever has no log."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from strongroom.errors import ConfigError
from strongroom_cli.audit_sequence import add_sink, open_sink
from strongroom_cli.words import printable

if TYPE_CHECKING:
    from strongroom_security.tlog.witnesses import LogKeys

__all__ = ["add_log_keys", "add_prove", "log_keys", "run"]

_NOT_FOUND: Final = 3
_SUFFIX: Final = ".tlog-proof"


def add_log_keys(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Add the options that say which log is believed."""
    parser.add_argument(
        "--log-key",
        metavar="VKEY",
        action="append",
        default=[],
        required=required,
        help="the log's public key, as keygen printed it; may be repeated",
    )
    parser.add_argument("--origin", metavar="NAME", help="the log's name (default: the first key's)")
    parser.add_argument(
        "--witness-key", metavar="VKEY", action="append", default=[], help="a witness's key; may be repeated"
    )
    parser.add_argument(
        "--witnesses", metavar="N", type=int, help="how many of them have to have cosigned (default: all)"
    )


def log_keys(options: argparse.Namespace) -> LogKeys:
    """Which log is believed, by the options of `add_log_keys`."""
    from strongroom_security.auditlog.sequencing.logkeys import parse_verifier
    from strongroom_security.tlog.witnesses import LogKeys, WitnessPolicy

    keys = tuple(parse_verifier(text) for text in options.log_key)
    if not keys:
        raise ConfigError("no key of the log is named; name it by --log-key, as keygen printed it")
    witnesses = tuple(parse_verifier(text) for text in options.witness_key)
    required = options.witnesses
    return LogKeys(
        origin=options.origin or keys[0].name,
        keys=keys,
        witnesses=WitnessPolicy(
            keys=witnesses, required=len({key.name for key in witnesses}) if required is None else required
        ),
    )


def add_prove(verbs: Any) -> None:
    """Add ``prove``."""
    prove = verbs.add_parser(
        "prove",
        help="write a file that shows one event to be in the log",
        description="Write a file that shows one event to be in the log, to whoever has the log's public key "
        "and nothing else. Exit status: 0 written, 1 the log is not whole, 3 the event is not in it (yet).",
    )
    prove.add_argument("event", metavar="EVENT", help="WRITER-SEQ, the event's metadata.uid")
    prove.add_argument(
        "--to", metavar="FILE", help=f"a new file (default: EVENT{_SUFFIX}); '-': standard output"
    )
    add_sink(prove)
    add_log_keys(prove, required=True)
    prove.add_argument("--json", action="store_true", help="one JSON object, for programs")


def run(options: argparse.Namespace) -> int:
    """Carry the command out; the exit status."""
    from strongroom_cli.console import print_json
    from strongroom_security.auditlog.sequencing.proving import EventId, Unproven, prove

    event = EventId.parse(options.event)
    found = prove(open_sink(options), event, log_keys(options))
    if isinstance(found, Unproven):
        if options.json:
            print_json({"event": str(event), "is_proven": False, "segment": found.segment})
        sys.stderr.write(f"strongroom: {printable(found.message)}\n")
        return _NOT_FOUND
    if options.to == "-":
        sys.stdout.write(found.proof.decode("utf-8"))
        return 0
    path = Path(options.to or f"{event}{_SUFFIX}")
    _write(path, found.proof)
    if options.json:
        print_json(
            {
                "event": str(event),
                "file": str(path),
                "index": found.index,
                "is_proven": True,
                "size": found.signed.head.size,
            }
        )
    else:
        sys.stdout.write(
            f"{printable(str(path))}: entry {found.index:,} of {found.signed.head.size:,} of "
            f"{printable(found.signed.head.origin)}\n"
        )
    return 0


def _write(path: Path, data: bytes) -> None:
    try:
        with path.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        raise ConfigError(f"{path} exists; name a new file by --to") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error
