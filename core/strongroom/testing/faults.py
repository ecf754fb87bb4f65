"""Fail the nth operation of any store, and see what is left.

::

    for store in every_fault(MemoryStore):
        try:
            save(store)
        except StrongroomError:
            pass
        check(store.inner)          # whatever failed, and however: what was committed is whole

`every_fault` runs through n = 1, 2, 3... for each kind of fault, as one failure and as one that
lasts, until a run needs no injection.
"""

from __future__ import annotations

import contextlib
import enum
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Final, TypeVar

from strongroom.errors import (
    AccessDeniedError,
    OutcomeUnknownError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
    StrongroomError,
)
from strongroom.stores.base import Buffer, ObjectInfo, ObjectReader, ObjectWriter, Store
from strongroom.stores.offers import Replacing

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Fault", "FaultyReader", "FaultyStore", "FaultyWriter", "Operation", "every_fault"]


class Fault(enum.Enum):
    """How an operation fails."""

    REFUSED = "refused"
    """Nothing was done; `StoreUnavailableError`."""
    TIMED_OUT = "timed out"
    """Nothing was done, but the caller cannot know: `OutcomeUnknownError` from `put_if_absent`
    and `replace`."""
    DENIED = "denied"
    """Nothing was done; `AccessDeniedError`."""
    FULL = "full"
    """Nothing was done; `StoreFullError`. Only of operations that need space."""
    ANSWER_LOST = "done but the answer was lost"
    """All was done; raised as `TIMED_OUT`."""
    TORN = "torn"
    """Half was done and stays, as when the process dies; `StoreUnavailableError`. Only of operations
    that are not atomic: an object half written, half of a tree removed."""


_Result = TypeVar("_Result")

