"""``strongroom audit verify``: whether the log is as it was written, and if not, where."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from rich.console import Console

from strongroom.errors import ConfigError
from strongroom_cli import words
from strongroom_cli.audit_log import sink_of, tell, vouchers_of
from strongroom_cli.audit_prove import log_keys
from strongroom_cli.console import Bar, line, new_console, print_json
from strongroom_security.auditlog.listing import absent_folder
from strongroom_security.auditlog.verifying.checking import Demands, VerifiedLog, check_log
from strongroom_security.auditlog.verifying.findings import Gravity
from strongroom_security.tlog.notes import MAX_NOTE_BYTES

__all__ = ["run"]

_TAMPERED: Final = 1
_NOT_FOUND: Final = 3

_STYLES: Final = {
    Gravity.TAMPERED: "bold red",
    Gravity.UNTRUSTED: "bold red",
    Gravity.UNPROVEN: "yellow",
    Gravity.NOTE: "dim",
}
_SHOWN: Final = {Gravity.TAMPERED: 1_000, Gravity.UNTRUSTED: 1_000, Gravity.UNPROVEN: 20, Gravity.NOTE: 20}


def run(options: argparse.Namespace) -> int:
    """Carry the command out; the exit status."""
    if (options.witness_key or options.witnesses or options.origin) and not options.log_key:
        raise ConfigError(
            "--origin and --witness-key are about the log that --log-key names, and it names none"
        )
    sink = sink_of(options, options.policy)
    options.activity.about(root=sink.uri, run=options.run)
    demands = Demands(
        vouchers=vouchers_of(options, options.policy),
        log=log_keys(options) if options.log_key else None,
        against=None if options.against is None else _read(Path(options.against)),
        run=options.run,
        allow_uncertified=options.allow_uncertified,
    )
    absent = absent_folder(sink)
    if absent is not None:
        tell(absent)
        return _NOT_FOUND
    with Bar("verifying", counts=True) as bar:
        found = check_log(sink, demands, progress=bar.show)
    is_there = found.totals.segments > 0 or found.is_tampered
    if options.run is None:
        is_there = is_there or found.tree is not None
    if options.json:
        print_json(
            {
                "findings": [finding.to_json() for finding in found.findings],
                "sink": sink.uri,
                "tampered": found.is_tampered,
                "totals": found.totals.to_json(),
                "untrusted": found.is_untrusted,
                "tree": None if found.tree is None else found.tree.to_json(),
            }
        )
    elif is_there:
        _print(new_console(), sink.uri, found)
    if not is_there:
        of_run = options.run is not None
        tell(
            f"nothing of run {options.run} is in the log {sink.uri}"
            if of_run
            else f"{sink.uri} holds no audit log"
        )
        return _NOT_FOUND
    return _TAMPERED if found.is_tampered or found.is_untrusted else 0


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_NOTE_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _print(console: Console, uri: str, found: VerifiedLog) -> None:
    totals = found.totals
    console.print(
        line(
            ("log ", "dim"),
            uri,
            f": {words.count(totals.events, 'event')} in {words.count(totals.segments, 'segment')} by "
            f"{words.count(totals.writers, 'writer')}, {totals.vouched_writers:,} of them vouched for",
        ),
        soft_wrap=True,
    )
    if found.tree is not None:
        signed = ", ".join(found.tree.signed_by) or "nobody that was asked for"
        cosigned = f", cosigned by {', '.join(found.tree.cosigned_by)}" if found.tree.cosigned_by else ""
        console.print(
            line(
                ("tree ", "dim"),
                f"{found.tree.origin}: {words.count(found.tree.size, 'line')}, signed by {signed}{cosigned}",
            ),
            soft_wrap=True,
        )
    for gravity in Gravity:
        several = [finding for finding in found.findings if finding.gravity is gravity]
        for finding in several[: _SHOWN[gravity]]:
            console.print(
                line((gravity.value, _STYLES[gravity]), f" {finding.kind.value}: {finding}"), soft_wrap=True
            )
        if len(several) > _SHOWN[gravity]:
            more = f"and {len(several) - _SHOWN[gravity]:,} more that are {gravity.value}; --json lists all"
            console.print(line((more, "dim")))
    if totals.salvaged_segments:
        console.print(
            line(
                ("salvaged ", "yellow"),
                f"{words.count(totals.salvaged_events, 'event')} in "
                f"{words.count(totals.salvaged_segments, 'segment')} are vouched for by who closed them for "
                "a dead writer, and by nobody else",
            ),
            soft_wrap=True,
        )
    unproven = totals.events - totals.sequenced_events
    if found.is_tampered:
        console.print(line(("the log is not as it was written", "bold red")))
    elif found.is_untrusted:
        told = "nothing was changed in what can be seen; writers are vouched for by keys that are not trusted"
        console.print(line((told, "bold red")))
    elif unproven:
        how_many = f"{unproven:,} of {words.count(totals.events, 'event')} are unproven: not in the tree"
        console.print(line(("nothing is wrong in what can be seen; ", "green"), (how_many, "yellow")))
    elif totals.salvaged_segments:
        console.print(line(("nothing is wrong in what can be seen, by the word of who salvaged", "green")))
    else:
        console.print(line(("the log is as it was written", "green")))
