"""What is gathered: the code by a real git, variables by name alone, versions, the architecture."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from strongroom.columns import Chunk, TensorRecord
from strongroom.index import Index
from strongroom.provenance.architecture import Architecture, architecture_digest, model_tensors
from strongroom.provenance.code import UNKNOWN, Entry, collect_code
from strongroom.provenance.collecting import Collection
from strongroom.provenance.environment import collect_environment, packages_digest
from strongroom.provenance.host import collect_host
from strongroom.provenance.job import ALLOWED, cluster_in, container_in, job_in
from strongroom.provenance.progress import progress_in
from strongroom.values import Encoder

PATH = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}


# ---------------------------------------------------------------------------------------------- code


def git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-c", "user.name=n", "-c", "user.email=e@x", *arguments],
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
        env={**PATH, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull},
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    top = tmp_path / "repository"
    (top / "src").mkdir(parents=True)
    git(top, "init", "--quiet", "--initial-branch=trunk")
    (top / "src/train.py").write_text("print()\n")
    (top / ".gitignore").write_text("ignored\n")
    git(top, "add", ".")
    git(top, "commit", "--quiet", "-m", "first")
    return top


def collected(top: Path, **environment: str) -> dict[str, Any]:
    entry = Entry(path=top / "src/train.py", folder=top.parent)
    return collect_code(entry, {**PATH, **environment}, within_s=60)


def test_a_clean_commit_is_told_with_its_branch_and_script(repository: Path) -> None:
    assert collected(repository) == {
        "commit": git(repository, "rev-parse", "HEAD"),
        "branch": "trunk",
        "is_dirty": False,
        "entry": {
            "name": "src/train.py",
            "digest": f"sha256:{hashlib.sha256(b'print()' + bytes([10])).hexdigest()}",
        },
    }


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere Python may have to fork for it")
def test_git_is_asked_without_a_pipe_that_another_threads_fork_would_hold_open(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loader forks its workers while git is asked: who inherits a pipe's end keeps its reader waiting."""
    expected = git(repository, "rev-parse", "HEAD")

    def never(*arguments: Any) -> Any:
        raise AssertionError("a pipe, or a fork that needs one")

    monkeypatch.setattr(os, "pipe", never)
    assert collected(repository)["commit"] == expected


def test_what_differs_from_the_commit_has_a_digest(repository: Path) -> None:
    seen = set()
    for change in (
        lambda: (repository / "src/train.py").write_text("print(1)\n"),
        lambda: (repository / "new.py").write_text("x\n"),
        lambda: (repository / "new.py").write_text("y\n"),
        lambda: (repository / "new.py").rename(repository / "newer.py"),
        lambda: (repository / "link").symlink_to("newer.py"),
        (repository / ".gitignore").unlink,
    ):
        change()
        found = collected(repository)
        assert found["is_dirty"] is True
        seen.add(found["changes"])
    assert len(seen) == 6
    (repository / "ignored").write_text("nothing of the program\n")
    git(repository, "add", "newer.py")
    again = collected(repository)
    assert again["changes"] in seen or again["changed_files"] != found["changed_files"]


def test_the_digest_of_the_changes_can_be_computed_by_hand(repository: Path) -> None:
    (repository / "src/train.py").write_bytes(b"changed")
    (repository / "a b.txt").write_bytes(b"untracked")
    lines = b"".join(
        hashlib.sha256(data).hexdigest().encode() + b"  " + name + b"\0"
        for name, data in ((b"a b.txt", b"untracked"), (b"src/train.py", b"changed"))
    )
    assert collected(repository)["changes"] == f"sha256:{hashlib.sha256(lines).hexdigest()}"


def test_staged_or_not_the_same_files_have_the_same_digest(repository: Path) -> None:
    (repository / "src/train.py").write_text("other")
    before = collected(repository)
    git(repository, "add", ".")
    assert collected(repository) == before


def test_a_remotes_credentials_are_not_told(repository: Path) -> None:
    git(repository, "remote", "add", "origin", "https://someone:s3cret@example.com/team/x.git")
    assert collected(repository)["repository"] == "https://example.com/team/x.git"


