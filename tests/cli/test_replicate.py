"""``strongroom replicate``, and what ``ls`` tells of other tiers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from strongroom import Checkpointer
from strongroom.catalog import Catalog
from strongroom.replication.ledger import Ledger
from strongroom.stores.local import LocalStore

Strongroom = Callable[..., Any]


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return tmp_path / "other"


def test_the_newest_is_copied_and_verified(strongroom: Strongroom, root: Path, other: Path) -> None:
    done = strongroom("replicate", root, "--to", other)
    assert done.status == 0
    assert "copied  step 250" in done.out
    assert "read back there" in done.out
    assert f"1 checkpoint copied to {other.as_uri()}" in done.out
    assert [each["step"] for each in strongroom("ls", other, "--json").json["checkpoints"]] == [250]
    assert strongroom("verify", other).status == 0


def test_one_step_or_all(strongroom: Strongroom, root: Path, other: Path) -> None:
    strongroom("replicate", root, 100, "--to", other)
    assert [each["step"] for each in strongroom("ls", other, "--json").json["checkpoints"]] == [100]
    document = strongroom("replicate", root, "--all", "--to", other.as_uri(), "--json").json
    assert [each["step"] for each in document["copied"]] == [250, 200, 300]
    assert [each["step"] for each in document["standing"]] == [100]
    assert document["damaged"] == []
    assert document["target"] == other.as_uri()
    assert all(each["verified_by"] == "reading" for each in document["copied"])
    assert strongroom("verify", other, "--all", "--chain").status == 0


def test_once_more_copies_nothing(strongroom: Strongroom, root: Path, other: Path) -> None:
    strongroom("replicate", root, "--to", other)
    done = strongroom("replicate", root, "--to", other)
    assert done.status == 0
    assert "there   step 250" in done.out
    assert "0 checkpoints copied" in done.out


def test_damage_at_the_source_is_told_and_the_rest_is_copied(
    strongroom: Strongroom, root: Path, other: Path, newest: Path
) -> None:
    shard = next(newest.glob("data/0*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"\xff")
    done = strongroom("replicate", root, "--all", "--to", other)
    assert done.status == 1
    assert "damaged step 250" in done.out
    listed = strongroom("ls", other, "--json").json["checkpoints"]
    assert {each["step"] for each in listed} == {100, 200, 300}


def test_a_target_of_another_run_is_refused(strongroom: Strongroom, root: Path, other: Path) -> None:
    with Checkpointer(other, run_id="another") as checkpointer:
        checkpointer.save(1, {"w": torch.ones(1)})
    done = strongroom("replicate", root, "--to", other)
    assert done.status == 2
    assert "holds run another" in done.err


def test_a_target_that_cannot_be_read_is_no_verdict(
    strongroom: Strongroom, root: Path, tmp_path: Path
) -> None:
    # A name that no file system takes.
    done = strongroom("replicate", root, "--to", tmp_path / ("x" * 300))
    assert done.status == 4
    assert done.out == ""


def test_where_there_is_no_run_nothing_is_found(strongroom: Strongroom, tmp_path: Path, other: Path) -> None:
    done = strongroom("replicate", tmp_path / "none", "--to", other)
    assert done.status == 3
    assert not other.exists()


def test_a_root_is_not_copied_onto_itself(strongroom: Strongroom, root: Path) -> None:
    assert strongroom("replicate", root, "--to", root).status == 2


def test_a_root_is_not_copied_into_itself(strongroom: Strongroom, root: Path) -> None:
    done = strongroom("replicate", root, "--to", root / "copy")
    assert done.status == 2
    assert "one lies inside the other" in done.err


def test_what_was_verified_is_read_again_if_one_asks(
    strongroom: Strongroom, root: Path, other: Path, newest: Path
) -> None:
    strongroom("replicate", root, "--to", other)
    shard = next((other / newest.name).glob("data/0*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"\xff")
    assert strongroom("replicate", root, "--to", other).status == 0
    done = strongroom("replicate", root, "--to", other, "--verify")
    assert done.status == 1
    assert "damaged step 250" in done.out
    assert strongroom("ls", root, "--json").json["checkpoints"][0]["verified_on"] == []


def test_a_rate_is_a_number_of_bytes(strongroom: Strongroom, root: Path, other: Path) -> None:
    assert strongroom("replicate", root, "--to", other, "--max-bytes-per-second", "fast").status == 2
    assert strongroom("replicate", root, "--to", other, "--max-bytes-per-second", "0").status == 2
    assert strongroom("replicate", root, "--to", other, "--max-bytes-per-second", "100000000").status == 0


def test_torch_is_not_waited_for(root: Path, other: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None; from strongroom_cli.main import main; "
        f"sys.exit(main(['replicate', {str(root)!r}, '--to', {str(other)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def job_copies(root: Path, *others: Path) -> None:
    """As a job that copies there notes it when it begins."""
    for other in others:
        Ledger(LocalStore(root), other.as_uri(), now_ms=lambda: 0).name_tier()


class TestLs:
    def test_tells_a_copy_by_hand_from_a_tier_and_counts_nothing_that_waits_for_it(
        self, strongroom: Strongroom, root: Path, other: Path
    ) -> None:
        strongroom("replicate", root, 300, "--to", other)
        assert "has superseded ones alone, copied by hand" in strongroom("ls", root).out
        (tier,) = strongroom("ls", root, "--json").json["tiers"]
        assert (tier["is_followed"], tier["behind"], tier["lag_s"]) == (False, 0, 0)
        job_copies(root, other)
        (tier,) = strongroom("ls", root, "--json").json["tiers"]
        assert (tier["is_followed"], tier["behind"]) == (True, 3)

    def test_marks_what_nobody_could_read_there(
        self, strongroom: Strongroom, root: Path, other: Path
    ) -> None:
        store = LocalStore(root)
        commit = Catalog(store).history().whole(Catalog(store).history().newest())
        ledger = Ledger(store, other.as_uri(), now_ms=lambda: 0)
        ledger.name_tier()
        ledger.claim_turn()
        ledger.note_verified(commit, "checksums")
        out = strongroom("ls", root).out
        assert " 1* " in out
        assert "by the server's checksums alone" in out
        newest = strongroom("ls", root, "--json").json["checkpoints"][0]
        assert newest["by_checksums_on"] == newest["verified_on"] == [other.as_uri()]

    def test_waits_for_nothing_that_copies(self, root: Path) -> None:
        code = (
            "import sys; sys.modules['numpy'] = None; from strongroom_cli.main import main; "
            f"sys.exit(main(['ls', {str(root)!r}]))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    def test_has_no_word_of_tiers_where_nothing_was_ever_copied(
        self, strongroom: Strongroom, root: Path
    ) -> None:
        assert "TIERS" not in strongroom("ls", root).out
        document = strongroom("ls", root, "--json").json
        assert document["tiers"] == []
        assert all(each["verified_on"] == [] for each in document["checkpoints"])

    def test_tells_where_each_checkpoint_is_verified(
        self, strongroom: Strongroom, root: Path, other: Path, tmp_path: Path
    ) -> None:
        strongroom("replicate", root, "--to", other)
        strongroom("replicate", root, 100, "--to", tmp_path / "third")
        job_copies(root, other, tmp_path / "third")
        done = strongroom("ls", root)
        rows = {row.split()[0]: row for row in done.out.splitlines() if row.strip()[:3].isdigit()}
        assert " 1 " in rows["250"]
        assert " 2 " in rows["100"]
        assert f"tier 1 {other.as_uri()}: has step 250, the newest" in done.out
        assert "has step 100; 2 newer ones wait, the first from" in done.out
        document = strongroom("ls", root, "--json").json
        on = {each["step"]: each["verified_on"] for each in document["checkpoints"]}
        assert on == {
            250: [other.as_uri()],
            200: [],
            100: [(tmp_path / "third").as_uri()],
            300: [],
        }
        first, second = document["tiers"]
        assert (first["last_step"], first["behind"], first["lag_s"]) == (250, 0, 0)
        assert (second["last_step"], second["behind"]) == (100, 2)
        assert second["lag_s"] > 0

    def test_contacts_nobody(self, strongroom: Strongroom, root: Path, other: Path) -> None:
        strongroom("replicate", root, "--to", other)
        job_copies(root, other)
        other.rename(other.with_name("gone"))
        assert "has step 250, the newest" in strongroom("ls", root).out

    def test_takes_no_damaged_note_at_its_word(self, strongroom: Strongroom, root: Path, other: Path) -> None:
        strongroom("replicate", root, "--to", other)
        job_copies(root, other)
        (note,) = root.glob("replication/*/verified/*.json")
        members = json.loads(note.read_bytes())
        note.write_text(json.dumps({**members, "size": 1}))
        done = strongroom("ls", root)
        assert "has none of these; 3 newer ones wait" in done.out

    def test_verifying_a_root_passes_the_notes_over(
        self, strongroom: Strongroom, root: Path, other: Path
    ) -> None:
        strongroom("replicate", root, "--to", other)
        assert strongroom("verify", root, "--all").status == 0
        assert strongroom("gc", root).status == 0
