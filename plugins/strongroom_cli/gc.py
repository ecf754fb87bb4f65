"""``strongroom gc``: retention and orphans, by whoever may delete. It reads commits, and no shard.

What goes and why is `strongroom.keeping.find_garbage`'s to say.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, Final

from rich.console import Console

from strongroom.acts import ActSink
from strongroom.catalog import History
from strongroom.config import SYSTEM_CLOCK, Policy
from strongroom.errors import ConfigError
from strongroom.keeping import event_of, find_garbage, start_of
from strongroom.layout import CheckpointName
from strongroom.replication import Notes, held_by_notes, read_notes
from strongroom.retention import KeepLast
from strongroom.roles import Duty, Operation
from strongroom.sweep import Kind, Outcome, Plan, forget_announcements, remove
from strongroom_cli import words
from strongroom_cli.auditing import open_store_of
from strongroom_cli.console import Bar, line, new_console, print_json
from strongroom_cli.standing import read_history, run_of

__all__ = ["run"]

_UNREADABLE: Final = 4

_WORDS: Final[dict[Kind, str]] = {
    "checkpoint": "checkpoint",
    "orphan": "uncommitted",
    "upload": "unfinished upload",
}


def run(options: argparse.Namespace) -> int:
    """Carry the command out; the exit status."""
    keep = None if options.keep_last is None else KeepLast(count=options.keep_last)
    options.activity.note(is_dry_run=options.dry_run)
    if not options.dry_run:
        _check_may_delete(options.policy)
    # Whoever only looks needs no more than whoever restores.
    store = open_store_of(options, Duty.RESTORE if options.dry_run else Duty.SAVE)
    guard = options.guard
    history = read_history(store, guard)
    options.activity.about(run=run_of(history))
    recorded = ActSink(guard.auditor, store.uri)
    notes = Notes(targets={}) if options.unreplicated else read_notes(store)
    plan = find_garbage(
        store,
        history,
        keep,
        now_ns=SYSTEM_CLOCK.now_ns(),
        guard=guard,
        held=lambda found: held_by_notes(found, notes),
        best=options.keep_best,
    )
    outcomes = []
    with Bar("removing", counts=True) as bar:
        for number, removal in enumerate(plan.removals):
            bar.show(number, len(plan.removals))
            if options.dry_run:
                outcomes.append(Outcome(removal=removal))
                continue
            start = start_of(run_of(history) or "", store.uri, removal)
            recorded.emit(start)
            outcomes.append(remove(store, removal))
            recorded.emit(event_of(start.run, store.uri, outcomes[-1], operation=start.operation))
    options.activity.note(
        removed=sum(outcome.error is None for outcome in outcomes), freed_bytes=_freed_bytes(outcomes)
    )
    if not options.dry_run:
        forget_announcements(store, history, now_ns=SYSTEM_CLOCK.now_ns())
    if options.json:
        print_json(
            {
                "dry_run": options.dry_run,
                "failed": sum(outcome.error is not None for outcome in outcomes),
                "freed_bytes": _freed_bytes(outcomes),
                "keep_best": options.keep_best,
                "keep_last": options.keep_last,
                "kept": [
                    {**_named(decision.name, history), "reason": decision.reason} for decision in plan.kept
                ],
                "removed": [_told(outcome, history) for outcome in outcomes],
                "root": store.uri,
                "run": history.run.run if history.run else None,
                "tiers": sorted(notes.tiers),
                "unknown": list(plan.unknown),
            }
        )
    else:
        console = new_console()
        _print_notes(console, notes)
        _print(console, plan, outcomes, is_dry_run=options.dry_run)
    return _UNREADABLE if any(outcome.error is not None for outcome in outcomes) else 0


def _check_may_delete(policy: Policy | None) -> None:
    role = policy.role if policy is not None else None
    if role is not None and not role.may(Operation.DELETE, Duty.SAVE):
        raise ConfigError(
            f"the role {role.name} of the policy may not delete: take a policy file with the role retention, "
            "or see with --dry-run what there would be to remove"
        )


def _freed_bytes(outcomes: Sequence[Outcome]) -> int:
    """As far as it is known: of unfinished uploads it is not."""
    return sum(outcome.removal.size_bytes or 0 for outcome in outcomes if outcome.error is None)


def _named(name: CheckpointName, history: History) -> dict[str, Any]:
    return {
        "attempt": name.attempt,
        "folder": name.folder,
        "is_committed": name in history.commits or name in history.damaged,
        "launch": name.launch,
        "step": name.step,
    }


def _told(outcome: Outcome, history: History) -> dict[str, Any]:
    removal = outcome.removal
    return {
        **_named(removal.name, history),
        "error": outcome.error,
        "kind": removal.kind,
        "path": removal.path,
        "reason": removal.reason,
        "size_bytes": removal.size_bytes,
    }


def _print_notes(console: Console, notes: Notes) -> None:
    """By what it was decided that something stands elsewhere."""
    for uri in sorted(notes.tiers):
        told = line(
            "what stands on ", uri, " is known by this root's own notes; the tier itself is not asked"
        )
        console.print(told, soft_wrap=True)
    for uri in notes.strange:
        told = line(("notes of ", "yellow"), uri, " lie here, which hold nothing back in this root")
        console.print(told, soft_wrap=True)


def _print(console: Console, plan: Plan, outcomes: Sequence[Outcome], *, is_dry_run: bool) -> None:
    for decision in plan.kept:
        told = line(("kept     ", "dim"), str(decision.name), (f": {decision.reason}", "dim"))
        console.print(told, soft_wrap=True)
    for unknown in plan.unknown:
        console.print(line(("unknown  ", "yellow"), unknown), soft_wrap=True)
    verb = "would go" if is_dry_run else "removed "
    for outcome in outcomes:
        removal = outcome.removal
        what = f"{_WORDS[removal.kind]} {removal.path}"
        if outcome.error is not None:
            told = line(("failed  ", "bold red"), " ", what, (f": {outcome.error}", "red"))
        else:
            size = "" if removal.size_bytes is None else f", {words.size(removal.size_bytes)}"
            told = line((verb, "bold"), " ", what, (f"{size}: {removal.reason}", "dim"))
        console.print(told, soft_wrap=True)
    gone = sum(outcome.error is None for outcome in outcomes)
    total = f"{words.count(gone, 'removal')}, {words.size(_freed_bytes(outcomes))}"
    if not outcomes:
        console.print(line("nothing to remove"))
    elif is_dry_run:
        console.print(line(f"{total} would be free; nothing was removed (--dry-run)"))
    else:
        console.print(line(f"{total} free again"))