def test_a_repository_runs_no_program_and_takes_no_lock(repository: Path) -> None:
    marker = repository.parent / "ran"
    program = repository.parent / "program"
    program.write_text(f"#!/bin/sh\ntouch {marker}\n")
    program.chmod(0o755)
    hooks = repository.parent / "hooks"
    hooks.mkdir()
    (hooks / "post-index-change").symlink_to(program)
    for name in ("core.fsmonitor", "diff.external", "core.pager"):
        git(repository, "config", name, str(program))
    git(repository, "config", "core.hooksPath", str(hooks))
    index = (repository / ".git/index").read_bytes()
    os.utime(repository / "src/train.py", (1, 1))
    assert collected(repository)["is_dirty"] is False
    assert not marker.exists()
    assert (repository / ".git/index").read_bytes() == index


def test_variables_of_another_repositorys_hook_do_not_mislead(repository: Path, tmp_path: Path) -> None:
    found = collected(repository, GIT_DIR=str(tmp_path / "elsewhere"), GIT_INDEX_FILE=str(tmp_path / "index"))
    assert found["commit"] == git(repository, "rev-parse", "HEAD")


def test_without_a_repository_or_git_only_the_script_is_told(repository: Path, tmp_path: Path) -> None:
    script = tmp_path / "alone.py"
    script.write_text("")
    alone = Entry(path=script, folder=tmp_path)
    assert set(collect_code(alone, {**PATH, "GIT_CEILING_DIRECTORIES": "/"}, within_s=60)) == {"entry"}
    nothing = {"PATH": str(tmp_path / "nothing"), "HOME": "/"}
    entry = Entry(path=repository / "src/train.py", folder=repository)
    found = collect_code(entry, nothing, within_s=60)
    assert (found["commit"], found["is_dirty"], found["entry"]["name"]) == (UNKNOWN, UNKNOWN, "train.py")
    assert collect_code(Entry(path=None, folder=Path("/")), PATH, within_s=60) == {}


