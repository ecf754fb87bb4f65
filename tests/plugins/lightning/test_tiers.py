"""A Lightning run on several tiers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from strongroom import ReplicationError, StoreUnavailableError, Tier
from strongroom.catalog import Catalog
from strongroom.stores import LocalStore, MemoryStore


def committed(root: Path) -> list[int]:
    return sorted(name.step for name in Catalog(LocalStore(root)).history().commits)


def test_a_run_goes_on_from_the_slow_tier_where_the_fast_one_is_lost(
    fit: Any, root: Path, tmp_path: Path, uninterrupted: Any
) -> None:
    slow = tmp_path / "slow"
    options = {"every_n_train_steps": 2, "replicate_to": [slow]}
    fit(root, until=9, checkpoint=options)
    assert committed(root) == committed(slow)
    shutil.rmtree(root)
    fit(root, checkpoint=options).ends_like(uninterrupted())
    assert committed(slow)[-1] == committed(root)[-1]
    assert len(committed(slow)) > len(committed(root))


def test_another_runs_checkpoint_is_read_without_this_runs_tiers(
    fit: Any, root: Path, tmp_path: Path
) -> None:
    fit(root, until=4, checkpoint={"every_n_train_steps": 2, "run_id": "theirs"})
    fit(
        tmp_path / "mine",
        until=6,
        ckpt_path=f"strongroom://{root}#step=4",
        checkpoint={
            "every_n_train_steps": 2,
            "replicate_to": [tmp_path / "slow"],
            "run_id": "mine",
            "launch": 3,
        },
    )
    history = Catalog(LocalStore(tmp_path / "slow")).history()
    assert history.run is not None
    assert history.run.run == "mine"
    assert {name.launch for name in history.commits} == {3}


class Away(MemoryStore):
    def put_if_absent(self, key: str, data: Any) -> bool:
        raise StoreUnavailableError("no route to it")


def test_a_fit_that_could_not_copy_everything_says_so_at_its_end(fit: Any, root: Path) -> None:
    with pytest.raises(ReplicationError, match="no route to it"):
        fit(
            root,
            max_epochs=1,
            checkpoint={
                "every_n_train_steps": 2,
                "replicate_to": [Tier(Away())],
                "accept_missing_tiers": True,
                "timeout_s": 2.0,
            },
        )
    assert committed(root)
