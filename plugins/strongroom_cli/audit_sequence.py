"""``strongroom audit sequence`` and ``keygen``: bring what was recorded into the log's tree, and sign it."""

from __future__ import annotations

import argparse
import re
import signal
import sys
import threading
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final

from strongroom_cli.words import count, printable

if TYPE_CHECKING:
    from strongroom.stores.base import Store
    from strongroom_security.auditlog.sequencing.sequencing import Log, Sequenced, Sequencer
    from strongroom_security.auditlog.verifying.trusting import Vouchers

__all__ = ["add_sequence", "add_sink", "duration_s", "open_sink", "run"]

_FOUND: Final = 1
_NOT_FOUND: Final = 3
_KINDS: Final = ("ed25519", "ecdsa-p256")
_DURATION: Final = re.compile(r"([0-9]{1,9})(ms|s|m|h|d)?")
_UNITS_S: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def duration_s(text: str) -> float:
    """Seconds of ``10s``, ``5m``, ``1h``, ``2d``; a number alone is seconds."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r:.40} is no time; write 10s, 5m, 1h or 2d")
    return int(match[1]) * _UNITS_S[match[2] or "s"]


def add_sink(parser: argparse.ArgumentParser) -> None:
    """Add the options that say where the audit log is."""
    parser.add_argument(
        "--sink", metavar="SINK", help="where the log is: a folder or s3://... (default: the policy's)"
    )
    parser.add_argument(
        "--security",
        metavar="FILE",
        help="the policy file (default: the one that the variable STRONGROOM_CONFIG names)",
    )


def open_sink(options: argparse.Namespace) -> Store:
    """The sink that the options name.

    Raises:
        ConfigError: none is named, and the policy has none.
    """
    from strongroom.config import load_policy
    from strongroom_cli.audit_log import sink_of

    return sink_of(options, load_policy(options.security) if options.sink is None else None)


def _vouchers(options: argparse.Namespace) -> Vouchers:
    """Whose certificates count where two claim one writer's id: by ``--signer``, or the policy."""
    from strongroom.config import load_policy
    from strongroom.errors import KeyServiceError, NoKeyError
    from strongroom_cli.audit_log import vouchers_of
    from strongroom_security.auditlog.verifying.trusting import Vouchers

    is_asked = options.sink is None or options.security is not None
    policy = load_policy(options.security) if is_asked and not options.signer else None
    try:
        return vouchers_of(options, policy)
    except (KeyServiceError, NoKeyError) as error:
        if options.signer:
            raise
        # What no writer's id was taken in goes in all the same.
        sys.stderr.write(f"strongroom: going on without the policy's keys: {printable(str(error))}\n")
        return Vouchers()


def add_sequence(verbs: Any) -> None:
    """Add ``sequence`` and ``keygen``."""
    sequence = verbs.add_parser(
        "sequence",
        help="bring recorded segments into the log's tree, and sign its head",
        description="Check what writers recorded, bring it into the log's tree, and sign the tree's head. It "
        "may be killed at any time and run again. Exit status: 0 all is in, 1 something was refused, or the "
        "log is not the one that was signed before, 3 the log's folder is not there, 4 the log or a witness "
        "could not be reached.",
    )
    add_sink(sequence)
    sequence.add_argument(
        "--key",
        metavar="KEY",
        action="append",
        required=True,
        help="who signs, as file:log.pem; may be repeated: each of them signs",
    )
    sequence.add_argument(
        "--origin", metavar="NAME", required=True, help="the log's name, as in example.com/audit"
    )
    sequence.add_argument(
        "--state",
        metavar="FILE",
        required=True,
        help="where the head that was signed last is remembered, where the log's writers cannot write",
    )
    sequence.add_argument(
        "--first",
        action="store_true",
        help="there is no such file yet: take the log as it is found, and remember it from now on",
    )
    sequence.add_argument(
        "--signer",
        metavar="KEY",
        action="append",
        default=[],
        help="whose word on a writer counts where two claim one writer's id, as in verify; may be repeated "
        "(default: the policy's)",
    )
    sequence.add_argument(
        "--former-key", metavar="VKEY", action="append", default=[], help="a key that has signed before"
    )
    sequence.add_argument(
        "--witness", metavar="URL", action="append", default=[], help="a witness to ask; may be repeated"
    )
    sequence.add_argument(
        "--witness-key", metavar="VKEY", action="append", default=[], help="a witness's key; may be repeated"
    )
    sequence.add_argument(
        "--witnesses",
        metavar="N",
        type=int,
        help="how many witnesses have to cosign before a head is published (default: all)",
    )
    sequence.add_argument(
        "--wait-for-gaps",
        metavar="TIME",
        type=duration_s,
        default=3600.0,
        help="how long a segment waits for the ones before it (default: 1h)",
    )
    sequence.add_argument("--follow", action="store_true", help="go on until SIGTERM or an interrupt")
    sequence.add_argument(
        "--every", metavar="TIME", type=duration_s, default=10.0, help="how often to look (default: 10s)"
    )
    sequence.add_argument("--json", action="store_true", help="one JSON object a run, for programs")

    keygen = verbs.add_parser(
        "keygen",
        help="make a key for the log, in a file that did not exist",
        description="Make a key for the log, in a file that did not exist, and print its public half: give "
        "that to whoever verifies.",
    )
    keygen.add_argument("--to", metavar="FILE", required=True, help="of the private key, in PEM")
    keygen.add_argument(
        "--origin", metavar="NAME", required=True, help="the log's name, as in example.com/audit"
    )
    keygen.add_argument("--kind", choices=_KINDS, default=_KINDS[0], help=f"(default: {_KINDS[0]})")
    keygen.add_argument("--json", action="store_true", help="one JSON object, for programs")


