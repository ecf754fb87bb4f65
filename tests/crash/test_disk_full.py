"""A disk that is really full: the save says so, leaves nothing behind, and works again once there is room."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import crash_children as children
import pytest
import torch
from crash_processes import Child
from crash_states import assert_whole, leftovers

from strongroom import Checkpointer, Tolerate
from strongroom.errors import SaveError, StoreFullError
from strongroom.stores.local import LocalStore

_PAGE_BYTES = 4096
_PAGES = 128


@contextlib.contextmanager
def _mounted(folder: Path, limit: str) -> Iterator[Path]:
    """A file system in memory, mounted there; the test is skipped where that cannot be."""
    folder.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", limit, "strongroom-test", str(folder)], capture_output=True, text=True
    )
    if mount.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mount.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture(params=["pages", "inodes"])
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A file system in memory of 128 pages, or of 64 inodes; what runs out first."""
    kind = request.param
    limit = f"size={_PAGES * _PAGE_BYTES}" if kind == "pages" else "size=16m,nr_inodes=64"
    with _mounted(tmp_path / "disk", limit) as folder:
        yield folder, kind


def _fill(folder: Path, kind: str, room: int) -> Callable[[], None]:
    """Leave room for so many pages or inodes; the result gives the rest back."""
    ballast = folder / "ballast"
    ballast.mkdir()
    if kind == "pages":
        free = _free(folder, kind)
        (ballast / "pages").write_bytes(bytes((free - room) * _PAGE_BYTES))
    else:
        for number in range(_free(folder, kind) - room):
            (ballast / str(number)).touch()
    assert _free(folder, kind) == room

    def give_back() -> None:
        for path in ballast.iterdir():
            path.unlink()
        ballast.rmdir()

    return give_back


def _free(folder: Path, kind: str) -> int:
    column = "avail" if kind == "pages" else "iavail"
    block = [f"--block-size={_PAGE_BYTES}"] if kind == "pages" else []
    told = subprocess.run(
        ["df", *block, f"--output={column}", str(folder)], capture_output=True, text=True, check=True
    )
    return int(told.stdout.split()[-1])


def _state(step: int) -> dict[str, Any]:
    return {"weights": torch.full((3000,), float(step)), "extra": {"step": step}}


def _assert_restores(root: Path, step: int) -> None:
    restored = Checkpointer(root).restore()
    assert restored is not None
    assert (restored.step, restored.skipped) == (step, ())
    assert torch.equal(restored.state["weights"], _state(step)["weights"])
    assert restored.state["extra"] == {"step": step}


def test_wherever_in_a_save_the_room_ends_it_says_so_and_leaves_nothing(
    small_disk: tuple[Path, str],
) -> None:
    folder, kind = small_disk
    root = folder / "run"
    checkpointer = Checkpointer(root)
    checkpointer.save(1, _state(1)).result()
    refused = 0
    for room in range(_PAGES):
        give_back = _fill(folder, kind, room)
        free_before = _free(folder, kind)
        handle = checkpointer.save(2, _state(2))
        try:
            handle.result()
        except SaveError as error:
            refused += 1
            told = error
        else:
            break
        assert isinstance(told.__cause__, StoreFullError)
        # What the weights alone have no room for is not begun; inodes nobody counts beforehand.
        is_begun = kind == "inodes" or room * _PAGE_BYTES >= 12_000
        assert ("No space left on device (ENOSPC)" in str(told)) == is_begun
        assert ("Nothing was written" in str(told)) != is_begun
        assert "step 1 is untouched" in str(told)
        assert _free(folder, kind) == free_before
        assert leftovers(LocalStore(root)) == set()
        _assert_restores(root, 1)
        give_back()
    # A shard of three pages and four files more; two folders and seven files.
    assert refused >= 7
    give_back()
    _assert_restores(root, 2)
    checkpointer.save(3, _state(3)).result()
    checkpointer.close()
    _assert_restores(root, 3)


def test_a_first_save_on_a_full_disk_says_so_at_once(small_disk: tuple[Path, str]) -> None:
    folder, kind = small_disk
    root = folder / "run"
    with Checkpointer(root) as checkpointer:
        give_back = _fill(folder, kind, 0)
        with pytest.raises(StoreFullError, match="No space left"):
            checkpointer.save(1, _state(1))
        assert checkpointer.checkpoints() == []
        give_back()
        checkpointer.save(1, _state(1)).result()
    _assert_restores(root, 1)


def test_a_reserve_is_left_free_on_a_disk_that_is_filling_up(tmp_path: Path) -> None:
    with _mounted(tmp_path / "disk", f"size={_PAGES * _PAGE_BYTES}") as folder:
        root = folder / "run"
        reserve_bytes = 40 * _PAGE_BYTES
        with Checkpointer(root, reserve_bytes=reserve_bytes, on_failure=Tolerate(consecutive=1)) as ck:
            step = 1
            while _free(folder, "pages") * _PAGE_BYTES >= 12_000 + reserve_bytes:
                ck.save(step, _state(step)).result()
                step += 1
            with pytest.raises(SaveError, match=r"163840 more are to stay free \(reserve_bytes\)"):
                ck.save(step, _state(step)).result()
            assert 3 < step < 12
            # What a save has besides its weights was not counted before.
            assert _free(folder, "pages") > 40 - 8
            _assert_restores(root, step - 1)
            # As `strongroom gc` would.
            for checkpoint in ck.checkpoints()[1:]:
                shutil.rmtree(root / checkpoint.folder)
            ck.save(step, _state(step)).result()
        _assert_restores(root, step)


def test_a_file_size_limit_counts_as_no_room_too(start: Callable[..., Child], tmp_path: Path) -> None:
    root = tmp_path / "run"
    child = start(children.save_with_a_file_size_limit, str(root), 600)
    code, (first, (kind, words), names, third) = child.end()
    assert code == 0
    assert (first, third) == (1, 3)
    assert kind == "SaveError"
    assert "File too large (EFBIG)" in words
    assert "file size limit" in words
    assert not [name for name in names if name.startswith("step-000000000002")]
    assert assert_whole(root) == [3, 1]
