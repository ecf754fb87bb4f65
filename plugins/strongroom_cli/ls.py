"""``strongroom ls``: what was committed, newest first, and on which other tiers it is.

Reads a commit each, and what was noted of copies; no other tier is contacted.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Console
from rich.text import Text

from strongroom.catalog import History
from strongroom.layout import CheckpointName
from strongroom.manifest import Commit
from strongroom.replication.lag import ALARM_S, WARN_S, lag_s
from strongroom.replication.notes import read_notes
from strongroom.roles import Duty
from strongroom.stores.base import Store
from strongroom_cli import words
from strongroom_cli.auditing import open_store_of
from strongroom_cli.console import line, new_console, new_table, print_json
from strongroom_cli.standing import STYLES, WORDS, Standing, read_history, run_of, standings

__all__ = ["run"]

_WIDE: Final = 112
"""Characters from which on time and folder stand in full."""
_NARROW: Final = 72
"""Characters below which only what matters most fits."""

_BY_CHECKSUMS: Final = "*"
"""Beside a tier's number: what stands there was never read there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tier:
    """Another tier, as far as was noted.

    Attributes:
        is_followed: whether a job copies there; else copies were made by hand, and nothing waits.
        verified: what stands there, of what stands here.
        by_checksums: those of them that nobody has read there: the server's checksums have to do.
        last: the newest of these on the line; None: there is none.
        behind: checkpoints on the line that are newer, and are to come there.
        lag_s: how long ago the oldest of them was committed.
    """

    uri: str
    is_followed: bool
    by_checksums: frozenset[CheckpointName]
    verified: frozenset[CheckpointName]
    last: CheckpointName | None
    behind: tuple[Commit, ...]
    lag_s: float

    def to_json(self) -> dict[str, Any]:
        return {
            "behind": len(self.behind),
            "is_followed": self.is_followed,
            "lag_s": round(self.lag_s, 3),
            "last_launch": self.last.launch if self.last else None,
            "last_step": self.last.step if self.last else None,
            "uri": self.uri,
        }


def run(options: argparse.Namespace) -> int:
    """Carry the command out; the exit status."""
    store = open_store_of(options, Duty.RESTORE)
    history = read_history(store, options.guard)
    options.activity.about(run=run_of(history))
    options.activity.note(checkpoints=len(history.commits))
    found = standings(history)
    now_ms = time.time_ns() // 1_000_000
    tiers = _tiers(store, history, now_ms)
    if options.json:
        print_json(
            {
                "checkpoints": [
                    {
                        **item.to_json(),
                        "by_checksums_on": [tier.uri for tier in tiers if item.name in tier.by_checksums],
                        "verified_on": [tier.uri for tier in tiers if item.name in tier.verified],
                    }
                    for item in found
                    if item.status != "uncommitted"
                ],
                "damaged_launches": [
                    {"launch": number, "reason": reason}
                    for number, reason in sorted(history.damaged_launches.items())
                ],
                "line_broken": history.line.broken,
                "root": store.uri,
                "run": history.run.run if history.run else None,
                "tiers": [tier.to_json() for tier in tiers],
                "uncommitted": [item.to_json() for item in found if item.status == "uncommitted"],
            }
        )
        return 0
    _print(new_console(), store.uri, history, found, tiers, now_ms)
    return 0


def _tiers(store: Store, history: History, now_ms: int) -> list[_Tier]:
    """The tiers to which copies were ever made from here."""
    found = []
    notes = read_notes(store)
    for uri in sorted(notes.targets):
        noted = notes.targets[uri].verified
        verified = frozenset(
            name for name, commit in history.commits.items() if name in noted and noted[name].is_of(commit)
        )
        is_followed = notes.targets[uri].is_tier
        line_of_run = [name for name in history.line.newest_first if name in history.commits]
        last = next((name for name in line_of_run if name in verified), None)
        newer = line_of_run if last is None else line_of_run[: line_of_run.index(last)]
        behind = tuple(history.commits[name] for name in newer) if is_followed else ()
        found.append(
            _Tier(
                uri=uri,
                is_followed=is_followed,
                verified=verified,
                by_checksums=frozenset(name for name in verified if noted[name].how == "checksums"),
                last=last,
                behind=behind,
                lag_s=lag_s(behind, now_ms),
            )
        )
    return found


