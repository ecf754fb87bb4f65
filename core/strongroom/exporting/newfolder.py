"""A new folder that appears whole or not at all: made beside its place, made durable, then put there.

It is for folders outside of any run's root. Nothing that stands already is replaced or changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final

from strongroom.digest import Digest
from strongroom.errors import ConfigError
from strongroom.stores.calls import OsCalls
from strongroom.stores.errnos import NO_SAFE_RENAME, explaining
from strongroom.stores.files import write_all

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["NewFile", "NewFolder", "WrittenFile", "check_absent"]

_MAX_COPY_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFile:
    """A file of the folder: its name, its length, and the SHA-256 of what was written."""

    name: str
    size_bytes: int
    digest: Digest


class NewFile:
    """A file that is written once, from its beginning to its end."""

    def __init__(self, path: Path, calls: OsCalls) -> None:
        self.name = path.name
        self._path = path
        self._calls = calls
        self._hasher = hashlib.sha256()
        self._size_bytes = 0
        with explaining(str(path), "create"):
            self._fd = calls.open(str(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL)

    def write(self, data: memoryview) -> None:
        """Append bytes.

        Raises:
            StoreError: the file system did not take them.
        """
        view = data.cast("B") if data.nbytes else memoryview(b"")
        with explaining(str(self._path), "write"):
            write_all(self._calls, self._fd, view)
            self._calls.start_writeback(self._fd, self._size_bytes, len(view))
        self._hasher.update(view)
        self._size_bytes += len(view)

    def finish(self) -> WrittenFile:
        """Make the file durable.

        Raises:
            StoreError: it is not known to be.
        """
        with explaining(str(self._path), "write"):
            self._calls.fsync(self._fd)
        self.close()
        return WrittenFile(
            name=self.name, size_bytes=self._size_bytes, digest=Digest("sha256", self._hasher.digest())
        )

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._calls.close(fd)


class NewFolder:
    """Holds what is written until `publish`; left without that, it is removed, and nothing was there.

    Args:
        path: where it is to stand.
        calls: the system's.
    """

    def __init__(self, path: Path, calls: OsCalls | None = None) -> None:
        self.path = path
        self._calls = OsCalls() if calls is None else calls
        self._made: Path | None = None
        self._open: list[NewFile] = []

    def __enter__(self) -> Self:
        """Make the folder beside its place.

        Raises:
            ConfigError: something stands at its place, or its parent is no folder.
            StoreError: it cannot be made.
        """
        check_absent(self.path)
        made = self.path.parent / f".{self.path.name[:50]}.unfinished-{secrets.token_hex(8)}"
        with explaining(str(made), "create"):
            self._calls.mkdir(str(made))
        self._made = made
        return self

    def open(self, name: str) -> NewFile:
        """Begin a file."""
        if self._made is None:
            raise ConfigError(f"{self.path} is not being written")
        file = NewFile(self._made / name, self._calls)
        self._open.append(file)
        return file

    def put(self, name: str, data: bytes) -> WrittenFile:
        """Write a whole file."""
        file = self.open(name)
        file.write(memoryview(data))
        return file.finish()

    def copy(self, name: str, source: Path) -> WrittenFile:
        """Write what another file holds.

        Raises:
            ConfigError: the other cannot be read.
        """
        file = self.open(name)
        for piece in _pieces(source):
            file.write(piece)
        return file.finish()

    def publish(self) -> None:
        """Put the folder at its place, durably.

        Raises:
            ConfigError: something stands there meanwhile.
            StoreError: it could not be done; or it was done, and may not outlast a power cut.
        """
        made = self._made
        if made is None:
            raise ConfigError(f"{self.path} is not being written")
        self._fsync(made)
        with explaining(str(self.path), "create"), self._folder(self.path.parent) as parent_fd:
            try:
                self._calls.rename_no_replace(made.name, self.path.name, dir_fd=parent_fd)
            except FileExistsError:
                check_absent(self.path)
                raise
            except OSError as error:
                if error.errno not in NO_SAFE_RENAME:
                    raise
                # A rename onto a folder succeeds only where that is empty.
                check_absent(self.path)
                os.rename(made, self.path)
            self._made = None
            self._calls.fsync(parent_fd)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._open:
            file.close()
        made, self._made = self._made, None
        if made is not None:
            # What cannot be removed keeps a name that says what it is.
            shutil.rmtree(made, ignore_errors=True)

    def _fsync(self, path: Path) -> None:
        with explaining(str(path), "write"), self._folder(path) as fd:
            self._calls.fsync(fd)

    @contextlib.contextmanager
    def _folder(self, path: Path) -> Iterator[int]:
        fd = self._calls.open(str(path), os.O_RDONLY | os.O_DIRECTORY)
        try:
            yield fd
        finally:
            self._calls.close(fd)


def check_absent(path: Path) -> None:
    """Raise ConfigError unless a new folder can be made at a path."""
    if os.path.lexists(path):
        raise ConfigError(
            f"{path} exists; nothing is replaced: name a folder that does not, or remove it first"
        )
    if not path.parent.is_dir():
        raise ConfigError(f"{path.parent} is no folder; make it first")


def _pieces(source: Path) -> Iterator[memoryview]:
    try:
        with source.open("rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigError(f"{source} is no file")
            while piece := file.read(_MAX_COPY_BYTES):
                yield memoryview(piece)
    except OSError as error:
        raise ConfigError(f"{source} cannot be read: {error.strerror or error}") from None
