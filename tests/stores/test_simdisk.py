"""A power cut at any moment leaves a whole checkpoint or none; and the simulated disk would notice.

Each planted fault is a local store with one fsync left out. A simulation that let one of them
pass would prove nothing about the store without it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from strongroom.errors import ObjectNotFoundError
from strongroom.stores import LocalStore, MemoryStore, Store
from strongroom.stores.calls import OsCalls
from strongroom.testing import CrashState, SimDisk

_OLD = "step-000000000001-0001-0123456789abcdef"
_NEW = "step-000000000002-0001-fedcba9876543210"
_SAVED = "the save returned"


def _save(store: Store, folder: str, shards: int = 4) -> None:
    """What a save does to a store, in small: shards, then small files, then the commit."""
    pinned = []
    for number in range(shards):
        path = f"data/{number:05d}-00.safetensors"
        blocks = [bytes([number + 1]) * 10, bytes([number + 101]) * 10]
        with store.open_writer(f"{folder}/{path}", length_bytes=20) as writer:
            for block in blocks:
                writer.write(block)
            writer.finish()
        pinned.append((path, b"".join(blocks)))
    store.put(f"{folder}/data/index", b"index")
    pinned.append(("data/index", b"index"))
    store.make_durable(folder)
    lines = [f"{path} {hashlib.sha256(data).hexdigest()}" for path, data in pinned]
    text = "\n".join(lines)
    digest = hashlib.sha256(text.encode()).hexdigest()
    assert store.put_if_absent(f"{folder}/COMMIT", f"{text}\n{digest}".encode())


def _is_whole(store: Store, folder: str) -> bool | None:
    """Whether a commit's files are all there and right; None where there is no commit."""
    try:
        commit = store.read(f"{folder}/COMMIT", limit_bytes=10_000).decode()
    except ObjectNotFoundError:
        return None
    text, _, digest = commit.rpartition("\n")
    if hashlib.sha256(text.encode()).hexdigest() != digest:
        return False
    for line in text.split("\n"):
        path, found = line.split()
        try:
            data = store.read(f"{folder}/{path}", limit_bytes=10_000)
        except ObjectNotFoundError:
            return False
        if hashlib.sha256(data).hexdigest() != found:
            return False
    return True


def _wrong(state: CrashState, under: str = "run") -> str | None:
    """What a power cut broke, if anything."""
    whole = _is_whole(state.store(under), _NEW)
    if whole is False:
        return "a commit stands whose files do not"
    if whole is None and _SAVED in state.promised:
        return "the save had returned, and is gone"
    return None


def _crash(folder: Path, make_store: Callable[[SimDisk], Store], **bounds: int) -> Iterator[CrashState]:
    disk = SimDisk(folder, **bounds)
    _save(make_store(disk), _NEW)
    disk.promise(_SAVED)
    return disk.crash_states()


def test_no_power_cut_breaks_a_save(tmp_path: Path) -> None:
    states = list(_crash(tmp_path, lambda disk: LocalStore(disk.folder / "run", calls=disk)))
    assert len(states) > 200
    assert [wrong for state in states if (wrong := _wrong(state))] == []
    outcomes = {(_is_whole(state.store("run"), _NEW), bool(state.promised)) for state in states}
    assert outcomes == {(None, False), (True, False), (True, True)}


def test_no_power_cut_breaks_a_save_into_a_root_with_new_folders_above_it(tmp_path: Path) -> None:
    states = list(_crash(tmp_path, lambda disk: LocalStore(disk.folder / "new" / "er" / "run", calls=disk)))
    assert [wrong for state in states if (wrong := _wrong(state, "new/er/run"))] == []


def test_no_power_cut_breaks_a_save_where_links_are_refused(tmp_path: Path) -> None:
    class WithoutLinks(SimDisk):
        def link(self, source: str, target: str, *, dir_fd: int) -> None:
            raise PermissionError(1, "Operation not permitted")

    disk = WithoutLinks(tmp_path)
    _save(LocalStore(disk.folder / "run", calls=disk), _NEW)
    disk.promise(_SAVED)
    assert [wrong for state in disk.crash_states() if (wrong := _wrong(state))] == []


def test_no_power_cut_during_a_save_touches_the_checkpoint_before_it(tmp_path: Path) -> None:
    _save(LocalStore(tmp_path / "run"), _OLD)
    for state in _crash(tmp_path, lambda disk: LocalStore(disk.folder / "run", calls=disk)):
        assert _is_whole(state.store("run"), _OLD) is True


def test_no_power_cut_breaks_a_save_into_folders_that_another_process_just_made(tmp_path: Path) -> None:
    """Its maker may die before its own fsync: whoever commits covers the names it relies on."""
    disk = SimDisk(tmp_path)
    other = LocalStore(disk.folder / "run", calls=disk)
    other.put(f"{_NEW}/data/by-the-other", b"x")
    _save(LocalStore(disk.folder / "run", calls=disk), _NEW)
    disk.promise(_SAVED)
    assert [wrong for state in disk.crash_states() if (wrong := _wrong(state))] == []


