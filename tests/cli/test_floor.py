"""``strongroom floor``: what a policy's floor remembers is shown, and a run is forgotten."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from strongroom.digest import sha256_of
from strongroom.layout import CheckpointName
from strongroom.manifest import Commit
from strongroom_security.floors import FileFloor, FolderFloor, open_floor

Strongroom = Callable[..., Any]


def commit(run: str, launch: int, step: int) -> Commit:
    name = CheckpointName(launch=launch, step=step, attempt="0" * 16)
    return Commit(run=run, name=name, manifest=sha256_of(run.encode()), size_bytes=1, committed_at_ms=1)


@pytest.fixture(params=("file:floor.json", "dir:floor"))
def floor(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> FileFloor | FolderFloor:
    """A policy's floor that remembers two runs and a list."""
    monkeypatch.chdir(tmp_path)
    Path("floor").mkdir()
    Path("policy.toml").write_text(f'[verify]\nrequire = false\nfloor = "{request.param}"\n')
    monkeypatch.setenv("STRONGROOM_CONFIG", "policy.toml")
    floor = open_floor(request.param, base=tmp_path)
    floor.lift("file:///runs/a", commit("run-a", 3, 1200))
    floor.lift("file:///copy", commit("run-a", 3, 1200))
    floor.lift("file:///runs/b", commit("run-b", 1, 7))
    floor.lift_trust("ab" * 32, 5, sha256_of(b"list"))
    return floor


def test_what_is_remembered_is_shown(floor: FileFloor | FolderFloor, strongroom: Strongroom) -> None:
    done = strongroom("floor", "show")
    assert (done.status, done.err) == (0, "")
    rows = [each.split() for each in done.out.splitlines()]
    assert rows[0] == [floor.uri]
    assert ["run-a", "3", "1200", str(sha256_of(b"run-a"))] in rows
    assert ["file:///copy", "run-a"] in rows
    assert ["ab" * 32, "5", str(sha256_of(b"list"))] in rows
    said = strongroom("floor", "show", "--json").json
    assert said["floor"] == floor.uri
    assert [each["root"] for each in said["roots"]] == ["file:///copy", "file:///runs/a", "file:///runs/b"]
    assert said["runs"][0] == {**commit("run-a", 3, 1200).ref.to_json(), "run": "run-a"}
    assert said["trust"] == [{"digest": str(sha256_of(b"list")), "roots": "ab" * 32, "version": 5}]


def test_a_run_is_forgotten_once(floor: FileFloor | FolderFloor, strongroom: Strongroom) -> None:
    done = strongroom("floor", "forget", "run-a", "--security", "policy.toml")
    assert (done.status, done.err) == (0, "")
    assert "file:///copy" in done.out
    assert "1200" in done.out
    assert "run-b" not in done.out
    assert (floor.highest("run-a"), floor.run_of("file:///copy")) == (None, None)
    assert floor.run_of("file:///runs/b") == "run-b"
    again = strongroom("floor", "forget", "run-a")
    assert (again.status, again.out) == (3, "")
    assert "remembers no run run-a" in again.err
    said = strongroom("floor", "forget", "run-b", "--json").json["forgotten"]
    assert said["roots"] == [{"root": "file:///runs/b", "run": "run-b"}]
    assert [each["step"] for each in said["runs"]] == [7]


def test_a_floor_that_remembers_nothing_says_so(
    floor: FileFloor | FolderFloor, strongroom: Strongroom
) -> None:
    Path("other").mkdir()
    Path("policy.toml").write_text('[verify]\nrequire = false\nfloor = "dir:other"\n')
    assert "remembers nothing yet" in strongroom("floor", "show").out


@pytest.mark.usefixtures("floor")
def test_what_has_no_floor_says_so(strongroom: Strongroom, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("none.toml").write_text('digest = "sha256"\n')
    for verb in (("show",), ("forget", "run-a")):
        done = strongroom("floor", *verb, "--security", "none.toml")
        assert (done.status, done.out) == (2, "")
        assert "the policy has no floor" in done.err
    done = strongroom("floor", "forget", "../run")
    assert (done.status, done.out) == (2, "")
    monkeypatch.delenv("STRONGROOM_CONFIG")
    done = strongroom("floor", "show")
    assert (done.status, done.out) == (2, "")
    assert "no policy is given" in done.err