def test_a_repository_without_a_commit_is_told_as_that(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    (tmp_path / "train.py").write_text("")
    found = collect_code(Entry(path=tmp_path / "train.py", folder=tmp_path), PATH, within_s=60)
    assert (found["commit"], found["is_dirty"]) == (UNKNOWN, True)


@pytest.fixture
def slow_git(tmp_path: Path, repository: Path) -> dict[str, str]:
    """A git that answers where the repository is, and then never again."""
    program = tmp_path / "bin/git"
    program.parent.mkdir()
    program.write_text(
        f"#!/bin/sh\ncase \"$*\" in *show-toplevel*) echo '{repository}';; *) exec sleep 600;; esac\n"
    )
    program.chmod(0o755)
    return {**PATH, "PATH": f"{program.parent}:{PATH['PATH']}"}


def test_a_git_that_does_not_end_is_not_waited_for(
    slow_git: dict[str, str], repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", slow_git["PATH"])
    entry = Entry(path=repository / "src/train.py", folder=repository)
    began = time.monotonic()
    found = collect_code(entry, slow_git, within_s=0.5)
    assert time.monotonic() - began < 30
    assert (found["commit"], found["is_dirty"], found["changes"]) == (UNKNOWN,) * 3


def test_changes_that_are_too_large_are_unknown(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (repository / "data.bin").write_bytes(b"x" * 100)
    monkeypatch.setattr("strongroom.provenance.code._MAX_CHANGED_BYTES", 99)
    found = collected(repository)
    assert (found["changes"], found["changed_files"]) == (UNKNOWN, 1)
    monkeypatch.undo()
    monkeypatch.setattr("strongroom.provenance.code._MAX_CHANGED", 0)
    assert collected(repository)["changes"] == UNKNOWN


def test_a_pipe_in_the_repository_is_not_read(repository: Path) -> None:
    (repository / "src/train.py").unlink()
    os.mkfifo(repository / "src/train.py")
    found = collected(repository)
    assert found["entry"]["digest"] == UNKNOWN
    assert found["changes"].startswith("sha256:")


# ----------------------------------------------------------------------------------- job and container


def test_only_variables_that_are_listed_are_taken() -> None:
    environment = {name: f"value of {name}" for name in ALLOWED} | {
        "SLURM_JWT": "hidden",
        "SLURM_JOB_COMMENT": "hidden",
        "KUBERNETES_TOKEN": "hidden",
        "AWS_SECRET": "hidden",
    }
    found = job_in(environment)
    assert set(found) == {"slurm", "kubernetes", "torchelastic"}
    assert found["slurm"]["SLURM_JOB_ID"] == "value of SLURM_JOB_ID"
    assert found["kubernetes"]["POD_NAME"] == "value of POD_NAME"
    assert found["torchelastic"]["TORCHELASTIC_RUN_ID"] == "value of TORCHELASTIC_RUN_ID"
    assert "hidden" not in str(found)


def test_a_scheduler_that_runs_nothing_here_is_not_told() -> None:
    assert job_in({}) == {}
    assert job_in({"NAMESPACE": "mine", "RANK": "3", "SLURM_CLUSTER_NAME": "c"}) == {}
    assert cluster_in({"SLURM_CLUSTER_NAME": "c"}) == "c"
    assert collect_host({"CLUSTER_NAME": "k"})["cluster"] == "k"
    assert {"name", "system", "user"} == set(collect_host({}))


def test_a_variables_value_is_bounded_and_valid_text() -> None:
    found = job_in({"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n" * 10_000, "SLURM_JOB_NAME": "caf\udce9"})
    assert len(found["slurm"]["SLURM_JOB_NODELIST"]) == 512
    assert found["slurm"]["SLURM_JOB_NAME"] == "caf\\udce9"


@pytest.mark.parametrize(
    ("value", "expected"),
    (
        (f"sha256:{'a' * 64}", f"sha256:{'a' * 64}"),
        (f"registry/team/image@sha256:{'b' * 64}", f"sha256:{'b' * 64}"),
        ("registry/team/image:latest", None),
        ("", None),
    ),
)
def test_the_container_is_known_by_its_digest_alone(value: str, expected: str | None) -> None:
    assert container_in({"CONTAINER_DIGEST": value}) == expected


# ------------------------------------------------------------------------------------------ environment


def test_versions_and_a_digest_of_all_packages_are_told() -> None:
    import torch

    found = collect_environment()
    assert found["torch"] == str(torch.__version__)
    assert found["frameworks"]["numpy"]
    assert found["packages"].startswith("sha256:")
    assert found == collect_environment()


def test_packages_are_found_however_they_were_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, version, folder in (
        ("accelerate", "1.2", "accelerate-1.2.dist-info"),
        ("Trl", "0.3", "trl.egg-info"),
        ("peft", "0.9", "peft-0.9-py3.11.egg-info"),
    ):
        (tmp_path / folder).mkdir()
        for file in ("METADATA", "PKG-INFO"):
            (tmp_path / folder / file).write_text(
                f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            )
    (tmp_path / "broken.dist-info").mkdir()
    (tmp_path / "empty.egg-info").mkdir()
    monkeypatch.setattr("sys.path", [str(tmp_path), str(tmp_path / "gone")])
    found = collect_environment()
    assert found["frameworks"] == {"accelerate": "1.2", "trl": "0.3", "peft": "0.9"}
    assert found["package_count"] == 3


def test_the_packages_digest_goes_by_sorted_lines() -> None:
    lines = b"a==1\nb==2.0\n"
    assert packages_digest([("b", "2.0"), ("a", "1")]) == f"sha256:{hashlib.sha256(lines).hexdigest()}"


def test_what_cannot_be_gathered_is_unknown_and_no_error(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> dict[str, Any]:
        raise RuntimeError("odd machine")

    monkeypatch.setattr("strongroom.provenance.collecting.collect_host", fail)
    collection = Collection({**PATH, "SLURM_JOB_ID": "7"}, Entry(path=None, folder=repository))
    assert collection.facts(0.0)["code"] == UNKNOWN
    collection.gather()
    found = collection.facts(0.0)
    assert found["host"] == UNKNOWN
    assert found["code"]["branch"] == "trunk"
    assert found["job"] == {"slurm": {"SLURM_JOB_ID": "7"}}


# --------------------------------------------------------------------------------- architecture, progress


def index_of(*tensors: tuple[str, str, tuple[int, ...]]) -> Index:
    records = [
        TensorRecord(name, dtype, shape, (Chunk((0,) * len(shape), shape, "a.safetensors", 8),))
        for name, dtype, shape in tensors
    ]
    return Index(records, ())


def module(*names: str) -> dict[str, Any]:
    pairs = [[name, {"$": "tensor", "v": f"model.{name}"}] for name in names]
    return {"$": "module", "v": [{"$": "dict", "v": []}, *pairs]}


def document(**members: Any) -> dict[str, Any]:
    return {"$": "dict", "v": [[name, value] for name, value in members.items()]}


def test_the_architecture_goes_by_names_shapes_and_dtypes_in_no_order() -> None:
    one, two = ("model.a", "F32", (2, 3)), ("model.b", "BF16", (4,))
    first = architecture_digest(document(model=module("a", "b")), index_of(one, two))
    assert first == architecture_digest(document(model=module("b", "a")), index_of(two, one))
    lines = b"model.a F32 2x3\nmodel.b BF16 4\n"
    assert first == f"sha256:{hashlib.sha256(lines).hexdigest()}"
    for other in (("model.b", "F32", (4,)), ("model.b", "BF16", (5,)), ("model.c", "BF16", (4,))):
        name = other[0].removeprefix("model.")
        assert first != architecture_digest(document(model=module("a", name)), index_of(one, other))


def test_the_architecture_of_the_next_save_is_looked_at_anew_where_anything_differs() -> None:
    one = Architecture()
    plan, state = object(), document(model=module("a"))
    seen = [
        one.digest(plan, state, index_of(("model.a", "F32", (2,)))),
        one.digest(plan, state, index_of(("model.a", "F32", (3,)))),
        one.digest(plan, state, index_of(("model.a", "BF16", (3,)))),
        one.digest(object(), document(model=module("b")), index_of(("model.b", "BF16", (3,)))),
    ]
    assert len(set(seen)) == 4
    # The same plan and index: the document is not walked again.
    kept = object()
    first = one.digest(kept, state, index_of(("model.a", "F32", (2,))))
    assert first == seen[0] == one.digest(kept, None, index_of(("model.a", "F32", (2,))))


def test_optimizers_and_each_ranks_own_are_no_part_of_the_architecture() -> None:
    rest = {
        "optimizer": {"$": "optimizer", "v": [[], [["a", {"$": "tensor", "v": "optimizer.a"}]], [], []]},
        "own": {"$": "per_rank", "v": "own"},
        "rng": {"$": "generator", "v": ["cpu", "rng"]},
        "extra": {"$": "tensor", "v": "extra"},
    }
    assert model_tensors(document(model=module("a"), **rest)) == {"model.a"}
    plain = document(model=document(a={"$": "tensor", "v": "model.a"}), **rest)
    assert model_tensors(plain) == {"model.a", "extra"}
    assert architecture_digest(document(epoch=1), index_of()) is None


def test_how_far_training_had_come_is_read_where_it_is_known() -> None:
    encode = Encoder().encode
    assert progress_in(encode({"epoch": 3}), []) == {"epoch": 3}
    assert progress_in(encode({"extra": {"epoch": 4}}), []) == {"epoch": 4}
    position = {"epoch": 2, "batches": 40, "epoch_start": None, "first_batch": None, "makes_workers": True}
    expected = {"epoch": 2, "cursor": {"epoch": 2, "batches": 40}}
    assert progress_in(encode({"loop": [{"data": position}]}), []) == expected
    assert progress_in(encode({}), [["mine", encode(position)]]) == expected
    assert progress_in(encode({"epoch": "three", "lr": 1}), []) == {}
