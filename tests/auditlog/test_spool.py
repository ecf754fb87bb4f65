"""The spool: whose folders are whose, and who may look into them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from strongroom_security.auditlog.recording.spool import Spool, default_base, temporary_base

WRITER, OTHER = "ab" * 16, "cd" * 16
SINK = "s3://audit/log"


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool(tmp_path / "spool", SINK)


def test_a_folder_is_its_process_s_for_as_long_as_that_lives(spool: Spool) -> None:
    program = (
        "import os, pathlib, sys; from strongroom_security.auditlog.recording.spool import Spool; "
        "folder = Spool(pathlib.Path(sys.argv[1]), sys.argv[2]).begin(sys.argv[3]); "
        "os.close(folder.create(1)); print('begun', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(spool.path.parent), SINK, WRITER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    assert list(spool.orphans()) == []
    process.send_signal(signal.SIGKILL)
    process.communicate()
    (folder,) = spool.orphans()
    assert folder.writer == WRITER
    assert list(spool.orphans()) == []  # it is this one's now
    folder.release()
    assert folder.path.is_dir()  # there is a segment in it


def test_a_folder_without_segments_goes_when_it_is_let_go(spool: Spool) -> None:
    folder = spool.begin(WRITER)
    folder.release()
    folder.release()
    assert not folder.path.exists()
    assert list(spool.orphans()) == []


def test_nobody_has_the_same_writer_twice(spool: Spool) -> None:
    first = spool.begin(WRITER)
    with pytest.raises(FileExistsError):
        spool.begin(WRITER)
    assert sorted(os.listdir(spool.path)) == [WRITER]
    first.release()


def test_segments_are_told_in_order_and_closed_ones_as_such(spool: Spool) -> None:
    folder = spool.begin(WRITER)
    for number in (1, 2, 10):
        os.close(folder.create(number))
    folder.close_segment(1)
    folder.put_closed(10, b"x\n")
    (folder.path / "notes.txt").write_bytes(b"")
    assert folder.segments() == [(1, True), (2, False), (10, True)]
    assert folder.read(10, is_closed=True) == b"x\n"
    folder.sync(1)
    folder.sync(2)
    for number in (1, 2, 10):
        folder.remove(number)
    assert folder.segments() == []
    folder.release()


def test_a_child_that_disowns_a_folder_leaves_it_to_its_process(spool: Spool) -> None:
    folder, other = spool.begin(WRITER), spool.begin(OTHER)
    other.disown()
    (found,) = spool.orphans()
    assert found.writer == OTHER
    found.release()
    folder.release()


def test_a_spool_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(PermissionError, match="can be written by others"):
        Spool(tmp_path / "open", SINK).begin(WRITER)
    # One like /tmp will do: others can make things there, and remove none of ours.
    (tmp_path / "open").chmod(0o1777)
    Spool(tmp_path / "open", SINK).begin(WRITER).release()


def test_where_it_is_by_the_environment() -> None:
    at_home = default_base({"HOME": "/users/jo"})
    assert at_home == Path("/users/jo/.local/state/strongroom/audit")
    assert default_base({"XDG_STATE_HOME": "/state"}) == Path("/state/strongroom/audit")
    assert default_base({"XDG_STATE_HOME": "state", "HOME": "/users/jo"}) == at_home
    assert default_base({}) is None
    assert temporary_base().name.endswith(f"-{os.geteuid()}")
