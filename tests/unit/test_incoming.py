"""What is on its way from another tier is not taken for dead, however long that takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from strongroom import ReplicationError, StoreError
from strongroom.catalog import Catalog, History
from strongroom.errors import AccessDeniedError, StoreFullError, StoreUnavailableError
from strongroom.incoming import VALID_S, Announcement, RemovalMark, announced, is_announced
from strongroom.layout import COMMIT, CheckpointName
from strongroom.manifest import Launch, Run
from strongroom.stores import MemoryStore
from strongroom.sweep import Outcome, Removal, abandoned_uploads, forget_announcements, orphans, remove

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
    return Announcement(store, NAME, monotonic=time.monotonic, wall_ns=time.ns)


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
    # Nor is it announced anew as if nothing had happened: what was copied may be gone.
    with pytest.raises(ReplicationError, match="taken for dead"):
        made.renew()
    assert len(store.list_names(f"replication/incoming/{NAME.folder}")) == 1
    again = announcement(store, time)
    again.renew()
    again.check()


@pytest.mark.parametrize("stands", ("monotonic", "wall"))
def test_its_age_is_the_longer_one_of_two_clocks(store: MemoryStore, time: Time, stands: str) -> None:
    """One stands still while a machine is suspended, the other may be set back."""
    still = Time()
    still.s -= 100.0 if stands == "wall" else 0.0
    made = Announcement(
        store,
        NAME,
        monotonic=still.monotonic if stands == "monotonic" else time.monotonic,
        wall_ns=still.ns if stands == "wall" else time.ns,
    )
    made.renew()
    time.s += VALID_S + 1
    still.s -= 50.0 if stands == "wall" else 0.0
    for act in (made.renew, made.check):
        with pytest.raises(ReplicationError, match="taken for dead"):
            act()


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
        def delete(self, key: str) -> None:
            raise StoreError("no")

    kept = Kept(clock_ns=time.ns)
    made = announcement(kept, time)
    made.renew()
    made.take_back()
    assert announced(kept) == [NAME]


def test_a_store_without_uploads_has_none_that_were_abandoned(store: MemoryStore, time: Time) -> None:
    assert abandoned_uploads(store, history(store), launch=1, now_ns=time.ns()).removals == ()


class Hooked(MemoryStore):
    """Shows every operation to a hook first."""

    def __init__(self, time: Time) -> None:
        super().__init__(clock_ns=time.ns)
        self.hook: Callable[[str, str], None] = lambda operation, key: None
        self.log: list[tuple[str, str]] = []

    def _see(self, operation: str, key: str) -> None:
        self.log.append((operation, key.replace(NAME.folder, "F")))
        self.hook(operation, key)

    def put_if_absent(self, key: str, data: Any) -> bool:
        self._see("create", key)
        return super().put_if_absent(key, data)

    def delete(self, key: str) -> None:
        self._see("delete", key)
        super().delete(key)

    def delete_tree(self, prefix: str) -> None:
        self._see("delete_tree", prefix)
        super().delete_tree(prefix)


MARK = f"replication/incoming/{NAME.folder}/removing.json"
FILE = f"{NAME.folder}/data/00000-00.safetensors"
COMMITTED = f"{NAME.folder}/{COMMIT}"


class TestRemoving:
    @pytest.fixture
    def store(self, time: Time) -> Hooked:
        store = Hooked(time)
        store.plant({FILE: b"x"})
        return store

    @pytest.fixture
    def removes(self, store: Hooked, time: Time) -> Callable[..., Outcome]:
        def go(kind: Any = "orphan", **options: Any) -> Outcome:
            removal = Removal(kind=kind, name=NAME, reason="it is old")
            return remove(store, removal, now_ns=time.ns, **options)

        return go

    def test_is_marked_before_anything_is_looked_at_and_until_the_folder_is_gone(
        self, store: Hooked, removes: Callable[..., Outcome]
    ) -> None:
        assert removes().error is None
        changes = [each for each in store.log if not each[1].endswith("incoming/F")]
        mark = "replication/incoming/F/removing.json"
        assert changes == [("create", mark), ("delete_tree", "F"), ("delete", mark)]
        assert store.contents() == {}

    def test_of_a_checkpoint_is_marked_before_its_commit_goes(
        self, store: Hooked, removes: Callable[..., Outcome]
    ) -> None:
        store.plant({COMMITTED: b"{}"})
        assert removes("checkpoint").error is None
        assert [each[0] for each in store.log][:4] == ["create", "delete", "delete_tree", "delete"]
        assert store.log[1] == ("delete", f"F/{COMMIT}")
        assert store.contents() == {}

    def test_is_not_marked_where_nobody_copies_to(
        self, store: Hooked, removes: Callable[..., Outcome]
    ) -> None:
        assert removes(marks=False).error is None
        assert store.log == [("delete_tree", "F")]

    def test_lets_go_of_what_was_announced_before_it_looked(
        self, store: Hooked, time: Time, removes: Callable[..., Outcome]
    ) -> None:
        made = announcement(store, time)

        def hook(operation: str, key: str) -> None:
            if operation == "create" and key == MARK:
                # At the last moment before there is a mark: this one looks and finds none.
                made.renew()
                made.refuse_marked()

        store.hook = hook
        assert "being copied here" in (removes().error or "")
        assert FILE in store.contents()
        assert MARK not in store.contents()

    def test_is_seen_by_who_announces_after_it_has_looked(
        self, store: Hooked, time: Time, removes: Callable[..., Outcome]
    ) -> None:
        made = announcement(store, time)

        def hook(operation: str, key: str) -> None:
            if operation == "delete_tree" and key == NAME.folder:
                made.renew()
                with pytest.raises(StoreUnavailableError, match="is being removed"):
                    made.refuse_marked()

        store.hook = hook
        assert removes().error is None
        assert FILE not in store.contents()

    def test_lets_go_of_what_is_committed_meanwhile(
        self, store: Hooked, removes: Callable[..., Outcome]
    ) -> None:
        def hook(operation: str, key: str) -> None:
            if key == MARK and operation == "create":
                store.plant({COMMITTED: b"{}"})

        store.hook = hook
        assert "committed after all" in (removes().error or "")
        assert set(store.contents()) == {FILE, COMMITTED}

    def test_takes_along_what_is_committed_right_after_a_last_look(
        self, store: Hooked, removes: Callable[..., Outcome]
    ) -> None:
        store.plant({COMMITTED: b"{}"})

        late: list[str] = []
        removed = MemoryStore.delete_tree

        def slow(prefix: str) -> None:
            removed(store, prefix)
            if prefix == NAME.folder and not late:
                late.append(prefix)
                store.plant({COMMITTED: b"{}"})

        store.delete_tree = slow  # type: ignore[method-assign]
        assert removes("checkpoint").error is None
        assert store.contents() == {}

    def test_is_left_to_who_is_at_it_until_that_one_must_be_dead(
        self, store: Hooked, time: Time, removes: Callable[..., Outcome]
    ) -> None:
        assert RemovalMark(store, NAME, now_ns=time.ns).set()
        assert "somebody else" in (removes().error or "")
        assert FILE in store.contents()
        assert MARK in store.contents()
        time.s += VALID_S + 1
        assert removes().error is None
        assert store.contents() == {}

    @pytest.mark.parametrize("error", (AccessDeniedError("no"), StoreFullError("no room")))
    def test_goes_without_a_mark_where_none_can_be_made(
        self, store: Hooked, removes: Callable[..., Outcome], error: StoreError
    ) -> None:
        def hook(operation: str, key: str) -> None:
            if operation == "create":
                raise error

        store.hook = hook
        assert removes().error is None
        assert store.contents() == {}

    def test_that_fails_leaves_no_mark(self, store: Hooked, removes: Callable[..., Outcome]) -> None:
        def hook(operation: str, key: str) -> None:
            if operation == "delete_tree" and key == NAME.folder:
                raise StoreError("gone")

        store.hook = hook
        assert removes().error == "gone"
        assert set(store.contents()) == {FILE}

    def test_that_died_hinders_nobody_for_ever(self, store: Hooked, time: Time) -> None:
        assert RemovalMark(store, NAME, now_ns=time.ns).set()
        made = announcement(store, time)
        with pytest.raises(StoreUnavailableError, match="is being removed"):
            made.refuse_marked()
        time.s += 2 * VALID_S + 1
        made.refuse_marked()
        made.renew()
        made.refuse_marked()
        forget_announcements(store, history_of(NAME), now_ns=time.ns())
        assert MARK not in store.contents()

    def test_is_never_unmarked_by_who_takes_an_announcement_back(self, store: Hooked, time: Time) -> None:
        made = announcement(store, time)
        made.renew()
        RemovalMark(store, NAME, now_ns=time.ns).set()
        made.take_back()
        assert [key for key in store.contents() if key != FILE] == [MARK]


def history_of(*names: CheckpointName) -> Any:
    class Some:
        commits = dict.fromkeys(names)

    return Some()


def test_what_somebody_is_removing_is_left_to_them(store: MemoryStore, time: Time) -> None:
    time.s += 1000.0
    RemovalMark(store, NAME, now_ns=time.ns).set()
    assert dead(store, time) == [OTHER]
