"""What is on its way from another tier is not taken for dead, however long that takes."""

from __future__ import annotations

import pytest

from strongroom import ReplicationError, StoreError
from strongroom.catalog import Catalog, History
from strongroom.incoming import VALID_S, Announcement, announced, is_announced
from strongroom.layout import CheckpointName
from strongroom.manifest import Launch, Run
from strongroom.stores import MemoryStore
from strongroom.sweep import abandoned_uploads, forget_announcements, orphans

NAME = CheckpointName(launch=1, step=7, attempt="0123456789abcdef")
OTHER = CheckpointName(launch=1, step=8, attempt="0123456789abcdef")


class Time:
    def __init__(self) -> None:
        self.s = 1_000_000.0

    def monotonic(self) -> float:
        return self.s

    def ns(self) -> int:
        return int(self.s * 10**9)


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def store(time: Time) -> MemoryStore:
    store = MemoryStore(clock_ns=time.ns)
    store.put("run.json", Run(run="r", created_at_ms=0).encode())
    launch = Launch(run="r", launch=1, parent=None, created_at_ms=0, deadline_s=60)
    store.put("launches/000001.json", launch.encode())
    for name in (NAME, OTHER):
        store.put(f"{name.folder}/data/00000-00.safetensors", b"x")
    return store


def announcement(store: MemoryStore, time: Time) -> Announcement:
    return Announcement(store, NAME, monotonic=time.monotonic)


def dead(store: MemoryStore, time: Time) -> list[CheckpointName]:
    plan = orphans(store, history(store), launch=1, now_ns=time.ns())
    return [removal.name for removal in plan.removals]


def history(store: MemoryStore) -> History:
    return Catalog(store).history()


def test_what_is_announced_is_left_alone_and_its_neighbour_goes(store: MemoryStore, time: Time) -> None:
    announcement(store, time).renew()
    time.s += VALID_S
    assert dead(store, time) == [OTHER]


def test_what_was_announced_long_ago_goes(store: MemoryStore, time: Time) -> None:
    announcement(store, time).renew()
    time.s += 2 * VALID_S + 1
    assert set(dead(store, time)) == {NAME, OTHER}


def test_an_announcement_is_renewed_for_as_long_as_it_takes(store: MemoryStore, time: Time) -> None:
    made = announcement(store, time)
    for _ in range(100):
        made.renew()
        made.check()
        assert NAME not in dead(store, time)
        time.s += VALID_S / 3
    assert len(store.list_names(f"replication/incoming/{NAME.folder}")) == 100


def test_it_is_renewed_no_more_often_than_it_has_to_be(store: MemoryStore, time: Time) -> None:
    made = announcement(store, time)
    for _ in range(1000):
        made.renew()
        time.s += 1.0
    assert len(store.list_names(f"replication/incoming/{NAME.folder}")) == 2


def test_a_copy_that_was_held_up_may_not_be_committed_by_an_old_announcement(
    store: MemoryStore, time: Time
) -> None:
    made = announcement(store, time)
    with pytest.raises(ReplicationError):
        made.check()
    made.renew()
    made.check()
    time.s += VALID_S
    with pytest.raises(ReplicationError, match="taken for dead"):
        made.check()
    made.renew()
    made.check()


def test_whoever_collects_waits_longer_than_a_copy_may_be_committed(store: MemoryStore, time: Time) -> None:
    """Whatever the moment: a copy that may still be committed is never one that may be removed."""
    made = announcement(store, time)
    made.renew()
    for _ in range(30):
        time.s += VALID_S / 8
        try:
            made.check()
        except ReplicationError:
            continue
        assert is_announced(store, NAME, time.ns())


def test_announcements_of_what_has_arrived_or_was_given_up_go(store: MemoryStore, time: Time) -> None:
    announcement(store, time).renew()
    forget_announcements(store, history(store), now_ns=time.ns())
    assert announced(store) == [NAME]
    time.s += 2 * VALID_S + 1
    forget_announcements(store, history(store), now_ns=time.ns())
    assert announced(store) == []


def test_it_is_taken_back_where_that_is_allowed(store: MemoryStore, time: Time) -> None:
    made = announcement(store, time)
    made.renew()
    made.take_back()
    assert announced(store) == []

    class Kept(MemoryStore):
        def delete_tree(self, prefix: str) -> None:
            raise StoreError("no")

    kept = Kept(clock_ns=time.ns)
    made = Announcement(kept, NAME, monotonic=time.monotonic)
    made.renew()
    made.take_back()
    assert announced(kept) == [NAME]


def test_a_store_without_uploads_has_none_that_were_abandoned(store: MemoryStore, time: Time) -> None:
    assert abandoned_uploads(store, history(store), launch=1, now_ns=time.ns()).removals == ()
