"""Figures as a table for people, and as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from strongroom_bench.figure import Figure

__all__ = ["as_json", "as_table"]

_WORDS = {True: ("met", "green"), False: ("missed", "bold red"), None: ("-", "dim")}


def as_json(figures: Sequence[Figure]) -> str:
    """One object a figure, in a list."""
    return json.dumps([figure.as_json() for figure in figures], indent=2, ensure_ascii=False) + "\n"


def as_table(figures: Sequence[Figure], title: str) -> RenderableType:
    """A row a figure; what stood beside it on the lines below."""
    table = Table(title=title, title_justify="left", show_lines=True, expand=True)
    table.add_column("figure", ratio=3)
    table.add_column("value", justify="right")
    table.add_column("bar", justify="right")
    table.add_column("holds")
    table.add_column("ranks", justify="right")
    table.add_column("runs", justify="right")
    table.add_column("beside it", ratio=3)
    for figure in figures:
        word, style = _WORDS[figure.holds]
        told = Group(
            Text(figure.figure),
            *[Text(words, style="dim") for words in (figure.setting, figure.note) if words],
        )
        table.add_row(
            told,
            _number(figure.value, figure.unit),
            "reported" if figure.bar is None else _number(figure.bar, figure.unit),
            Text(word, style=style),
            str(figure.world_size),
            str(figure.runs) if figure.runs else "-",
            "\n".join(_peer(figure, name) for name in figure.peers),
        )
    return table


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if unit == "ratio" else f"{value:,.4g} {unit}"


def _peer(figure: Figure, name: str) -> str:
    told = f"{name.rpartition(' ')[0]}: {figure.peers[name]:,.4g} {name.rpartition(' ')[2]}"
    bounds = figure.spread.get(name)
    return told if bounds is None else f"{told} ({bounds[0]:,.4g} to {bounds[1]:,.4g})"
