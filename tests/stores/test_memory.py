"""The store in memory keeps the promises of every store, and is deterministic."""

from __future__ import annotations

import pytest

from strongroom.errors import StoreError
from strongroom.stores import MemoryStore, Store
from strongroom.testing.conformance import StoreConformance


class TestMemoryStore(StoreConformance):
    @pytest.fixture
    def store(self) -> Store:
        return MemoryStore()

    def raw(self, store: Store, key: str) -> bytes | None:
        assert isinstance(store, MemoryStore)
        return store.contents().get(key)

    def plant(self, store: Store, key: str, data: bytes) -> None:
        assert isinstance(store, MemoryStore)
        store.plant({key: data})


def test_an_object_that_is_being_written_shows_in_part() -> None:
    store = MemoryStore()
    writer = store.open_writer("object", length_bytes=4)
    writer.write(b"ha")
    assert store.list_names("") == ["object"]
    assert store.read("object", limit_bytes=4) == b"ha"


def test_a_reader_keeps_the_bytes_it_was_opened_on() -> None:
    store = MemoryStore()
    store.put("object", b"first")
    with store.open_reader("object") as reader:
        store.plant({"object": b"other"})
        buffer = bytearray(5)
        assert reader.read_into(0, memoryview(buffer)) == 5
    assert buffer == b"first"


def test_one_name_is_never_an_object_and_a_folder() -> None:
    store = MemoryStore()
    store.put("a", b"")
    store.put("b/c", b"")
    with pytest.raises(StoreError, match="stands where a folder is needed"):
        store.put("a/b", b"")
    with pytest.raises(StoreError, match="a folder stands there"):
        store.put("b", b"")


def test_times_come_from_the_clock_that_was_given() -> None:
    store = MemoryStore(clock_ns=lambda: 1_000_000_007)
    store.put("object", b"x")
    assert store.stat("object").modified_ns == 1_000_000_007


def test_equal_histories_give_equal_stores() -> None:
    def run() -> list[object]:
        store = MemoryStore(clock_ns=lambda: 1)
        store.put("a", b"1")
        store.delete("a")
        store.put("a", b"2")
        return [store.stat("a"), store.contents(), store.list_names("")]

    assert run() == run()
