"""What a root shows: each checkpoint as its commit says, and no commit read twice."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from strongroom import Checkpointer
from strongroom.catalog import Catalog
from strongroom.digest import sha256_of
from strongroom.errors import CheckpointNotFoundError, ObjectNotFoundError, StoreUnavailableError
from strongroom.stores.memory import MemoryStore

STATE = {"t": torch.ones(3)}


def test_a_root_that_is_not_there_is_empty_and_stays_away(root: Path, begin: Any) -> None:
    assert begin(root).checkpoints() == []
    assert not root.parent.exists()


def test_a_checkpoint_says_what_its_commit_says(root: Path, begin: Any, clock: Any) -> None:
    saved = begin(root, clock=clock.clock).save(7, STATE).result()
    (listed,) = begin(root).checkpoints()
    assert listed == saved
    data = root / saved.folder / "data"
    assert saved.manifest_digest == str(sha256_of((data / "MANIFEST.json").read_bytes()))
    sizes = [path.stat().st_size for path in data.iterdir() if path.name != "MANIFEST.json"]
    assert saved.size_bytes == sum(sizes)
    assert saved.committed_at_ms == clock.wall_ns // 10**6
    assert (saved.step, saved.launch, saved.is_superseded) == (7, 1, False)
    assert saved.folder == f"step-000000000007-0001-{saved.attempt}"


def test_an_unchanged_root_is_listed_without_reading_a_commit_again(store: Any, begin: Any) -> None:
    with begin(store) as writer:
        for step in range(1, 6):
            writer.save(step, STATE)
    reader = begin(store)
    store.log.clear()
    first = reader.checkpoints()
    commits = [key for key in store.keys("read") if key.endswith("COMMIT")]
    assert len(commits) == len(set(commits)) == 5
    assert len(store.keys("list_names")) <= 2

    store.log.clear()
    assert reader.checkpoints() == first
    assert [key for key in store.keys("read") if key.endswith("COMMIT") or key.startswith("launches")] == []


def test_only_a_new_commit_is_read(store: Any, begin: Any) -> None:
    writer, reader = begin(store), begin(store)
    writer.save(1, STATE).result()
    reader.checkpoints()
    writer.save(2, STATE).result()
    store.log.clear()
    assert [c.step for c in reader.checkpoints()] == [2, 1]
    (read,) = [key for key in store.keys("read") if key.endswith("COMMIT")]
    assert read.startswith("step-000000000002")


def test_a_commit_that_changed_is_read_again_and_no_longer_listed(root: Path, begin: Any) -> None:
    with begin(root) as writer:
        writer.save(1, STATE)
        writer.save(2, STATE)
    reader = begin(root)
    assert len(reader.checkpoints()) == 2
    (commit,) = root.glob("step-000000000002-*/COMMIT")
    commit.write_bytes(commit.read_bytes()[:-2] + b"x}")
    assert [c.step for c in reader.checkpoints()] == [1]


def test_a_removed_checkpoint_is_forgotten(root: Path, begin: Any) -> None:
    with begin(root) as writer:
        writer.save(1, STATE)
        writer.save(2, STATE)
    reader = begin(root)
    reader.checkpoints()
    (commit,) = root.glob("step-000000000002-*/COMMIT")
    commit.unlink()
    assert [c.step for c in reader.checkpoints()] == [1]


def test_an_uncommitted_folder_is_seen_by_nothing(root: Path, begin: Any) -> None:
    with begin(root) as writer:
        writer.save(1, STATE)
        writer.save(2, STATE)
    (commit,) = root.glob("step-000000000002-*/COMMIT")
    commit.unlink()
    checkpointer = begin(root)
    assert [c.step for c in checkpointer.checkpoints()] == [1]
    restored = checkpointer.restore()
    assert (restored.step, restored.skipped) == (1, ())
    with pytest.raises(CheckpointNotFoundError):
        checkpointer.restore(step=2)


def test_a_run_copied_file_by_file_is_the_same_run(root: Path, tmp_path: Path, begin: Any) -> None:
    import shutil

    with begin(root) as writer:
        writer.save(1, STATE)
        writer.save(2, STATE)
    shutil.copytree(root, tmp_path / "copy", copy_function=shutil.copyfile)
    copied = begin(tmp_path / "copy")
    assert copied.checkpoints() == begin(root).checkpoints()
    assert copied.restore().step == 2
    copied.save(3, STATE).result()


def test_listing_from_one_thread_while_another_lists_as_well(memory: Any) -> None:
    with Checkpointer(memory) as writer:
        for step in range(20):
            writer.save(step, STATE)
    for _ in range(5):
        catalog = Catalog(memory)
        found: list[Any] = []

        def look(catalog: Catalog = catalog, found: list[Any] = found) -> None:
            try:
                found.append(len(catalog.history().checkpoints()))
            except BaseException as error:  # noqa: BLE001 - told by the assertion below
                found.append(error)

        threads = [threading.Thread(target=look) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [20] * 4


def test_where_nothing_changed_nothing_is_read_again(begin: Any, memory: Any) -> None:
    checkpointer = begin(memory)
    for step in (1, 2, 3):
        checkpointer.save(step, {"w": torch.ones(3)}).result()
    reader = begin(memory)
    listed = reader.checkpoints()
    memory.log.clear()
    assert reader.checkpoints() == listed
    assert memory.keys("read") == []


def test_a_store_that_lists_a_commit_and_cannot_find_it_says_nothing_of_it() -> None:
    class Forgetful(MemoryStore):
        """As a gateway that answers 404 for what it cannot reach."""

        is_forgetful = False

        def read(self, key: str, *, limit_bytes: int) -> bytes:
            if self.is_forgetful and key.endswith("COMMIT"):
                raise ObjectNotFoundError(f"{key}: 404")
            return super().read(key, limit_bytes=limit_bytes)

    store = Forgetful()
    with Checkpointer(store) as ck:
        ck.save(1, {"x": 1}).result(60)
    store.is_forgetful = True
    with (
        Checkpointer(store) as ck,
        pytest.raises(StoreUnavailableError, match=r"lists step-.*says that it is not"),
    ):
        ck.restore()
