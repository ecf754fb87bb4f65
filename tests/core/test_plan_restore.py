"""What a checkpointer would restore, told before anything is touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from strongroom import CheckpointNotFoundError, NoWholeCheckpointError


@pytest.fixture
def saved(root: Path, begin: Any) -> Path:
    with begin(root) as checkpointer:
        for step in (1, 2):
            state = {"w": torch.full((1000,), float(step)), "extra": {"epoch": step}}
            checkpointer.save(step, state).result()
    return root


def test_it_is_of_the_checkpoint_that_a_restore_would_take(saved: Path, begin: Any) -> None:
    checkpointer = begin(saved)
    template = {"w": torch.zeros(1000), "extra": {}}
    plan = checkpointer.plan_restore(template)
    assert (plan.step, plan.problem) == (2, None)
    assert torch.equal(template["w"], torch.zeros(1000))
    assert [read.tensors for read in plan.reads] == [("w",)]
    assert checkpointer.restore(template).step == 2


def test_what_does_not_fit_is_told_and_is_no_error(saved: Path, begin: Any) -> None:
    plan = begin(saved).plan_restore({"w": torch.zeros(7), "other": torch.zeros(2)}, step=1)
    assert plan.step == 1
    assert plan.missing == ("other",)
    assert plan.unexpected == ("extra",)
    assert "w" in plan.different[0]
    assert "other" in str(plan)


def test_a_part_of_it_can_be_asked_for(saved: Path, begin: Any) -> None:
    plan = begin(saved).plan_restore({"w": torch.zeros(1000), "mine": 1}, only="w")
    assert plan.problem is None


def test_a_checkpoint_whose_index_is_damaged_is_not_the_one(saved: Path, begin: Any) -> None:
    (index,) = saved.glob("step-000000000002-*/data/index.safetensors")
    index.write_bytes(index.read_bytes()[:-1])
    assert begin(saved).plan_restore().step == 1
    (index,) = saved.glob("step-000000000001-*/data/index.safetensors")
    index.write_bytes(index.read_bytes()[:-1])
    with pytest.raises(NoWholeCheckpointError, match=r"step 2.*step 1"):
        begin(saved).plan_restore()


def test_nothing_where_nothing_was_committed(root: Path, begin: Any) -> None:
    assert begin(root).plan_restore({"w": torch.zeros(3)}) is None
    assert not root.exists()
    with pytest.raises(CheckpointNotFoundError):
        begin(root).plan_restore(step=3)
