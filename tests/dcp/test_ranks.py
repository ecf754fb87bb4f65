"""The writer and reader on two ranks, in real processes over gloo."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dcp_ranks as ranks
import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from strongroom import Checkpointer


def test_a_sharded_state_is_saved_by_all_ranks_and_loaded_in_another_layout(
    run_ranks: Callable[[Any, Path], None], tmp_path: Path
) -> None:
    root = tmp_path / "run"
    run_ranks(ranks.save_sharded, root)
    shards = sorted(path.name for path in root.rglob("data/*-*.safetensors"))
    assert shards == ["00000-00.safetensors", "00001-00.safetensors"]

    run_ranks(ranks.load_resharded, root)
    restored = Checkpointer(root).restore()
    assert restored is not None
    assert torch.equal(restored.state["sharded"], ranks.whole())
    assert restored.state["extra"] == {"epoch": 4}


def test_a_save_that_fails_on_one_rank_is_never_committed(
    run_ranks: Callable[[Any, Path], None], tmp_path: Path
) -> None:
    root = tmp_path / "run"
    run_ranks(ranks.save_sharded, root)
    run_ranks(ranks.save_where_one_rank_fails, root)
    assert [found.step for found in Checkpointer(root).checkpoints()] == [11]


@pytest.mark.skipif(
    "enable_plan_caching" not in inspect.signature(DefaultSavePlanner).parameters,
    reason="this torch has no plan cache",
)
def test_a_replayed_plan_never_writes_into_a_committed_checkpoint(
    run_ranks: Callable[[Any, Path], None], tmp_path: Path
) -> None:
    root = tmp_path / "run"
    run_ranks(ranks.save_twice_with_cached_plans, root)
    assert [found.step for found in Checkpointer(root).checkpoints()] == [1]
