"""``strongroom verify``: reads every byte and names what is wrong. The verdict is the exit status."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, Final

from rich.console import Console

from strongroom import layout
from strongroom.chain import Link
from strongroom.roles import Duty
from strongroom.signing import Guard
from strongroom.stores.base import Store
from strongroom.verify import CheckpointReport, Problem, Progress, Report, Verdict, verify
from strongroom_cli import words
from strongroom_cli.auditing import open_store_of
from strongroom_cli.console import Bar, line, new_console, print_json

__all__ = ["run"]

_STATUSES: Final[dict[Verdict, int]] = {"whole": 0, "damaged": 1, "unverified": 4}
_CLOSED: Final = "{count} verified as stored, and not opened: no policy here names keys"
_UNJUDGED: Final = "signatures of {count} stand here, and nobody judged them: no policy here says whose count"
_STYLES: Final[dict[Verdict, str]] = {
    "whole": "bold green",
    "damaged": "bold red",
    "unverified": "bold yellow",
}


def run(options: argparse.Namespace) -> int:
    """Carry the command out; the exit status."""
    store = open_store_of(options, Duty.RESTORE)
    with Bar("verifying") as bar:

        def show(progress: Progress) -> None:
            bar.show(progress.done_bytes, progress.total_bytes)

        report = verify(
            store,
            step=options.step,
            everything=options.all,
            chain=options.chain,
            guard=options.guard,
            on_progress=show,
            activity=options.activity,
        )
    unjudged = _count_unjudged(store, report, options.guard)
    if options.json:
        print_json(_to_json(report, unjudged))
    else:
        _print(new_console(), report, unjudged)
    return _STATUSES[report.verdict]


def _count_unjudged(store: Store, report: Report, guard: Guard) -> int:
    """How many checkpoints have a signature, where nobody asked whose it is."""
    if guard.trust is not None:
        return 0
    return sum(_is_signed(store, checkpoint) for checkpoint in report.checkpoints)


def _is_signed(store: Store, checkpoint: CheckpointReport) -> bool:
    if checkpoint.commit is not None and checkpoint.commit.signature is not None:
        return True
    # `COMMIT` pins the writer's signature alone: one that was added later stands beside it.
    names = store.list_names(f"{checkpoint.name.folder}/{layout.SIGNATURES}")
    return any(layout.parse_signature_name(name) is not None for name in names)


def _print(console: Console, report: Report, unjudged: int) -> None:
    for problem in report.root_problems:
        _print_problem(console, problem)
    for checkpoint in report.checkpoints:
        for problem in checkpoint.problems:
            _print_problem(console, problem)
    if len(report.checkpoints) > 1:
        for checkpoint in report.checkpoints:
            console.print(
                line(
                    f"step {checkpoint.name.step}, launch {checkpoint.name.launch}: ",
                    (checkpoint.verdict, _STYLES[checkpoint.verdict]),
                    (f" ({_amount(checkpoint)})", "dim"),
                ),
                soft_wrap=True,
            )
    console.print(line((report.verdict, _STYLES[report.verdict]), ": ", _summary(report)), soft_wrap=True)
    closed = sum(checkpoint.is_closed for checkpoint in report.checkpoints)
    if closed:
        console.print(
            line((_CLOSED.format(count=words.count(closed, "sealed checkpoint")), "yellow")),
            soft_wrap=True,
        )
    if unjudged:
        console.print(
            line((_UNJUDGED.format(count=words.count(unjudged, "checkpoint")), "yellow")), soft_wrap=True
        )
    _print_signers(console, report)
    if report.chain is not None:
        _print_chain(console, report.chain)
    console.print(line((f"rollback protection: {report.rollback_protection}", "dim")), soft_wrap=True)


def _print_signers(console: Console, report: Report) -> None:
    signers = {signer: None for checkpoint in report.checkpoints for signer in checkpoint.signers}
    for signer in signers:
        count = sum(signer in checkpoint.signers for checkpoint in report.checkpoints)
        of = f" ({words.count(count, 'checkpoint')})" if len(report.checkpoints) > 1 else ""
        console.print(line(("signed by ", "dim"), signer, (of, "dim")), soft_wrap=True)


def _print_chain(console: Console, chain: Sequence[Link]) -> None:
    linked = sum(link.state == "linked" for link in chain)
    console.print(line(("chain: ", "dim"), f"{words.count(linked, 'checkpoint')} linked"), soft_wrap=True)
    for link in chain:
        if link.state != "linked":
            style = "red" if link.is_break else "yellow"
            told = f"  step {link.name.step}, launch {link.name.launch}: "
            console.print(line(told, (link.state, style), f": {link.message}"), soft_wrap=True)


def _print_problem(console: Console, problem: Problem) -> None:
    style = "red" if problem.is_damage else "yellow"
    console.print(
        line((problem.key, "bold"), ": ", (problem.kind, style), ": ", problem.message), soft_wrap=True
    )


def _summary(report: Report) -> str:
    steps = [f"step {checkpoint.name.step}" for checkpoint in report.checkpoints]
    what = steps[0] if len(steps) == 1 else words.count(len(steps), "checkpoint")
    found = f"{what} and the run's records; {_amount(report)} read and found right"
    if report.verdict == "whole":
        return found
    damaged = sum(problem.is_damage for problem in report.problems)
    unknown = len(report.problems) - damaged
    parts = [words.count(damaged, "problem")] if damaged else []
    if unknown:
        parts.append(f"{words.count(unknown, 'file')} that could not be verified")
    return f"{' and '.join(parts)} in {found}"


def _amount(report: Report | CheckpointReport) -> str:
    return f"{words.count(report.file_count, 'file')}, {words.size(report.size_bytes)}"


def _to_json(report: Report, unjudged: int) -> dict[str, Any]:
    return {
        "checkpoints": [
            {
                "attempt": checkpoint.name.attempt,
                "files": checkpoint.file_count,
                "folder": checkpoint.name.folder,
                "is_closed": checkpoint.is_closed,
                "launch": checkpoint.name.launch,
                "manifest_digest": str(checkpoint.commit.manifest) if checkpoint.commit else None,
                "problems": [_problem_json(problem) for problem in checkpoint.problems],
                "signers": list(checkpoint.signers),
                "size_bytes": checkpoint.size_bytes,
                "step": checkpoint.name.step,
                "verdict": checkpoint.verdict,
            }
            for checkpoint in report.checkpoints
        ],
        "chain": None if report.chain is None else [_link_json(link) for link in report.chain],
        "files": report.file_count,
        "problems": [_problem_json(problem) for problem in report.root_problems],
        "rollback_protection": report.rollback_protection,
        "root": report.uri,
        "run": report.run,
        "size_bytes": report.size_bytes,
        "unjudged": unjudged,
        "verdict": report.verdict,
    }


def _link_json(link: Link) -> dict[str, Any]:
    return {
        "attempt": link.name.attempt,
        "launch": link.name.launch,
        "message": link.message,
        "signers": list(link.signers),
        "state": link.state,
        "step": link.name.step,
    }


def _problem_json(problem: Problem) -> dict[str, Any]:
    return {"file": problem.key, "kind": problem.kind, "message": problem.message}
