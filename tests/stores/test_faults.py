"""A faulty store fails what it was told to fail, once or for ever, and counts everything."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from strongroom.errors import (
    AccessDeniedError,
    OutcomeUnknownError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
    StrongroomError,
)
from strongroom.stores import LocalStore, MemoryStore, Store
from strongroom.testing import Fault, FaultyStore, every_fault
from strongroom.testing.conformance import StoreConformance


class TestFaultyStoreWithoutFault(StoreConformance):
    @pytest.fixture
    def store(self) -> Store:
        return FaultyStore(MemoryStore())

    def raw(self, store: Store, key: str) -> bytes | None:
        return _contents(store).get(key)

    def plant(self, store: Store, key: str, data: bytes) -> None:
        assert isinstance(store, FaultyStore)
        assert isinstance(store.inner, MemoryStore)
        store.inner.plant({key: data})


def _contents(store: Store) -> dict[str, bytes]:
    assert isinstance(store, FaultyStore)
    assert isinstance(store.inner, MemoryStore)
    return store.inner.contents()


def _save(store: Store) -> None:
    with store.open_writer("step/data/shard", length_bytes=8) as writer:
        writer.write(b"abcd")
        writer.write(b"efgh")
        writer.finish()
    store.put("step/data/index", b"index")
    store.make_durable("step")
    store.put_if_absent("step/COMMIT", b"shard index")


def test_every_operation_of_a_run_counts() -> None:
    store = FaultyStore(MemoryStore())
    _save(store)
    with store.open_reader("step/data/shard") as reader:
        reader.read_into(0, memoryview(bytearray(4)))
    assert [operation.name for operation in store.operations] == [
        "open_writer",
        "write",
        "write",
        "finish",
        "put",
        "make_durable",
        "put_if_absent",
        "open_reader",
        "read_into",
    ]
    assert [operation.number for operation in store.operations] == list(range(1, 10))
    assert store.operations[4].key == "step/data/index"
    assert store.injected == []
    assert not store.reached


def test_a_single_fault_passes_and_a_lasting_one_does_not() -> None:
    single = FaultyStore(MemoryStore(), fail_at=1)
    lasting = FaultyStore(MemoryStore(), fail_at=1, lasting=True)
    for store in (single, lasting):
        with pytest.raises(StoreUnavailableError):
            store.put("a", b"")
    single.put("a", b"")
    with pytest.raises(StoreUnavailableError):
        lasting.put("a", b"")
    assert len(lasting.injected) == 2


@pytest.mark.parametrize(
    ("fault", "error", "left"),
    (
        (Fault.REFUSED, StoreUnavailableError, None),
        (Fault.TIMED_OUT, StoreUnavailableError, None),
        (Fault.DENIED, AccessDeniedError, None),
        (Fault.FULL, StoreFullError, None),
        (Fault.ANSWER_LOST, StoreUnavailableError, b"abcd"),
        (Fault.TORN, StoreUnavailableError, b"ab"),
    ),
)
def test_each_fault_raises_its_error_and_leaves_what_it_says(
    fault: Fault, error: type[StoreError], left: bytes | None
) -> None:
    store = FaultyStore(MemoryStore(), fail_at=1, fault=fault)
    with pytest.raises(error):
        store.put("object", b"abcd")
    assert _contents(store).get("object") == left


@pytest.mark.parametrize(
    ("fault", "error", "left"),
    (
        (Fault.REFUSED, StoreUnavailableError, None),
        (Fault.TIMED_OUT, OutcomeUnknownError, None),
        (Fault.DENIED, AccessDeniedError, None),
        (Fault.FULL, StoreFullError, None),
        (Fault.ANSWER_LOST, OutcomeUnknownError, b"abcd"),
    ),
)
def test_a_commit_is_whole_or_absent_and_unknown_where_no_answer_came(
    fault: Fault, error: type[StrongroomError], left: bytes | None
) -> None:
    store = FaultyStore(MemoryStore(), fail_at=1, fault=fault)
    with pytest.raises(error):
        store.put_if_absent("object", b"abcd")
    assert _contents(store).get("object") == left


def test_a_commit_is_never_torn() -> None:
    store = FaultyStore(MemoryStore(), fail_at=1, fault=Fault.TORN)
    assert store.put_if_absent("object", b"abcd")


@pytest.mark.parametrize(
    ("fail_at", "left"),
    ((1, b""), (2, b"ab"), (3, b"abcdef"), (4, b"abcd")),
    ids=("open", "1st", "2nd", "finish"),
)
@pytest.mark.parametrize("kind", ("memory", "local"))
def test_a_torn_writer_leaves_a_part_that_nobody_cleans_up(
    tmp_path: Path, kind: str, fail_at: int, left: bytes
) -> None:
    inner: Store = MemoryStore() if kind == "memory" else LocalStore(tmp_path)
    with pytest.raises(StoreUnavailableError):
        _save(FaultyStore(inner, fail_at=fail_at, fault=Fault.TORN))
    assert inner.read("step/data/shard", limit_bytes=8) == left


def test_a_torn_removal_removes_a_half() -> None:
    store = FaultyStore(MemoryStore(), fail_at=8, fault=Fault.TORN)
    _save(store)
    with pytest.raises(StoreUnavailableError):
        store.delete_tree("step")
    assert 0 < len(_contents(store)) < 3
    store.delete_tree("step")
    assert _contents(store) == {}


def test_only_the_operations_named_count() -> None:
    store = FaultyStore(MemoryStore(), fail_at=1, only={"read"})
    _save(store)
    with pytest.raises(StoreUnavailableError):
        store.read("step/COMMIT", limit_bytes=100)
    assert [operation.name for operation in store.operations] == ["read"]


def test_a_fault_of_reading_never_reads_as_absent() -> None:
    for store in every_fault(
        MemoryStore, faults=set(Fault) - {Fault.FULL, Fault.TORN}, only={"read", "stat"}
    ):
        _save(store)
        if store.fail_at == 1:
            with pytest.raises((StoreUnavailableError, AccessDeniedError)):
                store.read("step/COMMIT", limit_bytes=100)


def test_every_fault_reaches_each_operation_once_and_ends_with_a_run_without_any() -> None:
    runs: dict[tuple[Fault, bool], list[FaultyStore]] = {}
    for store in every_fault(MemoryStore):
        runs.setdefault((store.fault, store.lasting), []).append(store)
        try:
            _save(store)
        except StrongroomError:
            assert store.injected
    assert set(runs) == {(fault, lasting) for fault in Fault for lasting in (False, True)}
    for stores in runs.values():
        assert [store.fail_at for store in stores] == list(range(1, len(stores) + 1))
        assert all(store.reached for store in stores[:-1])
        assert stores[-1].injected == []
        assert "step/COMMIT" in _contents(stores[-1])
    hit = {store.injected[0].name for store in runs[Fault.REFUSED, False][:-1]}
    # The 8th run fails the abort of nothing: a save without fault has 7 operations.
    assert hit == {"open_writer", "write", "finish", "put", "make_durable", "put_if_absent"}


def test_whatever_fails_a_commit_stands_only_with_all_that_it_pins() -> None:
    for store in every_fault(MemoryStore):
        with contextlib.suppress(StrongroomError):
            _save(store)
        contents = _contents(store)
        if "step/COMMIT" in contents:
            assert contents["step/data/shard"] == b"abcdefgh", store
            assert contents["step/data/index"] == b"index", store
