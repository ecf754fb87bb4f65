"""``strongroom replicate``: checkpoints copied to another tier by hand. Called again, it goes on."""

from __future__ import annotations

import argparse
from typing import Any, Final

from rich.console import Console

from strongroom.layout import CheckpointName
from strongroom.replication import Progress, Report, Target, replicate
from strongroom.roles import Duty, open_root
from strongroom_cli import words
from strongroom_cli.auditing import open_store_of
from strongroom_cli.console import Bar, line, new_console, print_json

__all__ = ["run"]

_DAMAGED: Final = 1

_BY: Final = {
    "reading": "read back there",
    "checksums": "verified by the server's checksums: reading is denied there",
}


def run(options: argparse.Namespace) -> int:
    """Carry the command out; the exit status."""
    # How far it has come is noted at the source.
    source = open_store_of(options, Duty.SAVE)
    target = Target(
        store=open_root(options.to, options.policy, Duty.SAVE),
        max_bytes_per_second=options.max_bytes_per_second,
    )
    with Bar("copying") as bar:

        def show(progress: Progress) -> None:
            bar.show(progress.done_bytes, progress.total_bytes)

        report = replicate(
            source,
            target,
            step=options.step,
            everything=options.all,
            verify=options.verify,
            guard=options.guard,
            on_progress=show,
            activity=options.activity,
        )
    if options.json:
        print_json(_to_json(report))
    else:
        _print(new_console(), report)
    return _DAMAGED if report.damaged else 0


def _print(console: Console, report: Report) -> None:
    for copied in report.copied:
        sent = f"{words.size(copied.sent_bytes)} sent" if copied.sent_bytes else "stood there already"
        console.print(
            line(
                ("copied  ", "bold green"), str(copied.commit.name), (f": {sent}, {_BY[copied.how]}", "dim")
            ),
            soft_wrap=True,
        )
    for commit in report.standing:
        console.print(
            line(("there   ", "dim"), str(commit.name), (": verified there before", "dim")), soft_wrap=True
        )
    for name, why in report.damaged.items():
        console.print(line(("damaged ", "bold red"), str(name), (f": {why}", "red")), soft_wrap=True)
    if report.sidecars:
        added = words.count(report.sidecars, "file")
        console.print(line(f"{added} of signatures and keyrings that came later"), soft_wrap=True)
    total = sum(copied.sent_bytes for copied in report.copied)
    count = words.count(len(report.copied), "checkpoint")
    console.print(line(f"{count} copied to ", report.target, f", {words.size(total)} sent"), soft_wrap=True)


def _to_json(report: Report) -> dict[str, Any]:
    return {
        "copied": [
            {
                **_named(copied.commit.name),
                "sent_bytes": copied.sent_bytes,
                "size_bytes": copied.commit.size_bytes,
                "verified_by": copied.how,
            }
            for copied in report.copied
        ],
        "damaged": [{**_named(name), "reason": why} for name, why in report.damaged.items()],
        "root": report.source,
        "run": report.run,
        "sidecars": report.sidecars,
        "standing": [_named(commit.name) for commit in report.standing],
        "target": report.target,
    }


def _named(name: CheckpointName) -> dict[str, Any]:
    return {"attempt": name.attempt, "folder": name.folder, "launch": name.launch, "step": name.step}
