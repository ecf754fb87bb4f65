"""What ``ls``, ``show`` and ``verify`` tell, to people and to programs, and their exit statuses."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from strongroom import Checkpointer, layout

Strongroom = Callable[..., Any]


def lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines()]


@pytest.fixture
def mixed(root: Path) -> Path:
    """The run with a damaged commit at step 100 and what a dead save left at step 260."""
    (damaged,) = root.glob("step-000000000100-*/COMMIT")
    damaged.write_bytes(damaged.read_bytes()[:-5])
    left = root / "step-000000000260-0002-0123456789abcdef"
    shutil.copytree(next(root.glob("step-000000000250-*")), left)
    (left / "COMMIT").unlink()
    return root


# ---------------------------------------------------------------------------------------------- ls


def test_ls_lists_newest_first_and_says_how_each_stands(strongroom: Strongroom, mixed: Path) -> None:
    done = strongroom("ls", mixed)
    assert (done.status, done.err) == (0, "")
    rows = [line.split() for line in lines(done.out)]
    header = next(number for number, row in enumerate(rows) if row and row[0] == "STEP")
    assert [(row[0], row[1]) for row in rows[header + 1 : header + 6]] == [
        ("250", "newest"),
        ("200", "on"),
        ("100", "damaged"),
        ("300", "superseded"),
        ("260", "uncommitted"),
    ]
    assert "4 checkpoints" in done.out
    assert "step 100 is damaged: step-000000000100-0001" in done.out
    assert "never restored" in done.out


def test_ls_as_json_has_the_documented_members(strongroom: Strongroom, mixed: Path) -> None:
    done = strongroom("ls", mixed, "--json")
    assert done.status == 0
    assert set(done.json) == {
        "checkpoints", "damaged_launches", "line_broken", "root", "run", "tiers", "uncommitted",
    }  # fmt: skip
    assert done.json["root"] == mixed.as_uri()
    assert done.json["run"] == "demo"
    assert [(item["step"], item["status"]) for item in done.json["checkpoints"]] == [
        (250, "newest"),
        (200, "line"),
        (100, "damaged"),
        (300, "superseded"),
    ]
    for item in done.json["checkpoints"] + done.json["uncommitted"]:
        assert set(item) - {"by_checksums_on",
        "verified_on"} == {
            "attempt", "committed_at_ms", "folder", "launch", "manifest_digest", "reason",
            "size_bytes", "status", "step",
        }  # fmt: skip
        assert (mixed / item["folder"]).is_dir()
    damaged = done.json["checkpoints"][2]
    assert damaged["size_bytes"] is damaged["committed_at_ms"] is damaged["manifest_digest"] is None
    assert "COMMIT" in damaged["reason"]
    (uncommitted,) = done.json["uncommitted"]
    assert (uncommitted["step"], uncommitted["status"]) == (260, "uncommitted")


def test_ls_says_the_same_of_each_checkpoint_as_the_checkpointer(strongroom: Strongroom, root: Path) -> None:
    listed = strongroom("ls", root, "--json").json["checkpoints"]
    for item, checkpoint in zip(listed, Checkpointer(root).checkpoints(), strict=True):
        for member in (
            "step",
            "launch",
            "attempt",
            "folder",
            "manifest_digest",
            "size_bytes",
            "committed_at_ms",
        ):
            assert item[member] == getattr(checkpoint, member)
        assert (item["status"] == "superseded") == checkpoint.is_superseded


def test_when_the_newest_is_damaged_the_next_is_the_newest(
    strongroom: Strongroom, root: Path, newest: Path
) -> None:
    (newest / "COMMIT").write_bytes(b"")
    listed = strongroom("ls", root, "--json").json["checkpoints"]
    assert [(item["step"], item["status"]) for item in listed][:2] == [(250, "damaged"), (200, "newest")]


def test_ls_tells_a_damaged_launch_record_and_where_the_line_ends(strongroom: Strongroom, root: Path) -> None:
    (root / "launches/000002.json").write_bytes(b"x")
    done = strongroom("ls", root)
    assert done.status == 0
    assert "the record of launch 2 is damaged" in done.out
    assert "the line ends early" in done.out
    document = strongroom("ls", root, "--json").json
    assert [item["launch"] for item in document["damaged_launches"]] == [2]
    assert "000002.json" in document["line_broken"]


def test_ls_of_a_run_that_has_saved_nothing_yet(strongroom: Strongroom, root: Path) -> None:
    for folder in root.glob("step-*"):
        shutil.rmtree(folder)
    done = strongroom("ls", root)
    assert done.status == 0
    assert "nothing was committed yet" in done.out


def test_a_root_may_be_a_uri(strongroom: Strongroom, root: Path) -> None:
    assert strongroom("ls", root.as_uri(), "--json").json == strongroom("ls", root, "--json").json


@pytest.mark.parametrize("command", ("ls", "show", "verify"))
def test_no_run_is_not_found(strongroom: Strongroom, tmp_path: Path, command: str) -> None:
    for root in (tmp_path / "nothing", tmp_path):
        done = strongroom(command, root)
        assert done.status == 3
        assert done.out == ""
        assert done.err.startswith("strongroom: ")
    assert not (tmp_path / "nothing").exists()


# -------------------------------------------------------------------------------------------- show


def test_show_tells_what_a_checkpoint_is(strongroom: Strongroom, root: Path) -> None:
    done = strongroom("show", root, 300)
    assert (done.status, done.err) == (0, "")
    told = lines(done.out)
    for part in (
        "step 300  launch 1",
        "superseded",
        "run         demo",
        "parent      step 200 (launch 1, attempt",
        "digest      blake3",
        "strongroom 0.",
        "tags        good, ",
        "  loss: 0.5",
        "  git: 'abc123'",
        "  00000-00.safetensors",
        "  tied is model.0.weight",
        "  model: module of",
        "    lr: 0.125",
        "    betas: (0.9, 0.999)",
        "    epoch: 300",
        "    nan: nan",
        "    at: (1, tensor I64[3])",
        "    big: int 0x400000000000000000",
        "      [(1, 2)]: 'pair'",
        "      [3]: 'number'",
        "  generator: torch.Generator of cpu",
        "state of rank 0",
    ):
        assert any(part in line for line in told), part
    assert any(line.split() == ["model.0.weight", "F32", "2", "x", "3", "24", "B"] for line in told)


def test_show_without_a_step_shows_the_newest(strongroom: Strongroom, root: Path) -> None:
    assert strongroom("show", root, "--json").json["checkpoint"]["step"] == 250
    assert lines(strongroom("show", root).out)[0].startswith("step 250  launch 2")


def test_show_limits_the_tensors_for_people_alone(strongroom: Strongroom, root: Path) -> None:
    done = strongroom("show", root, 300, "--tensors", 2)
    assert "more (--tensors N shows more)" in done.out
    assert "model.0.weight" in done.out
    assert "model.1.running_mean" not in done.out
    assert len(strongroom("show", root, 300, "--tensors", 2, "--json").json["tensors"]) > 10


def test_show_as_json_has_the_documented_members_and_nothing_is_cut(
    strongroom: Strongroom, root: Path
) -> None:
    document = strongroom("show", root, 300, "--json").json
    assert set(document) == {
        "aliases", "checkpoint", "collected", "manifest", "metrics", "producer", "provenance", "rank_states",
        "root", "signers", "state", "tags", "tensors",
    }  # fmt: skip
    assert document["aliases"] == {"tied": "model.0.weight"}
    assert document["provenance"] == {"git": "abc123", "nested": {"a": {"b": None}}}
    assert document["metrics"]["loss"] == 0.5
    assert document["metrics"]["worst"] == {"$": "float", "v": "inf"}
    assert document["metrics"]["top"] == [1, 2]
    assert document["tags"][0] == "good"
    assert document["rank_states"] == {"0": [["mine", {"$": "dict", "v": [["rank", 0]]}]]}
    (folder,) = root.glob("step-000000000300-*")
    assert document["checkpoint"]["folder"] == folder.name
    assert {file["path"] for file in document["manifest"]["files"]} == {
        path.name for path in (folder / "data").iterdir()
    } - {layout.MANIFEST}
    weight = next(tensor for tensor in document["tensors"] if tensor["name"] == "model.0.weight")
    assert (weight["dtype"], weight["shape"], weight["size_bytes"]) == ("F32", [2, 3], 24)
    (chunk,) = weight["chunks"]
    content = (folder / "data" / chunk["file"]).read_bytes()
    import torch

    stored = torch.frombuffer(bytearray(content[chunk["start"] : chunk["start"] + 24]), dtype=torch.float32)
    restored = Checkpointer(root).restore(step=300)
    assert restored is not None
    assert torch.equal(stored.reshape(2, 3), restored.state["model"]["0.weight"])


@pytest.mark.parametrize(
    "file", ("COMMIT", "data/MANIFEST.json", "data/index.safetensors", "data/state.json")
)
def test_show_of_a_damaged_checkpoint_tells_the_file_and_nothing_else(
    strongroom: Strongroom, root: Path, newest: Path, file: str
) -> None:
    path = newest / file
    path.write_bytes(path.read_bytes()[:-1])
    for options in ((), ("--json",)):
        done = strongroom("show", root, *options)
        assert done.status == 1
        assert done.out == ""
        assert path.name in done.err
        assert done.err.count("\n") == 1


# ------------------------------------------------------------------------------------------ verify


def test_verify_of_a_whole_run_says_what_was_verified(strongroom: Strongroom, root: Path) -> None:
    done = strongroom("verify", root)
    assert (done.status, done.err) == (0, "")
    assert lines(done.out)[0].startswith("whole: step 250 and the run's records; 9 files, ")
    assert lines(done.out)[1] == "rollback protection: none"


def test_verify_names_every_problem_on_a_line_of_its_own(
    strongroom: Strongroom, root: Path, newest: Path
) -> None:
    (newest / "data/state.json").write_bytes(b"x")
    (newest / "data/extra").write_bytes(b"x")
    (root / "run.json").write_bytes(b"x")
    done = strongroom("verify", root)
    assert (done.status, done.err) == (1, "")
    told = lines(done.out)
    assert told[0].startswith("run.json: damaged: ")
    assert told[1].startswith(f"{newest.name}/data/extra: unexpected: ")
    assert told[2].startswith(f"{newest.name}/data/state.json: damaged: ")
    assert told[3].startswith("damaged: 3 problems in step 250 ")
    assert told[4] == "rollback protection: none"


def test_verify_all_tells_each_checkpoint(strongroom: Strongroom, root: Path) -> None:
    (damaged,) = root.glob("step-000000000100-*/data/provenance.json")
    damaged.unlink()
    assert strongroom("verify", root).status == 0
    done = strongroom("verify", root, "--all")
    assert done.status == 1
    assert "step 250, launch 2: whole" in done.out
    assert "step 100, launch 1: damaged" in done.out
    document = strongroom("verify", root, "--all", "--json").json
    assert [(item["step"], item["verdict"]) for item in document["checkpoints"]] == [
        (250, "whole"),
        (200, "whole"),
        (100, "damaged"),
        (300, "whole"),
    ]


def test_verify_as_json_has_the_documented_members(strongroom: Strongroom, root: Path, newest: Path) -> None:
    (newest / "data/state.json").unlink()
    done = strongroom("verify", root, "--json")
    assert done.status == 1
    document = done.json
    assert set(document) == {
        "chain", "checkpoints", "files", "problems", "rollback_protection", "root", "run", "size_bytes",
        "unjudged", "verdict",
    }  # fmt: skip
    assert document["verdict"] == "damaged"
    assert document["rollback_protection"] == "none"
    assert document["problems"] == []
    (checkpoint,) = document["checkpoints"]
    assert set(checkpoint) == {
        "attempt", "files", "folder", "is_closed", "launch", "manifest_digest", "problems", "signers",
        "size_bytes", "step", "verdict",
    }  # fmt: skip
    (problem,) = checkpoint["problems"]
    assert set(problem) == {"file", "kind", "message"}
    assert (problem["file"], problem["kind"]) == (f"{newest.name}/data/state.json", "missing")


def test_verify_chooses_a_step_as_a_restore_does(strongroom: Strongroom, root: Path) -> None:
    assert strongroom("verify", root, 300, "--json").json["checkpoints"][0]["launch"] == 1
    done = strongroom("verify", root, 7)
    assert done.status == 3
    assert "committed steps are 300, 250, 200, 100" in done.err


def test_what_cannot_be_read_is_unverified_and_not_damaged(
    strongroom: Strongroom, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from strongroom.stores import LocalStore
    from strongroom.testing import Fault, FaultyStore
    from strongroom_cli import auditing

    def faulty(given: str, *_: object) -> FaultyStore:
        return FaultyStore(LocalStore(given), fail_at=1, fault=Fault.DENIED, lasting=True, only={"read_into"})

    monkeypatch.setattr(auditing, "open_root", faulty)
    done = strongroom("verify", root)
    assert done.status == 4
    assert "damaged" not in done.out
    assert "4 files that could not be verified" in done.out
    assert strongroom("verify", root, "--json").json["verdict"] == "unverified"


@pytest.mark.parametrize("command", ("ls", "show", "verify"))
def test_a_store_that_refuses_is_status_4(
    strongroom: Strongroom, root: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    from strongroom.stores import LocalStore
    from strongroom.testing import Fault, FaultyStore
    from strongroom_cli import auditing

    monkeypatch.setattr(
        auditing, "open_root", lambda given, *_: FaultyStore(LocalStore(given), fail_at=1, fault=Fault.DENIED)
    )
    done = strongroom(command, root)
    assert (done.status, done.out) == (4, "")
    assert done.err.startswith("strongroom: ")


@pytest.mark.parametrize("command", ("ls", "show", "verify"))
def test_another_format_version_is_status_4_and_names_it(
    strongroom: Strongroom, root: Path, command: str
) -> None:
    from strongroom import canonical

    path = root / "run.json"
    members = canonical.decode(path.read_bytes(), "run", canonical.Bounds(length_bytes=4096))
    members.pop("~digest")
    path.write_bytes(canonical.with_self_digest({**members, "format": "0.7"}))
    done = strongroom(command, root)
    assert done.status == 4
    assert "format 0.7" in done.out + done.err


# --------------------------------------------------------------------------------- every command


@pytest.mark.parametrize("command", ("ls", "show", "verify"))
def test_a_policy_that_cannot_be_had_is_a_usage_error(
    strongroom: Strongroom, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    policy = tmp_path / "strongroom.toml"
    assert strongroom(command, root, "--security", policy).status == 2
    policy.write_text('digest = "sha256"\n')
    assert strongroom(command, root, "--security", policy).status == 0
    policy.write_text("[verify]\nrequire = true\n")
    done = strongroom(command, root, "--security", policy)
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith("strongroom: ")
    monkeypatch.setenv("STRONGROOM_CONFIG", str(policy))
    assert strongroom(command, root).status == 2


@pytest.mark.parametrize(
    "arguments",
    (
        (),
        ("nonsense",),
        ("ls",),
        ("show", "ROOT", "x"),
        ("show", "ROOT", "-1"),
        ("show", "ROOT", "1_0"),
        ("show", "ROOT", "\u0663"),
        ("show", "ROOT", "1" * 13),
        ("show", "ROOT", "--tensors", "x"),
        ("verify", "ROOT", "250", "--all"),
        ("verify", "ROOT", "1", "2"),
        ("ls", "ROOT", "--nonsense"),
        ("ls", "ftp://bucket/run"),
        ("ls", ""),
    ),
)
def test_a_usage_error_is_status_2(strongroom: Strongroom, root: Path, arguments: tuple[str, ...]) -> None:
    done = strongroom(*(root if argument == "ROOT" else argument for argument in arguments))
    assert (done.status, done.out) == (2, "")
    assert "strongroom" in done.err


def test_a_root_that_is_a_file_is_a_usage_error(strongroom: Strongroom, root: Path) -> None:
    done = strongroom("ls", root / "run.json")
    assert (done.status, done.out) == (2, "")
    assert "is a file" in done.err


def test_version_and_help(strongroom: Strongroom) -> None:
    from strongroom import __version__

    assert strongroom("--version").out == f"strongroom {__version__}\n"
    for arguments in (("--help",), ("ls", "--help"), ("show", "--help"), ("verify", "--help")):
        done = strongroom(*arguments)
        assert done.status == 0
        assert "usage: strongroom" in done.out


def test_looking_changes_nothing(strongroom: Strongroom, root: Path) -> None:
    def contents() -> dict[Path, Any]:
        return {path: path.read_bytes() if path.is_file() else None for path in root.rglob("*")}

    before = contents()
    for command in ("ls", "show", "verify"):
        strongroom(command, root)
    assert contents() == before
