"""Whatever disk a power cut leaves: what was promised is there, bit for bit, and nothing half done is.

A run of three saves with retention goes through a local store whose system calls `SimDisk` keeps a
journal of. Every disk that they allow is opened by a new process.
"""

from __future__ import annotations

import errno
import itertools
import os
import stat
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from crash_states import age, assert_newest_is, assert_whole, leftovers, numbers_from, state_at

from strongroom import Checkpointer, KeepLast
from strongroom.errors import SaveError, StoreError, StrongroomError
from strongroom.events import CheckpointCommitted, Event
from strongroom.layout import COMMIT
from strongroom.stores.base import Buffer
from strongroom.stores.local import LocalStore
from strongroom.testing import CrashState, SimDisk
from strongroom.testing.simdisk import _Data, _Name, _Sync

_VIEWS = ([], [1], [2, 1], [3, 2, 1], [3, 2])
"""What a process may list, oldest view first: retention takes step 1 once step 3 is committed."""


class _Promises:
    """Tells the disk what the caller was told, on the thread and at the moment that it happened."""

    def __init__(self, disk: SimDisk) -> None:
        self._disk = disk

    def emit(self, event: Event) -> None:
        if isinstance(event, CheckpointCommitted):
            self._disk.promise(event.step)


def _train(disk: SimDisk, store: LocalStore, steps: tuple[int, ...] = (1, 2, 3)) -> None:
    """One process's life: a save a step, each waited for."""
    with Checkpointer(
        store, keep=KeepLast(count=2), draw=numbers_from(steps[0] * 100), events=[_Promises(disk)]
    ) as checkpointer:
        checkpointer.restore()
        for step in steps:
            checkpointer.save(step, state_at(step)).result()
            disk.promise(step)


def _lost(state: CrashState, under: str = "run") -> str | None:
    """What a power cut broke, if anything."""
    store = state.store(under)
    try:
        steps = assert_whole(store)
    except (StrongroomError, AssertionError) as error:
        return f"after {state.calls} calls: {str(error) or type(error).__name__}"
    if steps not in _allowed(_promised(state)):
        return f"after {state.calls} calls: {steps} are left, and step {_promised(state)} was promised"
    return None


def _promised(state: CrashState) -> int:
    """The newest step that the caller had been told of; 0: none."""
    return max((int(str(step)) for step in state.promised), default=0)


def _allowed(promised: int) -> list[list[int]]:
    return [view for view in _VIEWS if promised in (0, *view)]


def _all_lost(disk: SimDisk, under: str = "run") -> list[str]:
    return [lost for state in disk.crash_states() if (lost := _lost(state, under))]


def test_no_power_cut_loses_what_was_promised_or_shows_what_was_not_committed(tmp_path: Path) -> None:
    disk = SimDisk(tmp_path)
    _train(disk, LocalStore(disk.folder / "run", calls=disk), steps=(1, 2))
    # Another process goes on: a launch with a parent, and nothing remembered of what is durable.
    _train(disk, LocalStore(disk.folder / "run", calls=disk), steps=(3,))
    views: Counter[tuple[tuple[int, ...], int]] = Counter()
    for state in disk.crash_states():
        seen = assert_whole(state.store("run"))
        promised = _promised(state)
        assert seen in _allowed(promised)
        views[tuple(seen), promised] += 1
    # Every view was met, and each of the later ones before and after it was promised.
    assert views.keys() >= {
        ((), 0),
        ((1,), 0),
        ((1,), 1),
        ((2, 1), 1),
        ((2, 1), 2),
        ((3, 2, 1), 3),
        ((3, 2), 3),
    }
    assert sum(views.values()) > 400


def test_no_power_cut_breaks_a_root_whose_folders_above_are_new_too(tmp_path: Path) -> None:
    disk = SimDisk(tmp_path)
    _train(disk, LocalStore(disk.folder / "new" / "er" / "run", calls=disk), steps=(1,))
    assert _all_lost(disk, "new/er/run") == []


def test_no_power_cut_breaks_a_run_on_a_file_system_without_links(tmp_path: Path) -> None:
    class WithoutLinks(SimDisk):
        def link(self, source: str, target: str, *, dir_fd: int) -> None:
            raise PermissionError(1, "Operation not permitted")

    disk = WithoutLinks(tmp_path)
    _train(disk, LocalStore(disk.folder / "run", calls=disk))
    assert _all_lost(disk) == []


def test_a_run_goes_on_after_any_power_cut_and_cleans_up(tmp_path: Path) -> None:
    """On real files, as the next process finds them; a sample of the disks of a save with retention."""
    first = tmp_path / "first"
    first.mkdir()
    _train(SimDisk(first), LocalStore(first / "run"), steps=(1, 2))
    disk = SimDisk(first)
    _train(disk, LocalStore(disk.folder / "run", calls=disk), steps=(3,))
    for number, state in enumerate(list(disk.crash_states())[::7]):
        root = state.write_to(tmp_path / f"disk-{number}") / "run"
        with Checkpointer(root, keep=KeepLast(count=1), timeout_s=1, draw=numbers_from(1000)) as later:
            restored = later.restore()
            assert restored is not None
            newest = restored.step
            assert newest in (2, 3)
            age(root)
            later.save(9, state_at(9)).result()
        assert leftovers(LocalStore(root)) == set()
        assert_newest_is(root, 9)
        assert assert_whole(root) == [9, newest]


