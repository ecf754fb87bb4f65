"""Whatever operation of a store fails, and however: what was committed stays, and nothing else is seen.

One process's whole life (resume, save with retention) runs on a store of which the first operation
fails, then the second, and so on until a life needs no fault; for every kind of fault, as one and
as one that lasts. After each, a new process looks at what is left.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import pytest
from crash_states import (
    TestClock,
    assert_is_state_at,
    assert_newest_is,
    assert_whole,
    leftovers,
    numbers_from,
    state_at,
    steps_seen,
)

from strongroom import Checkpointer, KeepLast
from strongroom.errors import OutcomeUnknownError, SaveError, StoreError, StrongroomError
from strongroom.layout import COMMIT, DATA
from strongroom.restore import Restored
from strongroom.stores.base import Buffer
from strongroom.stores.memory import MemoryStore
from strongroom.testing import Fault, FaultyStore, every_fault

_TIMEOUT_S = 600
_KEEP = KeepLast(count=2)


@dataclass
class World:
    """A root in memory, as the last process left it, and the time."""

    clock: TestClock
    contents: dict[str, bytes]

    def store(self) -> MemoryStore:
        store = MemoryStore(clock_ns=self.clock.now_ns)
        store.plant(self.contents)
        return store

    def begin(self, store: MemoryStore | FaultyStore, *, seed: int) -> Checkpointer:
        return Checkpointer(
            store, keep=_KEEP, timeout_s=_TIMEOUT_S, clock=self.clock.clock, draw=numbers_from(seed)
        )


@pytest.fixture
def empty() -> World:
    return World(clock=TestClock(), contents={})


@pytest.fixture
def old(empty: World) -> World:
    """Steps 1 and 2 are committed, and the process that saved them has ended."""
    store = empty.store()
    with empty.begin(store, seed=1) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state_at(step))
    return World(clock=empty.clock, contents=store.contents())


def _live(checkpointer: Checkpointer, step: int, next_call: str) -> StrongroomError | None:
    """Resume, save one step, and make the next call; the failure that the process heard of, if any."""
    try:
        checkpointer.restore()
        checkpointer.save(step, state_at(step))
        # As after an interrupt: nobody asks the handle, so only the next call can tell.
        checkpointer._join()
        if next_call == "save":
            checkpointer.save(step + 1, state_at(step + 1))
        elif next_call == "wait":
            checkpointer.wait()
        checkpointer.close()
    except StrongroomError as error:
        return error
    return None


def _is_explained(error: StrongroomError, store: FaultyStore) -> bool:
    """Whether a failure says which injected fault it came from, itself or in a cause."""
    told: BaseException | None = error
    while told is not None:
        if any(f"(injected, operation {operation.number})" in str(told) for operation in store.injected):
            return True
        told = told.__cause__
    return False


@pytest.mark.parametrize("lasting", (False, True), ids=["once", "lasting"])
@pytest.mark.parametrize("fault", list(Fault), ids=lambda fault: fault.name.lower())
class TestAFaultAnywhereInASave:
    def test_leaves_the_old_checkpoints_or_those_and_the_new_one(
        self, old: World, fault: Fault, lasting: bool
    ) -> None:
        outcomes = set()
        for store in every_fault(old.store, faults=[fault], lasting=[lasting]):
            error = _live(old.begin(store, seed=100), 3, "wait")
            steps = assert_whole(store.inner)
            # Retention takes step 1 once step 3 is committed, and may be kept from it.
            assert steps in ([2, 1], [3, 2, 1], [3, 2])
            if error is None:
                assert steps[0] == 3
            else:
                assert isinstance(error, SaveError | StoreError)
                assert _is_explained(error, store)
                if not isinstance(error, OutcomeUnknownError):
                    assert steps == [2, 1]
            outcomes.add((steps[0], error is None))
        assert outcomes >= {(3, True), (2, False)}
        assert ((3, False) in outcomes) == (fault is Fault.ANSWER_LOST)

    def test_into_an_empty_root_leaves_nothing_or_the_first_checkpoint(
        self, empty: World, fault: Fault, lasting: bool
    ) -> None:
        outcomes = set()
        for store in every_fault(empty.store, faults=[fault], lasting=[lasting]):
            error = _live(empty.begin(store, seed=100), 3, "wait")
            steps = assert_whole(store.inner)
            assert steps in ([], [3])
            if error is None:
                assert steps == [3]
            elif not isinstance(error, OutcomeUnknownError):
                assert steps == []
            outcomes.add((tuple(steps), error is None))
        assert outcomes >= {((3,), True), ((), False)}

    def test_is_over_when_the_store_works_again(self, old: World, fault: Fault, lasting: bool) -> None:
        for store in every_fault(old.store, faults=[fault], lasting=[lasting]):
            _live(old.begin(store, seed=100), 3, "wait")
            old.clock.seconds += 2 * _TIMEOUT_S + 1
            newest = steps_seen(store.inner)[0]
            with old.begin(store.inner, seed=200) as later:
                restored = later.restore()
                assert restored is not None
                assert (restored.step, restored.skipped) == (newest, ())
                later.save(9, state_at(9)).result()
            # A folder that was never committed, or that retention had begun to remove, is gone.
            assert leftovers(store.inner) == set()
            assert assert_whole(store.inner) == [9, newest]

    def test_is_over_for_a_first_save_too(self, empty: World, fault: Fault, lasting: bool) -> None:
        for store in every_fault(empty.store, faults=[fault], lasting=[lasting]):
            _live(empty.begin(store, seed=100), 3, "wait")
            empty.clock.seconds += 2 * _TIMEOUT_S + 1
            with empty.begin(store.inner, seed=200) as later:
                later.restore()
                later.save(9, state_at(9)).result()
            assert leftovers(store.inner) == set()
            assert_newest_is(store.inner, 9)


@pytest.mark.parametrize("next_call", ("save", "close"))
def test_a_fault_in_a_save_is_raised_by_the_very_next_call(old: World, next_call: str) -> None:
    for store in every_fault(old.store, faults=[Fault.REFUSED], lasting=[False]):
        error = _live(old.begin(store, seed=100), 3, next_call)
        if 3 not in steps_seen(store.inner):
            assert error is not None
            assert 4 not in steps_seen(store.inner)


@pytest.mark.parametrize("fault", list(Fault), ids=lambda fault: fault.name.lower())
def test_the_process_that_met_one_fault_goes_on_saving(old: World, fault: Fault) -> None:
    for store in every_fault(old.store, faults=[fault], lasting=[False]):
        checkpointer = old.begin(store, seed=100)
        try:
            checkpointer.restore()
        except StoreError:
            checkpointer.restore()
        with contextlib.suppress(StoreError, SaveError):
            checkpointer.save(3, state_at(3)).result()
        checkpointer._join()
        if not store.reached:
            break
        checkpointer.save(4, state_at(4)).result()
        checkpointer.close()
        steps = assert_whole(store.inner)
        assert steps[0] == 4
        assert set(steps) <= {1, 2, 3, 4}


def test_an_uncommitted_folder_is_left_alone_until_twice_its_deadline(old: World) -> None:
    """Its writer may only be slow: what is swept under it would be committed with holes."""
    store = FaultyStore(old.store(), fail_at=30, fault=Fault.REFUSED, lasting=True)
    assert _live(old.begin(store, seed=100), 3, "wait") is not None
    remains = leftovers(store.inner)
    assert remains
    old.clock.seconds += 2 * _TIMEOUT_S
    for step, gone in ((5, False), (6, True)):
        with old.begin(store.inner, seed=200 + step) as later:
            later.restore()
            later.save(step, state_at(step))
        assert leftovers(store.inner) == (set() if gone else remains)
        old.clock.seconds += 1


class _RepeatsItsCommits(MemoryStore):
    """Loses the first answer and asks again by itself, as a client of a bucket may."""

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        created = super().put_if_absent(key, data)
        return super().put_if_absent(key, data) if key.endswith(COMMIT) else created


def test_a_commit_that_is_found_standing_is_this_saves_own() -> None:
    store = _RepeatsItsCommits()
    with Checkpointer(store) as checkpointer:
        assert checkpointer.save(1, state_at(1)).result().step == 1
    assert_newest_is(store, 1)


def test_a_commit_that_is_found_standing_and_cannot_be_read_is_not_told_as_a_failure() -> None:
    for store in every_fault(_RepeatsItsCommits, faults=[Fault.REFUSED], only=["read"]):
        checkpointer = Checkpointer(store, draw=numbers_from(1))
        error = _live(checkpointer, 1, "wait")
        if error is not None and steps_seen(store.inner):
            assert isinstance(error, OutcomeUnknownError)
        assert assert_whole(store.inner) == ([1] if not isinstance(error, StoreError) else [])


# Restore


def _try_to_restore(reader: Checkpointer) -> Restored | StoreError | None:
    try:
        return reader.restore()
    except StoreError as error:
        return error


@pytest.mark.parametrize("lasting", (False, True), ids=["once", "lasting"])
@pytest.mark.parametrize("fault", (Fault.REFUSED, Fault.TIMED_OUT, Fault.DENIED, Fault.ANSWER_LOST))
def test_a_fault_anywhere_in_a_restore_is_told_and_never_falls_back(
    old: World, fault: Fault, lasting: bool
) -> None:
    refused = 0
    for store in every_fault(old.store, faults=[fault], lasting=[lasting]):
        reader = old.begin(store, seed=100)
        found = _try_to_restore(reader)
        if isinstance(found, StoreError):
            assert _is_explained(found, store)
            refused += 1
            if lasting:
                continue
            # The same reader, once the store answers.
            found = reader.restore()
        assert isinstance(found, Restored)
        assert (found.step, found.skipped) == (2, ())
        assert_is_state_at(found.state, 2)
    assert refused >= 10


def test_a_fault_that_comes_and_goes_while_falling_back_is_told_too(old: World) -> None:
    """The newest is damaged, so an older one is read: what cannot be read there is no damage either."""
    newest = max(key for key in old.contents if key.endswith("state.json"))
    old.contents[newest] = b"{}"
    refused = 0
    for store in every_fault(old.store, faults=[Fault.REFUSED], lasting=[False]):
        try:
            restored = old.begin(store, seed=100).restore()
        except StoreError:
            refused += 1
            continue
        assert restored is not None
        assert restored.step == 1
        assert [step for step, _ in restored.skipped] == [2]
        assert_is_state_at(restored.state, 1)
    assert refused >= 12


def test_an_object_that_is_absent_falls_back_and_is_named(old: World) -> None:
    newest = max(key.split("/")[0] for key in old.contents if key.endswith(COMMIT))
    absent = [key for key in old.contents if key.startswith(f"{newest}/{DATA}/")]
    assert len(absent) == 5
    for key in absent:
        store = old.store()
        store.delete(key)
        restored = old.begin(store, seed=100).restore()
        assert restored is not None
        assert restored.step == 1
        assert_is_state_at(restored.state, 1)
        [(step, reason)] = restored.skipped
        assert step == 2
        assert key.rpartition("/")[2] in reason
        assert "missing" in reason


def test_without_its_commit_a_checkpoint_was_never_there(old: World) -> None:
    store = old.store()
    store.delete(max(key for key in old.contents if key.endswith(COMMIT)))
    assert assert_whole(store) == [1]
