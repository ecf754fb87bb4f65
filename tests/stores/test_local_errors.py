"""What the operating system refuses becomes the right error, and says path, cause and what to do.

Real conditions where the machine can make them (a full tmpfs, an immutable folder, a read-only
mount, limits); the seam for what it cannot.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from strongroom.errors import (
    AccessDeniedError,
    ObjectNotFoundError,
    OutcomeUnknownError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
)
from strongroom.stores import LocalStore
from strongroom.stores.calls import OsCalls
from strongroom.testing import FaultyCalls

_FOLDER = "step-000000000001-0001-0123456789abcdef"
_COMMIT = f"{_FOLDER}/COMMIT"


def _mounted(folder: Path, *arguments: str) -> Iterator[Path]:
    folder.mkdir(exist_ok=True)
    made = subprocess.run(["mount", *arguments, str(folder)], capture_output=True, text=True)
    if made.returncode != 0:
        pytest.skip(f"nothing may be mounted here: {made.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 1 MiB and 24 names."""
    yield from _mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=1m,nr_inodes=24", "none")


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A run with one object, seen through a read-only mount."""
    LocalStore(tmp_path / "writable" / "run").put("object", b"x")
    folder = tmp_path / "read-only"
    for mounted in _mounted(folder, "--bind", str(tmp_path / "writable")):
        remounted = subprocess.run(
            ["mount", "-o", "remount,ro,bind", str(folder)], capture_output=True, text=True
        )
        if remounted.returncode != 0:
            pytest.skip(f"nothing may be mounted read-only here: {remounted.stderr.strip()}")
        yield mounted / "run"


# Full


def test_a_full_disk_is_told_as_full_and_leaves_no_part(small_disk: Path) -> None:
    store = LocalStore(small_disk / "run")
    with pytest.raises(StoreFullError, match=r"run/a/object: No space left on device \(ENOSPC\); free space"):
        store.put("a/object", bytes(2 * 2**20))
    assert store.list_names("a") == []
    with pytest.raises(StoreFullError):
        store.put_if_absent("a/created", bytes(2 * 2**20))
    assert os.listdir(small_disk / "run" / "a") == []
    store.put("a/object", b"fits")


def test_a_disk_out_of_names_is_told_as_full(small_disk: Path) -> None:
    store = LocalStore(small_disk / "run")
    with pytest.raises(StoreFullError):
        for number in range(100):
            store.put(f"object-{number}", b"")
    with pytest.raises(StoreFullError):
        store.put_if_absent("one-more/COMMIT", b"")
    assert not (small_disk / "run" / "one-more" / "COMMIT").exists()


def test_a_limit_on_the_size_of_files_is_told_as_full(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(StoreFullError, match="EFBIG"):
            LocalStore(tmp_path).put("object", bytes(8192))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert list(tmp_path.iterdir()) == []


# Denied


def test_a_read_only_mount_is_told_as_denied_and_can_be_read(read_only: Path) -> None:
    store = LocalStore(read_only)
    assert store.read("object", limit_bytes=1) == b"x"
    writes: tuple[Callable[[], object], ...] = (
        lambda: store.put("other", b"x"),
        lambda: store.put("new/other", b"x"),
        lambda: store.put_if_absent("other", b"x"),
        lambda: store.delete("object"),
    )
    for write in writes:
        with pytest.raises(AccessDeniedError, match=r"EROFS.*check who may write"):
            write()


def test_an_immutable_folder_is_told_as_denied(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "run")
    store.put("step/object", b"x")
    folder = tmp_path / "run" / "step"
    if subprocess.run(["chattr", "+i", str(folder)], capture_output=True).returncode != 0:
        pytest.skip("chattr +i does not work here")
    try:
        with pytest.raises(AccessDeniedError, match="EPERM"):
            store.put("step/other", b"x")
        with pytest.raises(AccessDeniedError):
            store.put_if_absent("step/COMMIT", b"x")
        with pytest.raises(AccessDeniedError):
            store.delete("step/object")
        with pytest.raises(AccessDeniedError):
            store.delete_tree("step")
    finally:
        subprocess.run(["chattr", "-i", str(folder)], check=True)
    assert store.read("step/object", limit_bytes=1) == b"x"


_AS_NOBODY = """
import os, sys
from strongroom.errors import AccessDeniedError
from strongroom.stores import LocalStore
os.setgid(65534)
os.setuid(65534)
store = LocalStore(sys.argv[1])
for call in (
    lambda: store.read("closed/object", limit_bytes=1),
    lambda: store.stat("closed/object"),
    lambda: store.list_names("closed"),
    lambda: store.read("unreadable", limit_bytes=1),
    lambda: store.put("new", b"x"),
):
    try:
        call()
    except AccessDeniedError as error:
        print("denied")
    else:
        print("no error")
