"""Long objects go past the page cache where that can be done, and arrive whole where it cannot."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from strongroom.errors import StoreUnavailableError
from strongroom.stores import LocalStore
from strongroom.stores.calls import OsCalls

MiB = 1 << 20
TOTAL = 9 * MiB + 12_345


class Watching(OsCalls):
    """Says of each write how long it was and whether it passed the page cache by."""

    def __init__(self, *, refuses: bool = False, fails: int | None = None) -> None:
        self.writes: list[tuple[int, bool]] = []
        self.hints = 0
        self._refuses = refuses
        self._fails = fails

    def write(self, fd: int, data: memoryview) -> int:
        is_direct = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & getattr(os, "O_DIRECT", 0))
        if is_direct and self._fails is not None:
            raise OSError(self._fails, os.strerror(self._fails))
        count = super().write(fd, data)
        self.writes.append((count, is_direct))
        return count

    def set_direct(self, fd: int, *, wanted: bool) -> bool:
        return False if wanted and self._refuses else super().set_direct(fd, wanted=wanted)

    def start_writeback(self, fd: int, offset_bytes: int, length_bytes: int) -> None:
        self.hints += 1
        super().start_writeback(fd, offset_bytes, length_bytes)


@pytest.fixture
def pages() -> Iterator[memoryview]:
    """Memory that begins with a page, and holds no two equal pages."""
    with mmap.mmap(-1, TOTAL + mmap.PAGESIZE) as memory:
        for start in range(0, TOTAL, mmap.PAGESIZE):
            memory[start : start + 4] = start.to_bytes(4, "little")
        with memoryview(memory) as view:
            yield view


@pytest.fixture
def _can_be_direct(tmp_path: Path) -> None:
    with (tmp_path / "probe").open("wb") as file:
        if not OsCalls().set_direct(file.fileno(), wanted=True):
            pytest.skip("this file system is not written past the page cache")


def written(root: Path, data: memoryview, calls: OsCalls, *, pieces: int) -> bytes:
    """What lies in the file after ``data`` was written in pieces."""
    with LocalStore(root, calls=calls).open_writer("object", length_bytes=len(data)) as writer:
        for start in range(0, len(data), pieces):
            with data[start : start + pieces] as piece:
                writer.write(piece)
        writer.finish()
    return (root / "object").read_bytes()


@pytest.mark.usefixtures("_can_be_direct")
def test_all_but_the_end_of_a_long_object_passes_the_page_cache_by(tmp_path: Path, pages: memoryview) -> None:
    calls = Watching()
    with pages[:TOTAL] as data:
        assert written(tmp_path, data, calls, pieces=4 * MiB) == data
    tail = TOTAL % 4096
    assert calls.writes == [(4 * MiB, True), (4 * MiB, True), (MiB + 12_345 - tail, True), (tail, False)]
    assert calls.hints == 0


@pytest.mark.usefixtures("_can_be_direct")
def test_pieces_of_odd_lengths_end_it_and_arrive_all_the_same(tmp_path: Path, pages: memoryview) -> None:
    calls = Watching()
    with pages[:TOTAL] as data:
        assert written(tmp_path, data, calls, pieces=MiB + 17) == data
    assert [is_direct for _, is_direct in calls.writes[:3]] == [True, False, False]


@pytest.mark.parametrize("offset", (1, 64, 512))
def test_memory_that_begins_anywhere_goes_through_the_cache(
    offset: int, tmp_path: Path, pages: memoryview
) -> None:
    calls = Watching()
    with pages[offset : offset + 9 * MiB] as data:
        assert written(tmp_path, data, calls, pieces=4 * MiB) == data
    assert not any(is_direct for _, is_direct in calls.writes)
    assert calls.hints > 0


def test_a_file_system_that_refuses_gets_ordinary_writes(tmp_path: Path, pages: memoryview) -> None:
    for name, calls in {"at once": Watching(refuses=True), "late": Watching(fails=errno.EINVAL)}.items():
        with pages[:TOTAL] as data:
            assert written(tmp_path / name, data, calls, pieces=4 * MiB) == data
        assert not any(is_direct for _, is_direct in calls.writes)


def test_short_objects_go_through_the_cache(tmp_path: Path, pages: memoryview) -> None:
    calls = Watching()
    with pages[: 4 * MiB] as data:
        assert written(tmp_path, data, calls, pieces=MiB) == data
    assert not any(is_direct for _, is_direct in calls.writes)


@pytest.mark.usefixtures("_can_be_direct")
def test_a_disk_that_fails_such_a_write_fails_the_object(tmp_path: Path, pages: memoryview) -> None:
    calls = Watching(fails=errno.EIO)
    with pages[:TOTAL] as data, pytest.raises(StoreUnavailableError):
        written(tmp_path, data, calls, pieces=4 * MiB)
    assert not (tmp_path / "object").exists()
