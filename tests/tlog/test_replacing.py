"""Putting one object in another's place, on a disk: no power cut and no failing call leaves anything else."""

from __future__ import annotations

import errno
import itertools
from pathlib import Path

import pytest

from strongroom.errors import OutcomeUnknownError, StrongroomError
from strongroom.stores.base import is_temporary
from strongroom.stores.local import LocalStore
from strongroom.testing.faultycalls import FaultyCalls
from strongroom.testing.simdisk import SimDisk

OLD, NEW = b"old " * 40, b"new " * 50
KEY = "tlog/checkpoint"


def test_after_a_power_cut_the_old_stands_or_the_new_and_once_it_returned_the_new(tmp_path: Path) -> None:
    (tmp_path / "run" / "tlog").mkdir(parents=True)
    (tmp_path / "run" / KEY).write_bytes(OLD)
    disk = SimDisk(tmp_path)
    store = LocalStore(disk.folder / "run", calls=disk)
    assert store.replace(KEY, NEW, version=store.stat(KEY).version)
    disk.promise("replaced")
    seen = set()
    for state in disk.crash_states():
        found = state.files[f"run/{KEY}"]
        seen.add(found)
        assert found in ((NEW,) if state.promised else (OLD, NEW))
    assert seen == {OLD, NEW}


class _NoFsyncOfFiles(SimDisk):
    """Forgets to make bytes durable before they get their name."""

    def fsync(self, fd: int) -> None:
        if not self._is_folder[self._open[fd]]:
            return
        super().fsync(fd)


def test_the_simulation_notices_bytes_that_were_not_made_durable(tmp_path: Path) -> None:
    (tmp_path / "run" / "tlog").mkdir(parents=True)
    (tmp_path / "run" / KEY).write_bytes(OLD)
    disk = _NoFsyncOfFiles(tmp_path)
    store = LocalStore(disk.folder / "run", calls=disk)
    assert store.replace(KEY, NEW, version=store.stat(KEY).version)
    assert any(state.files[f"run/{KEY}"] not in (OLD, NEW) for state in disk.crash_states())


@pytest.mark.parametrize("done", (False, True), ids=("not-done", "done"))
def test_whichever_call_fails_the_old_stands_or_the_new_and_the_answer_fits(
    tmp_path: Path, done: bool
) -> None:
    for number in itertools.count(1):
        root = tmp_path / f"{number}"
        LocalStore(root).put(KEY, OLD)
        version = LocalStore(root).stat(KEY).version
        calls = FaultyCalls(fail_at=number, error=errno.EIO, done=done)
        answer: bool | None = None
        was_unknown = False
        try:
            answer = LocalStore(root, calls=calls).replace(KEY, NEW, version=version)
        except OutcomeUnknownError:
            was_unknown = True
        except StrongroomError:
            answer = False
        found = (root / KEY).read_bytes()
        if not was_unknown:
            assert found == (NEW if answer else OLD), calls.log[-1]
        assert found in (OLD, NEW)
        if not done and not was_unknown:
            left = [each.name for each in (root / "tlog").iterdir() if not is_temporary(each.name)]
            assert left == ["checkpoint"]
        if not calls.reached:
            break
    assert number > 8
