"""SIGKILL at every system call of a save, in an unmodified process: a save that died was never there.

``strace`` watches one thread of a child and kills the process when that thread comes to its nth
call of a kind. A save uses two (a large one more): the caller's claims the launch, and one in the background
writes, commits and removes what retention lets go. A dry run tells which calls each makes.

The default run kills at each call that changes the disk; every other call, some minutes, is
``pytest -m soak -o faulthandler_timeout=0 tests/crash``.
"""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import crash_children as children
import pytest
from crash_children import Waiting
from crash_processes import Child
from crash_states import age, assert_newest_is, assert_whole, leftovers, state_at

from strongroom import Checkpointer
from strongroom.stores.local import LocalStore

Start = Callable[..., Child]

_CHANGES = ("write", "fsync", "linkat", "mkdirat", "mkdir", "unlink", "unlinkat", "rmdir")
_LOOKS = ("openat", "close", "newfstatat", "getdents64")

_KILLED = -signal.SIGKILL


@dataclass(frozen=True)
class Scene:
    """A child that saves, the thread of it that is watched, and what may be left of its run."""

    job: Callable[..., None]
    thread: str
    views: tuple[list[int], ...]
    begins_with: int = 0
    """How many steps were saved, by another process, before the child begins."""


_LATER_VIEWS = ([2, 1], [3, 2, 1], [3, 2])

_SCENES = {
    "the caller claims the first launch": Scene(
        job=children.begin_a_run, thread="MainThread", views=([], [1])
    ),
    "the first save is written and committed": Scene(
        job=children.begin_a_run, thread="strongroom-save", views=([], [1])
    ),
    "the caller claims a later launch": Scene(
        job=children.resume_and_save, thread="MainThread", views=_LATER_VIEWS, begins_with=2
    ),
    "a later save is written, committed and followed by retention": Scene(
        job=children.save_once_more, thread="strongroom-save", views=_LATER_VIEWS
    ),
}


def _play(start: Start, strace: str, root: Path, scene: Scene, *options: str) -> tuple[int, list[Any]]:
    """Run a scene's child with its thread watched; how it ended, and what it was promised or told."""
    if scene.begins_with:
        with Checkpointer(root, keep=children.KEEP) as checkpointer:
            for step in range(1, scene.begins_with + 1):
                checkpointer.save(step, state_at(step))
    child = start(scene.job, str(root))
    heard: list[Any] = []
    was_watched = False
    with contextlib.ExitStack() as watching:
        while True:
            try:
                said = child.hear()
            except EOFError:
                break
            if not isinstance(said, Waiting):
                heard.append(said)
                continue
            if said.thread == scene.thread:
                was_watched = True
                watching.enter_context(_watched(strace, said.native_id, *options))
            # A child that was killed a moment ago hears nothing any more.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                child.say("go on")
        code, _ = child.end()
    assert was_watched
    return code, heard


