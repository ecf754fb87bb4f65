"""What a target gets, in which order, and what it is never given."""

from __future__ import annotations

import pytest
from replication_runs import name_of, save

from strongroom import Checkpointer, KeepLast
from strongroom.catalog import Catalog, History
from strongroom.errors import ConfigError, FencedError
from strongroom.manifest import Commit
from strongroom.replication.planning import Plan, check_target, plan
from strongroom.stores.memory import MemoryStore


def history(root: MemoryStore) -> History:
    return Catalog(root).history()


def steps(commits: tuple[Commit, ...]) -> list[int]:
    return [commit.name.step for commit in commits]


def copy_of(root: MemoryStore, name: str = "copy") -> MemoryStore:
    copied = MemoryStore(name)
    copied.plant(root.contents())
    return copied


def planned(source: MemoryStore, target: MemoryStore | None, keep: object = None, **options: object) -> Plan:
    there = history(target) if target is not None else None
    options = {"verified": (), **options}
    return plan(history(source), there, keep, **options)  # type: ignore[arg-type]


def test_the_newest_comes_first(source: MemoryStore) -> None:
    save(source, 1, 2, 3)
    found = planned(source, MemoryStore("empty"))
    assert steps(found.copies) == [3, 2, 1]
    assert found.passed_over == {}


def test_what_was_superseded_comes_after_the_line(source: MemoryStore) -> None:
    save(source, 1, 2, 3)
    with Checkpointer(source) as checkpointer:
        checkpointer.restore(step=1)
        checkpointer.save(2, {"again": 1}).result()
    found = planned(source, MemoryStore("empty"))
    assert [(commit.name.launch, commit.name.step) for commit in found.copies] == [
        (2, 2),
        (1, 1),
        (1, 3),
        (1, 2),
    ]


def test_what_the_target_would_not_keep_is_passed_over_with_the_reason(source: MemoryStore) -> None:
    save(source, 1, 2, 3, 4)
    found = planned(source, MemoryStore("empty"), KeepLast(count=2))
    assert steps(found.copies) == [4, 3]
    assert found.passed_over.keys() == {name_of(source, 2), name_of(source, 1)}
    assert "not kept by KeepLast(count=2)" in found.passed_over[name_of(source, 1)]


def test_a_checkpoint_that_cannot_be_copied_makes_room_for_an_older_one(source: MemoryStore) -> None:
    save(source, 1, 2, 3)
    found = planned(source, MemoryStore("empty"), KeepLast(count=2), left_out=[name_of(source, 3)])
    assert steps(found.copies) == [2, 1]
    assert found.ranked[0] == name_of(source, 3)


def test_what_stands_there_counts_for_the_targets_policy(source: MemoryStore) -> None:
    save(source, 1, 2)
    target = copy_of(source)
    save(source, 3, resumes=True)
    found = planned(source, target, KeepLast(count=1), verified=history(target).commits.values())
    assert steps(found.copies) == [3]
    assert steps(found.standing) == [2, 1]


def test_what_stands_there_and_was_not_noted_is_to_be_verified(source: MemoryStore) -> None:
    save(source, 1, 2)
    found = planned(source, copy_of(source), verified=[history(source).commits[name_of(source, 1)]])
    assert steps(found.to_verify) == [2]
    assert steps(found.standing) == [1]
    assert steps(found.waiting) == [2]


def test_a_target_that_may_not_be_looked_at_holds_what_was_noted(source: MemoryStore) -> None:
    save(source, 1, 2)
    found = planned(source, None, verified=[history(source).commits[name_of(source, 2)]])
    assert steps(found.standing) == [2]
    assert steps(found.copies) == [1]


def test_what_was_noted_and_is_gone_from_the_target_is_copied_again(source: MemoryStore) -> None:
    save(source, 1)
    found = planned(source, MemoryStore("empty"), verified=history(source).commits.values())
    assert steps(found.copies) == [1]


def test_another_checkpoint_of_the_same_name_is_a_conflict(source: MemoryStore) -> None:
    save(source, 1)
    target = copy_of(source)
    name = name_of(source, 1)
    theirs = history(source).commits[name]
    forged = Commit(
        run=theirs.run,
        name=name,
        manifest=type(theirs.manifest)("sha256", b"\0" * 32),
        size_bytes=1,
        committed_at_ms=1,
    )
    target.plant({name.commit_key: forged.encode()})
    found = planned(source, target)
    assert found.copies == ()
    assert "another checkpoint of this name stands there" in found.conflicts[name]


def test_a_damaged_commit_there_is_a_conflict(source: MemoryStore) -> None:
    save(source, 1)
    target = copy_of(source)
    target.plant({name_of(source, 1).commit_key: b"torn"})
    found = planned(source, target)
    assert "the copy there is damaged" in found.conflicts[name_of(source, 1)]


class TestATargetIsRefused:
    def check(self, source: MemoryStore, target: MemoryStore, launch: int | None = None) -> None:
        check_target(history(source), history(target), source_uri=source.uri, uri=target.uri, launch=launch)

    def test_that_holds_another_run(self, source: MemoryStore) -> None:
        other = MemoryStore("other")
        save(source, 1)
        save(other, 1)
        with pytest.raises(
            ConfigError, match=r"memory://other holds run .* each run needs a root of its own"
        ):
            self.check(source, other)

    def test_where_another_writer_has_taken_the_same_number(self, source: MemoryStore) -> None:
        save(source, 1)
        target = copy_of(source)
        save(source, 2, resumes=True)
        save(target, 3, resumes=True)
        with pytest.raises(FencedError, match="another writer has taken launch 2 at memory://copy"):
            self.check(source, target)

    def test_where_a_later_writer_is_at_work_if_we_are_one_ourselves(self, source: MemoryStore) -> None:
        save(source, 1)
        target = copy_of(source)
        save(target, 2, resumes=True)
        self.check(source, target)
        self.check(source, target, launch=2)
        with pytest.raises(FencedError, match="launch 2 has taken the run over at memory://copy"):
            self.check(source, target, launch=1)

    def test_never_for_a_folder_that_nobody_committed(self, source: MemoryStore) -> None:
        save(source, 1)
        target = copy_of(source)
        target.plant({"step-000000000001-0999-0123456789abcdef/data/x": b"x"})
        assert 999 in history(target).launch_numbers
        self.check(source, target, launch=1)

    def test_never_where_it_is_empty_or_may_not_be_looked_at(self, source: MemoryStore) -> None:
        save(source, 1)
        self.check(source, MemoryStore("empty"), launch=1)
        check_target(history(source), None, source_uri=source.uri, uri="s3://blind", launch=1)
