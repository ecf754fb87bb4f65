"""What the store refuses or cannot give says nothing about the bytes: it is never told as damage."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from strongroom import AccessDeniedError, StoreError, canonical
from strongroom.stores import LocalStore
from strongroom.testing import Fault, FaultyCalls, FaultyStore
from strongroom.verify import verify

if TYPE_CHECKING:
    Run = Any

# What a store cannot give has nothing to do with digests.
pytestmark = pytest.mark.parametrize("pristine", ("blake3",), indirect=True)


@pytest.mark.parametrize("fault", (Fault.REFUSED, Fault.DENIED, Fault.TIMED_OUT))
@pytest.mark.parametrize("lasting", (False, True))
def test_whatever_operation_fails_nothing_is_called_damaged(run: Run, fault: Fault, lasting: bool) -> None:
    for number in itertools.count(1):
        store = FaultyStore(LocalStore(run.root), fail_at=number, fault=fault, lasting=lasting)
        try:
            report = verify(store, everything=True, workers=1)
        except StoreError:
            assert number == 1  # the root itself could not be listed
            continue
        if not store.reached:
            assert report.verdict == "whole"
            break
        assert report.verdict == "unverified", (number, report.problems)
        assert {problem.kind for problem in report.problems} == {"unreadable"}
        failed = store.injected[0].key
        assert any(problem.key.rstrip("/") == failed for problem in report.problems), (
            failed,
            report.problems,
        )
    assert number > 20


@pytest.mark.parametrize("error", (errno.EIO, errno.EACCES))
@pytest.mark.parametrize("call", ("pread_into", "open", "fstat", "list_folder"))
def test_an_error_of_the_file_system_is_not_damage(run: Run, error: int, call: str) -> None:
    for number in itertools.count(1):
        calls = FaultyCalls(fail_at=number, error=error, only={call})
        try:
            report = verify(LocalStore(run.root, calls=calls), everything=True, workers=1)
        except StoreError:
            assert call in ("open", "list_folder")
            continue
        if not calls.reached:
            break
        assert report.verdict == "unverified", (number, calls.log[-1], report.problems)
    assert number > 1


def test_damage_beside_what_cannot_be_read_is_told_as_damage(run: Run) -> None:
    (run.newest / "data/state.json").write_bytes(b"x")
    store = FaultyStore(LocalStore(run.root), fail_at=1, lasting=True, only={"read_into"})
    report = verify(store, workers=1)
    assert report.verdict == "damaged"
    assert {problem.kind for problem in report.problems} == {"damaged", "unreadable"}


def test_a_file_that_may_not_be_read_is_denied_and_not_damaged(run: Run) -> None:
    """By real permissions: as another user, where this one is root and may read everything."""
    child = (
        "import os, sys\n"
        "from strongroom.stores import LocalStore\n"
        "from strongroom.verify import verify\n"
        "if os.getuid() == 0: os.setgid(65534); os.setuid(65534)\n"
        "for problem in verify(LocalStore(sys.argv[1])).problems: print(problem.kind, problem.key)\n"
    )
    for path in (run.root, *run.root.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    denied = run.newest / "data/00000-00.safetensors"
    denied.chmod(0)
    for folder in run.root.parents:
        if folder.stat().st_uid == os.getuid() and not folder.stat().st_mode & 0o001:
            folder.chmod(folder.stat().st_mode | 0o011)
    done = subprocess.run([sys.executable, "-c", child, str(run.root)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"unreadable {run.key(denied)}\n"


def test_a_root_that_may_not_be_listed_is_an_error(run: Run) -> None:
    store = FaultyStore(LocalStore(run.root), fail_at=1, fault=Fault.DENIED)
    with pytest.raises(AccessDeniedError):
        verify(store)


def test_a_document_of_another_format_version_is_unsupported_and_not_damaged(run: Run) -> None:
    def of_version(path: Path, version: str) -> None:
        members = canonical.decode(path.read_bytes(), "x", canonical.Bounds(length_bytes=1 << 20))
        members.pop("~digest")
        path.write_bytes(canonical.with_self_digest({**members, "format": version}))

    for path in (run.newest / "COMMIT", run.root / "run.json", run.root / "launches/000002.json"):
        whole = path.read_bytes()
        of_version(path, "0.2")
        report = verify(LocalStore(run.root))
        assert report.verdict == "unverified"
        assert [(problem.key, problem.kind) for problem in report.problems] == [
            (run.key(path), "unsupported")
        ]
        assert "format 0.2" in report.problems[0].message
        path.write_bytes(whole)


def test_problems_are_values(run: Run) -> None:
    (run.newest / "data/state.json").unlink()
    (problem,) = verify(LocalStore(run.root)).problems
    assert hash(problem) == hash(dataclasses.replace(problem))
    with pytest.raises(dataclasses.FrozenInstanceError):
        problem.key = "other"  # type: ignore[misc]
