"""Beginning from another run's checkpoint, which is only read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from strongroom import CheckpointNotFoundError, ConfigError


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.fixture
def other(tmp_path: Path, begin: Any) -> Path:
    """A run that saved steps 5 and 9."""
    root = tmp_path / "other"
    checkpointer = begin(root)
    for step in (5, 9):
        checkpointer.save(step, {"w": torch.full((3,), float(step)), "extra": {"epoch": step}}).result()
    checkpointer.close()
    return root


def test_a_run_without_commits_begins_from_the_other_runs_newest(root: Path, other: Path, begin: Any) -> None:
    before = contents(other)
    restored = begin(root, init_from=other).restore({"w": torch.zeros(3), "extra": {}})
    assert restored.step == 9
    assert torch.equal(restored.state["w"], torch.full((3,), 9.0))
    assert restored.state["extra"] == {"epoch": 9}
    assert restored.init_from == other.as_uri()
    assert contents(other) == before
    assert not root.exists()


def test_its_steps_begin_anew_and_its_line_does_not_name_the_other_run(
    root: Path, other: Path, begin: Any
) -> None:
    checkpointer = begin(root, init_from=other)
    checkpointer.restore({"w": torch.zeros(3), "extra": {}})
    checkpointer.save(1, {"w": torch.ones(3), "extra": {}}).result()
    assert [(one.step, one.launch) for one in checkpointer.checkpoints()] == [(1, 1)]
    assert checkpointer._turns.current.launch.parent is None


def test_once_it_has_a_commit_of_its_own_the_other_run_is_not_looked_at(
    root: Path, other: Path, begin: Any
) -> None:
    first = begin(root, init_from=other)
    first.save(1, {"w": torch.ones(3), "extra": {}}).result()
    first.close()
    restored = begin(root, init_from=other).restore({"w": torch.zeros(3), "extra": {}})
    assert (restored.step, restored.init_from) == (1, None)


def test_a_run_whose_own_checkpoints_are_damaged_does_not_begin_again_from_the_other(
    root: Path, other: Path, begin: Any
) -> None:
    from strongroom import NoWholeCheckpointError

    first = begin(root, init_from=other)
    first.save(1, {"w": torch.ones(3), "extra": {}}).result()
    first.close()
    (shard,) = root.glob("step-*/data/*-00.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(NoWholeCheckpointError):
        begin(root, init_from=other).restore({"w": torch.zeros(3), "extra": {}})


def test_a_step_that_is_asked_for_is_one_of_this_run(root: Path, other: Path, begin: Any) -> None:
    with pytest.raises(CheckpointNotFoundError):
        begin(root, init_from=other).restore({"w": torch.zeros(3), "extra": {}}, step=9)


def test_another_run_that_has_no_checkpoint_is_an_error_and_no_new_beginning(
    root: Path, tmp_path: Path, begin: Any
) -> None:
    checkpointer = begin(root, init_from=tmp_path / "misspelt")
    with pytest.raises(CheckpointNotFoundError, match="misspelt"):
        checkpointer.restore({"w": torch.zeros(3)})
    with pytest.raises(CheckpointNotFoundError, match="misspelt"):
        checkpointer.plan_restore({"w": torch.zeros(3)})


def test_the_root_itself_is_no_other_run(root: Path, begin: Any) -> None:
    with pytest.raises(ConfigError, match="the root itself"):
        begin(root, init_from=root)
