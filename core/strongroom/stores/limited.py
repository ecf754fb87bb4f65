"""A store that refuses by itself what its user may not do, and everything once it was closed.

It decides nothing: a rule that is handed in is asked before each call, with the operation and the key. What
the store beneath offers besides `Store` (`strongroom.stores.offers`) it offers too, and nothing more.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, cast

from strongroom.errors import AccessDeniedError
from strongroom.stores.base import Buffer, ObjectInfo, ObjectReader, ObjectWriter, Store
from strongroom.stores.offers import (
    Bounded,
    Detailing,
    Outlining,
    Replacing,
    Resuming,
    Space,
    Spacious,
    Tuning,
    Unfinished,
    Upload,
    tuning_of,
)

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["LimitedStore", "Operation", "Rule", "limited", "unlimited"]


class Operation(enum.Enum):
    """What can be done to the objects of a store."""

    CREATE = "create"
    READ = "read"
    LIST = "list"
    DELETE = "delete"


Rule = Callable[[Operation, str], None]
"""Raises `AccessDeniedError` where an operation on a key, or on a folder, is not allowed."""


class LimitedStore:
    """A store under a rule. Made by `limited`, which sees what the store beneath offers.

    Args:
        inner: what carries out what is allowed.
        rule: asked before each operation.
    """

    def __init__(self, inner: Store, rule: Rule) -> None:
        self._inner: Store | None = inner
        self._rule: Final = rule
        self._closed_because = ""
        self.uri: Final = inner.uri
        self.tuning: Final[Tuning] = tuning_of(inner)

    def close(self, why: str) -> None:
        """Refuse everything from now on, readers that are open included, and let go of the store beneath.

        Args:
            why: for people.
        """
        self._closed_because = why
        self._inner = None

    @property
    def open_inner(self) -> Store:
        """The store beneath.

        Raises:
            AccessDeniedError: this one was closed.
        """
        if self._inner is None:
            raise AccessDeniedError(f"{self.uri}: {self._closed_because}")
        return self._inner

    def _asked(self, operation: Operation, key: str) -> Store:
        inner = self.open_inner
        self._rule(operation, key)
        return inner

    def __repr__(self) -> str:
        return f"LimitedStore({self.uri!r})"

    def open_writer(self, key: str, *, length_bytes: int) -> ObjectWriter:
        return self._asked(Operation.CREATE, key).open_writer(key, length_bytes=length_bytes)

    def put(self, key: str, data: Buffer) -> None:
        self._asked(Operation.CREATE, key).put(key, data)

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        return self._asked(Operation.CREATE, key).put_if_absent(key, data)

    def make_durable(self, prefix: str) -> None:
        # It changes nothing that this store did not create before, which the rule has seen.
        self.open_inner.make_durable(prefix)

    def read(self, key: str, *, limit_bytes: int) -> bytes:
        return self._asked(Operation.READ, key).read(key, limit_bytes=limit_bytes)

    def open_reader(self, key: str) -> ObjectReader:
        return _LimitedReader(self, key, self._asked(Operation.READ, key).open_reader(key))

    def stat(self, key: str) -> ObjectInfo:
        return self._asked(Operation.READ, key).stat(key)

    def list_names(self, prefix: str) -> list[str]:
        return self._asked(Operation.LIST, prefix).list_names(prefix)

    def delete(self, key: str) -> None:
        self._asked(Operation.DELETE, key).delete(key)

    def delete_tree(self, prefix: str) -> None:
        self._asked(Operation.DELETE, prefix).delete_tree(prefix)


class _LimitedReader:
    """An open object; it ends with the store that it came from, and with what the rule allows."""

    def __init__(self, store: LimitedStore, key: str, inner: ObjectReader) -> None:
        self._store = store
        self._key = key
        self._inner = inner

    @property
    def size_bytes(self) -> int:
        return self._inner.size_bytes

    def read_into(self, offset_bytes: int, buffer: memoryview) -> int:
        self._store._asked(Operation.READ, self._key)  # what was allowed then may be over
        return self._inner.read_into(offset_bytes, buffer)

    def close(self) -> None:
        self._inner.close()

    def __enter__(self) -> Self:
        self._inner.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._inner.__exit__(kind, error, trace)


# ----------------------------------------------------------------------------------------------------- offers
#
# The casts hold: `limited` picks a class only where the store beneath makes the offer.


class _Bounds(LimitedStore):
    def put_if_absent_within(self, key: str, data: Buffer, within_s: float) -> bool:
        inner: Bounded = cast(Bounded, self._asked(Operation.CREATE, key))
        return inner.put_if_absent_within(key, data, within_s)


class _Replaces(LimitedStore):
    def replace(self, key: str, data: Buffer, *, version: str | None) -> bool:
        # What is replaced is gone: it takes both rights.
        self._asked(Operation.CREATE, key)
        inner: Replacing = cast(Replacing, self._asked(Operation.DELETE, key))
        return inner.replace(key, data, version=version)


class _Outlines(LimitedStore):
    def outline(self, fold: str) -> Mapping[str, ObjectInfo | None]:
        inner: Outlining = cast(Outlining, self._asked(Operation.LIST, ""))
        return inner.outline(fold)


class _Details(LimitedStore):
    def details(self, prefix: str) -> Mapping[str, ObjectInfo]:
        inner: Detailing = cast(Detailing, self._asked(Operation.LIST, prefix))
        return inner.details(prefix)


class _Resumes(LimitedStore):
    def begin_upload(self, key: str, *, length_bytes: int) -> Upload:
        inner: Resuming = cast(Resuming, self._asked(Operation.CREATE, key))
        return inner.begin_upload(key, length_bytes=length_bytes)

    def resume_upload(self, key: str, *, length_bytes: int, token: str) -> Upload | None:
        inner: Resuming = cast(Resuming, self._asked(Operation.CREATE, key))
        return inner.resume_upload(key, length_bytes=length_bytes, token=token)

    def unfinished_uploads(self) -> list[Unfinished]:
        inner: Resuming = cast(Resuming, self._asked(Operation.LIST, ""))
        return inner.unfinished_uploads()

    def abort_upload(self, upload: Unfinished) -> None:
        # Who may create an object may give up creating it, and who may delete one may delete half of it.
        try:
            inner: Resuming = cast(Resuming, self._asked(Operation.CREATE, upload.key))
        except AccessDeniedError:
            inner = cast(Resuming, self._asked(Operation.DELETE, upload.key))
        inner.abort_upload(upload)


class _HasSpace(LimitedStore):
    def space(self) -> Space:
        inner: Spacious = cast(Spacious, self.open_inner)
        return inner.space()


_OFFERS: Final[tuple[tuple[Any, type[LimitedStore]], ...]] = (
    (Bounded, _Bounds),
    (Replacing, _Replaces),
    (Outlining, _Outlines),
    (Detailing, _Details),
    (Resuming, _Resumes),
    (Spacious, _HasSpace),
)


@functools.cache
def _kind_for(offered: tuple[type[LimitedStore], ...]) -> type[LimitedStore]:
    return type("LimitedStore", offered, {}) if offered else LimitedStore


def limited(inner: Store, rule: Rule) -> LimitedStore:
    """A store that asks a rule first, and offers what the one beneath does.

    Args:
        inner: what carries out what is allowed.
        rule: raises where an operation on a key, or on a folder, is not allowed.
    """
    return _kind_for(tuple(kind for offer, kind in _OFFERS if isinstance(inner, offer)))(inner, rule)


def unlimited(store: Store) -> Store:
    """The store beneath, for questions about where it is; a store under no rule is itself.

    Raises:
        AccessDeniedError: it was closed.
    """
    while isinstance(store, LimitedStore):
        store = store.open_inner
    return store
