"""The local store keeps the promises of every store, creates nothing early and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from strongroom.errors import ConfigError, FormatError, ObjectNotFoundError, StoreError
from strongroom.stores import LocalStore, Store
from strongroom.stores.calls import OsCalls
from strongroom.testing.conformance import StoreConformance


class TestLocalStore(StoreConformance):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return LocalStore(tmp_path / "new" / "runs" / "a b")

    def raw(self, store: Store, key: str) -> bytes | None:
        path = _path(store, key)
        return path.read_bytes() if path.is_file() else None

    def plant(self, store: Store, key: str, data: bytes) -> None:
        path = _path(store, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def reopen(self, store: Store) -> Store:
        assert isinstance(store, LocalStore)
        return LocalStore(store.root)


class _WithoutLinks(OsCalls):
    """A file system that knows no hard links, so that the name is given by renaming."""

    def link(self, source: str, target: str, *, dir_fd: int) -> None:
        raise PermissionError(1, "Operation not permitted")


class TestLocalStoreOnAFileSystemWithoutLinks(TestLocalStore):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return LocalStore(tmp_path / "run", calls=_WithoutLinks())

    def reopen(self, store: Store) -> Store:
        assert isinstance(store, LocalStore)
        return LocalStore(store.root, calls=_WithoutLinks())


# Roots


def test_building_and_reading_create_no_folder(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "new" / "run")
    store.list_names("")
    store.make_durable("")
    with pytest.raises(ObjectNotFoundError):
        store.stat("run.json")
    assert list(tmp_path.iterdir()) == []


def test_a_root_that_is_a_file_or_lies_under_one_is_refused_when_built(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="is a file"):
        LocalStore(tmp_path / "file")
    with pytest.raises(ConfigError, match="lies under a file"):
        LocalStore(tmp_path / "file" / "run")


@pytest.mark.parametrize("root", ("", "a\0b"))
def test_a_root_that_is_no_path_is_refused(root: str) -> None:
    with pytest.raises(ConfigError):
        LocalStore(root)


def test_a_root_that_is_a_link_to_nothing_is_refused_when_built(tmp_path: Path) -> None:
    (tmp_path / "run").symlink_to(tmp_path / "absent")
    with pytest.raises(ConfigError, match="link to nothing"):
        LocalStore(tmp_path / "run")


def test_the_root_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    store = LocalStore(tmp_path / "run")
    assert store.put_if_absent("a/COMMIT", b"x")
    assert (tmp_path / "disk" / "a" / "COMMIT").read_bytes() == b"x"


def test_a_relative_root_stays_where_it_was_when_the_working_folder_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = LocalStore("run")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    store.put("object", b"x")
    assert (tmp_path / "run" / "object").exists()


def test_the_uri_is_percent_encoded(tmp_path: Path) -> None:
    assert LocalStore("/runs/a b").uri == "file:///runs/a%20b"


# What lies beside the objects


def test_files_of_others_are_listed_and_unfinished_commits_are_not(tmp_path: Path) -> None:
    (tmp_path / ".COMMIT.0123456789abcdef.tmp").write_bytes(b"half")
    (tmp_path / ".hidden").write_bytes(b"")
    (tmp_path / "notes of mine.txt").write_bytes(b"")
    assert LocalStore(tmp_path).list_names("") == [".hidden", "notes of mine.txt"]


def test_removing_a_tree_takes_unfinished_commits_and_files_of_others_with_it(tmp_path: Path) -> None:
    folder = tmp_path / "step"
    (folder / "data" / "empty").mkdir(parents=True)
    (folder / ".COMMIT.0123456789abcdef.tmp").write_bytes(b"half")
    (folder / "data" / "notes of mine.txt").write_bytes(b"")
    LocalStore(tmp_path).delete_tree("step")
    assert list(tmp_path.iterdir()) == []


def test_folders_deeper_than_any_key_are_not_followed_for_ever(tmp_path: Path) -> None:
    folder = tmp_path / "step"
    folder.mkdir()
    fd = os.open(folder, os.O_RDONLY)
    for _ in range(300):
        os.mkdir("d", dir_fd=fd)
        below = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
    with pytest.raises(StoreError, match="deep"):
        LocalStore(tmp_path).delete_tree("step")
    subprocess.run(["rm", "-rf", str(folder)], check=True)


def test_a_pipe_where_an_object_is_expected_is_damage_and_never_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "object")
    store = LocalStore(tmp_path)
    with pytest.raises(FormatError, match="pipe"):
        store.read("object", limit_bytes=10)
    with pytest.raises(FormatError, match="pipe"):
        store.stat("object")


def test_a_store_leaves_no_descriptor_open(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "run")

    def use(step: int) -> None:
        store.put(f"step-{step}/data/object", b"x")
        store.put_if_absent(f"step-{step}/COMMIT", b"x")
        store.put_if_absent(f"step-{step}/COMMIT", b"x")
        with pytest.raises(StoreError):
            store.put(f"step-{step}/data/object", b"x")
        with pytest.raises(ObjectNotFoundError):
            store.read(f"step-{step}/data", limit_bytes=1)
        store.read(f"step-{step}/COMMIT", limit_bytes=1)
        store.open_writer(f"step-{step}/given-up", length_bytes=1).abort()
        store.list_names(f"step-{step}")
        store.delete_tree(f"step-{step}")

    use(1)
    before = len(os.listdir("/proc/self/fd"))
    for step in range(2, 6):
        use(step)
    assert len(os.listdir("/proc/self/fd")) == before


# System calls that do less than they were asked


class _Reluctant(OsCalls):
    """Writes and reads a few bytes a call, as the kernel may."""

    def write(self, fd: int, data: memoryview) -> int:
        return super().write(fd, data[:7])

    def pread_into(self, fd: int, buffer: memoryview, offset_bytes: int) -> int:
        return super().pread_into(fd, buffer[:5], offset_bytes)


def test_short_writes_and_short_reads_are_continued(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, calls=_Reluctant())
    data = bytes(range(256))
    store.put("put", data)
    store.put_if_absent("put-if-absent", data)
    assert (tmp_path / "put").read_bytes() == (tmp_path / "put-if-absent").read_bytes() == data
    assert store.read("put", limit_bytes=256) == data


def test_signals_do_not_disturb_a_write(tmp_path: Path) -> None:
    """A timer's signals interrupt the calls; every byte arrives all the same."""
    caught = []
    before = signal.signal(signal.SIGALRM, lambda *_: caught.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        store = LocalStore(tmp_path)
        deadline = time.monotonic() + 60
        while len(caught) < 20 and time.monotonic() < deadline:
            store.put("object", bytes(2**20))
            assert store.put_if_absent("created", b"x")
            store.delete("object")
            store.delete("created")
        store.put("object", bytes(2**20))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert caught
    assert (tmp_path / "object").read_bytes() == bytes(2**20)


def test_a_buffer_is_handed_to_the_system_as_it_is(tmp_path: Path) -> None:
    """One call for a buffer, and the very same memory: the shard path counts on it."""
    given: list[memoryview] = []

    class Watching(OsCalls):
        def write(self, fd: int, data: memoryview) -> int:
            given.append(data)
            return super().write(fd, data)

    block = bytearray(2**20)
    with LocalStore(tmp_path, calls=Watching()).open_writer("object", length_bytes=2**20) as writer:
        writer.write(memoryview(block))
        writer.finish()
    assert len(given) == 1
    assert given[0].obj is block


def test_a_long_object_is_handed_to_the_disk_while_it_is_written(tmp_path: Path) -> None:
    """Every byte but the last few is on its way before `finish`, once, in order."""
    begun: list[tuple[int, int]] = []

    class Watching(OsCalls):
        def start_writeback(self, fd: int, offset_bytes: int, length_bytes: int) -> None:
            begun.append((offset_bytes, length_bytes))
            super().start_writeback(fd, offset_bytes, length_bytes)

    block = bytes(3 * 2**20)
    with LocalStore(tmp_path, calls=Watching()).open_writer("object", length_bytes=30 * 2**20) as writer:
        for _ in range(10):
            writer.write(block)
        writer.finish()
    assert begun == [(0, 9 * 2**20), (9 * 2**20, 9 * 2**20), (18 * 2**20, 9 * 2**20)]
    assert (tmp_path / "object").stat().st_size == 30 * 2**20


# Several processes

_RACER = """
import sys, time
from strongroom.stores import LocalStore
store = LocalStore(sys.argv[1])
sys.stdout.write("ready\\n")
sys.stdout.flush()
sys.stdin.readline()
won = [n for n in range(1, 61) if store.put_if_absent(f"launches/{n:06d}.json", sys.argv[2].encode() * 1000)]
print(*won)
"""


def test_of_processes_that_race_for_a_name_exactly_one_gets_it(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    racers = {
        name: subprocess.Popen(
            [sys.executable, "-c", _RACER, str(tmp_path / "run"), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for name in "abc"
    }
    won: dict[str, list[int]] = {}
    for racer in racers.values():
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in racers.values():
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    for name, racer in racers.items():
        out, _ = racer.communicate(timeout=120)
        assert racer.returncode == 0
        won[name] = [int(number) for number in out.split()]
    assert sorted(number for numbers in won.values() for number in numbers) == list(range(1, 61))
    for name, numbers in won.items():
        for number in numbers:
            content = (tmp_path / "run" / "launches" / f"{number:06d}.json").read_bytes()
            assert content == name.encode() * 1000
    assert all(not path.name.startswith(".") for path in (tmp_path / "run" / "launches").iterdir())


def test_threads_that_make_the_same_folders_at_once_all_succeed(tmp_path: Path) -> None:
    for turn in range(20):
        store = LocalStore(tmp_path / f"run-{turn}")
        errors: list[Exception] = []
        gate = threading.Barrier(4)

        def write(
            number: int,
            store: LocalStore = store,
            gate: threading.Barrier = gate,
            errors: list[Exception] = errors,
        ) -> None:
            gate.wait(60)
            try:
                store.put(f"step/data/{number}", b"x")
            except StoreError as error:
                errors.append(error)

        threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert errors == []
        assert store.list_names("step/data") == ["0", "1", "2", "3"]


def _path(store: Store, key: str) -> Path:
    assert isinstance(store, LocalStore)
    return Path(store.root, key)


class _Overtaken(OsCalls):
    """Another one had the name just before, and has removed what it created when it is looked at."""

    def link(self, source: str, target: str, *, dir_fd: int) -> None:
        raise FileExistsError(17, "File exists")


def test_who_comes_second_to_a_name_that_is_gone_since_has_not_created_it(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, calls=_Overtaken())
    assert store.put_if_absent("entries/1.json", b"{}") is False
    assert store.list_names("entries") == []