store = LocalStore(sys.argv[1] + "/closed/run")
try:
    store.list_names("")
except AccessDeniedError:
    print("denied")
"""


def test_what_permissions_forbid_is_denied_and_never_taken_for_absent(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to become somebody else")
    run = tmp_path / "run"
    store = LocalStore(run)
    store.put("closed/object", b"x")
    store.put("unreadable", b"x")
    (run / "closed").chmod(0o700)
    (run / "unreadable").chmod(0o600)
    for folder in (run, *run.parents):
        if not os.stat(folder).st_mode & 0o001:
            folder.chmod(os.stat(folder).st_mode | 0o005)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    child = subprocess.run(
        [sys.executable, "-c", _AS_NOBODY, str(run)], capture_output=True, text=True, env=environment
    )
    if child.returncode != 0 and "ModuleNotFoundError" in child.stderr:
        pytest.skip("another user may not read the packages under test")
    assert child.stdout.split("\n") == ["denied"] * 6 + [""], child.stderr


# Through the seam


@pytest.mark.parametrize(
    ("code", "expected"),
    (
        (errno.EACCES, AccessDeniedError),
        (errno.EPERM, AccessDeniedError),
        (errno.EROFS, AccessDeniedError),
        (errno.ENOSPC, StoreFullError),
        (errno.EDQUOT, StoreFullError),
        (errno.EFBIG, StoreFullError),
        (errno.EIO, StoreUnavailableError),
        (errno.ETIMEDOUT, StoreUnavailableError),
        (errno.ESTALE, StoreUnavailableError),
        (errno.EMFILE, StoreUnavailableError),
        (errno.ENOMEM, StoreUnavailableError),
    ),
)
@pytest.mark.parametrize("call", ("open", "write", "fsync", "mkdir"))
def test_each_errno_of_a_write_has_its_error(
    tmp_path: Path, call: str, code: int, expected: type[StoreError]
) -> None:
    store = LocalStore(tmp_path / "run", calls=FaultyCalls(fail_at=1, error=code, only={call}))
    with pytest.raises(expected) as caught:
        store.put("step/object", b"x")
    assert errno.errorcode[code] in str(caught.value)
    assert str(tmp_path / "run" / "step" / "object") in str(caught.value)
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize(
    ("code", "expected"),
    (
        (errno.EACCES, AccessDeniedError),
        (errno.EIO, StoreUnavailableError),
        (errno.ETIMEDOUT, StoreUnavailableError),
        (errno.ESTALE, StoreUnavailableError),
        (errno.ENOENT, ObjectNotFoundError),
        (errno.ENOTDIR, ObjectNotFoundError),
        (errno.ENAMETOOLONG, ObjectNotFoundError),
    ),
)
def test_each_errno_of_a_read_has_its_error(tmp_path: Path, code: int, expected: type[StoreError]) -> None:
    LocalStore(tmp_path).put("step/object", b"x")
    for number in range(1, 4):
        calls = FaultyCalls(fail_at=number, error=code, only={"open", "pread_into"})
        with pytest.raises(expected):
            LocalStore(tmp_path, calls=calls).read("step/object", limit_bytes=10)


def test_a_real_name_that_is_too_long_is_absent_when_read_and_refused_when_written(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    with pytest.raises(ObjectNotFoundError):
        store.read("n" * 300, limit_bytes=1)
    with pytest.raises(StoreError, match="ENAMETOOLONG"):
        store.put("n" * 300, b"x")


def test_a_store_error_says_nothing_is_there_only_when_the_system_said_so(tmp_path: Path) -> None:
    """What cannot be looked at must never make a restore believe that there is no checkpoint."""
    LocalStore(tmp_path).put("step/object", b"x")
    for code in sorted(errno.errorcode):
        if code in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):
            continue
        calls = FaultyCalls(fail_at=1, error=code)
        with pytest.raises(Exception) as caught:  # noqa: PT011 - the kind is what is asked below
            LocalStore(tmp_path, calls=calls).list_names("step")
        assert not isinstance(caught.value, (ObjectNotFoundError, OSError))


# An fsync that failed is final


@pytest.mark.parametrize("kind", ("put", "writer"))
def test_after_a_failed_fsync_of_a_file_nothing_above_it_commits(tmp_path: Path, kind: str) -> None:
    calls = FaultyCalls(fail_at=1, error=errno.EIO, only={"fsync"})
    store = LocalStore(tmp_path / "run", calls=calls)
    shard = f"{_FOLDER}/data/00000-00.safetensors"
    with pytest.raises(StoreUnavailableError, match="EIO"):
        if kind == "put":
            store.put(shard, b"x")
        else:
            with store.open_writer(shard, length_bytes=1) as writer:
                writer.write(b"x")
                writer.finish()
    for refused in (
        lambda: store.put(shard, b"x"),
        lambda: store.open_writer(shard, length_bytes=1),
        lambda: store.make_durable(_FOLDER),
        lambda: store.make_durable(f"{_FOLDER}/data"),
        lambda: store.make_durable(""),
        lambda: store.put_if_absent(_COMMIT, b"x"),
    ):
        with pytest.raises(StoreUnavailableError, match="an fsync failed here before"):
            refused()
    assert not (tmp_path / "run" / _COMMIT).exists()


def test_another_attempt_commits_after_a_failed_fsync(tmp_path: Path) -> None:
    calls = FaultyCalls(fail_at=1, error=errno.EIO, only={"fsync"})
    store = LocalStore(tmp_path / "run", calls=calls)
    with pytest.raises(StoreUnavailableError):
        store.put("step-1/data/object", b"x")
    store.delete_tree("step-1")
    store.put("step-2/data/object", b"x")
    assert store.put_if_absent("run.json", b"{}")
    assert store.put_if_absent("step-2/COMMIT", b"x")


def test_a_writer_whose_fsync_failed_leaves_no_object_and_is_never_finished(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, calls=FaultyCalls(fail_at=1, error=errno.EIO, only={"fsync"}))
    writer = store.open_writer("object", length_bytes=1)
    writer.write(b"x")
    with pytest.raises(StoreUnavailableError):
        writer.finish()
    with pytest.raises(StoreError):
        writer.finish()
    writer.abort()
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_is_not_followed_by_a_finish(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, calls=FaultyCalls(fail_at=1, error=errno.ENOSPC, only={"write"}))
    with store.open_writer("object", length_bytes=2) as writer:
        with pytest.raises(StoreFullError):
            writer.write(b"xy")
        with pytest.raises(StoreError):
            writer.write(b"xy")
        with pytest.raises(StoreError):
            writer.finish()
    assert list(tmp_path.iterdir()) == []
    store.put("object", b"xy")


def test_a_folder_whose_fsync_failed_is_not_fsynced_again_for_a_commit(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    files = 1
    calls = FaultyCalls(fail_at=files + 1, error=errno.EIO, only={"fsync"})
    store = LocalStore(tmp_path / "run", calls=calls)
    store.put(f"{_FOLDER}/data/object", b"x")
    with pytest.raises(StoreUnavailableError):
        store.put_if_absent(_COMMIT, b"x")
    with pytest.raises(StoreUnavailableError, match="an fsync failed here before"):
        store.put_if_absent(_COMMIT, b"x")
    assert not (tmp_path / "run" / _COMMIT).exists()


def test_a_file_system_without_fsync_of_folders_is_taken_as_it_is(tmp_path: Path) -> None:
    class WithoutFolderSync(OsCalls):
        def fsync(self, fd: int) -> None:
            if os.path.isdir(f"/proc/self/fd/{fd}"):
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            super().fsync(fd)

    store = LocalStore(tmp_path / "run", calls=WithoutFolderSync())
    store.put("step/object", b"x")
    assert store.put_if_absent("step/COMMIT", b"x")


# Committing


def _fsyncs_before_the_name(tmp_path: Path) -> int:
    """How many fsyncs a first commit makes before the object has its name."""
    calls = FaultyCalls(error=errno.EIO)
    LocalStore(tmp_path / "counted", calls=calls).put_if_absent(_COMMIT, b"x")
    names = [name for name, _ in calls.log]
    return names[: names.index("link")].count("fsync")


def test_an_error_before_the_name_stands_means_that_nothing_was_created(tmp_path: Path) -> None:
    for number in range(1, _fsyncs_before_the_name(tmp_path) + 1):
        root = tmp_path / f"run-{number}"
        store = LocalStore(root, calls=FaultyCalls(fail_at=number, error=errno.EIO, only={"fsync"}))
        with pytest.raises(StoreUnavailableError):
            store.put_if_absent(_COMMIT, b"x")
        assert not (root / _COMMIT).exists()


def test_an_error_after_the_name_stands_is_an_unknown_outcome_for_good(tmp_path: Path) -> None:
    number = _fsyncs_before_the_name(tmp_path) + 1
    root = tmp_path / "run"
    store = LocalStore(root, calls=FaultyCalls(fail_at=number, error=errno.EIO, only={"fsync"}))
    for _ in range(3):
        # The second fsync would succeed, and prove nothing.
        with pytest.raises(OutcomeUnknownError, match="may not survive a power cut"):
            store.put_if_absent(_COMMIT, b"x")
    assert (root / _COMMIT).read_bytes() == b"x"


def test_a_commit_whose_name_another_threads_failed_fsync_took_is_an_unknown_outcome(tmp_path: Path) -> None:
    class Interfering(OsCalls):
        """Lets another thread's fsync of the folder fail, just before the commit's own."""

        has_linked = False
        fails = False

        def link(self, source: str, target: str, *, dir_fd: int) -> None:
            super().link(source, target, dir_fd=dir_fd)
            self.has_linked = True

        def open(self, path: str, flags: int, mode: int = 0o666, *, dir_fd: int | None = None) -> int:
            fd = super().open(path, flags, mode, dir_fd=dir_fd)
            if path == "." and self.has_linked:
                self.has_linked, self.fails = False, True
                other = threading.Thread(target=interfere)
                other.start()
                other.join(60)
            return fd

        def fsync(self, fd: int) -> None:
            if self.fails:
                self.fails = False
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            super().fsync(fd)

    refused: list[StoreError] = []

    def interfere() -> None:
        try:
            store.make_durable(_FOLDER)
        except StoreError as error:
            refused.append(error)

    store = LocalStore(tmp_path / "run", calls=Interfering())
    with pytest.raises(OutcomeUnknownError, match="may not survive"):
        store.put_if_absent(_COMMIT, b"x")
    assert len(refused) == 1
    with pytest.raises(OutcomeUnknownError):
        store.put_if_absent(_COMMIT, b"x")


@pytest.mark.parametrize("code", (errno.EIO, errno.ETIMEDOUT, errno.ESTALE))
@pytest.mark.parametrize("done", (False, True))
def test_a_name_whose_answer_was_lost_is_an_unknown_outcome_and_may_be_asked_again(
    tmp_path: Path, code: int, done: bool
) -> None:
    store = LocalStore(tmp_path / "run", calls=FaultyCalls(fail_at=1, error=code, only={"link"}, done=done))
    with pytest.raises(OutcomeUnknownError, match="it may stand or not"):
        store.put_if_absent(_COMMIT, b"x")
    assert (tmp_path / "run" / _COMMIT).exists() == done
    assert store.put_if_absent(_COMMIT, b"x") is not done
    assert store.list_names(_FOLDER) == ["COMMIT"]
    assert os.listdir(tmp_path / "run" / _FOLDER) == ["COMMIT"]


def test_a_link_that_was_made_and_then_answered_exists_is_known_as_ours(tmp_path: Path) -> None:
    """NFS may carry a call out, lose the answer, and refuse its own repetition."""
    calls = FaultyCalls(fail_at=1, error=errno.EEXIST, only={"link"}, done=True)
    assert LocalStore(tmp_path / "run", calls=calls).put_if_absent(_COMMIT, b"x") is True


def test_a_name_that_stands_is_durable_also_for_the_one_who_lost(tmp_path: Path) -> None:
    root = tmp_path / "run"
    (root / _FOLDER).mkdir(parents=True)
    (root / _COMMIT).write_bytes(b"theirs")
    calls = FaultyCalls(error=errno.EIO)
    assert LocalStore(root, calls=calls).put_if_absent(_COMMIT, b"ours") is False
    names = [name for name, _ in calls.log]
    assert "fsync" in names[names.index("link") :]


@pytest.mark.parametrize("code", (errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOSYS, errno.EOPNOTSUPP))
def test_where_links_are_refused_the_name_is_given_by_renaming(tmp_path: Path, code: int) -> None:
    calls = FaultyCalls(fail_at=1, error=code, only={"link"}, lasting=True)
    store = LocalStore(tmp_path / "run", calls=calls)
    assert store.put_if_absent(_COMMIT, b"first") is True
    assert store.put_if_absent(_COMMIT, b"second") is False
    assert (tmp_path / "run" / _COMMIT).read_bytes() == b"first"
    assert os.listdir(tmp_path / "run" / _FOLDER) == ["COMMIT"]


@pytest.mark.parametrize("code", (errno.ENOSYS, errno.EINVAL))
def test_a_file_system_that_can_neither_link_nor_rename_safely_is_refused(tmp_path: Path, code: int) -> None:
    class Neither(OsCalls):
        def link(self, source: str, target: str, *, dir_fd: int) -> None:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))

        def rename_no_replace(self, source: str, target: str, *, dir_fd: int) -> None:
            raise OSError(code, os.strerror(code))

    with pytest.raises(StoreError, match=r"EPERM.*choose a root on another file system"):
        LocalStore(tmp_path / "run", calls=Neither()).put_if_absent(_COMMIT, b"x")
    assert os.listdir(tmp_path / "run" / _FOLDER) == []


def test_the_real_rename_does_not_replace(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"new")
    (tmp_path / "target").write_bytes(b"old")
    fd = os.open(tmp_path, os.O_PATH)
    try:
        with pytest.raises(FileExistsError):
            OsCalls().rename_no_replace("source", "target", dir_fd=fd)
        OsCalls().rename_no_replace("source", "other", dir_fd=fd)
    finally:
        os.close(fd)
    assert sorted(os.listdir(tmp_path)) == ["other", "target"]
    assert (tmp_path / "target").read_bytes() == b"old"


def test_every_single_failing_call_of_a_commit_leaves_a_whole_object_or_none(tmp_path: Path) -> None:
    for done in (False, True):
        for lasting in (False, True):
            number = 0
            while True:
                number += 1
                root = tmp_path / f"run-{done}-{lasting}-{number}"
                calls = FaultyCalls(fail_at=number, error=errno.EIO, done=done, lasting=lasting)
                store = LocalStore(root, calls=calls)
                outcome: object
                try:
                    store.put("step/object", b"whole")
                    outcome = store.put_if_absent("step/COMMIT", b"whole")
                except (StoreError, OutcomeUnknownError) as error:
                    outcome = error
                commit = root / "step" / "COMMIT"
                if commit.exists():
                    assert commit.read_bytes() == b"whole"
                    assert (root / "step" / "object").read_bytes() == b"whole"
                if isinstance(outcome, StoreError):
                    assert not commit.exists(), f"call {number} {calls.log[number - 1]}: {outcome}"
                if outcome is True:
                    assert commit.exists()
                if not calls.reached:
                    assert outcome is True
                    break
            assert number > 20


# Removing


def test_deleting_an_absent_object_makes_its_absence_durable(tmp_path: Path) -> None:
    """Whoever removed it may have died before the fsync; what follows counts on its absence."""
    (tmp_path / "step").mkdir()
    calls = FaultyCalls(error=errno.EIO)
    LocalStore(tmp_path, calls=calls).delete("step/COMMIT")
    assert "fsync" in [name for name, _ in calls.log]


@pytest.mark.parametrize("call", ("unlink", "rmdir", "fsync", "list_folder"))
def test_a_removal_that_failed_may_be_repeated(tmp_path: Path, call: str) -> None:
    for number in range(1, 20):
        root = tmp_path / f"run-{number}"
        LocalStore(root).put("step/data/one", b"1")
        LocalStore(root).put("step/data/two", b"2")
        calls = FaultyCalls(fail_at=number, error=errno.EIO, only={call})
        store = LocalStore(root, calls=calls)
        try:
            store.delete_tree("step")
        except StoreUnavailableError:
            assert calls.reached
            store.delete_tree("step")
        assert os.listdir(root) == []
        if not calls.reached:
            break
    else:
        pytest.fail("the removal never came to an end")


def test_a_folder_that_is_written_to_while_it_is_removed_is_told(tmp_path: Path) -> None:
    class Busy(OsCalls):
        def rmdir(self, path: str, *, dir_fd: int) -> None:
            os.close(os.open(f"{path}/new", os.O_CREAT | os.O_WRONLY, dir_fd=dir_fd))
            super().rmdir(path, dir_fd=dir_fd)

    LocalStore(tmp_path).put("step/object", b"x")
    with pytest.raises(StoreError, match="written here while it was removed"):
        LocalStore(tmp_path, calls=Busy()).delete_tree("step")
