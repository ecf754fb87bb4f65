"""Floors: what was seen is never gone below, by whomever, however many at once, whatever befell the file."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strongroom import canonical
from strongroom.digest import Digest, sha256_of
from strongroom.errors import (
    AccessDeniedError,
    ConfigError,
    ObjectNotFoundError,
    RollbackError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
)
from strongroom.layout import CheckpointName
from strongroom.manifest import Commit
from strongroom.stores.local import LocalStore
from strongroom.stores.memory import MemoryStore
from strongroom_security.floors import FileFloor, FolderFloor, open_floor
from strongroom_security.floors import file as filefloor
from strongroom_security.floors.rules import Remembered

sys.path.insert(0, str(Path(__file__).parent.parent / "stores"))

from s3_servers import moto_s3

__all__ = ["moto_s3"]

ROOT = "file:///runs/a"

AnyFloor = Any
"""A `FileFloor` or a `FolderFloor`."""


def commit(launch: int, step: int, content: str = "a", *, run: str = "run-a") -> Commit:
    return Commit(
        run=run,
        name=CheckpointName(launch=launch, step=step, attempt=sha256_of(content.encode()).value.hex()[:16]),
        manifest=sha256_of(f"{run} {launch} {step} {content}".encode()),
        size_bytes=1,
        committed_at_ms=1,
    )


def digest(text: str) -> Digest:
    return sha256_of(text.encode())


@pytest.fixture(params=("file", "dir", "memory", "s3"))
def opening(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], AnyFloor]:
    """Opens the same floor anew, as another process would."""
    if request.param == "file":
        return lambda: FileFloor(tmp_path / "floor.json")
    if request.param == "dir":
        (tmp_path / "floor").mkdir()
        return lambda: open_floor("dir:floor", base=tmp_path)
    if request.param == "s3":
        server = request.getfixturevalue("moto_s3")
        bucket = server.make_bucket()
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        return lambda: open_floor(f"s3://{bucket}/floor", base=tmp_path)
    store = MemoryStore()
    return lambda: FolderFloor(store)


@pytest.fixture
def floor(opening: Callable[[], AnyFloor]) -> AnyFloor:
    return opening()


# ----------------------------------------------------------------------------------------------- positions


def test_nothing_is_refused_before_anything_was_seen(floor: AnyFloor) -> None:
    floor.check(ROOT, commit(1, 0))


@pytest.mark.parametrize("lower", ((3, 1199), (2, 5000), (1, 0)), ids=str)
def test_what_is_lower_than_what_was_seen_is_refused(
    opening: Callable[[], AnyFloor], lower: tuple[int, int]
) -> None:
    opening().lift(ROOT, commit(3, 1200))
    with pytest.raises(RollbackError) as caught:
        opening().check(ROOT, commit(*lower))
    said = str(caught.value)
    assert f"launch {lower[0]}, step {lower[1]}" in said
    assert "launch 3, step 1200" in said
    assert str(commit(3, 1200).manifest) in said
    assert "accept_older=True" in said
    assert opening().uri in said


@pytest.mark.parametrize("higher", ((3, 1200), (3, 1201), (4, 0)), ids=str)
def test_what_was_seen_and_what_is_higher_pass(
    opening: Callable[[], AnyFloor], higher: tuple[int, int]
) -> None:
    opening().lift(ROOT, commit(3, 1200))
    opening().check(ROOT, commit(*higher))


def test_another_checkpoint_at_the_same_position_is_called_equivocation(
    opening: Callable[[], AnyFloor],
) -> None:
    opening().lift(ROOT, commit(3, 1200, "ours"))
    with pytest.raises(RollbackError, match=r"^equivocation in run run-a") as caught:
        opening().check(ROOT, commit(3, 1200, "theirs"))
    assert str(commit(3, 1200, "ours").manifest) in str(caught.value)
    assert str(commit(3, 1200, "theirs").manifest) in str(caught.value)


def test_a_floor_never_goes_down(opening: Callable[[], AnyFloor], caplog: pytest.LogCaptureFixture) -> None:
    opening().lift(ROOT, commit(3, 1200))
    opening().lift(ROOT, commit(2, 9000))
    with caplog.at_level(logging.WARNING, logger="strongroom"):
        opening().lift(ROOT, commit(3, 1200, "theirs"))
    assert "goes on remembering launch 3, step 1200" in caplog.text
    with pytest.raises(RollbackError, match="goes back"):
        opening().check(ROOT, commit(2, 9000))
    with pytest.raises(RollbackError, match="equivocation"):
        opening().check(ROOT, commit(3, 1200, "theirs"))
    opening().check(ROOT, commit(3, 1200))


def test_each_run_has_a_floor_of_its_own(opening: Callable[[], AnyFloor]) -> None:
    opening().lift(ROOT, commit(9, 900))
    opening().lift("file:///runs/b", commit(1, 1, run="Run-a"))
    opening().check("file:///runs/b", commit(1, 2, run="Run-a"))
    with pytest.raises(RollbackError, match="goes back"):
        opening().check(ROOT, commit(1, 2))


def test_a_copy_of_a_root_elsewhere_is_held_to_the_same_floor(opening: Callable[[], AnyFloor]) -> None:
    opening().lift(ROOT, commit(3, 1200))
    with pytest.raises(RollbackError, match="goes back"):
        opening().check("s3://bucket/copy", commit(3, 1100))


def test_a_root_of_another_run_is_refused_by_name(opening: Callable[[], AnyFloor]) -> None:
    opening().lift(ROOT, commit(3, 1200))
    with pytest.raises(RollbackError) as caught:
        opening().check(ROOT, commit(8, 8000, run="run-b"))
    assert f"{ROOT} holds run run-b" in str(caught.value)
    assert "it was run run-a's" in str(caught.value)


def test_a_root_is_not_given_to_another_run_unsaid(opening: Callable[[], AnyFloor]) -> None:
    opening().lift(ROOT, commit(3, 1200))
    with pytest.raises(RollbackError, match=r"strongroom floor forget run-a"):
        opening().lift(ROOT, commit(9, 9000, run="run-b"))
    assert opening().run_of(ROOT) == "run-a"
    assert opening().highest("run-b") is None
    opening().check(ROOT, commit(3, 1200))


def test_a_root_is_another_runs_once_the_old_one_is_forgotten(opening: Callable[[], AnyFloor]) -> None:
    opening().lift(ROOT, commit(3, 1200))
    opening().forget("run-a")
    opening().lift(ROOT, commit(1, 10, run="run-b"))
    opening().check(ROOT, commit(1, 10, run="run-b"))
    with pytest.raises(RollbackError, match="holds run run-a"):
        opening().check(ROOT, commit(4, 1300))


def test_a_floor_says_whose_a_root_was_and_how_far_a_run_had_come(opening: Callable[[], AnyFloor]) -> None:
    assert opening().run_of(ROOT) is None
    assert opening().highest("run-a") is None
    opening().lift(ROOT, commit(3, 1200))
    opening().lift(ROOT, commit(3, 1100))
    assert opening().run_of(ROOT) == "run-a"
    assert opening().run_of("file:///runs/b") is None
    assert opening().highest("run-a") == commit(3, 1200).ref


def test_a_floor_tells_all_that_it_remembers(opening: Callable[[], AnyFloor]) -> None:
    assert opening().remembered() == Remembered()
    opening().lift(ROOT, commit(3, 1200))
    opening().lift("file:///copy", commit(3, 1300))
    opening().lift("file:///runs/b", commit(1, 1, run="run-b"))
    opening().lift_trust("roots", 7, digest("seven"))
    assert opening().remembered() == Remembered(
        roots={ROOT: "run-a", "file:///copy": "run-a", "file:///runs/b": "run-b"},
        runs={"run-a": (commit(3, 1300).ref,), "run-b": (commit(1, 1, run="run-b").ref,)},
        trust={"roots": (7, digest("seven"))},
    )


def test_what_is_forgotten_is_told_and_is_nothing_the_second_time(opening: Callable[[], AnyFloor]) -> None:
    opening().lift(ROOT, commit(3, 1200))
    opening().lift("file:///copy", commit(3, 1100))
    opening().lift("file:///runs/b", commit(1, 1, run="run-b"))
    assert opening().forget("run-a") == Remembered(
        roots={ROOT: "run-a", "file:///copy": "run-a"}, runs={"run-a": (commit(3, 1200).ref,)}
    )
    assert opening().forget("run-a") == Remembered()
    assert opening().remembered().roots == {"file:///runs/b": "run-b"}
    assert opening().remembered().runs == {"run-b": (commit(1, 1, run="run-b").ref,)}


def test_a_run_that_is_forgotten_begins_anew(opening: Callable[[], AnyFloor]) -> None:
    opening().lift(ROOT, commit(3, 1200))
    opening().lift("file:///runs/b", commit(3, 1200, run="run-b"))
    opening().forget("run-a")
    opening().check(ROOT, commit(2, 100))
    with pytest.raises(RollbackError):
        opening().check("file:///runs/b", commit(2, 100, run="run-b"))


def test_a_first_use_is_told_once(floor: AnyFloor, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="strongroom"):
        floor.check(ROOT, commit(1, 1))
        floor.check(ROOT, commit(1, 2))
    assert caplog.text.count("remembers nothing of run run-a yet") == 1
    assert floor.uri in caplog.text
    caplog.clear()
    floor.lift(ROOT, commit(1, 2))
    with caplog.at_level(logging.INFO, logger="strongroom"):
        floor.check(ROOT, commit(1, 3))
    assert "remembers nothing" not in caplog.text


positions = st.tuples(st.integers(1, 4), st.integers(0, 4), st.sampled_from("ab"))


@given(st.lists(positions, max_size=8), positions, st.booleans())
def test_a_floor_stands_at_the_first_of_the_highest_that_it_was_lifted_to(
    tmp_path_factory: pytest.TempPathFactory,
    lifted: list[tuple[int, int, str]],
    asked: tuple[int, int, str],
    is_file: bool,
) -> None:
    """Whatever the order, and however often."""
    floor: AnyFloor = FolderFloor(MemoryStore())
    if is_file:
        floor = FileFloor(tmp_path_factory.mktemp("floor") / "floor.json")
    highest: tuple[int, int, str] | None = None
    for each in lifted:
        floor.lift(ROOT, commit(*each))
        if highest is None or each[:2] > highest[:2]:
            highest = each
    if highest is None or asked[:2] > highest[:2] or asked == highest:
        floor.check(ROOT, commit(*asked))
    else:
        with pytest.raises(RollbackError):
            floor.check(ROOT, commit(*asked))


# -------------------------------------------------------------------------------------- lists of trusted keys


def test_an_older_list_of_trusted_keys_is_refused(opening: Callable[[], AnyFloor]) -> None:
    opening().check_trust("roots", 1, digest("one"))
    opening().lift_trust("roots", 7, digest("seven"))
    opening().check_trust("roots", 7, digest("seven"))
    opening().check_trust("roots", 8, digest("eight"))
    opening().check_trust("other roots", 1, digest("one"))
    with pytest.raises(RollbackError, match=r"is version 6, and .* remembers version 7"):
        opening().check_trust("roots", 6, digest("six"))
    with pytest.raises(RollbackError, match="equivocation: this version 7"):
        opening().check_trust("roots", 7, digest("another seven"))
    for version, text in ((6, "six"), (7, "another seven")):
        with pytest.raises(RollbackError):
            opening().lift_trust("roots", version, digest(text))


def test_a_list_of_trusted_keys_is_lifted_again_and_again(opening: Callable[[], AnyFloor]) -> None:
    for version in (1, 2, 2, 9, 10):
        opening().lift_trust("roots", version, digest(str(version)))
    with pytest.raises(RollbackError):
        opening().check_trust("roots", 9, digest("9"))


def test_lists_and_runs_do_not_mix(opening: Callable[[], AnyFloor]) -> None:
    opening().lift(ROOT, commit(3, 1200))
    opening().lift_trust("run-a", 1, digest("one"))
    with pytest.raises(RollbackError):
        opening().check(ROOT, commit(1, 1))
    opening().check_trust("run-a", 1, digest("one"))


# ------------------------------------------------------------------------------------------------ where it is


@pytest.mark.parametrize(
    "text", ("", "file:", "dir:", "gs://bucket/floor", "floor.json", "File:floor"), ids=repr
)
def test_what_names_no_floor_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="names no floor; expected one of file:PATH, dir:PATH"):
        open_floor(text, base=tmp_path)


def test_relative_paths_are_relative_to_the_policys_folder(tmp_path: Path) -> None:
    assert open_floor("file:floor.json", base=tmp_path).uri == f"file:{tmp_path}/floor.json"
    (tmp_path / "floor").mkdir()
    assert open_floor("dir:floor", base=tmp_path).uri == f"dir:{tmp_path}/floor"


@pytest.mark.parametrize("text", ("file:gone/floor.json", "dir:gone"))
def test_a_folder_that_is_not_there_is_no_first_use(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Mount or make it"):
        open_floor(text, base=tmp_path)
    (tmp_path / "gone").mkdir()
    floor = open_floor(text, base=tmp_path)
    (tmp_path / "gone").rmdir()
    for ask in (floor.check, floor.lift):
        with pytest.raises(ConfigError, match="Mount or make it"):
            ask(ROOT, commit(1, 1))
    assert not (tmp_path / "gone").exists()


@pytest.mark.parametrize("kind", ("file", "dir"))
def test_a_floor_inside_the_root_that_it_protects_is_refused(kind: str, tmp_path: Path) -> None:
    root = tmp_path / "run %23"
    (root / "floor").mkdir(parents=True)
    (tmp_path / "link").symlink_to(root)
    name = "floor" if kind == "dir" else "floor.json"
    for path in (root / name, tmp_path / "link" / name):
        floor = open_floor(f"{kind}:{path}", base=tmp_path)
        for ask in (floor.check, floor.lift):
            with pytest.raises(ConfigError, match="lies inside"):
                ask(LocalStore(root).uri, commit(1, 1))
            with pytest.raises(ConfigError, match="lies inside"):
                ask(str(root), commit(1, 1))
        floor.check(LocalStore(tmp_path / "run").uri, commit(1, 1))


def test_a_store_inside_the_root_that_it_protects_is_refused() -> None:
    floor = FolderFloor(MemoryStore("bucket/run/floor"))
    for root in ("memory://bucket/run", "memory://bucket/run/", "memory://bucket/run/floor"):
        with pytest.raises(ConfigError, match="lies inside"):
            floor.check(root, commit(1, 1))
    floor.check("memory://bucket/ru", commit(1, 1))


# ------------------------------------------------------------------------------------------------- the file


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "floor.json"
    FileFloor(path).lift(ROOT, commit(3, 1200))
    FileFloor(path).lift_trust("roots", 7, digest("seven"))
    return path


def test_the_file_is_what_is_documented(path: Path) -> None:
    members = canonical.check_self_digest(
        canonical.decode(path.read_bytes(), "floor", canonical.Bounds(length_bytes=9999)), "floor"
    )
    assert members == {
        "format": "0.1",
        "kind": "floor",
        "roots": {ROOT: "run-a"},
        "runs": {"run-a": commit(3, 1200).ref.to_json()},
        "trust": {"roots": {"digest": str(digest("seven")), "version": 7}},
    }
    assert path.stat().st_mode & 0o777 == 0o600
    assert sorted(each.name for each in path.parent.iterdir()) == ["floor.json", "floor.json.lock"]


def test_any_damage_to_the_file_is_an_error_that_says_what_to_do(path: Path) -> None:
    whole = path.read_bytes()
    for at in range(0, len(whole), 7):
        for damaged in (whole[:at], whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :], whole + b" "):
            path.write_bytes(damaged)
            for ask in (FileFloor(path).check, FileFloor(path).lift):
                with pytest.raises(ConfigError, match="Bring it back from a backup"):
                    ask(ROOT, commit(9, 9))
            assert path.read_bytes() == damaged


def forged(change: Callable[[dict[str, Any]], None]) -> bytes:
    members: dict[str, Any] = {
        "format": "0.1", "kind": "floor", "roots": {}, "runs": {"run-a": commit(1, 1).ref.to_json()},
        "trust": {"roots": {"digest": str(digest("one")), "version": 1}},
    }  # fmt: skip
    change(members)
    return canonical.with_self_digest(members)


@pytest.mark.parametrize(
    ("change", "problem"),
    (
        (lambda each: each.update(format="0.2"), "has format '0.2'"),
        (lambda each: each.update(kind="run"), "'kind' should be 'floor'"),
        (lambda each: each.pop("trust"), "'trust' is missing or unknown"),
        (lambda each: each.update(more=1), "'more' is missing or unknown"),
        (lambda each: each.update(runs=[]), "should be objects"),
        (lambda each: each.update(roots={"r": 1}), "expected a string"),
        (lambda each: each.update(roots={"r": "../y"}), "'../y' is not a run id"),
        (lambda each: each.update(runs={"../x": each["runs"]["run-a"]}), "'../x' is not a run id"),
        (lambda each: each["runs"]["run-a"].update(launch=0), "'launch' should be"),
        (lambda each: each["runs"]["run-a"].update(manifest="sha256:00"), "is not a digest"),
        (lambda each: each["trust"]["roots"].update(version=0), "from 1, found 0"),
        (lambda each: each["trust"]["roots"].update(version=True), "from 1, found True"),
        (lambda each: each["trust"]["roots"].update(digest="blake3:" + "0" * 64), "should be a sha256"),
        (lambda each: each["trust"].update(roots=[]), "a trusted list should have"),
    ),
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)  # fmt: skip
def test_a_whole_file_that_says_something_else_is_refused(
    change: Callable[[dict[str, Any]], None], problem: str, path: Path
) -> None:
    path.write_bytes(forged(lambda members: None))
    FileFloor(path).check(ROOT, commit(1, 1))
    path.write_bytes(forged(change))
    with pytest.raises(ConfigError, match=problem):
        FileFloor(path).check(ROOT, commit(9, 9))


def test_a_file_that_is_none_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(ConfigError, match="cannot be read"):
            FileFloor(tmp_path / name).check(ROOT, commit(1, 1))


def test_a_file_that_anyone_may_write_is_refused(path: Path) -> None:
    path.chmod(0o666)
    with pytest.raises(ConfigError, match="anyone may write it"):
        FileFloor(path).check(ROOT, commit(9, 9))


def test_a_file_that_is_too_long_is_refused(path: Path) -> None:
    os.truncate(path, (16 << 20) + 1)
    with pytest.raises(ConfigError, match="at most"):
        FileFloor(path).check(ROOT, commit(9, 9))


def test_a_full_floor_says_so_and_stays_as_it_is(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = path.read_bytes()
    monkeypatch.setattr(filefloor, "_FILE_BOUNDS", canonical.Bounds(length_bytes=len(before) + 10))
    with pytest.raises(ConfigError, match="the floor is full"):
        FileFloor(path).lift("file:///runs/b", commit(1, 1, run="run-b"))
    assert path.read_bytes() == before


def test_a_disk_that_is_full_leaves_the_floor_as_it_was(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreFullError, match="No space left"):
        FileFloor(path).lift(ROOT, commit(9, 9))
    assert path.read_bytes() == before
    assert not list(path.parent.glob(".*tmp"))


def test_what_does_not_change_the_floor_does_not_write_it(path: Path) -> None:
    before = path.stat().st_mtime_ns
    for each in (commit(3, 1200), commit(3, 1100)):
        FileFloor(path).lift(ROOT, each)
    FileFloor(path).lift_trust("roots", 7, digest("seven"))
    assert path.stat().st_mtime_ns == before
    FileFloor(path).lift(ROOT, commit(3, 1201))
    assert path.stat().st_mtime_ns != before


def test_what_does_not_change_the_floor_takes_no_lock(path: Path) -> None:
    """So a machine that may only read a floor restores what the floor knows."""
    (path.parent / "floor.json.lock").unlink()
    FileFloor(path).lift(ROOT, commit(3, 1200))
    FileFloor(path).lift(ROOT, commit(3, 1100))
    FileFloor(path).lift_trust("roots", 7, digest("seven"))
    with pytest.raises(RollbackError):
        FileFloor(path).lift(ROOT, commit(3, 1200, run="run-b"))
    assert [each.name for each in path.parent.iterdir()] == ["floor.json"]


def test_a_lock_that_is_never_given_back_is_not_waited_for_for_ever(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filefloor, "_LOCK_S", 0.1)
    with FileFloor(path)._locked(), pytest.raises(StoreUnavailableError, match=r"another process for 0 s"):
        FileFloor(path).lift(ROOT, commit(9, 9))
    FileFloor(path).check(ROOT, commit(9, 9))


LIFTING = """
import sys
from pathlib import Path
from strongroom.digest import sha256_of
from strongroom.layout import CheckpointName
from strongroom.manifest import Commit
from strongroom_security.floors import open_floor