class _FsyncFailsOnce(SimDisk):
    """One fsync fails, and what it should have covered is dropped; the next ones succeed.

    So do Linux's: after a failed write-back the pages count as clean, and are not written again.
    What was dropped is still there for everybody to see, until the power goes.
    """

    def __init__(self, folder: Path, fail_at: int) -> None:
        # What it holds in the end is asked, not what it might have held on the way.
        super().__init__(folder, exhaustive_below=4, samples=2)
        self._fail_at = fail_at
        self.fsyncs = 0

    def fsync(self, fd: int) -> None:
        with self._lock:
            self.fsyncs += 1
            if self.fsyncs != self._fail_at:
                super().fsync(fd)
                return
            node = self._open[fd]
            synced = max((n for n, event in enumerate(self._journal) if event == _Sync(node)), default=-1)
            dropped = [
                event
                for event in self._journal[synced + 1 :]
                if (isinstance(event, _Name) and event.folder == node)
                or (isinstance(event, _Data) and event.file == node)
            ]
            self._journal = [event for event in self._journal if not any(event is gone for gone in dropped)]
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def _train_on(disk: SimDisk, store: LocalStore) -> list[int]:
    """As `_train`, by a user who goes on after failures, as `Tolerate` does; what was promised."""
    promised = []
    checkpointer = Checkpointer(store, keep=KeepLast(count=2), draw=numbers_from(100))
    for step in (1, 2, 3):
        try:
            checkpointer.save(step, state_at(step)).result()
        except (SaveError, StoreError):
            continue
        checkpointer.wait()
        disk.promise(step)
        promised.append(step)
    return promised


def test_what_a_failed_fsync_dropped_is_never_relied_on(tmp_path: Path) -> None:
    for fail_at in itertools.count(1):
        folder = tmp_path / str(fail_at)
        folder.mkdir()
        disk = _FsyncFailsOnce(folder, fail_at)
        promised = _train_on(disk, LocalStore(disk.folder / "run", calls=disk))
        # What was dropped stays dropped, so the last disks tell.
        last = [state for state in disk.crash_states() if state.promised == tuple(promised)]
        assert last
        for state in last:
            steps = assert_whole(state.store("run"))
            assert max(promised, default=0) in (0, *steps), f"fsync {fail_at} failed, and {steps} are left"
        if disk.fsyncs < fail_at:
            break


# The simulation notices what a store, or the protocol above it, leaves out. A test that let one of
# these pass would prove nothing about the run without it.


class _NoFsyncOfFiles(SimDisk):
    def fsync(self, fd: int) -> None:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            super().fsync(fd)


class _NoFsyncOfFolders(SimDisk):
    def fsync(self, fd: int) -> None:
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            super().fsync(fd)


class _NoFsyncOfTheFolderThatCommits(SimDisk):
    """The one after COMMIT got its name; those before it are made."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._has_linked = False

    def link(self, source: str, target: str, *, dir_fd: int) -> None:
        super().link(source, target, dir_fd=dir_fd)
        self._has_linked = target == COMMIT

    def fsync(self, fd: int) -> None:
        if self._has_linked and stat.S_ISDIR(os.fstat(fd).st_mode):
            self._has_linked = False
            return
        super().fsync(fd)


class _NoFsyncOfTheRoot(SimDisk):
    """Names of new checkpoint folders."""

    def fsync(self, fd: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}") != str(self.folder / "run"):
            super().fsync(fd)


@pytest.mark.parametrize(
    "disk_type", (_NoFsyncOfFiles, _NoFsyncOfFolders, _NoFsyncOfTheFolderThatCommits, _NoFsyncOfTheRoot)
)
def test_the_simulation_notices_an_fsync_that_is_left_out(
    tmp_path: Path, disk_type: Callable[[Path], SimDisk]
) -> None:
    disk = disk_type(tmp_path)
    _train(disk, LocalStore(disk.folder / "run", calls=disk))
    assert any(_lost(state) for state in disk.crash_states())


class _CommitsFirst(LocalStore):
    """COMMIT is there before the folders' names are durable."""

    def make_durable(self, prefix: str) -> None:
        pass

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        if not key.endswith(COMMIT):
            return super().put_if_absent(key, data)
        self.put(key, data)
        return True


class _RemovesTheCommitLast(LocalStore):
    def delete(self, key: str) -> None:
        if not key.endswith(COMMIT):
            super().delete(key)

    def delete_tree(self, prefix: str) -> None:
        super().delete_tree(f"{prefix}/data")
        super().delete_tree(prefix)


class _ForgetsToMakeTheRemovalDurable(LocalStore):
    """COMMIT and all else of a folder vanish in any order."""

    def delete(self, key: str) -> None:
        pass


@pytest.mark.parametrize(
    "store_type", (_CommitsFirst, _RemovesTheCommitLast, _ForgetsToMakeTheRemovalDurable)
)
def test_the_simulation_notices_a_wrong_order(tmp_path: Path, store_type: Any) -> None:
    disk = SimDisk(tmp_path)
    _train(disk, store_type(disk.folder / "run", calls=disk))
    assert any(_lost(state) for state in disk.crash_states())
