"""Where logs of access lie, and how they are read: files, folders and buckets, compressed or not.

A file is opened when its turn comes and is read in pieces, and what cannot be read of it is told as a
`Damage` and hides nothing that follows. Access logs are read a line at a time; a file of CloudTrail's is one
document, and is bounded.
"""

from __future__ import annotations

import io
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Final, Literal, Protocol

from strongroom.errors import ConfigError, FormatError, StoreError, StrongroomError
from strongroom.stores.base import Store
from strongroom.stores.open import open_store
from strongroom_security.auditlog.reconciling.accesses import Access, Damage
from strongroom_security.auditlog.reconciling.accesslogs import access_of_line
from strongroom_security.auditlog.reconciling.cloudtrail import accesses_of, records_of

__all__ = ["KINDS", "Kind", "LogFile", "find_logs", "read_log"]

Kind = Literal["access-log", "cloudtrail"]
KINDS: Final[tuple[Kind, ...]] = ("access-log", "cloudtrail")

MAX_LINE_BYTES: Final = 64 << 10
"""Of an access log; the longest parts of a line, its request and its program, have 8 KiB each at S3."""
MAX_DOCUMENT_BYTES: Final = 256 << 20
"""Of a file of CloudTrail's, unpacked; those that it delivers have some tens of MB."""
_PIECE_BYTES: Final = 1 << 20
_GZIP: Final = b"\x1f\x8b"

_DELIVERED: Final = re.compile(
    r"(?P<day>[0-9]{4}-[0-9]{2}-[0-9]{2}-[0-9]{2}-[0-9]{2}-[0-9]{2})-[0-9A-F]{8,}"
    r"|.*_(?P<trail>[0-9]{8}T[0-9]{4})Z_[A-Za-z0-9]+\.json(?:\.gz)?"
)
"""How delivered files are called: access logs by their delivery, CloudTrail's likewise."""


class _Source(Protocol):
    """Bytes, read in order."""

    def read(self, length: int, /) -> bytes: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFile:
    """A file of a log.

    Attributes:
        name: for people.
        path: on this machine; None: it is in a store.
        store, key: where it is otherwise.
    """

    name: str
    path: Path | None = None
    store: Store | None = None
    key: str = ""

    def open(self) -> _Source:
        """
        Raises:
            OSError, StrongroomError: it cannot be opened.
        """
        if self.path is not None:
            return self.path.open("rb")
        if self.store is None:
            raise ConfigError(f"{self.name} is neither in a folder nor in a store")
        return _Object(self.store, self.key)


def find_logs(places: Sequence[str], *, since_ms: int | None = None) -> Iterator[LogFile | Damage]:
    """The files at each place: a file, a folder with all that is in it, or ``s3://BUCKET/PREFIX``.

    Args:
        since_ms: files that were delivered before are passed over, by their names.

    Raises:
        ConfigError: there is nothing at a place, or it cannot be looked into.
    """
    for place in places:
        if place[:5].lower() == "s3://":
            store = open_store(place)
            yield from _in_store(store, "", since_ms)
            continue
        path = Path(place)
        if path.is_dir():
            yield from _in_folder(path, since_ms)
        elif path.exists():
            yield LogFile(name=place, path=path)
        else:
            raise ConfigError(
                f"there is no log at {place!r:.200}; expected a file, a folder or s3://BUCKET/PREFIX"
            )


def _in_folder(path: Path, since_ms: int | None) -> Iterator[LogFile | Damage]:
    failures: list[OSError] = []
    for folder, folders, names in os.walk(path, onerror=failures.append):
        folders.sort()
        for name in sorted(names):
            if not name.startswith(".") and not _is_too_old(name, since_ms):
                yield LogFile(name=os.path.join(folder, name), path=Path(folder, name))
        while failures:
            failure = failures.pop()
            yield Damage(source=str(failure.filename), reason=failure.strerror or type(failure).__name__)
    for failure in failures:
        yield Damage(source=str(failure.filename), reason=failure.strerror or type(failure).__name__)


def _in_store(store: Store, folder: str, since_ms: int | None) -> Iterator[LogFile | Damage]:
    for name in store.list_names(folder):
        key = f"{folder}/{name}" if folder else name
        if name.endswith("/"):
            try:
                yield from _in_store(store, key.rstrip("/"), since_ms)
            except ConfigError:
                yield Damage(source=f"{store.uri}/{key}", reason="its name is none that a store here reads")
        elif not _is_too_old(name, since_ms):
            yield LogFile(name=f"{store.uri}/{key}", store=store, key=key)


def _is_too_old(name: str, since_ms: int | None) -> bool:
    match = _DELIVERED.fullmatch(name)
    if match is None or since_ms is None:
        return False
    form = "%Y-%m-%d-%H-%M-%S" if match["day"] else "%Y%m%dT%H%M"
    try:
        delivered = datetime.strptime(match["day"] or match["trail"], form).replace(tzinfo=timezone.utc)
    except ValueError:
        return False
    # What is delivered tells of what was before. A minute is cut off CloudTrail's name.
    return (delivered.timestamp() + 60) * 1000 < since_ms