def test_no_power_cut_loses_a_folder_that_was_used_only_once(tmp_path: Path) -> None:
    disk = SimDisk(tmp_path)
    store = LocalStore(disk.folder / "run", calls=disk)
    store.put(f"{_NEW}/data/deep/only", b"x")
    assert store.put_if_absent(f"{_NEW}/COMMIT", b"x")
    for state in disk.crash_states():
        found = state.store("run").contents()
        assert f"{_NEW}/COMMIT" not in found or found[f"{_NEW}/data/deep/only"] == b"x"


def test_no_power_cut_loses_an_object_that_was_created_if_absent(tmp_path: Path) -> None:
    disk = SimDisk(tmp_path)
    store = LocalStore(disk.folder / "new" / "run", calls=disk)
    for key in ("run.json", "launches/000001.json"):
        assert store.put_if_absent(key, b"whole")
        disk.promise(key)
    # The loser was told that an object stands, and may build on it just as well.
    assert not LocalStore(disk.folder / "new" / "run", calls=disk).put_if_absent("run.json", b"other")
    for state in disk.crash_states():
        found = state.store("new/run").contents()
        assert all(found[str(key)] == b"whole" for key in state.promised)
        assert {data for key, data in found.items() if "/." not in f"/{key}"} <= {b"whole"}


def test_no_power_cut_during_a_removal_leaves_a_commit_without_its_files(tmp_path: Path) -> None:
    _save(LocalStore(tmp_path / "run"), _NEW)
    disk = SimDisk(tmp_path)
    store = LocalStore(disk.folder / "run", calls=disk)
    store.delete(f"{_NEW}/COMMIT")
    disk.promise("uncommitted")
    store.delete_tree(_NEW)
    disk.promise("removed")
    seen = set()
    for state in disk.crash_states():
        whole = _is_whole(state.store("run"), _NEW)
        assert whole is not False
        assert whole is None or not state.promised
        if "removed" in state.promised:
            assert f"run/{_NEW}" not in state.folders
        seen.add(whole)
    assert seen == {True, None}


def test_no_power_cut_after_a_kill_during_a_removal_brings_the_commit_back(tmp_path: Path) -> None:
    """Killed between unlink and fsync: the next process finds no commit, and must not trust that."""
    _save(LocalStore(tmp_path / "run"), _NEW)
    disk = SimDisk(tmp_path)
    commit_folder = disk.open(str(disk.folder / "run" / _NEW), os.O_PATH)
    disk.unlink("COMMIT", dir_fd=commit_folder)
    disk.close(commit_folder)
    store = LocalStore(disk.folder / "run", calls=disk)
    store.delete(f"{_NEW}/COMMIT")
    store.delete_tree(_NEW)
    assert all(_is_whole(state.store("run"), _NEW) is not False for state in disk.crash_states())


# Planted faults


