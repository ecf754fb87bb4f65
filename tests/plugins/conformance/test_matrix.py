"""Ways, loaders, interruptions: every pair in every run of the tests, every cell by ``-m matrix``.

A cell trains to the interruption, starts again in processes that know nothing of the first ones, and ends:
with the losses and the weights of the run that was never interrupted, and that knew nothing of Strongroom,
equal as floats.
"""

from __future__ import annotations

import signal
from pathlib import Path

import cells
import pytest
from asking import Asked, Ended
from cells import Cell
from recording import Record
from run_plans import BATCHES, EPOCHS, INTERRUPTIONS, FrontEnd, RunPlan

BATCHES_OF_ALL = EPOCHS * BATCHES


def interrupt(cell: Cell, asked: Asked, plan: RunPlan, folder: Path) -> None:
    """Train until it happens, and see that it has."""
    interruption = INTERRUPTIONS[cell.interruption]
    ranks = asked.ranks_of(plan)
    if interruption.kills:
        job = asked.start(plan, folder)
        # Where all are to die, one may see that another has, and be ended by that.
        waited = job.wait(range(ranks) if interruption.everywhere else [ranks - 1])
        assert -signal.SIGKILL in [one.exit_code for one in waited.values()], waited
        # Whoever started the job takes the others away too, as torchrun does.
        job.kill()
        return
    ended: list[Ended] = asked.end(plan, folder)
    if "SIGTERM" in cell.interruption:
        assert [one.status for one in ended] == [128 + signal.SIGTERM] * ranks, ended
    else:
        assert ended[-1].error == ("RuntimeError", "the GPU fell off the bus"), ended
        assert all(one.result is None for one in ended), ended


def check(cell: Cell, asked: Asked, folder: Path, record: Record) -> None:
    """Run a cell."""
    record("cells", " / ".join(cell), cells.rule_of(asked.front_end, cell) or "equal")
    root = folder / "run"
    plan = RunPlan(root=root, way=cell.way, loader=cell.loader, interruption=cell.interruption)
    interrupt(cell, asked, plan, folder / "work")
    # Whoever goes on stands elsewhere in every random stream.
    again = RunPlan(root=root, way=cell.way, loader=cell.loader, draw_from=99)
    resumed = asked.train(again, folder / "work")
    expected = asked.reference(again, folder / "alone")
    left = len(resumed[0].losses)
    # One save may have been under way, and one step may have been trained beside it; ranks that are told to
    # stop agree on a step to stop after, some steps on.
    done = BATCHES_OF_ALL - left
    assert INTERRUPTIONS[cell.interruption].batch - 2 <= done < BATCHES_OF_ALL, f"it went on after {done}"
    rule = cells.rule_of(asked.front_end, cell)
    for rank, (one, whole) in enumerate(zip(resumed, expected, strict=True)):
        assert (one.step, one.lr) == (whole.step, whole.lr), rank
        if rule is None:
            assert one.losses == whole.losses[-left:], rank
            assert one.weights == whole.weights, rank


def test_every_pair_resumes_exactly(asked: Asked, pair: Cell, record: Record, tmp_path: Path) -> None:
    check(pair, asked, tmp_path, record)


@pytest.mark.matrix
def test_every_cell_resumes_exactly(asked: Asked, cell: Cell, record: Record, tmp_path: Path) -> None:
    check(cell, asked, tmp_path, record)


def test_the_pairs_are_all_there(front_end: FrontEnd) -> None:
    chosen, names = cells.cover(front_end), cells.axes(front_end)
    for first, second in ((0, 1), (0, 2), (1, 2)):
        pairs = {(cell[first], cell[second]) for cell in chosen}
        assert len(pairs) == len(names[first]) * len(names[second])
    assert len(chosen) < len(cells.product(front_end))
