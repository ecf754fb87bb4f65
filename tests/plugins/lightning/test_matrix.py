"""Strategies, loaders, interruptions: every pair in every run of the tests, every cell by ``-m matrix``."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matrix_cells
import pytest
from matrix_cells import AXES, BATCHES, EPOCHS, INTERRUPTIONS, STRATEGIES, Cell
from multiprocess import LightningLauncher

PAGE = Path(__file__).parents[3] / "docs" / "explanation" / "lightning-matrix.md"

Reference = Callable[[str, str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def reference(launcher: LightningLauncher) -> Reference:
    """The uninterrupted run of a strategy and a loader, once for all cells that have both."""
    known: dict[tuple[str, str], list[dict[str, Any]]] = {}

    def run(strategy: str, loader: str) -> list[dict[str, Any]]:
        if (strategy, loader) not in known:
            ranks = STRATEGIES[strategy].ranks
            known[strategy, loader] = launcher.run(matrix_cells.train, None, strategy, loader, ranks=ranks)
        return known[strategy, loader]

    return run


def check(cell: Cell, launcher: LightningLauncher, reference: Reference, root: Path) -> str:
    """Run a cell; the word for what it came to."""
    ranks, plan = STRATEGIES[cell.strategy].ranks, INTERRUPTIONS[cell.interruption]
    job = launcher.start(matrix_cells.train, root, *cell, ranks=ranks)
    if plan.kills:
        # Whoever started the job takes the others away too, as torchrun does.
        assert job.wait([ranks - 1])[ranks - 1].exit_code == -signal.SIGKILL
        job.kill()
    else:
        assert any(one.error is not None or one.exit_code != 0 for one in job.outcomes())
    resumed = launcher.run(matrix_cells.train, root, cell.strategy, cell.loader, ranks=ranks)
    expected = reference(cell.strategy, cell.loader)
    left = len(resumed[0]["losses"])
    # One save may have been under way, and one step may have been trained beside it; ranks that are told to
    # stop agree on a step to stop after, some steps on.
    done = EPOCHS * BATCHES - left
    assert plan.batch - 2 <= done < EPOCHS * BATCHES, f"{cell} went on after batch {done}"
    for rank, (one, whole) in enumerate(zip(resumed, expected, strict=True)):
        assert len(whole["losses"]) == EPOCHS * BATCHES
        assert one["losses"] == whole["losses"][-left:], (cell, rank)
        assert one["weights"] == whole["weights"], (cell, rank)
        assert (one["step"], one["lr"]) == (whole["step"], whole["lr"]), (cell, rank)
    return "equal"


@pytest.mark.parametrize("cell", matrix_cells.cover(), ids=" / ".join)
def test_every_pair_resumes_exactly(
    cell: Cell, launcher: LightningLauncher, reference: Reference, tmp_path: Path
) -> None:
    assert check(cell, launcher, reference, tmp_path / "run") == "equal"


def test_the_pairs_are_all_there() -> None:
    cells = matrix_cells.cover()
    for first, second in ((0, 1), (0, 2), (1, 2)):
        names = list(AXES.values())
        pairs = {(cell[first], cell[second]) for cell in cells}
        assert len(pairs) == len(names[first]) * len(names[second])
    assert len(cells) < len(matrix_cells.product()) / 2


@pytest.fixture(scope="module")
def results() -> Iterator[dict[Cell, str]]:
    """What the cells came to; the page is written where all of them were run."""
    found: dict[Cell, str] = {}
    yield found
    if found.keys() == set(matrix_cells.product()):
        PAGE.write_text(matrix_cells.page(found), encoding="utf-8")


@pytest.mark.matrix
@pytest.mark.parametrize("cell", matrix_cells.product(), ids=" / ".join)
def test_every_cell_resumes_exactly(
    cell: Cell,
    launcher: LightningLauncher,
    reference: Reference,
    results: dict[Cell, str],
    tmp_path: Path,
) -> None:
    results[cell] = "**differs**"
    results[cell] = check(cell, launcher, reference, tmp_path / "run")


def test_the_page_tells_of_these_axes_and_of_no_cell_that_differs() -> None:
    shown = PAGE.read_text(encoding="utf-8")
    assert shown == matrix_cells.page(dict.fromkeys(matrix_cells.product(), "equal"))
