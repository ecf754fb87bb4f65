"""Stores to copy to: one with atomic objects and uploads that outlive a process, and one that is watched."""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from strongroom.errors import AccessDeniedError, ObjectExistsError, StoreError, StoreUnavailableError
from strongroom.stores.memory import MemoryStore
from strongroom.stores.offers import Unfinished

__all__ = ["PART_BYTES", "Bucket", "Watched", "WatchedBucket", "WatchedResuming"]

PART_BYTES = 4096


class Bucket(MemoryStore):
    """Like a bucket: an object is there whole or not at all, and an upload outlives who has begun it.

    Attributes:
        denied: operations that this identity may not do: ``read``, ``list``, ``delete``, ``parts``.
        sent: how often each part of each key was sent.
        fail_on: the end of keys that cannot be created.
        hidden: the end of keys that cannot be read.
    """

    def __init__(self, name: str = "bucket", *, part_bytes: int = PART_BYTES) -> None:
        super().__init__(name)
        self.denied: set[str] = set()
        self.sent: Counter[tuple[str, int]] = Counter()
        self.part_hook: Callable[[str, int], None] | None = None
        self.fail_on: str | None = None
        self.hidden: str | None = None
        self._part_bytes = part_bytes
        self._uploads: dict[str, tuple[str, int, dict[int, bytes]]] = {}
        self._tokens = itertools.count(1)

    def open_writer(self, key: str, *, length_bytes: int) -> Any:
        return _WholeWriter(self, key, length_bytes)

    def read(self, key: str, *, limit_bytes: int) -> bytes:
        self._refuse("read")
        return super().read(key, limit_bytes=limit_bytes)

    def open_reader(self, key: str) -> Any:
        self._refuse("read")
        if self.hidden is not None and key.endswith(self.hidden):
            raise AccessDeniedError(f"{key} is denied to this identity")
        return super().open_reader(key)

    def stat(self, key: str) -> Any:
        self._refuse("read")
        return super().stat(key)

    def list_names(self, prefix: str) -> list[str]:
        self._refuse("list")
        return super().list_names(prefix)

    def put_if_absent(self, key: str, data: Any) -> bool:
        if self.fail_on is not None and key.endswith(self.fail_on):
            raise StoreUnavailableError("the line went down")
        return super().put_if_absent(key, data)

    def delete(self, key: str) -> None:
        self._refuse("delete")
        super().delete(key)

    def begin_upload(self, key: str, *, length_bytes: int) -> _Upload:
        token = f"upload-{next(self._tokens)}"
        self._uploads[token] = (key, length_bytes, {})
        return _Upload(self, token)

    def resume_upload(self, key: str, *, length_bytes: int, token: str) -> _Upload | None:
        self._refuse("parts")
        found = self._uploads.get(token)
        return _Upload(self, token) if found is not None and found[:2] == (key, length_bytes) else None

    def unfinished_uploads(self) -> list[Unfinished]:
        return [Unfinished(key=key, token=token, began_ns=0) for token, (key, _, _) in self._uploads.items()]

    def abort_upload(self, upload: Unfinished) -> None:
        self._uploads.pop(upload.token, None)

    def _refuse(self, operation: str) -> None:
        if operation in self.denied:
            raise AccessDeniedError(f"{operation} is denied to this identity")


class _WholeWriter:
    def __init__(self, bucket: Bucket, key: str, length_bytes: int) -> None:
        self._bucket = bucket
        self._key = key
        self._data = bytearray()

    def write(self, data: Any) -> None:
        self._data += memoryview(data)

    def finish(self) -> None:
        if not self._bucket.put_if_absent(self._key, self._data):
            raise ObjectExistsError(f"{self._key} exists")

    def abort(self) -> None:
        self._data.clear()

    def __enter__(self) -> _WholeWriter:
        return self

    def __exit__(self, *_: object) -> None:
        return


class _Upload:
    def __init__(self, bucket: Bucket, token: str) -> None:
        self._bucket = bucket
        self.token = token
        self.part_bytes = bucket._part_bytes

    @property
    def _parts(self) -> dict[int, bytes]:
        return self._bucket._uploads[self.token][2]

    def has_part(self, number: int, data: Any) -> bool:
        found = self._parts.get(number)
        return found is not None and hashlib.sha256(found).digest() == hashlib.sha256(data).digest()

    def write_part(self, number: int, data: Any) -> None:
        key, length, parts = self._bucket._uploads[self.token]
        if self._bucket.part_hook is not None:
            self._bucket.part_hook(key, number)
        if len(data) != min(self.part_bytes, length - number * self.part_bytes):
            raise StoreError(f"part {number} of {key} has {len(data)} bytes")
        self._bucket.sent[key, number] += 1
        parts[number] = bytes(data)

    def finish(self) -> None:
        key, length, parts = self._bucket._uploads[self.token]
        data = b"".join(parts[number] for number in sorted(parts))
        if len(data) != length:
            raise StoreError(f"parts of {key} are missing")
        if not self._bucket.put_if_absent(key, data):
            raise ObjectExistsError(f"{key} exists")
        del self._bucket._uploads[self.token]

    def abort(self) -> None:
        self._bucket._uploads.pop(self.token, None)


