"""Whatever operation of either store fails, and however: no commit on the target of anything incomplete."""

from __future__ import annotations

import contextlib

import pytest
from replication_runs import save, steps_of, without_notes

from strongroom.errors import StrongroomError
from strongroom.layout import COMMIT
from strongroom.replication import Target, replicate
from strongroom.stores.base import Store
from strongroom.stores.memory import MemoryStore
from strongroom.testing import Fault, every_fault
from strongroom.verify import verify


@pytest.fixture(scope="module")
def run() -> dict[str, bytes]:
    """Two checkpoints."""
    store = MemoryStore("first")
    save(store, 1, 2, length=10)
    return store.contents()


def store_of(contents: dict[str, bytes], name: str) -> MemoryStore:
    store = MemoryStore(name)
    store.plant(contents)
    return store


def copy(source: Store, target: Store) -> None:
    replicate(source, Target(store=target), everything=True)


def assert_nothing_incomplete(target: MemoryStore) -> list[int]:
    """All that is committed there is whole, and everything that it needs is there."""
    if not any(key.endswith(f"/{COMMIT}") for key in target.contents()):
        return []
    assert verify(target, everything=True).verdict == "whole"
    return steps_of(target)


@pytest.mark.parametrize("fault", list(Fault), ids=lambda fault: fault.name.lower())
def test_a_fault_anywhere_on_the_target(run: dict[str, bytes], fault: Fault) -> None:
    seen = set()
    for faulty in every_fault(lambda: MemoryStore("second"), faults=[fault]):
        source = store_of(run, "first")
        error: StrongroomError | None = None
        try:
            copy(source, faulty)
        except StrongroomError as raised:
            error = raised
        there = assert_nothing_incomplete(faulty.inner)  # type: ignore[arg-type]
        seen.add(tuple(there))
        if error is None:
            assert there == [2, 1]
        # Once more, and nothing fails: it goes on from whatever was left.
        copy(source, faulty.inner)
        assert without_notes(faulty.inner) == run  # type: ignore[arg-type]
        assert without_notes(source) == run
    assert seen >= {(), (2,), (2, 1)}


@pytest.mark.parametrize("fault", list(Fault), ids=lambda fault: fault.name.lower())
def test_a_fault_anywhere_on_the_first_tier(run: dict[str, bytes], fault: Fault) -> None:
    for faulty in every_fault(lambda: store_of(run, "first"), faults=[fault], lasting=[False]):
        target = MemoryStore("second")
        with contextlib.suppress(StrongroomError):
            copy(faulty, target)
        assert_nothing_incomplete(target)
        assert without_notes(faulty.inner) == run  # type: ignore[arg-type]
        copy(faulty.inner, target)
        assert without_notes(target) == run
