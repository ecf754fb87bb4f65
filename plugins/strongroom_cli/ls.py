"""``strongroom ls``: what was committed, newest first. Reads a commit each, and no other file."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Final

from rich.console import Console
from rich.text import Text

from strongroom.catalog import History
from strongroom.roles import Duty, open_root
from strongroom_cli import words
from strongroom_cli.console import line, new_console, new_table, print_json
from strongroom_cli.standing import STYLES, WORDS, Standing, read_history, standings

__all__ = ["run"]

_WIDE: Final = 112
"""Characters from which on time and folder stand in full."""
_NARROW: Final = 72
"""Characters below which only what matters most fits."""


def run(options: argparse.Namespace) -> int:
    """Carry the command out; the exit status."""
    store = open_root(options.root, options.policy, Duty.RESTORE)
    history = read_history(store, options.guard)
    found = standings(history)
    if options.json:
        print_json(
            {
                "checkpoints": [item.to_json() for item in found if item.status != "uncommitted"],
                "damaged_launches": [
                    {"launch": number, "reason": reason}
                    for number, reason in sorted(history.damaged_launches.items())
                ],
                "line_broken": history.line.broken,
                "root": store.uri,
                "run": history.run.run if history.run else None,
                "uncommitted": [item.to_json() for item in found if item.status == "uncommitted"],
            }
        )
        return 0
    _print(new_console(), store.uri, history, found)
    return 0


def _print(console: Console, uri: str, history: History, found: list[Standing]) -> None:
    committed = sum(item.status != "uncommitted" for item in found)
    run_id = history.run.run if history.run else "unknown"
    console.print(
        line(
            ("run ", "dim"), run_id, (" in ", "dim"), uri, (": ", "dim"), words.count(committed, "checkpoint")
        )
    )
    if found:
        console.print()
        _print_table(console, found)
    notes = [
        line((f"step {item.name.step} ", "bold"), ("is damaged: ", "red"), item.reason or "")
        for item in found
        if item.status == "damaged"
    ]
    notes.extend(
        line(("the record of launch ", "red"), str(number), (" is damaged: ", "red"), reason)
        for number, reason in sorted(history.damaged_launches.items())
    )
    if any(item.status == "uncommitted" for item in found):
        notes.append(line(("uncommitted: a save that died, or one under way; never restored", "dim")))
    if history.line.broken is not None:
        notes.append(line(("the line ends early: ", "red"), history.line.broken))
    if not found:
        notes.append(line("nothing was committed yet"))
    if notes:
        console.print()
    for note in notes:
        console.print(note, soft_wrap=True)


def _print_table(console: Console, found: list[Standing]) -> None:
    """The rows, with as much of each as the terminal has room for."""
    now_ms = time.time_ns() // 1_000_000
    columns: dict[str, Callable[[Standing], str | Text]] = {
        "STEP": lambda item: str(item.name.step),
        "STATE": lambda item: line((WORDS[item.status], STYLES[item.status])),
        "LAUNCH": lambda item: str(item.name.launch),
        "SIZE": lambda item: words.size(item.size_bytes),
        "AGE": lambda item: words.age(item.committed_at_ms, now_ms=now_ms),
        "SAVED": lambda item: words.when(item.committed_at_ms),
        "ATTEMPT": lambda item: item.name.attempt,
        "FOLDER": lambda item: item.name.folder,
    }
    left_out = {"ATTEMPT"} if console.width >= _WIDE else {"SAVED", "FOLDER"}
    if console.width < _NARROW:
        left_out |= {"LAUNCH", "ATTEMPT"}
    shown = [column for column in columns if column not in left_out]
    table = new_table(*shown, right=("STEP", "LAUNCH", "SIZE", "AGE"))
    for item in found:
        table.add_row(*(columns[column](item) for column in shown))
    console.print(table)