floor = open_floor(sys.argv[1], base=Path.cwd())
for step in range(20):
    name = CheckpointName(launch=1, step=step, attempt="0" * 16)
    for run in (sys.argv[2], "shared"):
        commit = Commit(run=run, name=name, manifest=sha256_of(b"%d" % step), size_bytes=1, committed_at_ms=1)
        floor.lift("file:///runs/" + run, commit)
"""


@pytest.mark.parametrize("kind", ("file", "dir"))
def test_several_processes_at_once_lose_nothing(kind: str, tmp_path: Path) -> None:
    if kind == "dir":
        (tmp_path / "floor").mkdir()
    text = f"{kind}:{tmp_path / 'floor'}"
    children = [
        subprocess.Popen([sys.executable, "-c", LIFTING, text, f"run-{number}"]) for number in range(3)
    ]
    assert [child.wait(60) for child in children] == [0, 0, 0]
    floor = open_floor(text, base=tmp_path)
    for run in ("run-0", "run-1", "run-2", "shared"):
        with pytest.raises(RollbackError, match="step 19 "):
            floor.check(f"file:///runs/{run}", commit(1, 18, run=run))


CHECKING = """
import sys
from pathlib import Path
from strongroom.digest import sha256_of
from strongroom.layout import CheckpointName
from strongroom.manifest import Commit
from strongroom_security.floors import open_floor

