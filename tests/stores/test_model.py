"""A folder and a dictionary do the same to every sequence of operations."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from strongroom.errors import StrongroomError
from strongroom.stores import LocalStore, MemoryStore, Store

_KEYS = st.sampled_from(["a", "a/b", "a/b/c", "a/d", "ab", "e/f", "../a", "e//f", ""])
_DATA = st.binary(max_size=12)


def _write(store: Store, key: str, data: bytes, announced_bytes: int) -> None:
    with store.open_writer(key, length_bytes=announced_bytes) as writer:
        writer.write(data[:3])
        writer.write(data[3:])
        writer.finish()


def _range(store: Store, key: str, offset_bytes: int, length_bytes: int) -> tuple[int, bytes, int]:
    buffer = bytearray(length_bytes)
    with store.open_reader(key) as reader:
        return reader.read_into(offset_bytes, memoryview(buffer)), bytes(buffer), reader.size_bytes


_Operation = Callable[[Store], object]
_OPERATIONS: st.SearchStrategy[tuple[str, _Operation]] = st.one_of(
    st.builds(lambda k, d: (f"put {k} {d!r}", lambda s: s.put(k, d)), _KEYS, _DATA),
    st.builds(lambda k, d: (f"put_if_absent {k} {d!r}", lambda s: s.put_if_absent(k, d)), _KEYS, _DATA),
    st.builds(
        lambda k, d, n: (f"write {k} {d!r} as {n}", lambda s: _write(s, k, d, n)),
        _KEYS,
        _DATA,
        st.integers(0, 14),
    ),
    st.builds(
        lambda k, d: (f"write {k} {d!r}", lambda s: _write(s, k, d, len(d))),
        _KEYS,
        _DATA,
    ),
    st.builds(lambda k, n: (f"read {k} {n}", lambda s: s.read(k, limit_bytes=n)), _KEYS, st.integers(0, 12)),
    st.builds(
        lambda k, o, n: (f"range {k} {o} {n}", lambda s: _range(s, k, o, n)),
        _KEYS,
        st.integers(0, 14),
        st.integers(0, 14),
    ),
    st.builds(lambda k: (f"size {k}", lambda s: s.stat(k).size_bytes), _KEYS),
    st.builds(lambda k: (f"delete {k}", lambda s: s.delete(k)), _KEYS),
    st.builds(lambda k: (f"delete_tree {k}", lambda s: s.delete_tree(k)), _KEYS),
    st.builds(lambda k: (f"make_durable {k}", lambda s: s.make_durable(k)), _KEYS),
)


def _outcome(operation: _Operation, store: Store) -> object:
    try:
        return operation(store)
    except StrongroomError as error:
        return type(error)


def _objects(store: Store, prefix: str = "") -> dict[str, bytes]:
    found = {}
    for name in store.list_names(prefix):
        path = f"{prefix}/{name}" if prefix else name
        if name.endswith("/"):
            # A folder that holds nothing exists on a disk and not in a dictionary: it adds nothing.
            found.update(_objects(store, path.rstrip("/")))
        else:
            found[path] = store.read(path, limit_bytes=100)
    return found


@given(st.lists(_OPERATIONS, max_size=30))
def test_a_folder_and_a_dictionary_agree(operations: list[tuple[str, _Operation]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        local, memory = LocalStore(Path(folder, "run")), MemoryStore()
        for told, operation in operations:
            # A folder left empty still takes its name on a disk, where a bucket knows none.
            for empty in _empty_folders(Path(folder, "run")):
                local.delete_tree(empty)
            assert _outcome(operation, local) == _outcome(operation, memory), told
            assert _objects(local) == _objects(memory), told


def _empty_folders(root: Path) -> list[str]:
    """Folders with no file anywhere in them."""
    folders = [path for path in root.rglob("*") if path.is_dir()]
    return [
        str(path.relative_to(root))
        for path in folders
        if not any(below.is_file() for below in path.rglob("*"))
    ]