def read_log(file: LogFile, kind: Kind | None = None) -> Iterator[Access | Damage]:
    """What a file tells, in its order; never raises for what is in it, or where it cannot be read.

    Args:
        kind: which log it is of; None: it is looked at.
    """
    try:
        source = file.open()
    except (OSError, StrongroomError) as error:
        yield Damage(source=file.name, reason=_why(error))
        return
    try:
        unpacked = _unpacked(source)
        first = unpacked.read(_PIECE_BYTES)
        if kind is None:
            kind = "cloudtrail" if first.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"[") else "access-log"
        read = _of_trail if kind == "cloudtrail" else _of_access_log
        yield from read(file, _Joined(first, unpacked))
    except (OSError, StoreError, FormatError, ConfigError, EOFError, zlib.error) as error:
        yield Damage(source=file.name, reason=_why(error))
    finally:
        source.close()


def _why(error: BaseException) -> str:
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return str(error)[:300] or type(error).__name__


def _of_access_log(file: LogFile, source: _Source) -> Iterator[Access | Damage]:
    for number, line in enumerate(_lines(source), start=1):
        place = f"{file.name}:{number}"
        if line is None:
            yield Damage(source=place, reason=f"a line of more than {MAX_LINE_BYTES} bytes")
            continue
        if not line.strip():
            continue
        try:
            access = access_of_line(line.decode("utf-8", "surrogateescape").rstrip("\r"), place)
        except FormatError as error:
            yield Damage(source=place, reason=str(error).removeprefix(f"{place} "))
            continue
        if access is not None:
            yield access


def _of_trail(file: LogFile, source: _Source) -> Iterator[Access | Damage]:
    pieces, length = [], 0
    while piece := source.read(_PIECE_BYTES):
        length += len(piece)
        if length > MAX_DOCUMENT_BYTES:
            yield Damage(source=file.name, reason=f"more than {MAX_DOCUMENT_BYTES} bytes in one document")
            return
        pieces.append(piece)
    text = b"".join(pieces).decode("utf-8-sig", "replace")
    for found in records_of(text, file.name):
        if isinstance(found, Damage):
            yield found
            continue
        place, event = found
        try:
            yield from accesses_of(event, place)
        except FormatError as error:
            yield Damage(source=place, reason=str(error).removeprefix(f"{place} "))


def _lines(source: _Source) -> Iterator[bytes | None]:
    """Lines without their feeds; None for one that is too long."""
    rest, is_skipping = b"", False
    while piece := source.read(_PIECE_BYTES):
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            if is_skipping or len(line) > MAX_LINE_BYTES:
                is_skipping = False
                yield None
            else:
                yield line
        if len(rest) > MAX_LINE_BYTES:
            rest, is_skipping = b"", True
    if is_skipping:
        yield None
    elif rest:
        yield rest


class _Joined:
    """What was read already, and the rest."""

    def __init__(self, first: bytes, rest: _Source) -> None:
        self._first, self._rest = first, rest

    def read(self, length: int, /) -> bytes:
        if self._first:
            first, self._first = self._first, b""
            return first
        return self._rest.read(length)

    def close(self) -> None:
        self._rest.close()


class _Object(io.RawIOBase):
    """An object of a store, from its beginning to its end."""

    def __init__(self, store: Store, key: str) -> None:
        super().__init__()
        self._reader = store.open_reader(key)
        self._offset = 0

    def read(self, length: int = -1, /) -> bytes:
        room = bytearray(min(length, self._reader.size_bytes - self._offset))
        if not room:
            return b""
        filled = self._reader.read_into(self._offset, memoryview(room))
        self._offset += filled
        return bytes(room[:filled])

    def close(self) -> None:
        if not self.closed:
            self._reader.close()
        super().close()


class _Unpacking:
    """What gzip holds, however many members it has one after another."""

    def __init__(self, first: bytes, source: _Source) -> None:
        self._source = source
        self._packed = first
        self._unpacker = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)

    def read(self, length: int, /) -> bytes:
        while True:
            if self._unpacker.eof:
                self._packed = self._unpacker.unused_data or self._source.read(_PIECE_BYTES)
                if not self._packed:
                    return b""
                self._unpacker = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
            elif not self._packed:
                self._packed = self._source.read(_PIECE_BYTES)
                if not self._packed:
                    raise EOFError("it is cut off: its compressed data has no end")
            # Bounded, whatever the data would come to.
            piece = self._unpacker.decompress(self._packed, length)
            self._packed = self._unpacker.unconsumed_tail
            if piece:
                return piece

    def close(self) -> None:
        self._source.close()


def _unpacked(source: _Source) -> _Source:
    first = source.read(_PIECE_BYTES)
    return _Unpacking(first, source) if first.startswith(_GZIP) else _Joined(first, source)
