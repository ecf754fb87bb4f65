"""The command: measure every family, show a table, write JSON; the status says whether all bars are met."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
from rich.console import Console

from strongroom.config import POLICY_VARIABLE
from strongroom_bench.families import FAMILIES, NEEDS, can_be_measured
from strongroom_bench.figure import Figure
from strongroom_bench.report import as_json, as_table
from strongroom_bench.scale import FULL, QUICK

__all__ = ["main"]

_MIN_COLUMNS: Final = 160


def main(arguments: Sequence[str]) -> int:
    """Run the benchmarks; 0 where every bar that was measured is met, else 1."""
    parser = argparse.ArgumentParser(prog="strongroom_bench", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write one object a figure")
    parser.add_argument("--quick", action="store_true", help="small sizes and few rounds, for a look")
    parser.add_argument("--rounds", type=int, help="of everything that is interleaved")
    parser.add_argument(
        "--only", action="append", choices=list(FAMILIES), help="this family of figures; may be repeated"
    )
    parser.add_argument(
        "--folder", type=Path, help="measure on the disk of this folder; by default the current one"
    )
    given = parser.parse_args(arguments)
    if given.rounds is not None and given.rounds < 1:
        parser.error(f"--rounds: expected 1 or more, got {given.rounds}")
    for folder in (given.folder, given.json and given.json.parent):
        # Before the minutes that it takes, and not after them.
        if folder is not None and not folder.is_dir():
            parser.error(f"{folder} is not a folder; create it first")
    for name in given.only or ():
        if not can_be_measured(name):
            parser.error(f"--only {name}: needs the package {NEEDS[name]}, which is not installed here")
    # A policy that holds for everything here would seal what plain saves are measured by.
    os.environ.pop(POLICY_VARIABLE, None)
    scale = QUICK if given.quick else FULL
    if given.rounds is not None:
        scale = replace(scale, rounds=given.rounds)
    # Where nobody's terminal says how wide it is, a file or a log takes long lines.
    console = Console(width=max(_MIN_COLUMNS, shutil.get_terminal_size().columns))
    progress = Console(stderr=True)
    figures: list[Figure] = []
    # Not the system's temporary folder by default: that is often in memory.
    with tempfile.TemporaryDirectory(prefix="strongroom-bench-", dir=given.folder or Path.cwd()) as folder:
        for name in given.only or FAMILIES:
            if not can_be_measured(name):
                progress.print(f"left out: {name}, which is not installed here", style="dim")
                continue
            progress.print(f"measuring: {name}", style="dim")
            figures += FAMILIES[name](scale, Path(folder))
    if given.json is not None:
        given.json.write_text(as_json(figures), encoding="utf-8")
    console.print(as_table(figures, f"Strongroom, {scale.name} run. {_machine()}"))
    return 0 if all(figure.holds is not False for figure in figures) else 1


def _machine() -> str:
    load = os.getloadavg()[0]
    return (
        f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores, "
        f"load {load:.2f} at the end"
    )


if __name__ == "__main__":
    # Stock DCP warns of every save without a process group.
    warnings.filterwarnings("ignore")
    sys.exit(main(sys.argv[1:]))
