"""What every store must do, as tests that a store's author runs.

Subclass `StoreConformance` in a test module, and say how a store is made and how to look behind
it, so that the store is not asked to vouch for itself::

    class TestMyStore(StoreConformance):
        @pytest.fixture
        def store(self):
            return MyStore(...)

        def raw(self, store, key):
            return backend_bytes(store, key)        # None where there is nothing

        def plant(self, store, key, data):
            write_backend_bytes(store, key, data)

        def reopen(self, store):
            return MyStore(...)                     # as another process would open it

It needs pytest. What a power cut leaves is `strongroom.testing.SimDisk`'s to show, and only a file
system's concern.
"""
# ruff: noqa: S101 - these are tests, and assert is how a test speaks

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, ClassVar, cast

import pytest

from strongroom.errors import (
    ConfigError,
    FormatError,
    ObjectExistsError,
    ObjectNotFoundError,
    StoreError,
)
from strongroom.stores.base import Store
from strongroom.stores.offers import Replacing

__all__ = ["StoreConformance"]

_FOLDER = "step-000000000001-0001-0123456789abcdef"
_WAIT_S = 60.0


class StoreConformance:
    """One store, empty at the beginning of each test."""

    bad_keys: ClassVar[tuple[str, ...]] = (
        "",
        "/absolute",
        "..",
        "a/../b",
        "../a",
        "a//b",
        "a/",
        "./a",
        "a/.",
        ".hidden",
        "a/.hidden",
        "a\\b",
        "a b",
        "a\0b",
        "a\nb",
        "ä",
        "a/" * 300 + "a",
    )

    @pytest.fixture
    def store(self) -> Store:
        """An empty store. Its root need not exist yet."""
        raise NotImplementedError("a subclass's `store` fixture makes the store under test")

    def raw(self, store: Store, key: str) -> bytes | None:
        """The bytes that lie behind a key, read past the store; None where there are none."""
        raise NotImplementedError

    def plant(self, store: Store, key: str, data: bytes) -> None:
        """Put bytes behind a key past the store, over what lies there."""
        raise NotImplementedError

    def reopen(self, store: Store) -> Store:
        """A second store on the same root, as another process would open it."""
        return store

    # Reading creates nothing

    def test_it_is_a_store(self, store: Store) -> None:
        assert isinstance(store, Store)
        assert "://" in store.uri

    def test_an_empty_store_lists_nothing(self, store: Store) -> None:
        assert store.list_names("") == []
        assert store.list_names("launches") == []

    @pytest.mark.parametrize("key", ("run.json", "launches/000001.json", "a/b/c/d"))
    def test_an_absent_object_is_not_found(self, store: Store, key: str) -> None:
        with pytest.raises(ObjectNotFoundError):
            store.read(key, limit_bytes=10)
        with pytest.raises(ObjectNotFoundError):
            store.open_reader(key)
        with pytest.raises(ObjectNotFoundError):
            store.stat(key)

    def test_reading_creates_nothing(self, store: Store) -> None:
        for prefix in ("", "a", "a/b"):
            store.list_names(prefix)
            store.make_durable(prefix)
        with pytest.raises(ObjectNotFoundError):
            store.read("a/b", limit_bytes=10)
        store.delete("a/b")
        store.delete_tree("a")
        assert self.reopen(store).list_names("") == []

    # Objects

    @pytest.mark.parametrize("size_bytes", (0, 1, 4095, 4096, 3 * 2**20 + 1))
    def test_what_was_put_is_what_lies_there(self, store: Store, size_bytes: int) -> None:
        data = _pattern(size_bytes)
        store.put("a/object", data)
        assert self.raw(store, "a/object") == data
        assert self.reopen(store).read("a/object", limit_bytes=size_bytes) == data
        assert store.stat("a/object").size_bytes == size_bytes

    def test_what_others_wrote_is_read(self, store: Store) -> None:
        self.plant(store, "a/planted", b"by somebody else")
        assert store.read("a/planted", limit_bytes=100) == b"by somebody else"
        assert store.list_names("a") == ["planted"]
        assert store.stat("a/planted").size_bytes == len(b"by somebody else")

    def test_a_buffer_of_any_item_type_counts_as_its_bytes(self, store: Store) -> None:
        words = _as_doubles(bytearray(range(64)))
        store.put("put", words)
        assert store.put_if_absent("put-if-absent", words)
        with store.open_writer("written", length_bytes=96) as writer:
            writer.write(words)
            writer.write(bytearray(bytes(16)))
            writer.write(memoryview(bytes(16)))
            writer.finish()
        assert self.raw(store, "put") == bytes(range(64))
        assert self.raw(store, "put-if-absent") == bytes(range(64))
        assert self.raw(store, "written") == bytes(range(64)) + bytes(32)

    def test_the_bytes_given_are_those_of_that_moment(self, store: Store) -> None:
        block = bytearray(b"first")
        with store.open_writer("object", length_bytes=10) as writer:
            writer.write(block)
            block[:] = b"other"
            writer.write(block)
            writer.finish()
        assert self.raw(store, "object") == b"firstother"

    def test_an_object_is_never_overwritten(self, store: Store) -> None:
        store.put("a/object", b"first")
        with pytest.raises(ObjectExistsError):
            store.put("a/object", b"second")
        with pytest.raises(ObjectExistsError):
            self._write(store, "a/object", b"third")
        assert self.raw(store, "a/object") == b"first"

    def test_a_key_that_is_none_is_refused(self, store: Store) -> None:
        for key in self.bad_keys:
            calls: tuple[Callable[[str], object], ...] = (
                lambda key: store.open_writer(key, length_bytes=1),
                lambda key: store.put(key, b"x"),
                lambda key: store.put_if_absent(key, b"x"),
                lambda key: store.read(key, limit_bytes=1),
                store.open_reader,
                store.stat,
                store.delete,
            )
            for call in calls:
                with pytest.raises(ConfigError):
                    call(key)
        assert store.list_names("") == []

    def test_a_prefix_that_is_none_is_refused(self, store: Store) -> None:
        for prefix in self.bad_keys:
            if prefix in ("", "a/"):
                continue
            for call in (store.list_names, store.make_durable, store.delete_tree):
                with pytest.raises(ConfigError):
                    call(prefix)

    # Writers

    def test_an_object_is_written_in_pieces(self, store: Store) -> None:
        pieces = [_pattern(2**20, start) for start in range(3)] + [b"", b"end"]
        with store.open_writer(f"{_FOLDER}/data/00000-00.safetensors", length_bytes=3 * 2**20 + 3) as writer:
            for piece in pieces:
                writer.write(piece)
            writer.finish()
        assert self.raw(store, f"{_FOLDER}/data/00000-00.safetensors") == b"".join(pieces)

    def test_an_empty_object_may_be_written(self, store: Store) -> None:
        self._write(store, "empty", b"")
        assert self.raw(store, "empty") == b""

    def test_a_writer_that_did_not_finish_leaves_nothing(self, store: Store) -> None:
        with store.open_writer("a/object", length_bytes=8) as writer:
            writer.write(b"half")
        assert self.raw(store, "a/object") is None
        self._write(store, "a/object", b"whole")
        assert self.raw(store, "a/object") == b"whole"

    def test_a_writer_left_by_an_error_leaves_nothing_and_the_error_passes(self, store: Store) -> None:
        with pytest.raises(ZeroDivisionError), store.open_writer("object", length_bytes=8) as writer:
            writer.write(b"half")
            raise ZeroDivisionError
        assert self.raw(store, "object") is None

    def test_aborting_is_repeatable_and_nothing_after_finish(self, store: Store) -> None:
        writer = store.open_writer("given-up", length_bytes=1)
        writer.abort()
        writer.abort()
        assert self.raw(store, "given-up") is None
        writer = store.open_writer("kept", length_bytes=1)
        writer.write(b"x")
        writer.finish()
        writer.abort()
        assert self.raw(store, "kept") == b"x"

    def test_a_writer_that_has_ended_takes_nothing_more(self, store: Store) -> None:
        for end in ("finish", "abort"):
            writer = store.open_writer(end, length_bytes=1)
            writer.write(b"x")
            getattr(writer, end)()
            with pytest.raises(StoreError):
                writer.write(b"")
            with pytest.raises(StoreError):
                writer.finish()

    def test_fewer_bytes_than_announced_do_not_make_an_object(self, store: Store) -> None:
        with pytest.raises(StoreError), store.open_writer("object", length_bytes=5) as writer:
            writer.write(b"four")
            writer.finish()
        assert self.raw(store, "object") is None

    def test_more_bytes_than_announced_do_not_make_an_object(self, store: Store) -> None:
        with pytest.raises(StoreError), store.open_writer("object", length_bytes=5) as writer:
            writer.write(b"fourfive")
        with store.open_writer("object", length_bytes=5) as writer:
            with pytest.raises(StoreError):
                writer.write(b"fourfive")
            with pytest.raises(StoreError):
                writer.finish()
        assert self.raw(store, "object") is None

    def test_a_negative_length_is_refused(self, store: Store) -> None:
        with pytest.raises(ConfigError):
            store.open_writer("object", length_bytes=-1)

    def test_several_objects_are_written_at_once(self, store: Store) -> None:
        def write(number: int) -> None:
            data = _pattern(2**18, number)
            with store.open_writer(f"{_FOLDER}/data/{number:05d}", length_bytes=len(data)) as writer:
                for start in range(0, len(data), 2**16):
                    writer.write(data[start : start + 2**16])
                writer.finish()

        _together([lambda number=number: write(number) for number in range(8)])  # type: ignore[misc]
        for number in range(8):
            assert self.raw(store, f"{_FOLDER}/data/{number:05d}") == _pattern(2**18, number)

    # Creating what is absent

    def test_of_two_creations_the_first_stands(self, store: Store) -> None:
        assert store.put_if_absent(f"{_FOLDER}/COMMIT", b"first") is True
        assert store.put_if_absent(f"{_FOLDER}/COMMIT", b"second") is False
        assert self.reopen(store).put_if_absent(f"{_FOLDER}/COMMIT", b"third") is False
        assert self.raw(store, f"{_FOLDER}/COMMIT") == b"first"

    def test_an_object_put_or_planted_counts_as_present(self, store: Store) -> None:
        store.put("put", b"first")
        self.plant(store, "planted", b"first")
        assert store.put_if_absent("put", b"second") is False
        assert store.put_if_absent("planted", b"second") is False
        assert self.raw(store, "put") == self.raw(store, "planted") == b"first"

    def test_creating_leaves_nothing_else_to_list(self, store: Store) -> None:
        store.put_if_absent("launches/000001.json", b"{}")
        store.put_if_absent("launches/000001.json", b"{}")
        assert store.list_names("launches") == ["000001.json"]
        assert store.list_names("") == ["launches/"]

    def test_of_many_creators_exactly_one_wins_and_no_reader_sees_a_part(self, store: Store) -> None:
        contents = [_pattern(100_000, number) for number in range(4)]
        for attempt in range(5):
            key = f"launches/{attempt + 1:06d}.json"
            results: dict[int, bool] = {}
            seen: list[bytes] = []
            is_over = threading.Event()

            def create(number: int, key: str = key, results: dict[int, bool] = results) -> None:
                results[number] = self.reopen(store).put_if_absent(key, contents[number])

            def watch(key: str = key, seen: list[bytes] = seen, is_over: threading.Event = is_over) -> None:
                while not is_over.is_set():
                    try:
                        seen.append(store.read(key, limit_bytes=200_000))
                    except ObjectNotFoundError:
                        continue

            watcher = threading.Thread(target=watch)
            watcher.start()
            try:
                _together([lambda number=number: create(number) for number in range(4)])  # type: ignore[misc]
            finally:
                is_over.set()
                watcher.join(_WAIT_S)
            winners = [number for number, won in results.items() if won]
            assert len(winners) == 1
            assert set(seen) <= {contents[winners[0]]}
            assert self.raw(store, key) == contents[winners[0]]

    def test_an_object_may_be_created_again_once_deleted(self, store: Store) -> None:
        assert store.put_if_absent("object", b"first")
        store.delete("object")
        assert store.put_if_absent("object", b"second")
        assert self.raw(store, "object") == b"second"

    # Replacing, where it is offered

    def test_an_object_takes_the_place_of_the_one_that_was_seen(self, store: Store) -> None:
        offered = _replacing(store)
        store.put("a/object", b"first")
        seen = store.stat("a/object").version
        assert offered.replace("a/object", b"second one", version=seen) is True
        assert self.raw(store, "a/object") == b"second one"
        assert self.reopen(store).read("a/object", limit_bytes=100) == b"second one"
        assert store.list_names("a") == ["object"]
        assert store.stat("a/object").version != seen

    def test_what_came_between_is_not_replaced(self, store: Store) -> None:
        offered = _replacing(store)
        store.put("a/object", b"first")
        seen = store.stat("a/object").version
        assert offered.replace("a/object", b"second", version=seen)
        assert offered.replace("a/object", b"third", version=seen) is False
        assert self.raw(store, "a/object") == b"second"
        store.delete("a/object")
        assert offered.replace("a/object", b"third", version=seen) is False
        assert offered.replace("b/object", b"third", version=seen) is False
        assert store.list_names("") in ([], ["a/"])

    def test_in_the_place_of_nothing_it_is_created(self, store: Store) -> None:
        offered = _replacing(store)
        assert offered.replace("a/object", b"first", version=None) is True
        assert offered.replace("a/object", b"second", version=None) is False
        assert self.raw(store, "a/object") == b"first"

    def test_a_key_that_is_none_is_not_replaced_either(self, store: Store) -> None:
        offered = _replacing(store)
        for key in self.bad_keys:
            for version in ("seen", None):
                with pytest.raises(ConfigError):
                    offered.replace(key, b"x", version=version)

    def test_of_many_that_replace_one_version_one_wins_and_no_reader_sees_a_part(self, store: Store) -> None:
        rounds = [[_pattern(100_000, 4 * turn + number) for number in range(4)] for turn in range(3)]
        first = _pattern(100_000, 99)
        store.put("a/object", first)
        seen: list[bytes] = []
        for contents in rounds:
            version = store.stat("a/object").version
            results: dict[int, bool] = {}

            def replace(
                number: int,
                version: str = version,
                contents: list[bytes] = contents,
                results: dict[int, bool] = results,
            ) -> None:
                offered = _replacing(self.reopen(store))
                results[number] = offered.replace("a/object", contents[number], version=version)
                seen.append(store.read("a/object", limit_bytes=200_000))

            _together([lambda number=number: replace(number) for number in range(4)])  # type: ignore[misc]
            winners = [number for number, won in results.items() if won]
            assert len(winners) == 1
            assert self.raw(store, "a/object") == contents[winners[0]]
        assert set(seen) <= {first, *(content for contents in rounds for content in contents)}

    # Reading

    def test_reading_is_bounded(self, store: Store) -> None:
        store.put("object", bytes(1000))
        assert len(store.read("object", limit_bytes=1000)) == 1000
        with pytest.raises(FormatError):
            store.read("object", limit_bytes=999)
        store.put("empty", b"")
        assert store.read("empty", limit_bytes=0) == b""

    def test_a_folder_is_no_object(self, store: Store) -> None:
        store.put("a/b/object", b"x")
        for key in ("a", "a/b"):
            with pytest.raises(ObjectNotFoundError):
                store.read(key, limit_bytes=10)
            with pytest.raises(ObjectNotFoundError):
                store.open_reader(key)
            with pytest.raises(ObjectNotFoundError):
                store.stat(key)

    def test_nothing_lies_under_an_object(self, store: Store) -> None:
        store.put("a", b"x")
        with pytest.raises(ObjectNotFoundError):
            store.read("a/b", limit_bytes=10)
        with pytest.raises(ObjectNotFoundError):
            store.stat("a/b")
        assert store.list_names("a") == []
        store.delete("a/b")
        store.delete_tree("a")
        assert self.raw(store, "a") == b"x"

    def test_ranges_are_read(self, store: Store) -> None:
        data = _pattern(300_000)
        store.put("object", data)
        with store.open_reader("object") as reader:
            assert reader.size_bytes == len(data)
            for offset, length in ((0, 1), (0, 300_000), (299_999, 1), (4096, 70_000), (1, 0)):
                assert _read(reader.read_into, offset, length) == data[offset : offset + length]

    def test_a_read_is_short_only_where_the_object_ends(self, store: Store) -> None:
        data = _pattern(1000)
        store.put("object", data)
        with store.open_reader("object") as reader:
            buffer = bytearray(b"\xee" * 100)
            assert reader.read_into(950, memoryview(buffer)) == 50
            assert buffer == data[950:] + b"\xee" * 50
            assert reader.read_into(1000, memoryview(buffer)) == 0
            assert reader.read_into(5000, memoryview(buffer)) == 0

    def test_a_buffer_of_any_item_type_is_filled(self, store: Store) -> None:
        data = _pattern(64)
        store.put("object", data)
        buffer = bytearray(64)
        with store.open_reader("object") as reader:
            assert reader.read_into(0, _as_doubles(buffer)) == 64
        assert buffer == data

    def test_several_threads_read_through_one_reader(self, store: Store) -> None:
        data = _pattern(2**20)
        store.put("object", data)
        size = 2**16
        with store.open_reader("object") as reader:

            def read(number: int) -> None:
                for turn in range(16):
                    offset = (number * 7 + turn) % 16 * size
                    assert _read(reader.read_into, offset, size) == data[offset : offset + size]

            _together([lambda number=number: read(number) for number in range(4)])  # type: ignore[misc]

    def test_a_closed_reader_reads_nothing(self, store: Store) -> None:
        store.put("object", b"x")
        reader = store.open_reader("object")
        reader.close()
        reader.close()
        with pytest.raises(StoreError):
            reader.read_into(0, memoryview(bytearray(1)))

    def test_a_version_tells_contents_apart(self, store: Store) -> None:
        store.put("object", b"first")
        first = store.stat("object")
        assert store.stat("object") == first
        assert first.modified_ns > 0
        store.delete("object")
        store.put("object", b"other")
        assert store.stat("object").version != first.version

    # Listing

    def test_names_are_listed_in_order_and_folders_end_in_a_slash(self, store: Store) -> None:
        for key in ("b", "a/x", "a/y/z", "c-d/e", "a-b", "C"):
            store.put(key, b"")
        assert store.list_names("") == ["C", "a-b", "a/", "b", "c-d/"]
        assert store.list_names("a") == store.list_names("a/") == ["x", "y/"]
        assert store.list_names("a/y") == ["z"]

    def test_a_prefix_is_a_folder_and_not_the_beginning_of_a_name(self, store: Store) -> None:
        store.put("step-1/COMMIT", b"")
        store.put("step-10/COMMIT", b"")
        assert store.list_names("step-1") == ["COMMIT"]
        store.delete_tree("step-1")
        assert "step-10/" in store.list_names("")
        assert self.raw(store, "step-10/COMMIT") == b""

    # Removing

    def test_an_object_is_deleted_and_its_neighbours_stay(self, store: Store) -> None:
        store.put("a/one", b"1")
        store.put("a/two", b"2")
        store.delete("a/one")
        store.delete("a/one")
        assert self.raw(store, "a/one") is None
        assert store.list_names("a") == ["two"]

    def test_deleting_a_folder_as_an_object_removes_nothing(self, store: Store) -> None:
        store.put("a/object", b"x")
        store.delete("a")
        assert self.raw(store, "a/object") == b"x"

    def test_a_tree_is_deleted_whole_and_again(self, store: Store) -> None:
        store.put(f"{_FOLDER}/data/MANIFEST.json", b"{}")
        store.put(f"{_FOLDER}/data/deep/er/object", b"x")
        store.put_if_absent(f"{_FOLDER}/COMMIT", b"x")
        self.plant(store, f"{_FOLDER}/data/planted", b"x")
        store.put("run.json", b"{}")
        store.delete_tree(_FOLDER)
        store.delete_tree(_FOLDER)
        assert store.list_names("") == ["run.json"]
        assert store.list_names(_FOLDER) == []
        assert self.raw(store, f"{_FOLDER}/data/deep/er/object") is None

    def test_a_whole_root_is_never_deleted(self, store: Store) -> None:
        store.put("run.json", b"{}")
        with pytest.raises(ConfigError):
            store.delete_tree("")
        assert self.raw(store, "run.json") == b"{}"

    # Durability

    def test_making_durable_changes_nothing_that_can_be_seen(self, store: Store) -> None:
        store.put(f"{_FOLDER}/data/object", b"x")
        store.make_durable(_FOLDER)
        store.make_durable(f"{_FOLDER}/data/")
        store.make_durable("")
        store.make_durable("absent/folder")
        assert store.list_names("") == [f"{_FOLDER}/"]
        assert self.raw(store, f"{_FOLDER}/data/object") == b"x"

    def _write(self, store: Store, key: str, data: bytes) -> None:
        with store.open_writer(key, length_bytes=len(data)) as writer:
            writer.write(data)
            writer.finish()


