"""What the README shows is run as it stands there: a quick start that fails is worse than none."""

from __future__ import annotations

from pathlib import Path

import pytest
from pages import README, blocks, program, run


@pytest.fixture(scope="module")
def quick_start() -> str:
    first, *_ = (block for block in blocks(README) if block.kind == "python")
    return first.text


def test_the_page_runs_as_it_stands_and_seals(tmp_path: Path) -> None:
    run(program(README), tmp_path)
    (checkpoint,) = (tmp_path / "runs" / "c").glob("step-*")
    stored = [path.name for path in (checkpoint / "data").iterdir()]
    assert all(name.endswith(".floe") or name == "MANIFEST.json" for name in stored), stored


def test_the_quick_start_leaves_the_three_newest_checkpoints(quick_start: str, tmp_path: Path) -> None:
    from strongroom import Checkpointer

    run(quick_start, tmp_path)
    with Checkpointer(tmp_path / "runs" / "b") as checkpointer:
        assert [checkpoint.step for checkpoint in checkpointer.checkpoints()] == [300, 200, 100]


def test_the_quick_start_resumes_when_it_is_run_again(quick_start: str, tmp_path: Path) -> None:
    from strongroom import Checkpointer

    run(quick_start, tmp_path)
    longer = quick_start.replace("301", "401")
    run(longer + "\nassert restored.step == 300, restored", tmp_path)
    with Checkpointer(tmp_path / "runs" / "b") as checkpointer:
        assert [checkpoint.step for checkpoint in checkpointer.checkpoints()] == [400, 300, 200]