_NEEDS_SPACE: Final = frozenset(
    {"open_writer", "write", "finish", "put", "put_if_absent", "replace", "make_durable"}
)
_TEARS: Final = frozenset({"open_writer", "write", "finish", "put", "delete_tree"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation that a `FaultyStore` was asked for.

    Attributes:
        number: counted from 1.
        name: the method's, of the store, a writer (``write``, ``finish``, ``abort``) or a reader
            (``read_into``).
        key: what it was asked of.
        failed: whether a fault was injected into it.
    """

    number: int
    name: str
    key: str
    failed: bool


class FaultyStore:
    """A store of which one operation, or each from one on, fails.

    Args:
        inner: the store that does the work.
        fail_at: which operation fails, counted from 1; None: none.
        fault: how. An operation that cannot fail so is carried out.
        lasting: every operation from then on fails too.
        only: the names of the operations that count and may fail; None: every one.

    Attributes:
        operations: everything that counted, in order.
    """

    def __init__(
        self,
        inner: Store,
        *,
        fail_at: int | None = None,
        fault: Fault = Fault.REFUSED,
        lasting: bool = False,
        only: Iterable[str] | None = None,
    ) -> None:
        self.inner: Final = inner
        self.fail_at: Final = fail_at
        self.fault: Final = fault
        self.lasting: Final = lasting
        self.operations: Final[list[Operation]] = []
        self._only = None if only is None else frozenset(only)
        self._lock = threading.Lock()

    @property
    def reached(self) -> bool:
        """Whether the operation that was to fail was asked for."""
        return self.fail_at is not None and len(self.operations) >= self.fail_at

    @property
    def injected(self) -> list[Operation]:
        """The operations that were made to fail."""
        return [operation for operation in self.operations if operation.failed]

    @property
    def uri(self) -> str:
        return self.inner.uri

    def __repr__(self) -> str:
        lasting = ", lasting" if self.lasting else ""
        return f"FaultyStore({self.inner!r}, operation {self.fail_at} {self.fault.value}{lasting})"

    def open_writer(self, key: str, *, length_bytes: int) -> FaultyWriter:
        writer = self._call(
            "open_writer",
            key,
            lambda: self.inner.open_writer(key, length_bytes=length_bytes),
            tear=lambda: self.inner.put(key, b""),
            lose=lambda writer: self._abandon(writer, key),
        )
        return FaultyWriter(self, writer, key)

    def put(self, key: str, data: Buffer) -> None:
        content = memoryview(data).tobytes()
        self._call(
            "put",
            key,
            lambda: self.inner.put(key, content),
            tear=lambda: self.inner.put(key, content[: len(content) // 2]),
        )

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        return self._call("put_if_absent", key, lambda: self.inner.put_if_absent(key, data))

    def replace(self, key: str, data: Buffer, *, version: str | None) -> bool:
        """See `strongroom.stores.offers.Replacing`, which the store that does the work has to offer."""
        inner = self.inner
        if not isinstance(inner, Replacing):
            raise StoreError(f"{key}: {inner.uri} replaces nothing")
        return self._call("replace", key, lambda: inner.replace(key, data, version=version))

    def make_durable(self, prefix: str) -> None:
        self._call("make_durable", prefix, lambda: self.inner.make_durable(prefix))

    def read(self, key: str, *, limit_bytes: int) -> bytes:
        return self._call("read", key, lambda: self.inner.read(key, limit_bytes=limit_bytes))

    def open_reader(self, key: str) -> FaultyReader:
        reader = self._call(
            "open_reader", key, lambda: self.inner.open_reader(key), lose=lambda reader: reader.close()
        )
        return FaultyReader(self, reader, key)

    def stat(self, key: str) -> ObjectInfo:
        return self._call("stat", key, lambda: self.inner.stat(key))

    def list_names(self, prefix: str) -> list[str]:
        return self._call("list_names", prefix, lambda: self.inner.list_names(prefix))

    def delete(self, key: str) -> None:
        self._call("delete", key, lambda: self.inner.delete(key))

    def delete_tree(self, prefix: str) -> None:
        self._call(
            "delete_tree",
            prefix,
            lambda: self.inner.delete_tree(prefix),
            tear=lambda: self._delete_half(prefix),
        )

    def _abandon(self, writer: ObjectWriter, key: str) -> None:
        """Free a writer whose answer was lost; the object was begun, and stays, empty."""
        writer.abort()
        self.inner.put(key, b"")

    def _delete_half(self, prefix: str) -> None:
        keys = sorted(_keys_under(self.inner, prefix.rstrip("/")))
        for key in keys[: (len(keys) + 1) // 2]:
            self.inner.delete(key)

    def _call(
        self,
        name: str,
        key: str,
        make: Callable[[], _Result],
        *,
        tear: Callable[[], object] | None = None,
        lose: Callable[[_Result], object] | None = None,
    ) -> _Result:
        operation = self._count(name, key)
        if operation is None or not operation.failed:
            return make()
        if self.fault is Fault.ANSWER_LOST:
            result = make()
            if lose is not None:
                lose(result)
        if self.fault is Fault.TORN and tear is not None:
            tear()
        raise _error(self.fault, operation)

    def _count(self, name: str, key: str) -> Operation | None:
        """The operation, if it is one that counts."""
        if self._only is not None and name not in self._only:
            return None
        with self._lock:
            number = len(self.operations) + 1
            is_due = self.fail_at is not None and (
                number >= self.fail_at if self.lasting else number == self.fail_at
            )
            fails = is_due and _can_fail(name, self.fault)
            operation = Operation(number=number, name=name, key=key, failed=fails)
            self.operations.append(operation)
        return operation


class FaultyWriter:
    """A writer whose every call counts as an operation of its store."""

    def __init__(self, store: FaultyStore, inner: ObjectWriter, key: str) -> None:
        self._store = store
        self._inner = inner
        self._key = key
        self._is_over = False
        # Only a torn object needs its bytes once more.
        self._written: bytearray | None = bytearray() if store.fault is Fault.TORN else None

    def write(self, data: Buffer) -> None:
        content = memoryview(data).tobytes()
        self._store._call(
            "write",
            self._key,
            lambda: self._inner.write(content),
            tear=lambda: self._tear(content[: len(content) // 2]),
        )
        if self._written is not None:
            self._written += content

    def finish(self) -> None:
        self._store._call("finish", self._key, self._inner.finish, tear=lambda: self._tear(b"", cut=True))
        self._is_over = True

    def abort(self) -> None:
        if self._is_over:
            return
        self._store._call("abort", self._key, self._inner.abort)
        self._is_over = True

    def _tear(self, more: bytes, *, cut: bool = False) -> None:
        written = bytes(self._written or b"")
        self._inner.abort()
        self._store.inner.put(self._key, written[: len(written) // 2] if cut else written + more)
        # The process "died": nobody comes to clean up.
        self._is_over = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.abort()
            return
        with contextlib.suppress(StoreError):
            self.abort()


class FaultyReader:
    """A reader whose every `read_into` counts as an operation of its store."""

    def __init__(self, store: FaultyStore, inner: ObjectReader, key: str) -> None:
        self._store = store
        self._inner = inner
        self._key = key

    @property
    def size_bytes(self) -> int:
        return self._inner.size_bytes

    def read_into(self, offset_bytes: int, buffer: memoryview) -> int:
        return self._store._call("read_into", self._key, lambda: self._inner.read_into(offset_bytes, buffer))

    def close(self) -> None:
        self._inner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def every_fault(
    make_inner: Callable[[], Store],
    *,
    faults: Iterable[Fault] = tuple(Fault),
    lasting: Iterable[bool] = (False, True),
    only: Iterable[str] | None = None,
) -> Iterator[FaultyStore]:
    """A `FaultyStore` for each operation of a run, each fault, single and lasting.

    Args:
        make_inner: makes the store that a run begins with; called once a run.
        faults: the kinds to try.
        lasting: whether to try one failure, failures that last, or both.
        only: as for `FaultyStore`.

    Yields:
        The store for one run. What the run asks of it decides when to stop: the last one of each
        kind is never made to fail.
    """
    counted = None if only is None else frozenset(only)
    for fault in faults:
        for is_lasting in lasting:
            fail_at = 1
            while True:
                store = FaultyStore(
                    make_inner(), fail_at=fail_at, fault=fault, lasting=is_lasting, only=counted
                )
                yield store
                if not store.reached:
                    break
                fail_at += 1


def _can_fail(name: str, fault: Fault) -> bool:
    if fault is Fault.FULL:
        return name in _NEEDS_SPACE
    if fault is Fault.TORN:
        return name in _TEARS
    return True


def _error(fault: Fault, operation: Operation) -> StrongroomError:
    told = f"{operation.name} of {operation.key!r}: {fault.value} (injected, operation {operation.number})"
    if fault is Fault.DENIED:
        return AccessDeniedError(told)
    if fault is Fault.FULL:
        return StoreFullError(told)
    if operation.name in ("put_if_absent", "replace") and fault in (Fault.TIMED_OUT, Fault.ANSWER_LOST):
        return OutcomeUnknownError(told)
    return StoreUnavailableError(told)


def _keys_under(store: Store, prefix: str) -> Iterator[str]:
    for name in store.list_names(prefix):
        if name.endswith("/"):
            yield from _keys_under(store, f"{prefix}/{name[:-1]}")
        else:
            yield f"{prefix}/{name}"