class _WatchedWriter:
    def __init__(self, store: Watched, key: str, inner: Any) -> None:
        self._store = store
        self._key = key
        self._inner = inner

    def write(self, data: Any) -> None:
        self._store._see("write", self._key)
        self._inner.write(data)

    def finish(self) -> None:
        self._store._see("finish", self._key)
        self._inner.finish()

    def abort(self) -> None:
        self._inner.abort()

    def __enter__(self) -> _WatchedWriter:
        self._inner.__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        self._inner.__exit__(*details)


class WatchedBucket:
    """A store whose uploads can be resumed, of which each part that is sent is first shown to a hook."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.sent: Counter[tuple[str, int]] = Counter()
        self.hook: Callable[[str, int], None] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def begin_upload(self, key: str, *, length_bytes: int) -> Any:
        return _WatchedUpload(self, key, self._inner.begin_upload(key, length_bytes=length_bytes))

    def resume_upload(self, key: str, *, length_bytes: int, token: str) -> Any:
        found = self._inner.resume_upload(key, length_bytes=length_bytes, token=token)
        return None if found is None else _WatchedUpload(self, key, found)


class _WatchedUpload:
    def __init__(self, bucket: WatchedBucket, key: str, inner: Any) -> None:
        self._bucket = bucket
        self._key = key
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write_part(self, number: int, data: Any) -> None:
        if self._bucket.hook is not None:
            self._bucket.hook(self._key, number)
        self._inner.write_part(number, data)
        self._bucket.sent[self._key, number] += 1


class Watched:
    """Any store, of which every operation on a key is first shown to a hook, which may wait or raise."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.log: list[tuple[str, str]] = []
        self.hook: Callable[[str, str], None] | None = None
        self._lock = threading.Lock()

    @property
    def uri(self) -> str:
        return str(self.inner.uri)

    def asked(self, operation: str) -> list[str]:
        """The keys that an operation was asked of, in order."""
        return [key for name, key in self.log if name == operation]

    def _see(self, operation: str, key: str) -> None:
        with self._lock:
            self.log.append((operation, key))
        if self.hook is not None:
            self.hook(operation, key)

    def open_writer(self, key: str, *, length_bytes: int) -> Any:
        self._see("open_writer", key)
        return _WatchedWriter(self, key, self.inner.open_writer(key, length_bytes=length_bytes))

    def put(self, key: str, data: Any) -> None:
        self._see("put", key)
        self.inner.put(key, data)

    def put_if_absent(self, key: str, data: Any) -> bool:
        self._see("put_if_absent", key)
        return bool(self.inner.put_if_absent(key, data))

    def make_durable(self, prefix: str) -> None:
        self._see("make_durable", prefix)
        self.inner.make_durable(prefix)

    def read(self, key: str, *, limit_bytes: int) -> bytes:
        self._see("read", key)
        return bytes(self.inner.read(key, limit_bytes=limit_bytes))

    def open_reader(self, key: str) -> Any:
        self._see("open_reader", key)
        return self.inner.open_reader(key)

    def stat(self, key: str) -> Any:
        self._see("stat", key)
        return self.inner.stat(key)

    def list_names(self, prefix: str) -> list[str]:
        self._see("list_names", prefix)
        return list(self.inner.list_names(prefix))

    def delete(self, key: str) -> None:
        self._see("delete", key)
        self.inner.delete(key)

    def delete_tree(self, prefix: str) -> None:
        self._see("delete_tree", prefix)
        self.inner.delete_tree(prefix)


class WatchedResuming(Watched):
    """As `Watched`, of a store whose uploads can be resumed."""

    def begin_upload(self, key: str, *, length_bytes: int) -> Any:
        return self.inner.begin_upload(key, length_bytes=length_bytes)

    def resume_upload(self, key: str, *, length_bytes: int, token: str) -> Any:
        return self.inner.resume_upload(key, length_bytes=length_bytes, token=token)

    def unfinished_uploads(self) -> Any:
        return self.inner.unfinished_uploads()

    def abort_upload(self, upload: Any) -> None:
        self.inner.abort_upload(upload)