def run(options: argparse.Namespace) -> int:
    """Carry ``sequence`` or ``keygen`` out; the exit status."""
    return _keygen(options) if options.verb == "keygen" else _sequence(options)


def _keygen(options: argparse.Namespace) -> int:
    from strongroom_cli.console import print_json
    from strongroom_security.auditlog.sequencing.logkeys import generate_log_key

    key = generate_log_key(Path(options.to), options.origin, kind=options.kind)
    if options.json:
        print_json({"file": options.to, "vkey": str(key)})
    else:
        sys.stdout.write(f"{key}\n")
    return 0


def _sequence(options: argparse.Namespace) -> int:
    from strongroom_security.auditlog.listing import absent_folder
    from strongroom_security.auditlog.sequencing.logstate import LogState
    from strongroom_security.auditlog.sequencing.sequencing import Sequencer

    sink = open_sink(options)
    absent = absent_folder(sink)
    if absent is not None:
        sys.stderr.write(f"strongroom: {printable(absent)}\n")
        return _NOT_FOUND
    sequencer = Sequencer(
        sink,
        _log(options),
        state=LogState(Path(options.state)),
        wait_for_gaps_s=options.wait_for_gaps,
        vouchers=_vouchers(options),
    )
    if not options.follow:
        return _tell(sequencer.run_once(), options, set())
    return _follow(sequencer, options)


def _log(options: argparse.Namespace) -> Log:
    from strongroom_security.auditlog.sequencing.logkeys import parse_verifier, read_log_key
    from strongroom_security.auditlog.sequencing.sequencing import Log
    from strongroom_security.tlog.witnesses import WitnessPolicy
    from strongroom_security.tlog.witnessing import Witness

    witness_keys = tuple(parse_verifier(text) for text in options.witness_key)
    required = options.witnesses
    if required is None:
        required = len({key.name for key in witness_keys})
    return Log(
        origin=options.origin,
        signers=tuple(read_log_key(text, options.origin) for text in options.key),
        former=tuple(parse_verifier(text) for text in options.former_key),
        witnesses=tuple(Witness(url=url) for url in options.witness),
        policy=WitnessPolicy(keys=witness_keys, required=required),
    )


def _follow(sequencer: Sequencer, options: argparse.Namespace) -> int:
    from strongroom.errors import StoreError

    stop = threading.Event()
    # A handler may interrupt the very wait for ``stop``, whose lock it would then wait for for ever: it tells
    # another thread, by the one queue that may be filled from anywhere.
    told_to: SimpleQueue[None] = SimpleQueue()

    def stop_when_told() -> None:
        told_to.get()
        stop.set()

    def tell(*_: object) -> None:
        told_to.put(None)

    threading.Thread(target=stop_when_told, daemon=True).start()
    before = {each: signal.signal(each, tell) for each in (signal.SIGTERM, signal.SIGINT)}
    status, told = 0, set[str]()
    try:
        for found in sequencer.follow(options.every, stop):
            if isinstance(found, StoreError):
                sys.stderr.write(f"strongroom: {printable(str(found))}; trying again\n")
                sys.stderr.flush()
                continue
            status = max(status, _tell(found, options, told))
            sys.stdout.flush()
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        tell()
    return status


def _tell(found: Sequenced, options: argparse.Namespace, told: set[str]) -> int:
    """Say what a run came to, of what was not said before; the exit status."""
    from strongroom_cli.console import print_json

    refused = [each for each in found.refused if str(each) not in told]
    waiting = [each for each in found.waiting if each.key not in told]
    is_news = bool(found.segments or refused or waiting) or not told
    if found.taken_at is not None:
        _tell_taken(found.taken_at, options)
    if options.json and is_news:
        head = found.head
        print_json(
            {
                "size": 0 if head is None else head.size,
                "root": None if head is None else head.root.hex(),
                "segments": found.segments,
                "lines": found.lines,
                "gaps": list(found.gaps),
                "refused": [
                    {"key": each.key, "line": each.line, "message": each.message} for each in found.refused
                ],
                "waiting": [
                    {"key": each.key, "missing": each.missing, "age_s": each.age_s} for each in found.waiting
                ],
                "cosigned": list(found.cosigned),
                "unwitnessed": list(found.unwitnessed),
                "taken_at": found.taken_at,
            }
        )
    elif is_news:
        size = 0 if found.head is None else found.head.size
        cosigned = f", cosigned by {', '.join(found.cosigned)}" if found.cosigned else ""
        _say(
            f"{count(found.segments, 'segment')} with {count(found.lines, 'line')} went into the log; its "
            f"size is {size:,}{cosigned}"
        )
        for key in found.gaps:
            _say(f"gap: {key}: the writer's segment before it is missing, and it went in without")
        for each in refused:
            _say(f"refused: {each}")
        for late in waiting:
            _say(f"waiting: {late}")
        for contradiction in found.unwitnessed:
            _say(f"witness: {contradiction}")
    told |= {"", *(str(each) for each in refused), *(each.key for each in waiting)}
    return 0 if found.is_clean else _FOUND


def _tell_taken(size: int, options: argparse.Namespace) -> None:
    """Say that a log which was set back before now would not show; beside the answer unless it was meant."""
    text = f"no state: took the log as found, at size {size:,}"
    if not options.first:
        sys.stderr.write(
            f"strongroom: warning: {text}; what was set back before would not show. If {options.state} was "
            "lost or mistyped, put it back or name the right one; --first says that it is meant\n"
        )
    elif not options.json:
        _say(text)


def _say(text: str) -> None:
    sys.stdout.write(f"{printable(text)}\n")