def _print(
    console: Console,
    uri: str,
    history: History,
    found: list[Standing],
    tiers: Sequence[_Tier],
    now_ms: int,
) -> None:
    committed = sum(item.status != "uncommitted" for item in found)
    run_id = history.run.run if history.run else "unknown"
    console.print(
        line(
            ("run ", "dim"), run_id, (" in ", "dim"), uri, (": ", "dim"), words.count(committed, "checkpoint")
        )
    )
    if found:
        console.print()
        _print_table(console, found, tiers, now_ms)
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
    notes.extend(_told(number, tier, now_ms) for number, tier in enumerate(tiers, start=1))
    if any(tier.by_checksums for tier in tiers):
        told = "by the server's checksums alone: nobody could read it there"
        notes.append(line((f"{_BY_CHECKSUMS}  ", "bold"), (told, "dim")))
    if notes:
        console.print()
    for note in notes:
        console.print(note, soft_wrap=True)


def _told(number: int, tier: _Tier, now_ms: int) -> Text:
    """How far a tier is, by what was noted."""
    if tier.last is not None:
        last = f"has step {tier.last.step}"
    elif tier.verified:
        last = "has superseded ones alone"
    else:
        last = "has none of these"
    if not tier.is_followed:
        return line((f"tier {number} ", "bold"), tier.uri, f": {last}", (", copied by hand", "dim"))
    if not tier.behind:
        return line(
            (f"tier {number} ", "bold"), tier.uri, f": {last}", (", the newest" if tier.last else "", "green")
        )
    style = "red" if tier.lag_s > ALARM_S else "yellow" if tier.lag_s > WARN_S else ""
    oldest_ms = min(commit.committed_at_ms for commit in tier.behind)
    waits = f"{words.count(len(tier.behind), 'newer one')} wait{'s' if len(tier.behind) == 1 else ''}"
    since = words.age(oldest_ms, now_ms=now_ms)
    return line(
        (f"tier {number} ", "bold"), tier.uri, f": {last}; ", (f"{waits}, the first from {since}", style)
    )


def _print_table(console: Console, found: list[Standing], tiers: Sequence[_Tier], now_ms: int) -> None:
    """The rows, with as much of each as the terminal has room for."""
    columns: dict[str, Callable[[Standing], str | Text]] = {
        "STEP": lambda item: str(item.name.step),
        "STATE": lambda item: line((WORDS[item.status], STYLES[item.status])),
        "LAUNCH": lambda item: str(item.name.launch),
        "SIZE": lambda item: words.size(item.size_bytes),
        "TIERS": lambda item: _numbers(item, tiers),
        "AGE": lambda item: words.age(item.committed_at_ms, now_ms=now_ms),
        "SAVED": lambda item: words.when(item.committed_at_ms),
        "ATTEMPT": lambda item: item.name.attempt,
        "FOLDER": lambda item: item.name.folder,
    }
    left_out = {"ATTEMPT"} if console.width >= _WIDE else {"SAVED", "FOLDER"}
    if not tiers:
        left_out.add("TIERS")
    if console.width < _NARROW:
        left_out |= {"LAUNCH", "ATTEMPT"}
    shown = [column for column in columns if column not in left_out]
    table = new_table(*shown, right=("STEP", "LAUNCH", "SIZE", "AGE"))
    for item in found:
        table.add_row(*(columns[column](item) for column in shown))
    console.print(table)


def _numbers(item: Standing, tiers: Sequence[_Tier]) -> str:
    """On which other tiers a checkpoint is verified, by the numbers that are told below."""
    numbers = [
        f"{number}{_BY_CHECKSUMS if item.name in tier.by_checksums else ''}"
        for number, tier in enumerate(tiers, start=1)
        if item.name in tier.verified
    ]
    return ",".join(numbers) or words.NOTHING
