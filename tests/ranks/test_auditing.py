"""What many ranks tell the audit log: each for itself, and what one cannot put on record none does."""

from __future__ import annotations

from pathlib import Path

import audit_jobs as jobs
import pytest
from crews import Crews

from strongroom_security.recipients.file import create_key_file

RANKS = 4


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "kek.key"
    create_key_file(path)
    return path


@pytest.fixture(scope="module")
def saved(crews: Crews, key: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[jobs.Told]]:
    root = tmp_path_factory.mktemp("audited") / "run"
    return root, crews.run(jobs.save, root, key, [1, 2], ranks=RANKS)


def kinds(told: jobs.Told) -> list[tuple[str, str, str, int | None]]:
    return [act[:4] for act in told.acts]


def test_each_rank_tells_of_its_own_part_of_a_save(saved: tuple[Path, list[jobs.Told]]) -> None:
    _, (first, *others) = saved
    saves = [
        (action, phase, outcome, step)
        for step in (1, 2)
        for action, phase, outcome in (("save", "started", "unknown"), ("save", "finished", "success"))
    ]
    assert kinds(first) == [("launch", "finished", "success", None), *saves]
    assert all(kinds(other) == saves for other in others)
    # One save is one operation, whoever tells of it.
    operations = {tuple(act[4] for act in told.acts if act[0] == "save") for told in (first, *others)}
    assert len(operations) == 1
    # Only who commits has to wait for it.
    assert [told.secured for told in (first, *others)] == [2, 0, 0, 0]


def test_each_rank_says_itself_what_it_reads_and_one_unwraps(
    crews: Crews, saved: tuple[Path, list[jobs.Told]], key: Path
) -> None:
    first, *others = crews.run(jobs.restore, saved[0], key, ranks=RANKS)
    read = [("restore", "intended", "unknown", 2), ("restore", "finished", "success", 2)]
    assert kinds(first) == [read[0], ("unwrap", "finished", "success", 2), read[1]]
    assert all(kinds(other) == read for other in others)
    assert not any(told.is_untouched for told in (first, *others))


@pytest.mark.parametrize("refused_on", ([2], [0], [0, 1, 2, 3]))
def test_what_one_rank_cannot_put_on_record_no_rank_restores(
    crews: Crews, saved: tuple[Path, list[jobs.Told]], key: Path, refused_on: list[int]
) -> None:
    found = crews.run(jobs.restore, saved[0], key, refused_on, ranks=RANKS)
    assert {told.error[0] for told in found} == {"AuditError"}
    assert all(told.is_untouched for told in found)
    for rank, told in enumerate(found):
        assert kinds(told)[-1][:3] == ("restore", "finished", "denied")
        if rank in refused_on:
            assert ("restore", "intended", "unknown", 2) not in kinds(told)
        # An older one is no way out: this says nothing about the bytes.
        assert 1 not in {step for *_, step in kinds(told)}
    if refused_on == [2]:
        assert "rank 2" in found[1].error[1]


@pytest.mark.parametrize("unrecorded_on", ([1, 2], [0]))
def test_no_rank_reads_off_the_record_what_another_has_keys_for(
    crews: Crews, saved: tuple[Path, list[jobs.Told]], key: Path, unrecorded_on: list[int]
) -> None:
    for told in crews.run(jobs.without_a_record, saved[0], key, unrecorded_on, ranks=RANKS):
        assert told.error[0] == "ConfigError ConfigError"
        assert "puts nothing on record" in told.error[1]
        assert told.is_untouched
        assert not [act for act in told.acts if act[0] == "unwrap"]


def test_under_plain_dcp_each_rank_says_what_it_reads(
    crews: Crews, saved: tuple[Path, list[jobs.Told]], key: Path
) -> None:
    for told in crews.run(jobs.load_by_dcp, saved[0], key, ranks=RANKS):
        assert kinds(told)[0] == ("restore", "intended", "unknown", 1)
        assert kinds(told)[-1] == ("restore", "finished", "success", 1)
        assert not told.is_untouched
