"""What a store promises; every store implements this, and `strongroom.testing` holds it to it.

A key is a relative path with ``/`` between its parts, as made by `strongroom.layout`; it
never climbs out, is never absolute, and no part of it is empty or begins with a dot. A store
refuses any other key with `ConfigError` (`check_key`, `check_prefix`), and never follows a
symbolic link below its root: on the way to a read one is a `FormatError`, on the way to a
write a `StoreError`.

A store turns each failure into one of `strongroom.errors`' store errors, and into nothing
else, but for the errors that a method names: `ObjectNotFoundError` only when the object is
definitely absent.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from strongroom.errors import ConfigError, FormatError
from strongroom.layout import check_relative_path

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "Buffer",
    "ObjectInfo",
    "ObjectReader",
    "ObjectWriter",
    "Store",
    "check_key",
    "check_prefix",
    "is_temporary",
    "temporary_name",
]

Buffer = bytes | bytearray | memoryview

_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.tmp")


def check_key(key: str) -> str:
    """Return a key unchanged if it is one.

    Raises:
        ConfigError: it is absolute, climbs out, has an empty or hidden part, or holds
            anything that `strongroom.layout` never puts into a name.
    """
    try:
        return check_relative_path(key)
    except FormatError as error:
        raise ConfigError(f"not a key of a store: {error}") from None


def check_prefix(prefix: str) -> str:
    """As `check_key`, for a folder: a trailing ``/`` is cut off, and ``""`` is the root."""
    return check_key(prefix.removesuffix("/")) if prefix else ""


def temporary_name(name: str, nonce: str) -> str:
    """What an object is called until it is whole; never a key, since it begins with a dot.

    Args:
        name: the object's last part.
        nonce: 16 lower-case hex digits.
    """
    return f".{name}.{nonce}.tmp"


def is_temporary(name: str) -> bool:
    """Whether a name is one of `temporary_name`'s; such names are never listed."""
    return _TEMPORARY.fullmatch(name) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """What a store knows of an object without reading it.

    Attributes:
        size_bytes: its length.
        version: differs whenever the content may differ (an ETag; inode and times).
        modified_ns: when the store last saw it written, nanoseconds since the epoch by the
            store's clock.
    """

    size_bytes: int
    version: str
    modified_ns: int


class ObjectWriter(Protocol):
    """One object being written, in order, by one thread.

    Used as a context manager it aborts unless `finish` returned. Until then a reader may see
    nothing of the object or a part of it.
    """

    def write(self, data: Buffer) -> None:
        """Append all of ``data``; a C-contiguous buffer of any item type counts as its bytes.

        Raises:
            StoreError: the store refused, the object would grow beyond the length that was
                announced, or the writer had failed or ended before.
        """

    def finish(self) -> None:
        """Return once every byte is on stable storage; the name follows with `Store.make_durable`.

        A failure to make bytes durable is final: the object must not be used, writing it out
        again under this key is refused, and so is `Store.make_durable` of any folder that it
        lies in, and with that a `Store.put_if_absent` that would commit it.

        Raises:
            StoreError: that failure, fewer bytes than announced, or an earlier failed write.
        """

    def abort(self) -> None:
        """Give the object up, remove what stands of it and free what it held.

        Fine when repeated, and without effect after `finish` returned.
        """

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class ObjectReader(Protocol):
    """One object open for reading; `read_into` may be called from several threads at once."""

    @property
    def size_bytes(self) -> int:
        """The object's length when it was opened."""

    def read_into(self, offset_bytes: int, buffer: memoryview) -> int:
        """Fill ``buffer`` from ``offset_bytes``; return how many bytes were filled.

        Fewer than ``len(buffer)`` only where the object ends.
        """

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


@runtime_checkable
class Store(Protocol):
    """Objects under one root: a folder, a bucket's prefix, a dictionary.

    Reading creates nothing, and neither does building one.
    """

    @property
    def uri(self) -> str:
        """Where the root is, for people: ``file:///runs/a``, ``s3://bucket/prefix``."""

    def open_writer(self, key: str, *, length_bytes: int) -> ObjectWriter:
        """Begin a new object of exactly ``length_bytes`` at its final name.

        Raises:
            ObjectExistsError: the key exists already: an object is never overwritten.
            StoreError: the store refused.
        """

    def put(self, key: str, data: Buffer) -> None:
        """Create a small object whole; its bytes are on stable storage on return.

        Raises:
            StoreError: as `open_writer`.
        """

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        """Create ``key`` whole, at once and durably, name included; say whether this call did.

        A commit rests on this: of two writers exactly one sees ``True``, a reader sees all
        of the bytes or no object, and on return the object that stands (this call's or the
        other's) survives a power cut. It makes durable first what `make_durable` would for the
        key's folder; for a key directly under the root only the root itself, whose folders
        belong to attempts that must not wait for or fail one another.

        After a lost answer a store looks whose object stands before it answers ``False``. Where this
        identity may not look the answer is ``False`` too: a caller that alone ever writes the key then
        knows that it is its own.

        Raises:
            StoreError: the object was not created by this call and never will be.
            OutcomeUnknownError: the object may or may not stand.
        """

    def make_durable(self, prefix: str) -> None:
        """Return once every name created under ``prefix`` by this store survives a power cut.

        A file system fsyncs the folders, new ancestors included; an object store returns at once.

        Raises:
            StoreError: it could not, or something under ``prefix`` could not be made durable
                before; that is final.
        """

    def read(self, key: str, *, limit_bytes: int) -> bytes:
        """The whole object.

        Raises:
            ObjectNotFoundError: it is absent.
            FormatError: it is longer than ``limit_bytes``; nothing of it was kept.
        """

    def open_reader(self, key: str) -> ObjectReader:
        """Open an object for ranged reads.

        Raises:
            ObjectNotFoundError: it is absent.
        """

    def stat(self, key: str) -> ObjectInfo:
        """What is known of an object without reading it.

        Raises:
            ObjectNotFoundError: it is absent.
        """

    def list_names(self, prefix: str) -> list[str]:
        """The names directly under ``prefix`` (``""``: the root), sorted; folders end in ``/``.

        An absent folder lists as empty: a bucket cannot tell the two apart. A folder that holds
        nothing may be listed or not, for the same reason.
        """

    def delete(self, key: str) -> None:
        """Remove an object durably; absent is fine."""

    def delete_tree(self, prefix: str) -> None:
        """Remove every object under ``prefix`` durably; absent is fine. Safe to repeat after a crash.

        Raises:
            ConfigError: ``prefix`` is the root: a whole run is not removed by one wrong string.
        """
