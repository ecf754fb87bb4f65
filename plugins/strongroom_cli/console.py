"""Where output goes: a terminal, a pipe, or a program that wants JSON.

Colours and bars are for terminals alone, and rich honours ``NO_COLOR``. Nothing that is printed
is taken for markup.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from strongroom_cli.words import printable

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Bar", "line", "new_console", "new_table", "print_json"]

_PIPE_WIDTH: Final = 10_000
"""A pipe has no width: nothing is wrapped or cut for it."""

_PATIENCE_S: Final = 0.5
"""Work that is over sooner needs no bar."""


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to `main`: what rich does here ends the process with the status of damage."""
        raise BrokenPipeError


def new_console() -> Console:
    """The console for what people read, on standard output."""
    # rich takes COLUMNS=0 at its word, and prints nothing.
    is_told = os.environ.get("COLUMNS", "0").strip("0") != ""
    width = None if is_told or sys.stdout.isatty() else _PIPE_WIDTH
    return _Console(file=sys.stdout, width=width, highlight=False, markup=False, emoji=False)


def new_table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """A table without lines; the columns named in ``right`` hold numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def line(*parts: str | tuple[str, str]) -> Text:
    """A line of texts, or texts with a style, each made printable."""
    text = Text()
    for part in parts:
        words, style = (part, "") if isinstance(part, str) else part
        text.append(printable(words), style=style or None)
    return text


def print_json(document: Mapping[str, Any]) -> None:
    """One object on one line, ASCII, members sorted."""
    text = json.dumps(document, allow_nan=False, ensure_ascii=True, sort_keys=True)
    sys.stdout.write(f"{text}\n")


class Bar:
    """A progress bar on standard error, if that is a terminal and the work takes long enough.

    Args:
        doing: in a word.
        counts: the work is counted in pieces; otherwise in bytes.
    """

    def __init__(self, doing: str, *, counts: bool = False) -> None:
        self._doing = doing
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._began = time.monotonic()
        if sys.stderr.isatty():
            amounts: list[ProgressColumn] = (
                [MofNCompleteColumn()]
                if counts
                else [DownloadColumn(binary_units=True), TransferSpeedColumn()]
            )
            self._progress = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                *amounts,
                TimeRemainingColumn(),
                console=Console(file=sys.stderr, highlight=False, markup=False, emoji=False),
                transient=True,
            )

    def show(self, done: int, total: int) -> None:
        """Tell how far the work is; from any thread, one at a time."""
        if self._progress is None or time.monotonic() - self._began < _PATIENCE_S:
            return
        if self._task is None:
            self._task = self._progress.add_task(printable(self._doing), total=total)
            self._progress.start()
        self._progress.update(self._task, completed=done, total=total)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.stop()
