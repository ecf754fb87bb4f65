"""``strongroom plan``: what a restore on so many ranks would read. Reads index and documents, no shard."""

from __future__ import annotations

import argparse
from typing import Any, Final

from rich.console import Console

from strongroom.errors import CheckpointNotFoundError, FormatError, IntegrityError
from strongroom.opened import OpenedCheckpoint, open_checkpoint
from strongroom.roles import Duty
from strongroom.shares import RankShare, Shares, shares_of
from strongroom_cli import words
from strongroom_cli.auditing import open_store_of
from strongroom_cli.console import line, new_console, new_table, print_json
from strongroom_cli.standing import STYLES, WORDS, Standing, read_history, run_of, standings

__all__ = ["run"]

_RANKS_SHOWN: Final = 40


def run(options: argparse.Namespace) -> int:
    """Carry the command out; the exit status."""
    store = open_store_of(options, Duty.RESTORE)
    history = read_history(store, options.guard)
    options.activity.about(run=run_of(history))
    if options.step is None and not history.line.newest_first:
        raise CheckpointNotFoundError(f"nothing was committed yet in {store.uri}")
    name = history.at_step(options.step) if options.step is not None else history.line.newest_first[0]
    options.activity.about(checkpoint=name)
    commit = history.commits.get(name)
    if commit is None:
        raise IntegrityError(f"step {name.step} cannot be restored: {history.damaged[name]}")
    options.activity.intend(commit.run, name)
    opened = open_checkpoint(store, commit, options.guard)
    options.activity.vouched(opened.signers)
    standing = next(item for item in standings(history) if item.name == name)
    try:
        shares = shares_of(opened, options.ranks)
    except RecursionError:
        raise FormatError(f"a document of {name} nests deeper than any that is written") from None
    if options.json:
        print_json(_to_json(store.uri, standing, opened, shares))
    else:
        _print(new_console(), standing, opened, shares)
    return 0


def _to_json(uri: str, standing: Standing, opened: OpenedCheckpoint, shares: Shares) -> dict[str, Any]:
    return {
        "checkpoint": standing.to_json(),
        "common_bytes": shares.common_bytes,
        "lacking": list(shares.lacking),
        "ownerless": list(shares.ownerless),
        "ranks": [
            {
                "files": [{"file": file.path, "size_bytes": file.size_bytes} for file in rank.files],
                "has_own_state": rank.has_own_state,
                "rank": rank.rank,
                "size_bytes": rank.size_bytes,
            }
            for rank in shares.ranks
        ],
        "root": uri,
        "saved_by": opened.manifest.world_size,
        "size_bytes": shares.size_bytes,
    }


# ------------------------------------------------------------------------------------ for people


def _print(console: Console, standing: Standing, opened: OpenedCheckpoint, shares: Shares) -> None:
    console.print(
        line(
            (f"step {standing.name.step}", "bold"),
            (f"  launch {standing.name.launch}, attempt {standing.name.attempt}  ", "dim"),
            (WORDS[standing.status], STYLES[standing.status]),
        )
    )
    ranks = len(shares.ranks)
    console.print(
        line(
            f"saved by {words.count(opened.manifest.world_size, 'rank')}; restored on "
            f"{words.count(ranks, 'rank')} that shard every tensor evenly along its first dimension:"
        ),
        soft_wrap=True,
    )
    console.print()
    table = new_table("  RANK", "READS", "FILES", "OWN VALUES", right=("  RANK", "READS", "FILES"))
    for rank in shares.ranks[:_RANKS_SHOWN]:
        table.add_row(
            f"  {rank.rank}", words.size(rank.size_bytes), f"{len(rank.files):,}", _own(rank, shares)
        )
    console.print(table)
    if ranks > _RANKS_SHOWN:
        console.print(line((f"  ... {ranks - _RANKS_SHOWN:,} more (--json lists all of them)", "dim")))
    console.print()
    stored = sum(opened.record(path).size_bytes for path in opened.index.used_paths)
    console.print(
        line(
            f"all ranks read {words.size(shares.size_bytes)} of {words.size(stored)} stored, in blocks; "
            f"each also {words.size(shares.common_bytes)} of manifest, index and common state"
        ),
        soft_wrap=True,
    )
    for text, numbers in (
        ("no values of their own are stored for {}: they keep what they have", shares.lacking),
        ("nobody reads what was stored as their own by {}", shares.ownerless),
    ):
        if numbers:
            console.print(line(("note: ", "yellow"), text.format(_ranks(numbers))), soft_wrap=True)


def _own(rank: RankShare, shares: Shares) -> str:
    if rank.has_own_state:
        return "read"
    return "none stored" if rank.rank in shares.lacking else words.NOTHING


def _ranks(numbers: tuple[int, ...]) -> str:
    """``rank 3``, ``ranks 1, 2, 5 to 9``."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    texts = [
        str(low) if low == high else f"{low}, {high}" if high == low + 1 else f"{low} to {high}"
        for low, high in spans
    ]
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {', '.join(texts)}"
