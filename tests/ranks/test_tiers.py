"""Tiers of a job of many ranks: one copies, all can wait for it, and each reads what it needs from any."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import tier_jobs as jobs
from crews import Crews

RANKS = 4


@pytest.fixture
def fast(tmp_path: Path) -> Path:
    return tmp_path / "fast"


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    return tmp_path / "slow"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_every_rank_can_wait_for_the_slow_tier(crews: Crews, fast: Path, slow: Path) -> None:
    found = crews.run(jobs.save_replicated, fast, slow, [1, 2], ranks=RANKS)
    assert all(each == found[0] for each in found)
    shutil.rmtree(fast)
    assert crews.run(jobs.restored_over_tiers, fast, slow, ranks=RANKS) == [(2, 0)] * RANKS


def test_each_rank_reads_a_damaged_shard_from_the_other_tier(crews: Crews, fast: Path, slow: Path) -> None:
    crews.run(jobs.save_replicated, fast, slow, [1, 2], ranks=RANKS)
    (newest,) = fast.glob("step-000000000002-*")
    (copy,) = slow.glob("step-000000000002-*")
    flip(newest / "data/00000-00.safetensors")
    flip(copy / "data/00001-00.safetensors")
    assert crews.run(jobs.restored_over_tiers, fast, slow, ranks=RANKS) == [(2, 0)] * RANKS
    # One that is damaged on both tiers is damaged for all ranks, whichever needs it.
    flip(newest / "data/00001-00.safetensors")
    assert crews.run(jobs.restored_over_tiers, fast, slow, ranks=RANKS) == [(1, 1)] * RANKS