@contextlib.contextmanager
def _watched(strace: str, thread_id: int, *options: str) -> Iterator[None]:
    watcher = subprocess.Popen(
        [strace, *options, "-p", str(thread_id)], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    assert watcher.stderr is not None
    line = watcher.stderr.readline()
    assert "attached" in line, line + watcher.stderr.read()
    try:
        yield
    finally:
        # It ends with the thread that it watches; what it still writes is of no interest.
        watcher.communicate(timeout=60)


def _calls_made(
    start: Start, strace: str, folder: Path, scene: Scene, calls: tuple[str, ...]
) -> Counter[str]:
    """How often the watched thread makes each call, by a run that nothing happens to."""
    log = folder / "calls"
    code, heard = _play(start, strace, folder / "dry", scene, "-o", str(log), "-e", _trace(calls))
    assert code == 0
    assert heard[-1] == "done"
    return Counter(re.findall(r"^(?:\d+ +)?(\w+)\(", log.read_text(), re.MULTILINE))


def _trace(calls: tuple[str, ...]) -> str:
    # A question mark: not every processor's kernel has each of them.
    return "trace=" + ",".join(f"?{call}" for call in calls)


def _kill_at_each(
    start: Start, strace: str, folder: Path, scene: Scene, calls: tuple[str, ...]
) -> set[tuple[int, ...]]:
    """Kill at each call that a dry run made; what was left each time."""
    left = set()
    for call, count in _calls_made(start, strace, folder, scene, calls).items():
        for number in range(1, count + 1):
            root = folder / f"{call}-{number}"
            inject = f"inject={call}:signal=SIGKILL:when={number}"
            code, heard = _play(start, strace, root, scene, "-e", _trace((call,)), "-e", inject)
            assert code == _KILLED, f"{call} {number} of {count} was not reached: {code}, {heard}"
            steps = assert_whole(root)
            assert steps in scene.views
            assert [promised for promised in heard if promised not in steps] == []
            _assert_the_run_goes_on(root)
            left.add(tuple(steps))
    return left


def _assert_the_run_goes_on(root: Path) -> None:
    """A new process resumes and saves; once twice a deadline has passed it has also cleaned up."""
    age(root)
    with Checkpointer(root, keep=children.KEEP) as later:
        restored = later.restore()
        step = 1 + (restored.step if restored is not None else 0)
        later.save(step, state_at(step)).result()
    assert_newest_is(root, step)
    # Kills between a commit and its retention add up; one save that is let be makes up for all of
    # them: KeepLast, and the one that was verified by the resume.
    assert len(Checkpointer(root).checkpoints()) <= children.KEEP.count + 1
    assert leftovers(LocalStore(root)) == set()


@pytest.mark.parametrize("scene", _SCENES.values(), ids=_SCENES.keys())
def test_a_kill_at_a_call_that_changes_the_disk(
    start: Start, strace: str, tmp_path: Path, scene: Scene
) -> None:
    left = _kill_at_each(start, strace, tmp_path, scene, _CHANGES)
    assert tuple(scene.views[0]) in left
    if scene.thread == "strongroom-save":
        # Killed before the commit and after it, within retention and after it.
        assert left == {tuple(view) for view in scene.views}


# A disk that fails instead of a process that dies. After a failed fsync nothing may be tried again.

_FAILURES = {
    "fsync fails once": (("fsync",), "error=EIO:when={n}"),
    "fsync fails for good": (("fsync",), "error=EIO:when={n}+"),
    "a write finds no room": (("write",), "error=ENOSPC:when={n}"),
    "a link is refused for want of room": (("linkat",), "error=EDQUOT:when={n}"),
    "a removal fails": (("unlink", "unlinkat"), "error=EIO:when={n}"),
}


@pytest.mark.parametrize(("calls", "failure"), _FAILURES.values(), ids=_FAILURES.keys())
def test_a_call_that_fails_leaves_the_old_checkpoints_and_is_told(
    start: Start, strace: str, tmp_path: Path, calls: tuple[str, ...], failure: str
) -> None:
    scene = _SCENES["a later save is written, committed and followed by retention"]
    told = set()
    for call, count in _calls_made(start, strace, tmp_path, scene, calls).items():
        for number in range(1, count + 1):
            root = tmp_path / f"{call}-{number}"
            inject = f"inject={call}:{failure.format(n=number)}"
            code, heard = _play(start, strace, root, scene, "-e", _trace((call,)), "-e", inject)
            assert code == 0
            outcome, *others, last = heard
            assert last == "done"
            steps = assert_whole(root)
            if outcome == 3:
                assert others == []
                assert steps in ([3, 2, 1], [3, 2])
            else:
                kind, words = outcome
                told.add(kind)
                assert kind in ("SaveError", "OutcomeUnknownError")
                assert re.search(r"\((EIO|ENOSPC|EDQUOT)\)", words)
                # The next save of the same process, with the disk as it should be.
                assert others == [4]
                assert steps[0] == 4
                assert steps[1:] == [2] or (kind == "OutcomeUnknownError" and 3 in steps)
            _assert_the_run_goes_on(root)
    if "fsync" in calls:
        # Of an fsync after the commit got its name, nobody knows what it leaves.
        assert told == {"SaveError", "OutcomeUnknownError"}
    elif "unlink" in calls:
        assert told == set()
    else:
        assert told == {"SaveError"}


# SIGKILL at any moment, without anything that watches


def _assert_survives_random_kills(start: Start, root: Path, rounds: int, randomness: Random) -> None:
    promised = 0
    kills_in_a_save = 0
    for _ in range(rounds):
        child = start(children.save_until_killed, str(root))
        assert child.hear() >= promised, "what was promised to an earlier process is gone"
        # Long enough for the first save of a process, which imports a little more.
        time.sleep(randomness.uniform(0, 0.4))
        child.process.kill()
        code, heard = child.end()
        assert code == _KILLED
        promised = max([promised, *heard])
        steps = assert_whole(root)
        newest = steps[0] if steps else 0
        # One save may have been under way, and have committed without anybody being told.
        assert newest in (promised, promised + 1)
        kills_in_a_save += bool(leftovers(LocalStore(root)))
        promised = newest
    assert promised > 0
    _assert_the_run_goes_on(root)
    assert kills_in_a_save > 0, "no kill met a save half way; the delays are wrong"


def test_kills_at_random_moments(start: Start, tmp_path: Path, randomness: Random) -> None:
    _assert_survives_random_kills(start, tmp_path / "run", 30, randomness)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_very_many_kills_at_random_moments(start: Start, tmp_path: Path, randomness: Random) -> None:
    _assert_survives_random_kills(start, tmp_path / "run", 2000, randomness)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("scene", _SCENES.values(), ids=_SCENES.keys())
def test_a_kill_at_any_other_call(start: Start, strace: str, tmp_path: Path, scene: Scene) -> None:
    _kill_at_each(start, strace, tmp_path, scene, _LOOKS)
