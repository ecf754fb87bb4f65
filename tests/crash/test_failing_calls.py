"""Whatever system call of a local store fails, and with what: the same promises, on real files.

`test_faults` fails a store's operations; here the calls that the local store itself makes fail, so
that what it makes of an errno, and what it leaves lying about, counts as well. The default run fails
each call that changes something; every call, some minutes, is
``pytest -m soak -o faulthandler_timeout=0 tests/crash``.
"""

from __future__ import annotations

import errno
import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from crash_states import (
    age,
    assert_is_state_at,
    assert_newest_is,
    assert_whole,
    leftovers,
    numbers_from,
    state_at,
    steps_seen,
)

from strongroom import Checkpointer, KeepLast
from strongroom.errors import OutcomeUnknownError, SaveError, StoreError, StrongroomError
from strongroom.restore import Restored
from strongroom.stores.local import LocalStore
from strongroom.testing import FaultyCalls

_KEEP = KeepLast(count=2)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A root with steps 1 and 2, and the folder that copies of it are made in."""
    root = tmp_path / "old"
    with Checkpointer(root, keep=_KEEP, draw=numbers_from(1)) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state_at(step))
    return root


def _copies(old: Path) -> Iterator[tuple[int, Path]]:
    """A fresh copy of the root for each number, until it is said to be enough."""
    for number in itertools.count(1):
        root = old.with_name("copy")
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(old, root)
        yield number, root


def _live(checkpointer: Checkpointer) -> StrongroomError | None:
    """Resume, save step 3 and wait; the failure that the process heard of, if any."""
    try:
        checkpointer.restore()
        checkpointer.save(3, state_at(3))
        checkpointer.wait()
    except StrongroomError as error:
        return error
    return None


_CHANGES = ("write", "fsync", "link", "mkdir", "unlink", "rmdir")

_FAILURES = pytest.mark.parametrize(
    ("code", "done", "lasting"),
    (
        (errno.EIO, False, False),
        (errno.EIO, False, True),
        (errno.EIO, True, False),
        (errno.ENOSPC, False, True),
    ),
    ids=["EIO once", "EIO for good", "done but EIO", "ENOSPC for good"],
)


@_FAILURES
def test_a_call_that_fails_to_change_the_disk_leaves_old_checkpoints_or_those_and_the_new_one(
    old: Path, code: int, done: bool, lasting: bool
) -> None:
    _assert_nothing_is_lost(old, code, done, lasting, _CHANGES)


@pytest.mark.soak
@_FAILURES
def test_any_call_that_fails_leaves_old_checkpoints_or_those_and_the_new_one(
    old: Path, code: int, done: bool, lasting: bool
) -> None:
    _assert_nothing_is_lost(old, code, done, lasting, None)


def _assert_nothing_is_lost(
    old: Path, code: int, done: bool, lasting: bool, only: tuple[str, ...] | None
) -> None:
    outcomes = set()
    for number, root in _copies(old):
        calls = FaultyCalls(fail_at=number, error=code, lasting=lasting, done=done, only=only)
        error = _live(Checkpointer(LocalStore(root, calls=calls), keep=_KEEP, draw=numbers_from(100)))
        steps = assert_whole(root)
        assert steps in ([2, 1], [3, 2, 1], [3, 2])
        if error is None:
            assert steps[0] == 3
        else:
            assert isinstance(error, SaveError | StoreError)
            if not isinstance(error, OutcomeUnknownError):
                assert steps == [2, 1]
        outcomes.add((steps[0], error is None))
        age(root)
        with Checkpointer(root, keep=_KEEP, draw=numbers_from(200)) as later:
            later.restore()
            later.save(9, state_at(9)).result()
        assert_newest_is(root, 9)
        assert steps_seen(root) == [9, steps[0]]
        assert leftovers(LocalStore(root)) == set()
        if not calls.reached:
            break
    assert outcomes >= {(3, True), (2, False)}


@pytest.mark.parametrize("code", (errno.EIO, errno.EACCES))
def test_a_call_that_fails_anywhere_in_a_restore_is_told_and_never_falls_back(old: Path, code: int) -> None:
    refused = 0
    for number in itertools.count(1):
        calls = FaultyCalls(fail_at=number, error=code)
        found = _try_to_restore(Checkpointer(LocalStore(old, calls=calls)))
        if isinstance(found, StoreError):
            refused += 1
        else:
            assert isinstance(found, Restored)
            assert (found.step, found.skipped) == (2, ())
            assert_is_state_at(found.state, 2)
        if not calls.reached:
            break
    assert refused > 40


def _try_to_restore(reader: Checkpointer) -> Restored | StoreError | None:
    try:
        return reader.restore()
    except StoreError as error:
        return error
