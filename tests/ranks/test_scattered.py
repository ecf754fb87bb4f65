"""Shards of many ranks, each in a folder of its own."""

from __future__ import annotations

from pathlib import Path

import scattered_jobs
from crews import Crews

from strongroom import layout
from strongroom.stores.local import LocalStore
from strongroom.verify import verify


def test_the_ranks_write_into_different_folders(crews: Crews, tmp_path: Path) -> None:
    root = tmp_path / "run"
    assert crews.run(scattered_jobs.save_and_restore_scattered, root, ranks=2) == [[], []]
    shards = sorted(root.glob("step-*/data/*/*.safetensors"))
    assert {layout.parse_shard_path(f"{path.parent.name}/{path.name}") for path in shards} == {(0, 0), (1, 0)}
    assert len({path.parent for path in shards}) == 2
    assert verify(LocalStore(root)).verdict == "whole"
