"""A store in memory: the reference model that the others are compared with, and a fast one for tests.

Nothing in it is random, and time is the caller's where a ``clock_ns`` is given. As on a file
system, an object that is being written is there in part, and one name is never both an object
and a folder.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from strongroom.errors import (
    ConfigError,
    FormatError,
    ObjectExistsError,
    ObjectNotFoundError,
    StoreError,
)
from strongroom.stores.base import Buffer, ObjectInfo, check_key, check_prefix, is_temporary

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["MemoryReader", "MemoryStore", "MemoryWriter"]


@dataclass(slots=True)
class _Object:
    room: bytearray
    """As long as the object will be; never resized, so that open readers may look into it."""
    size_bytes: int
    version: int
    modified_ns: int

    @property
    def data(self) -> memoryview:
        return memoryview(self.room)[: self.size_bytes]


class MemoryStore:
    """Objects in a dictionary; safe to use from several threads.

    Args:
        name: what tells this one from others in `uri`.
        clock_ns: the store's clock, nanoseconds since the epoch.
    """

    def __init__(self, name: str = "store", *, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._name = name
        self._clock_ns = clock_ns
        self._lock = threading.RLock()
        self._objects: dict[str, _Object] = {}
        self._versions = 0

    @property
    def uri(self) -> str:
        return f"memory://{self._name}"

    def __repr__(self) -> str:
        return f"MemoryStore({self._name!r})"

    def open_writer(self, key: str, *, length_bytes: int) -> MemoryWriter:
        check_key(key)
        if length_bytes < 0:
            raise ConfigError(f"an object's length is not negative, got {length_bytes} for {key}")
        with self._lock:
            if not self._add(key, bytearray(length_bytes), size_bytes=0):
                raise ObjectExistsError(
                    f"{key} exists in {self.uri}; an object is never overwritten: write it under another name"
                )
            return MemoryWriter(self, key, self._objects[key], length_bytes)

    def put(self, key: str, data: Buffer) -> None:
        view = memoryview(data)
        with self.open_writer(key, length_bytes=view.nbytes) as writer:
            writer.write(view)
            writer.finish()

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        check_key(key)
        content = bytearray(memoryview(data).tobytes())
        with self._lock:
            return self._add(key, content, size_bytes=len(content))

    def replace(self, key: str, data: Buffer, *, version: str | None) -> bool:
        """Put an object in another's place; see `strongroom.stores.offers.Replacing`."""
        if version is None:
            return self.put_if_absent(key, data)
        check_key(key)
        content = bytearray(memoryview(data).tobytes())
        with self._lock:
            found = self._objects.get(key)
            if found is None or str(found.version) != version:
                return False
            self._objects[key] = self._object(content, len(content))
        return True

    def make_durable(self, prefix: str) -> None:
        check_prefix(prefix)

    def read(self, key: str, *, limit_bytes: int) -> bytes:
        with self._lock:
            data = self._find(key).data
            if len(data) > limit_bytes:
                raise FormatError(
                    f"{key} in {self.uri} holds {len(data)} bytes, at most {limit_bytes} were expected"
                )
            return bytes(data)

    def open_reader(self, key: str) -> MemoryReader:
        with self._lock:
            return MemoryReader(key, self._find(key).data)

    def stat(self, key: str) -> ObjectInfo:
        with self._lock:
            found = self._find(key)
            return ObjectInfo(
                size_bytes=found.size_bytes, version=str(found.version), modified_ns=found.modified_ns
            )

    def list_names(self, prefix: str) -> list[str]:
        prefix = check_prefix(prefix)
        start = len(prefix) + 1 if prefix else 0
        with self._lock:
            names = set()
            for key in self._under(prefix):
                name, slash, _ = key[start:].partition("/")
                names.add(name + slash)
        return sorted(name for name in names if not is_temporary(name))

    def delete(self, key: str) -> None:
        check_key(key)
        with self._lock:
            self._objects.pop(key, None)

    def delete_tree(self, prefix: str) -> None:
        prefix = check_prefix(prefix)
        if not prefix:
            raise ConfigError("delete_tree never removes a whole root; drop the MemoryStore instead")
        with self._lock:
            for key in self._under(prefix):
                del self._objects[key]

    def contents(self) -> dict[str, bytes]:
        """A copy of everything, by key: for tests that look behind the store."""
        with self._lock:
            return {key: bytes(found.data) for key, found in sorted(self._objects.items())}

    def plant(self, objects: Mapping[str, bytes]) -> None:
        """Put objects in place, over what stands there and under any name: for tests that do damage."""
        with self._lock:
            for key, data in objects.items():
                self._objects[key] = self._object(bytearray(data), len(data))

    def _add(self, key: str, room: bytearray, *, size_bytes: int) -> bool:
        """Create an object, unless its key is taken by one."""
        parts = key.split("/")
        for depth in range(1, len(parts)):
            if "/".join(parts[:depth]) in self._objects:
                raise StoreError(f"{key}: an object stands where a folder is needed in {self.uri}; remove it")
        if key in self._objects:
            return False
        if self._under(key):
            raise ObjectExistsError(
                f"{key}: a folder stands there in {self.uri}; write it under another name"
            )
        self._objects[key] = self._object(room, size_bytes)
        return True

    def _object(self, room: bytearray, size_bytes: int) -> _Object:
        self._versions += 1
        return _Object(room, size_bytes, self._versions, self._clock_ns())

    def _grow(self, found: _Object, data: bytes) -> None:
        with self._lock:
            found.room[found.size_bytes : found.size_bytes + len(data)] = data
            found.size_bytes += len(data)
            self._versions += 1
            found.version, found.modified_ns = self._versions, self._clock_ns()

    def _drop(self, key: str, found: _Object) -> None:
        with self._lock:
            if self._objects.get(key) is found:
                del self._objects[key]

    def _find(self, key: str) -> _Object:
        try:
            return self._objects[check_key(key)]
        except KeyError:
            raise ObjectNotFoundError(f"{key} does not exist in {self.uri}") from None

    def _under(self, prefix: str) -> list[str]:
        if not prefix:
            return list(self._objects)
        return [key for key in self._objects if key.startswith(prefix + "/")]


