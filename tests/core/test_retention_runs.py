"""Retention and orphans on a real root: after the commit, COMMIT first, and never into training."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from strongroom import AccessDeniedError, Checkpointer, KeepLast, SaveError, StoreUnavailableError, events
from strongroom.layout import CheckpointName
from strongroom.stores.local import LocalStore

Begin = Callable[..., Checkpointer]
STATE = {"t": torch.ones(3)}


def save(checkpointer: Checkpointer, *steps: int) -> None:
    for step in steps:
        checkpointer.save(step, STATE)
    checkpointer.wait(60)


def steps(root: Any) -> list[int]:
    return [c.step for c in Checkpointer(root).checkpoints()]


def folders(root: Path) -> list[int]:
    """Steps that have a folder, committed or not."""
    return sorted(int(path.name.split("-")[1]) for path in root.glob("step-*"))


def test_the_newest_so_many_stay_after_each_commit(root: Path, begin: Begin) -> None:
    checkpointer = begin(root, keep=KeepLast(count=2))
    for step in range(1, 6):
        save(checkpointer, step)
        assert folders(root) == list(range(max(1, step - 1), step + 1))
    assert steps(root) == [5, 4]


def test_without_a_policy_everything_stays(root: Path, begin: Begin) -> None:
    save(begin(root), *range(1, 6))
    assert steps(root) == [5, 4, 3, 2, 1]


def test_nothing_is_removed_before_the_new_checkpoint_is_committed(store: Any, begin: Begin) -> None:
    save(begin(store, keep=KeepLast(count=1)), 1, 2, 3)
    for removed in (1, 2):
        commit_of_next = next(
            number
            for number, (name, key) in enumerate(store.log)
            if name == "put_if_absent" and key.startswith(f"step-{removed + 1:012d}")
        )
        first_delete = next(
            number
            for number, (name, key) in enumerate(store.log)
            if name in {"delete", "delete_tree"} and key.startswith(f"step-{removed:012d}")
        )
        assert commit_of_next < first_delete


def test_a_removal_takes_commit_first(store: Any, begin: Begin) -> None:
    checkpointer = begin(store, keep=KeepLast(count=1))
    first = checkpointer.save(1, STATE).result()
    save(checkpointer, 2)
    deletes = [(name, key) for name, key in store.log if name.startswith("delete")]
    assert deletes == [("delete", f"{first.folder}/COMMIT"), ("delete_tree", first.folder)]


def test_a_sweep_that_dies_half_way_leaves_no_checkpoint_with_holes(store: Any, begin: Begin) -> None:
    store.fail(StoreUnavailableError("gone"), on="delete_tree")
    save(begin(store, keep=KeepLast(count=1)), 1, 2)
    store.hook = None
    assert steps(store) == [2]
    assert begin(store).restore().step == 2


def test_the_newest_checkpoint_survives_a_policy_that_keeps_nothing(root: Path, begin: Begin) -> None:
    class KeepNothing:
        def keep(self, ranked: Sequence[CheckpointName]) -> Collection[CheckpointName]:
            return ()

    save(begin(root, keep=KeepNothing()), 1, 2, 3)
    assert steps(root) == [3]


def test_the_newest_that_was_restored_survives_until_a_newer_one_was(root: Path, begin: Begin) -> None:
    save(begin(root), 1, 2)
    checkpointer = begin(root, keep=KeepLast(count=1))
    checkpointer.restore(step=1)
    save(checkpointer, 2, 3, 4)
    # Steps 2 to 4 were never read: if all of them turn out damaged, the run resumes from 1.
    assert [c.step for c in checkpointer.checkpoints() if not c.is_superseded] == [4, 1]
    # A later process knows it from the launch's record.
    later = begin(root, keep=KeepLast(count=1))
    later.restore()
    save(later, 5, 6)
    assert steps(root) == [6, 4]


def test_a_rewound_run_replaces_what_it_left_behind_one_by_one(root: Path, begin: Begin) -> None:
    save(begin(root), 1, 2, 3, 4)
    checkpointer = begin(root, keep=KeepLast(count=3))
    checkpointer.restore(step=1)
    save(checkpointer, 2)
    found = checkpointer.checkpoints()
    assert [(c.launch, c.step) for c in found] == [(2, 2), (1, 1), (1, 4)]
    save(checkpointer, 3)
    assert [(c.launch, c.step) for c in checkpointer.checkpoints()] == [(2, 3), (2, 2), (1, 1)]


def test_a_policy_with_a_bug_never_fails_a_save(root: Path, begin: Begin, listener: Any) -> None:
    class Broken:
        def keep(self, ranked: Sequence[CheckpointName]) -> Collection[CheckpointName]:
            raise ZeroDivisionError

    checkpointer = begin(root, keep=Broken(), events=[listener])
    save(checkpointer, 1, 2)
    checkpointer.close()
    assert steps(root) == [2, 1]
    assert len(listener.of(events.RemovalFailed)) == 2


@pytest.mark.parametrize("operation", ("delete", "delete_tree"))
def test_a_removal_that_fails_never_fails_a_save_and_is_tried_again(
    operation: str, store: Any, root: Path, begin: Begin, listener: Any
) -> None:
    checkpointer = begin(store, keep=KeepLast(count=1), events=[listener])
    save(checkpointer, 1)
    store.fail(AccessDeniedError("no delete"), on=operation, times=3)
    save(checkpointer, 2)
    save(checkpointer, 3)
    failed = listener.of(events.RemovalFailed)
    assert [event.folder.split("-")[1] for event in failed] == [
        "000000000001",
        "000000000002",
        "000000000001",
    ]
    assert all("no delete" in event.reason for event in failed)
    assert folders(root) == [1, 2, 3]
    save(checkpointer, 4)
    assert folders(root) == [4]
    checkpointer.close()


def test_a_listing_that_is_denied_never_fails_a_save(store: Any, begin: Begin, listener: Any) -> None:
    checkpointer = begin(store, keep=KeepLast(count=1), events=[listener])
    save(checkpointer, 1)
    store.fail(AccessDeniedError("no list"), on="list_names")
    save(checkpointer, 2)
    checkpointer.close()
    assert len(listener.of(events.RemovalFailed)) == 1
    store.hook = None
    assert steps(store) == [2, 1]


# ---------------------------------------------------------------------------------------- orphans


def die_in_a_save(store: Any, begin: Begin, step: int, **options: Any) -> None:
    """What a killed process leaves: a folder without a COMMIT, which nobody came to clean up."""

    def hook(operation: str, key: str) -> None:
        if operation == "put_if_absent" and key.endswith("COMMIT"):
            raise StoreUnavailableError("killed")
        if operation == "delete_tree":
            raise StoreUnavailableError("killed")

    checkpointer = begin(store, **options)
    store.hook = hook
    with pytest.raises(SaveError):
        checkpointer.save(step, STATE).result(60)
    store.hook = None


class Aging:
    """Moves the clock, and what the file system says of when files were written stays real."""

    def __init__(self, clock: Any) -> None:
        import time

        self._clock = clock
        self._zero_ns = time.time_ns()

    def to(self, seconds: float) -> None:
        self._clock.wall_ns = self._zero_ns + int(seconds * 10**9)


def test_what_a_killed_save_left_is_removed_past_twice_its_deadline_and_not_before(
    store: Any, root: Path, begin: Begin, clock: Any, listener: Any
) -> None:
    age = Aging(clock)
    age.to(0)
    die_in_a_save(store, begin, 7, timeout_s=100)
    assert folders(root) == [7]
    checkpointer = begin(store, keep=KeepLast(count=9), clock=clock.clock, events=[listener], timeout_s=1)
    # The deadline that counts is the dead launch's own, not this one's.
    age.to(190)
    save(checkpointer, 8)
    assert folders(root) == [7, 8]
    age.to(260)
    save(checkpointer, 9)
    assert folders(root) == [8, 9]
    (event,) = listener.of(events.OrphanRemoved)
    assert event.folder.startswith("step-000000000007-0001-")


def test_a_folder_whose_launch_record_is_lost_is_given_a_day(
    store: Any, root: Path, begin: Begin, clock: Any
) -> None:
    age = Aging(clock)
    age.to(0)
    die_in_a_save(store, begin, 7, timeout_s=100)
    (root / "launches" / "000001.json").unlink()
    checkpointer = begin(store, keep=KeepLast(count=9), clock=clock.clock)
    age.to(2 * 86_400 - 600)
    save(checkpointer, 8)
    assert folders(root) == [7, 8]
    age.to(2 * 86_400 + 600)
    save(checkpointer, 9)
    assert folders(root) == [8, 9]


def test_an_empty_folder_of_an_older_launch_is_removed_at_once(root: Path, begin: Begin) -> None:
    save(begin(root), 1)
    (root / "step-000000000002-0001-0123456789abcdef" / "data").mkdir(parents=True)
    (root / "step-000000000002-0009-0123456789abcdef" / "data").mkdir(parents=True)
    checkpointer = begin(root, keep=KeepLast(count=9))
    checkpointer.restore()
    save(checkpointer, 3)
    # Of a launch above this one nothing is touched: it has taken the run over.
    assert [path.name for path in root.glob("step-000000000002-*")] in (
        ["step-000000000002-0009-0123456789abcdef"],
        [],
    )


def test_a_save_under_way_by_a_later_writer_is_left_alone(
    store: Any, root: Path, begin: Begin, clock: Any
) -> None:
    age = Aging(clock)
    age.to(0)
    early = begin(store, keep=KeepLast(count=1), clock=clock.clock, timeout_s=10)
    save(early, 1)
    # The earlier writer has passed its fence and is about to commit when the later one begins.
    passed = store.hold(on="put_if_absent", where="COMMIT")
    last = early.save(2, STATE)
    passed.wait_reached()
    other = type(store)(LocalStore(root))
    under_way = other.hold(on="put_if_absent", where="COMMIT")
    handle = begin(other, timeout_s=10).save(3, STATE)
    under_way.wait_reached()
    # However late it is: a later launch's folder is not an older writer's to judge.
    clock.jump(10**7)
    passed.open()
    assert last.result(60).step == 2
    early.wait(60)
    # And what stays of the rest is the later writer's to say: step 1 may be where it goes on from.
    assert folders(root) == [1, 2, 3]
    under_way.open()
    assert handle.result(60).step == 3


def test_what_is_not_ours_is_never_touched(root: Path, begin: Begin) -> None:
    root.mkdir(parents=True)
    (root / "notes.txt").write_text("mine")
    (root / "step-latest").mkdir()
    (root / "step-000000000001-0001-0123456789abcdef.bak").mkdir()
    (root / "step-1-1-0123456789abcdef").mkdir()
    checkpointer = begin(root, keep=KeepLast(count=1))
    save(checkpointer, 1, 2, 3)
    assert (root / "notes.txt").read_text() == "mine"
    assert {path.name for path in root.iterdir() if "step-0000" not in path.name or "bak" in path.name} == {
        "notes.txt", "step-latest", "step-000000000001-0001-0123456789abcdef.bak",
        "step-1-1-0123456789abcdef", "launches", "run.json",
    }  # fmt: skip


def test_opening_a_root_and_restoring_removes_nothing(
    store: Any, root: Path, begin: Begin, clock: Any
) -> None:
    save(begin(store), 1, 2)
    die_in_a_save(store, begin, 7, timeout_s=1)
    store.log.clear()
    reader = begin(store, keep=KeepLast(count=1), clock=clock.clock)
    Aging(clock).to(10**7)
    reader.checkpoints()
    reader.restore()
    reader.close()
    assert not [name for name, _ in store.log if name.startswith(("delete", "put", "open_writer"))]
    assert folders(root) == [1, 2, 7]
