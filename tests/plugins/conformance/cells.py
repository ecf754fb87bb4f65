"""The matrix of exact resume: a way to train, a loader, an interruption; few cells that have all pairs."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from run_plans import INTERRUPTIONS, FrontEnd

__all__ = ["Cell", "axes", "cover", "product", "rule_of"]


class Cell(NamedTuple):
    """One of each axis, by name."""

    way: str
    loader: str
    interruption: str


def axes(front_end: FrontEnd) -> tuple[tuple[str, ...], ...]:
    """The values of each, in their order."""
    interruptions = tuple(name for name, one in INTERRUPTIONS.items() if one.is_of_matrix)
    return tuple(front_end.ways), front_end.loaders, interruptions


def product(front_end: FrontEnd) -> list[Cell]:
    """Every cell."""
    return [Cell(*values) for values in itertools.product(*axes(front_end))]


def cover(front_end: FrontEnd) -> list[Cell]:
    """Few cells, among them every pair of values of two axes: the cell with most pairs that are still
    missing first.
    """
    cells = product(front_end)
    missing = {pair for cell in cells for pair in pairs(cell)}
    chosen = []
    while missing:
        best = max(cells, key=lambda cell: len(missing.intersection(pairs(cell))))
        missing.difference_update(pairs(best))
        chosen.append(best)
    return sorted(chosen)


def pairs(cell: Cell) -> set[tuple[tuple[int, str], ...]]:
    """Of two axes each, the values."""
    return set(itertools.combinations(enumerate(cell), 2))


def rule_of(front_end: FrontEnd, cell: Cell) -> str | None:
    """The words of the rule that a cell follows in place of being equal; None: there is none."""
    for pattern, words in front_end.rules.items():
        if all(of_rule in ("*", of_cell) for of_rule, of_cell in zip(pattern, cell, strict=True)):
            return words
    return None
