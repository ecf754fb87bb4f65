"""The words of the demonstration: what is told while it happens, and how it looks."""

from __future__ import annotations

import contextlib
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich import filesize
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text
from runs import Batch, OnDisk, Start, size_of, step_of

__all__ = ["Account", "Watch"]

QUIET_S = 5.0
"""Where there is no terminal for a bar, a line tells this often how far the training is."""

WIDEST = 100
"""Columns: longer lines are tiring to read."""

SHOWN_DIFFERENCES = 10


class Watch:
    """How far one process is, as it goes: a bar in a terminal, now and then a line elsewhere."""

    def __init__(self, console: Console, progress: Progress | None, steps: int) -> None:
        self._console = console
        self._progress = progress
        self._steps = steps
        self._task = TaskID(0)
        self._told_s = time.monotonic()
        if progress is not None:
            self._task = progress.add_task("", total=steps, where=self._where(None))

    def show(self, start: Start) -> None:
        last = start.batches[-1] if start.batches else None
        if self._progress is not None:
            done = 0 if last is None else last.step
            self._progress.update(self._task, completed=done, where=self._where(last))
        elif time.monotonic() - self._told_s >= QUIET_S:
            self._told_s = time.monotonic()
            self._console.print(Text(f"    … {self._where(last)}", style="dim"))

    def _where(self, last: Batch | None) -> str:
        if last is None:
            return "Python, PyTorch and Lightning are starting"
        return f"step {last.step} of {self._steps}, epoch {last.epoch + 1}, loss {last.loss:.2f}"


class Account:
    """Tells a person what happens, in the order in which it does."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began_s = time.monotonic()

    def opens(self, *, steps: int, kills: int, seed: int) -> None:
        self._console.print()
        self._console.print(Text("Strongroom: a training run survives SIGKILL", style="bold"))
        self._line(
            f"A small transformer learns from the source of Python's standard library, {steps} steps in all: "
            f"once undisturbed, and once killed {_count(kills, 'time')} and started again by the same "
            f"command. Both must end with the same weights, bit for bit. (The moments of the kills are drawn "
            f"with --seed {seed}.)",
            indent=2,
        )

    def chapter(self, number: int, title: str) -> None:
        self._console.print()
        self._console.print(Text(f"{number}  {title}", style="bold cyan"))

    @contextlib.contextmanager
    def watch(self, steps: int) -> Iterator[Watch]:
        """Keep telling how far one process is."""
        if not self._console.is_terminal:
            yield Watch(self._console, None, steps)
            return
        columns = (
            SpinnerColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[where]}"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self._console, transient=True) as progress:
            yield Watch(self._console, progress, steps)

    def begins(self, start: Start) -> None:
        seconds = start.first_batch_after_s
        self._event("▶", "cyan", f"training from the first step, {seconds:.1f} s after the start")

    def begins_again(self, start: Start, *, lost: int) -> None:
        first, seconds = start.batches[0], start.first_batch_after_s
        if first.step == 0:
            how = "nothing was committed yet, so it trains from the first step"
        else:
            how = f"it resumed from step {first.step}, at batch {first.batch + 1} of epoch {first.epoch + 1}"
        self._event("▶", "green", f"the same command again: {how}")
        self._line(f"{_count(lost, 'step')} lost; training {seconds:.1f} s after the start")

    def killed(self, start: Start, disk: OnDisk, torn: Sequence[Path]) -> None:
        last = start.batches[-1]
        if torn:
            where = f"inside the save of step {step_of(torn[-1])}, in epoch {last.epoch + 1}"
        else:
            where = f"at batch {last.batch + 1} of epoch {last.epoch + 1}, {_count(last.step, 'step')} done"
        self._event("✖", "bold red", f"SIGKILL {where}")
        whole = ", ".join(f"step {step}" for step in disk.whole)
        self._line(f"on disk: {whole or 'nothing whole'}")
        for folder in torn:
            files, size_bytes = size_of(folder)
            size = f"{_count(files, 'file')}, {filesize.decimal(size_bytes)}"
            self._line(f"         step {step_of(folder)} half-written: {size}, no COMMIT")

    def escaped(self) -> None:
        self._event("▷", "yellow", "the run was over before this kill could strike")

    def ends(self, batches: Sequence[Batch], seconds: float) -> None:
        losses = f"the loss went from {batches[0].loss:.2f} to {batches[-1].loss:.2f}"
        self._event("✔", "green", f"finished after {seconds:.0f} s; {losses}")

    def compares(self, *, undisturbed: str, killed: str) -> None:
        self._line("SHA-256 of the final weights", indent=2)
        style = "green" if undisturbed == killed else "red"
        for name, digest in (("undisturbed", undisturbed), ("killed", killed)):
            self._console.print(Text.assemble(f"  {name:11}  ", (digest, style)), soft_wrap=True)

    def concludes(self, differences: Sequence[str], *, batches: int, again: int) -> None:
        if not differences:
            self._event(
                "✔",
                "bold green",
                f"equal, bit for bit: the weights, and the losses of all {batches} batches, of which "
                f"{again} were trained on again after a kill",
            )
            return
        self._event("✖", "bold red", f"the runs differ in {_count(len(differences), 'place')}")
        for difference in differences[:SHOWN_DIFFERENCES]:
            self._line(difference)

    def verified(self, complaint: str) -> None:
        if not complaint:
            self._event(
                "✔", "bold green", "strongroom verify: every byte that the kills left committed is right"
            )
            return
        self._event("✖", "bold red", "strongroom verify found damage")
        self._line(complaint)

    def closes(self, *, is_proved: bool, advice: str, commands: Sequence[str]) -> None:
        seconds = time.monotonic() - self._began_s
        verdict = (
            ("The run survived.", "bold green") if is_proved else ("The run did not survive.", "bold red")
        )
        self._console.print()
        self._console.print(Text.assemble(verdict, (f" {seconds:.0f} s in all", "dim")))
        self._console.print()
        self._console.print(Text(advice))
        for command in commands:
            self._console.print(Text(f"  {command}", style="bold"), soft_wrap=True)

    def fails(self, reason: str, log: str = "") -> None:
        self._event("✖", "bold red", reason)
        if log:
            self._console.print(Text(log, style="dim"), soft_wrap=True)

    def _event(self, sign: str, style: str, words: str) -> None:
        first, *rest = self._wrapped(words, 4)
        self._console.print(Text.assemble("  ", (sign, style), " ", first))
        for line in rest:
            self._console.print(Text(f"    {line}"))

    def _line(self, words: str, indent: int = 4) -> None:
        for line in self._wrapped(words, indent):
            self._console.print(Text(" " * indent + line))

    def _wrapped(self, words: str, indent: int) -> list[str]:
        return textwrap.wrap(words, min(self._console.width, WIDEST) - indent)


def _count(number: int, one: str) -> str:
    return f"{number} {one}" if number == 1 else f"{number} {one}s"