def _replacing(store: Store) -> Replacing:
    if not isinstance(store, Replacing):
        pytest.skip("this store does not offer to replace an object")
    return store


def _pattern(size_bytes: int, start: int = 0) -> bytes:
    """Bytes that tell one offset from the next, and one ``start`` from another."""
    unit = b"".join(
        (start * 2**20 + number).to_bytes(4, "big") for number in range(min(size_bytes // 4 + 1, 2**14))
    )
    return (unit * (size_bytes // len(unit) + 1))[:size_bytes]


def _as_doubles(data: bytearray) -> memoryview:
    """64 bytes, seen as a matrix of float64."""
    view: Any = memoryview(data).cast("d", shape=(2, 4))
    return cast("memoryview", view)


def _read(read_into: Callable[[int, memoryview], int], offset_bytes: int, length_bytes: int) -> bytes:
    buffer = bytearray(length_bytes)
    assert read_into(offset_bytes, memoryview(buffer)) == length_bytes
    return bytes(buffer)


def _together(tasks: list[Callable[[], object]]) -> None:
    """Run tasks in threads that begin at one moment; raise what any of them raised."""
    gate = threading.Barrier(len(tasks))
    errors: list[BaseException] = []

    def run(task: Callable[[], object]) -> None:
        try:
            gate.wait(_WAIT_S)
            task()
        except BaseException as error:  # noqa: BLE001 - raised below, in the test's own thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(task,), daemon=True) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_WAIT_S)
        if thread.is_alive():
            raise TimeoutError(f"a thread did not end within {_WAIT_S} s")
    if errors:
        raise errors[0]
