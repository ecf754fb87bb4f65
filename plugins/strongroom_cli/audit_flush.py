"""``strongroom audit flush``: sends what processes of this machine that have died left for the audit log."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any, Final

from strongroom.errors import ConfigError
from strongroom_cli.words import count, printable

__all__ = ["add_flush", "run"]

_LEFT: Final = 1
_WITHIN_S: Final = 60.0


def add_flush(verbs: Any) -> None:
    """Add the verb.

    Args:
        verbs: what `argparse` adds the command's verbs to.
    """
    text = "send what processes of this machine that have died left for the log"
    flush = verbs.add_parser(
        "flush",
        help=text,
        description=f"{text[0].upper()}{text[1:]}. What living ones write is left alone.",
        epilog="Exit status: 0 nothing is left, 1 something is (see why), or waits for another sink, 2 the "
        "policy cannot be followed.",
    )
    flush.add_argument(
        "--security",
        metavar="FILE",
        help="the policy file (default: the one that the variable STRONGROOM_CONFIG names)",
    )
    flush.add_argument("--spool", metavar="FOLDER", help="where it waits (default: the policy's)")
    flush.add_argument(
        "--any-host",
        action="store_true",
        help="of a spool that machines share, send what others have left in the last 24 hours, too: their "
        "processes must be dead",
    )
    flush.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Carry the verb out; the exit status."""
    from strongroom.config import load_policy
    from strongroom_cli.console import print_json
    from strongroom_security.auditlog.recording.auditor import LogAuditor
    from strongroom_security.auditlog.recording.elsewhere import waiting_elsewhere
    from strongroom_security.auditlog.recording.spool import find_spool

    policy = load_policy(options.security)
    auditor = None if policy is None else policy.auditor
    if not isinstance(auditor, LogAuditor):
        raise ConfigError(
            "no policy with a section [audit] is named, which says where the log is and who vouches for what "
            "is sent there; name its file by --security or STRONGROOM_CONFIG"
        )
    settings = dataclasses.replace(auditor.settings, salvages=False)
    if options.spool is not None:
        settings = dataclasses.replace(settings, spool=Path(options.spool).absolute())
    flushing = LogAuditor(settings)
    try:
        done = flushing.salvage(of_any_host=options.any_host)
    finally:
        flushing.close(within_s=_WITHIN_S)
    spool = find_spool(settings.spool, settings.sink)
    others = {} if spool is None else waiting_elsewhere(spool)
    if options.json:
        elsewhere = {str(folder): waiting for folder, waiting in others.items()}
        print_json({"sink": settings.sink, **dataclasses.asdict(done), "elsewhere": elsewhere})
    else:
        sent = f"{count(done.segments, 'segment')} with {count(done.events, 'event')} sent to {settings.sink}"
        torn = f"; {done.torn} ended in the middle of a line" if done.torn else ""
        sys.stdout.write(f"{printable(sent)}{torn}\n")
        if done.left or done.error:
            why = done.error or "another process was in the way"
            sys.stderr.write(printable(f"strongroom: {done.left} still wait here: {why}") + "\n")
        for folder, waiting in others.items():
            told = f"waiting for another sink, in {folder}: {count(waiting, 'segment')}; flush by its policy"
            sys.stderr.write(printable(f"strongroom: {told}") + "\n")
    return _LEFT if done.left or done.error or others else 0