class _NoDataSync(SimDisk):
    def fsync(self, fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            super().fsync(fd)


class _NoFolderSyncBefore(SimDisk):
    """Leaves out the fsyncs of folders until something was linked to its final name."""

    has_linked = False

    def fsync(self, fd: int) -> None:
        if self.has_linked or not os.path.isdir(f"/proc/self/fd/{fd}"):
            super().fsync(fd)

    def link(self, source: str, target: str, *, dir_fd: int) -> None:
        super().link(source, target, dir_fd=dir_fd)
        self.has_linked = True


class _NoFolderSyncAfter(_NoFolderSyncBefore):
    def fsync(self, fd: int) -> None:
        if not self.has_linked:
            SimDisk.fsync(self, fd)


class _NoSyncOf(SimDisk):
    """Leaves out the fsync of one folder."""

    left_out = ""

    def fsync(self, fd: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}") != str(self.folder / self.left_out):
            super().fsync(fd)


def _found(folder: Path, kind: type[SimDisk], left_out: str | None = None) -> set[str]:
    disk = kind(folder)
    if left_out is not None:
        assert isinstance(disk, _NoSyncOf)
        disk.left_out = left_out
    _save(LocalStore(disk.folder / "new" / "run", calls=disk), _NEW)
    disk.promise(_SAVED)
    return {wrong for state in disk.crash_states() if (wrong := _wrong(state, "new/run"))}


def test_a_store_that_does_not_fsync_files_is_caught(tmp_path: Path) -> None:
    assert "a commit stands whose files do not" in _found(tmp_path, _NoDataSync)


def test_a_store_that_does_not_fsync_folders_before_the_commit_is_caught(tmp_path: Path) -> None:
    assert "a commit stands whose files do not" in _found(tmp_path, _NoFolderSyncBefore)


def test_a_store_that_does_not_fsync_the_folder_after_the_commit_is_caught(tmp_path: Path) -> None:
    """The disk is the same as before the save returned; only the promise makes it wrong."""
    assert _found(tmp_path, _NoFolderSyncAfter) == {"the save had returned, and is gone"}


@pytest.mark.parametrize("left_out", ("", "new", "new/run", f"new/run/{_NEW}", f"new/run/{_NEW}/data"))
def test_a_store_that_forgets_one_folder_on_the_way_is_caught(tmp_path: Path, left_out: str) -> None:
    assert _found(tmp_path, _NoSyncOf, left_out)


def test_a_commit_written_at_its_final_name_is_caught(tmp_path: Path) -> None:
    """Without temporary file and link a power cut leaves half a commit."""

    class InPlace(LocalStore):
        def put_if_absent(self, key: str, data: bytes | bytearray | memoryview) -> bool:
            self.make_durable(key.rpartition("/")[0])
            self.put(key, data)
            self.make_durable(key.rpartition("/")[0])
            return True

    states = _crash(tmp_path, lambda disk: InPlace(disk.folder / "run", calls=disk))
    assert "a commit stands whose files do not" in {_wrong(state) for state in states}


# The simulation itself


def test_a_write_that_no_fsync_covers_is_lost_kept_or_torn_and_its_name_apart(tmp_path: Path) -> None:
    disk = SimDisk(tmp_path)
    writer = LocalStore(disk.folder, calls=disk).open_writer("object", length_bytes=4)
    writer.write(b"abcd")
    found = {state.files.get("object") for state in disk.crash_states()}
    writer.abort()
    assert found == {None, b"", b"ab", b"\0\0cd", b"abcd"}


def test_an_fsynced_file_still_needs_its_folders_fsync(tmp_path: Path) -> None:
    disk = SimDisk(tmp_path)
    store = LocalStore(disk.folder, calls=disk)
    store.put("object", b"abcd")
    disk.promise("put")
    store.make_durable("")
    disk.promise("durable")
    found = {(state.promised, state.files.get("object")) for state in disk.crash_states()}
    assert (("put",), None) in found
    assert (("put",), b"abcd") in found
    assert {data for promised, data in found if "durable" in promised} == {b"abcd"}
    assert {data for promised, data in found if promised == ("put",)} == {None, b"abcd"}


def test_a_file_in_a_folder_whose_name_was_lost_is_lost(tmp_path: Path) -> None:
    disk = SimDisk(tmp_path)
    store = LocalStore(disk.folder / "run", calls=disk)
    store.put("a/b/object", b"")
    shapes = {state.folders for state in disk.crash_states()}
    assert shapes == {(), ("run",), ("run", "run/a"), ("run", "run/a", "run/a/b")}


def test_what_lay_there_before_is_safe(tmp_path: Path) -> None:
    (tmp_path / "run" / "folder").mkdir(parents=True)
    (tmp_path / "run" / "folder" / "object").write_bytes(b"old")
    disk = SimDisk(tmp_path)
    LocalStore(disk.folder / "run", calls=disk).put("new", b"x")
    for state in disk.crash_states():
        assert state.files["run/folder/object"] == b"old"


def test_above_the_bound_every_single_and_every_all_but_one_is_still_looked_at(tmp_path: Path) -> None:
    disk = SimDisk(tmp_path, exhaustive_below=3, samples=8)
    store = LocalStore(disk.folder, calls=disk)
    names = [f"object-{number:02d}" for number in range(16)]
    for name in names:
        store.put(name, b"")
    found = {frozenset(state.files) for state in disk.crash_states()}
    assert len(found) < 5_000
    for name in names:
        assert frozenset({name}) in found
        assert frozenset(names) - {name} in found
    assert frozenset(names) in found


def test_the_same_journal_gives_the_same_states(tmp_path: Path) -> None:
    disk = SimDisk(tmp_path, exhaustive_below=3, samples=8, seed=7)
    _save(LocalStore(disk.folder / "run", calls=disk), _NEW, shards=6)
    first = [(state.calls, sorted(state.files)) for state in disk.crash_states()]
    assert first == [(state.calls, sorted(state.files)) for state in disk.crash_states()]


def test_a_state_can_be_recovered_from_as_real_files_and_crash_again(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    disk = SimDisk(tmp_path / "disk")
    _save(LocalStore(disk.folder / "run", calls=disk), _NEW, shards=1)
    state = max(disk.crash_states(), key=lambda state: len(state.files))
    (tmp_path / "after").mkdir()
    folder = state.write_to(tmp_path / "after")
    again = SimDisk(folder)
    store = LocalStore(again.folder / "run", calls=again)
    in_memory = state.store("run")
    assert isinstance(in_memory, MemoryStore)
    assert store.list_names(_NEW) == in_memory.list_names(_NEW)
    assert store.read(f"{_NEW}/data/index", limit_bytes=9) == in_memory.read(
        f"{_NEW}/data/index", limit_bytes=9
    )
    store.delete_tree(_NEW)
    assert {f"run/{_NEW}" in found.folders for found in again.crash_states()} == {True, False}


def test_the_simulated_disk_makes_the_real_calls(tmp_path: Path) -> None:
    disk = SimDisk(tmp_path)
    _save(LocalStore(disk.folder / "run", calls=disk), _NEW)
    assert _is_whole(LocalStore(tmp_path / "run", calls=OsCalls()), _NEW) is True
    assert disk.calls > 20
