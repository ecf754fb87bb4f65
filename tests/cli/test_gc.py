"""``strongroom gc``: what it removes and why, to people and to programs, and what it never touches."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from strongroom import Checkpointer, ConfigError

Strongroom = Callable[..., Any]


def steps(root: Path) -> list[int]:
    """Of the folders that there are, committed or not."""
    return sorted(int(path.name.split("-")[1]) for path in root.glob("step-*"))


def age(folder: Path, seconds: float) -> None:
    for path in folder.rglob("*"):
        then = path.stat().st_mtime - seconds
        os.utime(path, (then, then))


@pytest.fixture
def left(root: Path) -> Path:
    """What a save that was killed a week ago has left."""
    folder = root / "step-000000000260-0002-0123456789abcdef"
    shutil.copytree(next(root.glob("step-000000000250-*")), folder)
    (folder / "COMMIT").unlink()
    age(folder, 7 * 86_400)
    return folder


def test_without_a_policy_only_what_died_goes(strongroom: Strongroom, root: Path, left: Path) -> None:
    done = strongroom("gc", root)
    assert (done.status, done.err) == (0, "")
    assert not left.exists()
    assert steps(root) == [100, 200, 250, 300]
    assert f"uncommitted {left.name}" in done.out
    assert "past twice its deadline of 1800 s" in done.out
    assert "nothing to remove" in strongroom("gc", root).out


def test_a_policy_keeps_the_newest_and_what_was_verified(strongroom: Strongroom, root: Path) -> None:
    done = strongroom("gc", root, "--keep-last", 1, "--json")
    assert done.status == 0
    # The run went on from step 200, which was read whole then.
    assert steps(root) == [200, 250]
    assert [item["step"] for item in done.json["removed"]] == [100, 300]
    assert [item["step"] for item in done.json["kept"]] == [250, 200]
    assert strongroom("ls", root).status == strongroom("verify", root, "--all").status == 0


@pytest.fixture
def ranked(tmp_path: Path) -> Path:
    """A run that was ranked: when it ended, step 2 was its best, then 3; step 1 had been, before these."""
    root = tmp_path / "ranked"
    with Checkpointer(root) as checkpointer:
        for step, best in enumerate(([1], [2, 1], [2, 3], [2, 3], [2, 3]), start=1):
            checkpointer.save(step, {"weight": torch.ones(3)}, best=best).result()
    return root


def test_what_the_run_ranked_as_its_best_stays(strongroom: Strongroom, ranked: Path) -> None:
    done = strongroom("gc", ranked, "--keep-last", 1)
    assert done.status == 0
    assert steps(ranked) == [2, 3, 5]
    assert "number 1 of the best, by step 5" in done.out


@pytest.mark.parametrize(("best", "left"), ((0, [5]), (1, [2, 5]), (7, [2, 3, 5])))
def test_of_the_best_as_many_stay_as_was_said(
    strongroom: Strongroom, ranked: Path, best: int, left: list[int]
) -> None:
    assert strongroom("gc", ranked, "--keep-last", 1, "--keep-best", best).status == 0
    assert steps(ranked) == left


def test_where_the_newest_manifest_is_damaged_the_one_before_says_what_is_best(
    strongroom: Strongroom, ranked: Path
) -> None:
    (newest,) = ranked.glob("step-000000000005-*/data/MANIFEST.json")
    newest.write_bytes(newest.read_bytes().replace(b"[2,3]", b"[1,4]"))
    strongroom("gc", ranked, "--keep-last", 1)
    assert steps(ranked) == [2, 3, 5]


@pytest.mark.parametrize("best", ("1", [1, 1], [-1], 3, [None]))
def test_best_steps_that_are_none_are_refused_and_nothing_is_saved(tmp_path: Path, best: Any) -> None:
    with Checkpointer(tmp_path / "run") as checkpointer:
        with pytest.raises(ConfigError, match=r"best must|step must"):
            checkpointer.save(1, {"weight": torch.ones(3)}, best=best)
        assert checkpointer.checkpoints() == []


def test_a_dry_run_says_the_same_and_removes_nothing(strongroom: Strongroom, root: Path, left: Path) -> None:
    before = sorted(path for path in root.rglob("*"))
    dry = strongroom("gc", root, "--keep-last", 2, "--dry-run", "--json").json
    told = strongroom("gc", root, "--keep-last", 2, "--dry-run")
    assert sorted(path for path in root.rglob("*")) == before
    assert "would go" in told.out
    assert "nothing was removed (--dry-run)" in told.out
    done = strongroom("gc", root, "--keep-last", 2, "--json").json
    assert (dry.pop("dry_run"), done.pop("dry_run")) == (True, False)
    assert dry == done
    assert {item["path"] for item in done["removed"]} > {left.name}
    assert not any((root / item["path"]).exists() for item in done["removed"])


def test_its_json_has_the_documented_members(strongroom: Strongroom, root: Path, left: Path) -> None:
    done = strongroom("gc", root, "--keep-last", 3, "--json").json
    assert set(done) == {
        "dry_run", "failed", "freed_bytes", "keep_best", "keep_last", "kept", "removed", "root", "run",
        "tiers", "unknown",
    }  # fmt: skip
    assert (done["run"], done["root"], done["keep_last"], done["failed"]) == ("demo", root.as_uri(), 3, 0)
    for item in done["removed"]:
        assert set(item) == {
            "attempt", "error", "folder", "is_committed", "kind", "launch", "path", "reason",
            "size_bytes", "step",
        }  # fmt: skip
    for item in done["kept"]:
        assert set(item) == {"attempt", "folder", "is_committed", "launch", "reason", "step"}
    (committed, orphan) = done["removed"]
    assert (committed["kind"], committed["is_committed"]) == ("checkpoint", True)
    assert (orphan["kind"], orphan["is_committed"]) == ("orphan", False)
    assert done["freed_bytes"] == committed["size_bytes"] + orphan["size_bytes"] > 0


def test_a_save_that_may_be_under_way_is_left_alone_and_named(
    strongroom: Strongroom, root: Path, left: Path
) -> None:
    (left / "data" / "state.json").touch()
    done = strongroom("gc", root)
    assert left.exists()
    assert "step 260" in done.out
    assert "perhaps yet to be" in done.out


def test_no_link_leads_it_out_of_the_run(strongroom: Strongroom, root: Path) -> None:
    elsewhere = root.parent / "elsewhere"
    (target,) = root.glob("step-000000000100-*")
    target.rename(elsewhere)
    target.symlink_to(elsewhere)
    strongroom("gc", root, "--keep-last", 1)
    assert (elsewhere / "COMMIT").exists()
    assert (elsewhere / "data" / "MANIFEST.json").exists()
    assert steps(root) == [100, 200, 250]


def test_denied_removals_are_told_one_by_one_with_status_4(
    strongroom: Strongroom, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from strongroom.errors import AccessDeniedError
    from strongroom.stores.local import LocalStore

    whole = LocalStore.delete

    def delete(self: LocalStore, key: str) -> None:
        if key.startswith("step-000000000100"):
            raise AccessDeniedError("Operation not permitted")
        whole(self, key)

    monkeypatch.setattr(LocalStore, "delete", delete)
    done = strongroom("gc", root, "--keep-last", 1, "--json")
    assert done.status == 4
    assert done.json["failed"] == 1
    assert [(item["step"], item["error"]) for item in done.json["removed"]] == [
        (100, "Operation not permitted"),
        (300, None),
    ]
    assert steps(root) == [100, 200, 250]
    assert "failed" in strongroom("gc", root, "--keep-last", 1).out


def test_planted_checkpoints_make_it_remove_none_of_the_true_ones(
    strongroom: Strongroom, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert strongroom("keys", "init", "alice.pem", "--kind", "sign-p256").status == 0
    Path("policy.toml").write_text('[sign]\nkey = "file:alice.pem"\n')
    with Checkpointer("run", security="policy.toml", run_id="demo") as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, {"w": torch.ones(3)}).result(60)
    with Checkpointer("stranger", run_id="demo") as checkpointer:
        for step in (901, 902, 903):
            checkpointer.save(step, {"w": torch.ones(3)}).result(60)
    root = tmp_path / "run"
    # In the run's own launch, whose checkpoints they seem to follow.
    for folder in Path("stranger").glob("step-*"):
        shutil.copytree(folder, root / folder.name)
    # And in a launch of a stranger's own, which would make all the others superseded.
    with Checkpointer("stranger") as checkpointer:
        checkpointer.restore(step=901)
        checkpointer.save(950, {"w": torch.ones(3)}).result(60)
    (folder,) = Path("stranger").glob("step-000000000950-*")
    shutil.copytree(folder, root / folder.name)
    shutil.copy("stranger/launches/000002.json", root / "launches")
    done = strongroom("gc", root, "--keep-last", 2, "--json", "--security", "policy.toml")
    assert (done.status, done.err) == (0, "")
    assert steps(root) == [2, 3, 901, 902, 903, 950]
    assert [item["step"] for item in done.json["removed"]] == [1]
    assert {item["step"] for item in done.json["kept"] if "counts for nothing" in item["reason"]} == {
        901, 902, 903, 950,
    }  # fmt: skip
    # Where nobody asks for signatures they count like any others: 950 is the newest, and went on from 901.
    assert strongroom("gc", root, "--keep-last", 2).status == 0
    assert steps(root) == [901, 950]


def test_a_planted_launch_has_no_say_in_what_was_superseded(
    strongroom: Strongroom, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert strongroom("keys", "init", "alice.pem", "--kind", "sign-p256").status == 0
    Path("policy.toml").write_text('[sign]\nkey = "file:alice.pem"\n')
    with Checkpointer("run", security="policy.toml", run_id="demo") as checkpointer:
        for step in (1, 2, 3, 4):
            checkpointer.save(step, {"w": torch.ones(3)}).result(60)
        checkpointer.restore(step=2)
        checkpointer.save(5, {"w": torch.ones(3)}).result(60)
    with Checkpointer("stranger", run_id="demo") as checkpointer:
        for _ in range(3):  # the third launch is above all of the run's
            checkpointer.save(901, {"w": torch.ones(3)}).result(60)
            checkpointer.restore()
    (folder,) = Path("stranger").glob("step-000000000901-0003-*")
    shutil.copytree(folder, tmp_path / "run" / folder.name)
    shutil.copy("stranger/launches/000003.json", "run/launches")
    assert strongroom("gc", "run", "--keep-last", 3, "--security", "policy.toml").status == 0
    # The line is 5, 2, 1: what it left behind, 4 and 3, goes first.
    assert steps(tmp_path / "run") == [1, 2, 5, 901]


@pytest.mark.parametrize("count", ("0", "-1", "two", ""))
def test_a_number_that_is_none_is_a_usage_error(strongroom: Strongroom, root: Path, count: str) -> None:
    assert strongroom("gc", root, f"--keep-last={count}").status == 2
    assert len(steps(root)) == 4


def test_no_run_is_not_found(strongroom: Strongroom, tmp_path: Path) -> None:
    assert strongroom("gc", tmp_path / "none").status == 3
    assert not (tmp_path / "none").exists()


def test_a_policy_that_cannot_be_had_removes_nothing(strongroom: Strongroom, root: Path) -> None:
    done = strongroom("gc", root, "--keep-last", 1, "--security", root / "none.toml")
    assert done.status == 2
    assert len(steps(root)) == 4


def test_a_run_record_that_is_missing_stops_it(strongroom: Strongroom, root: Path) -> None:
    (root / "run.json").unlink()
    assert strongroom("gc", root, "--keep-last", 1).status == 1
    assert len(steps(root)) == 4


def test_what_stands_on_no_other_tier_stays_unless_that_is_said(
    strongroom: Strongroom, tmp_path: Path
) -> None:
    fast, slow = tmp_path / "fast", tmp_path / "slow"
    with Checkpointer(fast, replicate_to=[slow]) as ck:
        for step in (1, 2):
            ck.save(step, {"w": torch.ones(4)}).replicated(60)
    with Checkpointer(fast) as ck:
        ck.restore()
        for step in (3, 4, 5):
            ck.save(step, {"w": torch.ones(4)}).result(60)
    done = strongroom("gc", fast, "--keep-last", "1")
    assert done.status == 0
    assert f"verified on no other tier yet, of {slow.as_uri()}" in done.out
    assert "is known by this root's own notes; the tier itself is not asked" in done.out
    # Step 2 is what the newest launch goes on from.
    assert steps(fast) == [2, 3, 4, 5]
    assert strongroom("gc", fast, "--keep-last", "1", "--unreplicated").status == 0
    assert steps(fast) == [2, 5]


def test_what_was_copied_by_hand_holds_nothing_back_and_neither_do_the_notes_of_another_root(
    strongroom: Strongroom, root: Path, tmp_path: Path
) -> None:
    assert strongroom("replicate", root, 100, "--to", tmp_path / "by-hand").status == 0
    done = strongroom("gc", root, "--keep-last", 1, "--json")
    assert done.json["tiers"] == []
    assert steps(root) == [200, 250]
    shutil.copytree(root, tmp_path / "copy")
    assert f"notes of {root.as_uri()} lie here" in strongroom("gc", tmp_path / "copy", "--dry-run").out
