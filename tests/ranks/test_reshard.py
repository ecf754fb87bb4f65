"""One run through jobs of 4, 2, 1, 3 and 4 ranks: its state is the same at every turn."""

from __future__ import annotations

from pathlib import Path

import model_jobs
import pytest
from crews import Crews

pytestmark = pytest.mark.usefixtures("fsdp2_on_cpus")


def test_a_run_moves_from_4_to_2_to_1_to_3_to_4_ranks(crews: Crews, tmp_path: Path) -> None:
    crews.run(model_jobs.save_truth, tmp_path, ranks=1)
    # Three ranks take the mean of a gradient with rounding of their own, and so they do not train.
    turns = [
        (4, "fsdp", 1),
        (2, "fsdp", 1),
        (1, "plain", 1),
        (3, "fsdp", 0),
        (4, "fsdp x tp", 0),
        (2, "tp", 0),
        (4, "hsdp", 1),
        (3, "ddp", 0),
        (2, "ddp", 1),
    ]
    step = 2
    for ranks, style, more in turns:
        step += more
        wrong = crews.run(model_jobs.pass_on, tmp_path, tmp_path, style, step, more=more, ranks=ranks)
        assert wrong == [[]] * ranks, f"{style} on {ranks} ranks"
