"""Jobs of two ranks for plain DCP. Each rank is a process, so what it runs must be importable by name."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import dcp_ranks

WORLD_SIZE = 2


@pytest.fixture(scope="module")
def context() -> Any:
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(
        ["torch.distributed.checkpoint", "torch.distributed.tensor", "strongroom.dcp"]
    )
    return made


@pytest.fixture
def run_ranks(context: Any, tmp_path: Path) -> Callable[[Any, Path], None]:
    def run(job: Any, root: Path) -> None:
        meeting_point = tmp_path / f"meet-{job.__name__}"
        processes = [
            context.Process(target=dcp_ranks.run, args=(job, rank, WORLD_SIZE, str(meeting_point), str(root)))
            for rank in range(WORLD_SIZE)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(120)
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
        assert codes == [0] * WORLD_SIZE

    return run