class MemoryWriter:
    """An object being written; `MemoryStore` shows what there is of it."""

    def __init__(self, store: MemoryStore, key: str, found: _Object, length_bytes: int) -> None:
        self._store = store
        self._key = key
        self._object = found
        self._length_bytes = length_bytes
        self._written_bytes = 0
        self._has_ended = False
        self._is_finished = False

    def write(self, data: Buffer) -> None:
        self._refuse_ended()
        view = memoryview(data)
        if self._written_bytes + view.nbytes > self._length_bytes:
            self._has_ended = True
            raise StoreError(
                f"{self._key}: {self._length_bytes} bytes were announced, and "
                f"{self._written_bytes + view.nbytes} were handed over; announce what is written"
            )
        self._store._grow(self._object, view.tobytes())
        self._written_bytes += view.nbytes

    def finish(self) -> None:
        self._refuse_ended()
        self._has_ended = True
        if self._written_bytes != self._length_bytes:
            raise StoreError(
                f"{self._key}: {self._length_bytes} bytes were announced, and only {self._written_bytes} "
                f"were handed over; write all of them before finish"
            )
        self._is_finished = True

    def abort(self) -> None:
        self._has_ended = True
        if not self._is_finished:
            self._store._drop(self._key, self._object)

    def _refuse_ended(self) -> None:
        if self._has_ended:
            raise StoreError(f"{self._key}: its writer has ended or failed before; nothing more is written")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abort()


class MemoryReader:
    """The bytes of an object as they were when it was opened."""

    def __init__(self, key: str, data: memoryview) -> None:
        self._key = key
        self._data = data
        self._is_closed = False

    @property
    def size_bytes(self) -> int:
        return len(self._data)

    def read_into(self, offset_bytes: int, buffer: memoryview) -> int:
        if self._is_closed:
            raise StoreError(f"{self._key}: its reader was closed")
        if not buffer.nbytes:
            return 0
        target = buffer if buffer.format == "B" and buffer.ndim == 1 else buffer.cast("B")
        piece = self._data[offset_bytes : offset_bytes + len(target)]
        target[: len(piece)] = piece
        return len(piece)

    def close(self) -> None:
        self._is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
