"""Two processes under DDP, taken up exactly: with adapters, and with folders of both, sealed as one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import lm_ranks
from lm_ranks import STEPS

from strongroom import Checkpointer
from strongroom_transformers import unseal
from strongroom_transformers.folders import listed


@pytest.fixture(scope="module")
def ranks() -> Iterator[Any]:
    with lm_ranks.launcher() as launcher:
        yield launcher


def goes_on(resumed: list[Any], whole: list[Any], done: int) -> None:
    for one, expected in zip(resumed, whole, strict=True):
        assert one["trained"] == STEPS - done
        assert one["losses"] == expected["losses"]
        assert one["weights"] == expected["weights"]


def test_folders_of_two_processes_that_are_told_to_stop(tmp_path: Path, ranks: Any) -> None:
    whole = ranks.run(lm_ranks.folders, tmp_path / "whole", None, ranks=2)
    root = tmp_path / "root"
    stopped = ranks.start(lm_ranks.folders, tmp_path / "out", root, ranks=2, save_steps=100, signal_at=2)
    outcomes = stopped.outcomes()
    assert [one.error[0] for one in outcomes] == ["Preempted"] * 2, outcomes
    (saved,) = Checkpointer(root).checkpoints()
    back = unseal(root, tmp_path / "back")
    names = {name for name, _ in listed(back)}
    assert {"rng_state_0.pth", "rng_state_1.pth", "model.safetensors", "optimizer.pt"} <= names
    assert not list((tmp_path / "out").glob("checkpoint-*"))
    resumed = ranks.run(lm_ranks.folders, tmp_path / "out", root, ranks=2, save_steps=100)
    goes_on(resumed, whole, saved.step)


def test_adapters_of_two_processes(tmp_path: Path, ranks: Any) -> None:
    whole = ranks.run(lm_ranks.adapters, tmp_path / "whole", None, ranks=2)
    root = tmp_path / "root"
    broken = ranks.start(lm_ranks.adapters, tmp_path / "out", root, ranks=2, stops_at=3).outcomes()
    assert [one.error[0] for one in broken] == ["ZeroDivisionError"] * 2
    restored = Checkpointer(root).restore(step=3)
    assert restored is not None
    assert all("lora_" in name for name in restored.state["model"])
    goes_on(ranks.run(lm_ranks.adapters, tmp_path / "out", root, ranks=2, draw_from=99), whole, 3)


def test_adapters_that_are_sharded_and_a_base_that_is(tmp_path: Path, ranks: Any) -> None:
    for one in ranks.run(lm_ranks.sharded_adapters, tmp_path / "root", ranks=2):
        assert one["sharded"]
        assert one["same"]
        assert one["digest"] == one["whole"]  # however it is sharded
    found = Checkpointer(tmp_path / "root").restore()
    assert found is not None
    assert all("lora_" in name for name in found.state["model"])
