"""Whose notes are whose, which targets are tiers, and what is held on the first tier by notes alone."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pytest
from replication_runs import name_of, save
from replication_stores import Bucket, Watched

from strongroom.catalog import Catalog
from strongroom.errors import StoreUnavailableError
from strongroom.replication import (
    Notes,
    Replicator,
    Target,
    held_by_notes,
    known_targets,
    read_notes,
    replicate,
)
from strongroom.replication.ledger import Ledger
from strongroom.stores.memory import MemoryStore

Begin = Callable[..., Replicator]

WAIT_S = 30.0


def held(source: MemoryStore) -> set[int]:
    return {name.step for name in held_by_notes(Catalog(source).history(), read_notes(source))}


def test_a_target_that_was_never_reached_is_noted_all_the_same(
    source: MemoryStore, target: Watched, begin: Begin
) -> None:
    def fail(operation: str, key: str) -> None:
        raise StoreUnavailableError("the target is down")

    save(source, 1, 2)
    target.hook = fail
    replicator = begin(source, target)
    replicator.begin()
    pause = threading.Event()
    while not replicator.state()[0].failures:
        pause.wait(0.01)
    assert read_notes(source).tiers.keys() == {target.uri}
    assert held(source) == {1, 2}


def test_a_copy_by_hand_makes_no_tier(source: MemoryStore, target: Watched) -> None:
    save(source, 1, 2)
    replicate(source, Target(store=target))
    notes = read_notes(source)
    assert notes.targets.keys() == {target.uri}
    assert notes.tiers == {}
    assert held(source) == set()


def test_a_tier_is_given_up_by_removing_its_notes(source: MemoryStore, target: Watched, begin: Begin) -> None:
    save(source, 1)
    begin(source, target).wait(name_of(source, 1), WAIT_S)
    save(source, 2, resumes=True)
    assert held(source) == {2}
    source.delete_tree("replication")
    assert held(source) == set()


@pytest.mark.parametrize("file", ("tier.json", "target.json"))
def test_notes_that_are_damaged_hold_everything(
    source: MemoryStore, target: Watched, begin: Begin, file: str
) -> None:
    save(source, 1)
    begin(source, target).wait(name_of(source, 1), WAIT_S)
    assert held(source) == set()
    key = next(key for key in source.contents() if key.endswith(f"/{file}"))
    source.plant({key: b"torn"})
    assert len(read_notes(source).unreadable) == 1
    assert held(source) == {1}
    # Whoever copies there mends them.
    save(source, 2, resumes=True)
    begin(source, target).wait(name_of(source, 2), WAIT_S)
    assert held(source) == set()


def test_notes_that_came_with_a_plain_copy_of_a_root_are_nobodys(
    source: MemoryStore, target: Watched, begin: Begin
) -> None:
    save(source, 1, 2)
    begin(source, target).wait(name_of(source, 1), WAIT_S)
    moved = MemoryStore("moved")
    moved.plant(source.contents())
    assert read_notes(moved) == Notes(targets={}, strange=(source.uri,))
    assert known_targets(moved) == {}
    assert held(moved) == set()
    target.log.clear()
    # What stands there is read before this root believes it, and what it was told of it is gone then.
    begin(moved, target).wait(name_of(moved, 1), WAIT_S)
    assert any(key.endswith(".safetensors") for key in target.asked("open_reader"))
    assert read_notes(moved).tiers.keys() == {target.uri}
    assert read_notes(moved).strange == ()


def test_whoever_copies_to_a_target_removes_what_another_root_has_noted_of_it(
    source: MemoryStore, target: Watched
) -> None:
    save(source, 1)
    replicate(source, Target(store=target))
    moved = MemoryStore("moved")
    moved.plant(source.contents())

    def ledger() -> Ledger:
        return Ledger(moved, target.uri, now_ms=lambda: 0)

    assert ledger().verified() == {}
    # The turns go on: somebody may copy there under the other name.
    assert ledger().claim_turn() == 2
    assert ledger().verified() == {}


class TestWhatWasVerified:
    def test_is_compared_with_the_target_by_names_and_lengths(
        self, source: MemoryStore, target: Watched
    ) -> None:
        save(source, 1, 2)
        replicate(source, Target(store=target), everything=True)
        shards = [key for key in target.inner.contents() if key.endswith(".safetensors")]
        target.inner.plant({shards[0]: target.inner.contents()[shards[0]][:-1]})
        report = replicate(source, Target(store=target), everything=True)
        (damaged,) = report.damaged
        assert shards[0].startswith(damaged.folder)
        assert [commit.name for commit in report.standing] == [
            name for name in (name_of(source, 2), name_of(source, 1)) if name != damaged
        ]
        assert damaged not in known_targets(source)[target.uri]

    def test_is_read_again_where_that_is_asked_for(self, source: MemoryStore, target: Watched) -> None:
        save(source, 1)
        name = name_of(source, 1)
        replicate(source, Target(store=target))
        assert replicate(source, Target(store=target), verify=True).copied[0].sent_bytes == 0
        key = next(key for key in target.inner.contents() if key.endswith(".safetensors"))
        data = target.inner.contents()[key]
        target.inner.plant({key: data[:-1] + bytes([data[-1] ^ 1])})
        assert replicate(source, Target(store=target)).damaged == {}
        assert replicate(source, Target(store=target), verify=True).damaged.keys() == {name}
        assert known_targets(source)[target.uri] == {}


def test_a_note_that_may_not_be_removed_is_worth_no_warning(
    target: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    source = Bucket("first")
    save(source, 1)
    source.denied = {"delete"}
    source.delete_tree = lambda prefix: source._refuse("delete")  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING, "strongroom"):
        replicate(source, Target(store=target))
        replicate(source, Target(store=target))
    assert caplog.records == []