floor = open_floor(sys.argv[1], base=Path.cwd())
for step in range(60):
    name = CheckpointName(launch=1, step=step, attempt="0" * 16)
    digest = sha256_of(b"%d" % step)
    commit = Commit(run="shared", name=name, manifest=digest, size_bytes=1, committed_at_ms=1)
    floor.lift("file:///runs/shared", commit)
    floor.check("file:///runs/shared", Commit(
        run="shared", name=CheckpointName(launch=2, step=0, attempt="0" * 16), manifest=sha256_of(b""),
        size_bytes=1, committed_at_ms=1,
    ))
    floor.remembered()
    floor.lift_trust("roots", 1000, sha256_of(b"list"))
"""


@pytest.mark.parametrize("kind", ("file", "dir"))
def test_processes_that_lift_and_check_at_once_are_not_in_each_others_way(kind: str, tmp_path: Path) -> None:
    """What one has listed, another may have removed before it is read."""
    if kind == "dir":
        (tmp_path / "floor").mkdir()
    text = f"{kind}:{tmp_path / 'floor'}"
    children = [
        subprocess.Popen([sys.executable, "-c", CHECKING, text], stderr=subprocess.PIPE) for _ in range(6)
    ]
    assert [child.communicate(timeout=120)[1] for child in children] == [b""] * 6
    highest = open_floor(text, base=tmp_path).highest("shared")
    assert highest is not None
    assert highest.step == 59


def test_an_entry_that_goes_while_it_is_read_is_looked_for_anew_and_not_for_ever() -> None:
    class Moving(MemoryStore):
        gone = 0

        def read(self, key: str, *, limit_bytes: int) -> bytes:
            if self.gone > 0:
                self.gone -= 1
                raise ObjectNotFoundError(f"{key} is absent")
            return super().read(key, limit_bytes=limit_bytes)

    store = Moving()
    FolderFloor(store).lift(ROOT, commit(1, 5))
    store.gone = 5
    assert FolderFloor(store).highest("run-a") == commit(1, 5).ref
    store.gone = 1_000_000
    with pytest.raises(StoreUnavailableError, match="changes again and again"):
        FolderFloor(store).check(ROOT, commit(1, 5))


def test_threads_of_one_process_lose_nothing(path: Path) -> None:
    floor = FileFloor(path)
    threads = [
        threading.Thread(
            target=floor.lift, args=(f"file:///runs/{number}", commit(1, 1, run=f"run-{number}"))
        )
        for number in range(12)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for number in range(12):
        with pytest.raises(RollbackError):
            floor.check("file:///elsewhere", commit(1, 0, run=f"run-{number}"))


# ------------------------------------------------------------------------------------------------- the store


class Denying(MemoryStore):
    """A store in which this identity may create, list and read, and never remove."""

    def delete(self, key: str) -> None:
        raise AccessDeniedError(f"{key} may not be removed")


def keys(store: MemoryStore, folder: str = "") -> list[str]:
    found = []
    for name in store.list_names(folder):
        key = f"{folder}{name}"
        found += keys(store, key) if name.endswith("/") else [key]
    return found


def test_what_is_below_the_floor_is_removed_where_that_is_allowed() -> None:
    store = MemoryStore()
    for step in range(5):
        FolderFloor(store).lift(ROOT, commit(1, step))
        FolderFloor(store).lift_trust("roots", step + 1, digest(str(step)))
    assert len(keys(store, "runs/")) == len(keys(store, "trust/")) == 1


def test_creating_and_listing_are_enough() -> None:
    store = Denying()
    for step in range(5):
        FolderFloor(store).lift(ROOT, commit(1, step))
    FolderFloor(store).lift(ROOT, commit(1, 2, "late"))
    assert len(keys(store, "runs/")) == 5
    with pytest.raises(RollbackError):
        FolderFloor(store).check(ROOT, commit(1, 3))
    FolderFloor(store).check(ROOT, commit(1, 4))


def test_two_machines_that_saw_two_histories_are_found_out() -> None:
    """Both had looked before either wrote, so both entries stand."""
    one, other = MemoryStore("floor"), MemoryStore("floor")
    FolderFloor(one).lift(ROOT, commit(2, 10, "ours"))
    FolderFloor(other).lift(ROOT, commit(2, 10, "theirs"))
    (key,) = keys(other, "runs/")
    one.put(key, other.read(key, limit_bytes=9999))
    for content in ("ours", "theirs"):
        with pytest.raises(RollbackError, match="equivocation"):
            FolderFloor(one).check(ROOT, commit(2, 10, content))
    FolderFloor(one).check(ROOT, commit(2, 11))


def test_a_damaged_entry_is_an_error_and_never_passed_over() -> None:
    store = MemoryStore()
    FolderFloor(store).lift(ROOT, commit(1, 1))
    FolderFloor(store).lift(ROOT, commit(1, 2))
    for key in (*keys(store, "runs/"), *keys(store, "roots/")):
        whole = store.read(key, limit_bytes=9999)
        for damaged in (whole[:-1], b"", whole.replace(b"run-a", b"run-b"), b"x" * 99_999):
            store.delete(key)
            store.put(key, damaged)
            with pytest.raises(ConfigError, match="Bring that object back"):
                FolderFloor(store).check(ROOT, commit(9, 9))
        store.delete(key)
        store.put(key, whole)
    FolderFloor(store).check(ROOT, commit(9, 9))


def test_an_entry_that_was_put_at_another_ones_place_is_refused() -> None:
    store, other = MemoryStore(), MemoryStore()
    FolderFloor(store).lift(ROOT, commit(1, 5))
    FolderFloor(other).lift("file:///runs/b", commit(1, 1, run="run-b"))
    for folder in ("runs/", "roots/"):
        (key,), (theirs,) = keys(store, folder), keys(other, folder)
        whole = store.read(key, limit_bytes=9999)
        store.delete(key)
        store.put(key, other.read(theirs, limit_bytes=9999))
        with pytest.raises(ConfigError, match="is about"):
            FolderFloor(store).check(ROOT, commit(1, 5))
        store.delete(key)
        store.put(key, whole)


def test_names_that_are_no_entries_do_not_count() -> None:
    store = MemoryStore()
    FolderFloor(store).lift(ROOT, commit(1, 5))
    (key,) = keys(store, "runs/")
    folder = key.rpartition("/")[0]
    for name in ("zzz.json", "999999-0-0.json", "README", "999999-999999999999-" + "0" * 63 + ".json"):
        store.put(f"{folder}/{name}", b"")
    FolderFloor(store).check(ROOT, commit(1, 5))


def test_a_store_that_cannot_be_asked_is_no_first_use() -> None:
    class Silent(MemoryStore):
        def list_names(self, prefix: str) -> list[str]:
            raise StoreUnavailableError("out of reach")

    for ask in (FolderFloor(Silent()).check, FolderFloor(Silent()).lift):
        with pytest.raises(StoreError, match="out of reach"):
            ask(ROOT, commit(1, 1))


def test_floors_fill_the_cores_seam(floor: AnyFloor) -> None:
    from strongroom.signing import Floor

    assert isinstance(floor, Floor)
