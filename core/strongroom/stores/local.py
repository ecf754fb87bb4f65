"""A store in a folder of a file system: durable by fsync, atomic by link, closed to symbolic links.

It owns the order in which bytes and names reach the disk. Three rules carry it:

- A file is durable once it was fsynced *and* its folder was, and that folder's folder, up to
  one that existed before. A failed fsync is never tried again: the kernel may have dropped the
  pages and report success the next time, so what it should have covered is lost for good.
- An object that commits something appears whole or not at all: it is written and fsynced
  under a hidden name, then linked to its final one, which fails where that stands.
- Below the root every part of a path is opened from its folder's descriptor and no symbolic
  link is followed, so that one planted there leads nowhere. The root itself may be a link.

Which names are not durable yet is `strongroom.stores.ledger`'s; the system calls are
`strongroom.stores.calls`'s.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final

from strongroom.errors import (
    ConfigError,
    FormatError,
    ObjectNotFoundError,
    OutcomeUnknownError,
    StoreError,
    StoreUnavailableError,
)
from strongroom.stores.base import (
    Buffer,
    ObjectInfo,
    check_key,
    check_prefix,
    is_temporary,
    temporary_name,
)
from strongroom.stores.calls import OsCalls
from strongroom.stores.errnos import MAYBE_DONE, NO_LINKS, NO_SAFE_RENAME, explained, reason
from strongroom.stores.ledger import NameLedger

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["LocalReader", "LocalStore", "LocalWriter"]

_PATH_ONLY: Final = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY
"""Walking a folder needs the right to search it, not to list it."""
_LIST: Final = os.O_RDONLY | os.O_DIRECTORY
_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
"""O_NONBLOCK: opening a planted pipe must not wait for its other end."""

_MAX_DEPTH: Final = 256
"""Folders in folders that `LocalStore.delete_tree` follows; keys are at most 512 characters."""


class LocalStore:
    """Objects as files under one folder, made when first written to.

    Args:
        root: the folder; it need not exist.
        calls: the system calls, for tests.

    Raises:
        ConfigError: ``root`` is empty, is a file, or lies under one.
    """

    def __init__(self, root: str | os.PathLike[str], *, calls: OsCalls | None = None) -> None:
        given = os.fsdecode(root)
        if not given or "\0" in given:
            raise ConfigError(f"a local store's root is a folder's path, got {given!r}")
        self._root = os.path.abspath(given)
        self._calls = calls or OsCalls()
        self._ledger = NameLedger()
        self._made_root = False
        self._doubtful: set[str] = set()
        _refuse_root_that_is_no_folder(self._root)

    @property
    def uri(self) -> str:
        return Path(self._root).as_uri()

    @property
    def root(self) -> str:
        """The folder's absolute path."""
        return self._root

    def __repr__(self) -> str:
        return f"LocalStore({self._root!r})"

    # Writing

    def open_writer(self, key: str, *, length_bytes: int) -> LocalWriter:
        check_key(key)
        if length_bytes < 0:
            raise ConfigError(f"an object's length is not negative, got {length_bytes} for {key}")
        self._refuse_lost(key, below=False)
        folder, name = _split(key)
        with self._explaining("create", key), self._folder(folder, create=True) as folder_fd:
            fd = self._calls.open(name, _CREATE, dir_fd=folder_fd)
        self._ledger.note_created(folder, name)
        return LocalWriter(self, key, fd, length_bytes)

    def put(self, key: str, data: Buffer) -> None:
        view = _bytes_of(data)
        with self.open_writer(key, length_bytes=len(view)) as writer:
            writer.write(view)
            writer.finish()

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        check_key(key)
        view = _bytes_of(data)
        folder, name = _split(key)
        if key in self._doubtful:
            # Asking again could answer "it stands" of a name that the disk has lost.
            raise OutcomeUnknownError(self._doubt(key, "an fsync of its folder failed before"))
        self._refuse_lost(key, below=False)
        with self._explaining("create", key), self._folder(folder, create=True) as folder_fd:
            # First, so that no power cut can leave this object without what it commits.
            self._make_durable(folder, below=folder != "")
            temporary = temporary_name(name, secrets.token_hex(8))
            self._write_temporary(temporary, view, folder_fd, key)
            try:
                created = self._publish(temporary, name, folder_fd, key)
            finally:
                # It may be gone (renamed), or stay behind: hidden, and removed with its folder.
                with contextlib.suppress(OSError):
                    self._calls.unlink(temporary, dir_fd=folder_fd)
            self._ledger.note_created(folder, name)
            self._settle_commit(key, folder, folder_fd)
        return created

    def make_durable(self, prefix: str) -> None:
        prefix = check_prefix(prefix)
        with self._explaining("make durable", prefix):
            self._make_durable(prefix, below=True)

    # Reading

    def read(self, key: str, *, limit_bytes: int) -> bytes:
        with self.open_reader(key) as reader:
            if reader.size_bytes > limit_bytes:
                raise FormatError(
                    f"{self._path(key)} holds {reader.size_bytes} bytes, at most {limit_bytes} were expected"
                )
            # One byte more tells a file that grew meanwhile from one that did not.
            buffer = bytearray(reader.size_bytes + 1)
            filled = reader.read_into(0, memoryview(buffer))
        if filled > reader.size_bytes:
            raise StoreUnavailableError(
                f"{self._path(key)} grew while it was read; it is still being written: read it again later"
            )
        return bytes(memoryview(buffer)[:filled])

    def open_reader(self, key: str) -> LocalReader:
        check_key(key)
        folder, name = _split(key)
        with self._explaining("open", key, reading=True):
            with self._folder(folder) as folder_fd:
                fd = self._calls.open(name, _READ, dir_fd=folder_fd)
            try:
                found = self._calls.fstat(fd)
                _refuse_no_file(found, self._path(key))
            except BaseException:
                self._calls.close(fd)
                raise
        return LocalReader(self, key, fd, found.st_size)

    def stat(self, key: str) -> ObjectInfo:
        check_key(key)
        folder, name = _split(key)
        with self._explaining("look at", key, reading=True), self._folder(folder) as folder_fd:
            found = self._calls.stat(name, dir_fd=folder_fd)
            _refuse_no_file(found, self._path(key))
        return ObjectInfo(
            size_bytes=found.st_size,
            version=f"{found.st_ino:x}-{found.st_size:x}-{found.st_mtime_ns:x}-{found.st_ctime_ns:x}",
            modified_ns=found.st_mtime_ns,
        )

    def list_names(self, prefix: str) -> list[str]:
        prefix = check_prefix(prefix)
        try:
            with (
                self._explaining("list", prefix, reading=True),
                self._folder(prefix, flags=_LIST) as folder_fd,
            ):
                entries = self._calls.list_folder(folder_fd)
        except ObjectNotFoundError:
            return []
        return sorted(
            name + "/" if is_folder else name for name, is_folder in entries if not is_temporary(name)
        )

    # Removing

    def delete(self, key: str) -> None:
        check_key(key)
        folder, name = _split(key)
        with self._explaining("delete", key):
            try:
                with self._folder(folder) as folder_fd:
                    with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                        self._calls.unlink(name, dir_fd=folder_fd)
                    # Also where it was absent: whoever removed it may have died before this.
                    self._fsync_folder(folder, folder_fd)
            except (FileNotFoundError, NotADirectoryError):
                return

    def delete_tree(self, prefix: str) -> None:
        prefix = check_prefix(prefix)
        if not prefix:
            raise ConfigError(f"delete_tree never removes a whole root; remove {self._root} by hand")
        folder, name = _split(prefix)
        with self._explaining("delete", prefix):
            try:
                with self._folder(folder) as folder_fd:
                    with contextlib.suppress(FileNotFoundError):
                        self._remove_folder(name, folder_fd, self._path(prefix), depth=0)
                    self._ledger.forget(prefix)
                    self._fsync_folder(folder, folder_fd)
            except (FileNotFoundError, NotADirectoryError):
                return

    def _remove_folder(self, name: str, parent_fd: int, path: str, *, depth: int) -> None:
        if depth > _MAX_DEPTH:
            raise StoreError(f"{path}: folders lie more than {_MAX_DEPTH} deep; remove them by hand")
        fd = self._open_folder(name, _LIST, parent_fd, path)
        try:
            entries = sorted(self._calls.list_folder(fd))
            for entry, is_folder in entries:
                if not is_folder:
                    with contextlib.suppress(FileNotFoundError):
                        self._calls.unlink(entry, dir_fd=fd)
            for entry, is_folder in entries:
                if is_folder:
                    with contextlib.suppress(FileNotFoundError):
                        self._remove_folder(entry, fd, f"{path}/{entry}", depth=depth + 1)
        finally:
            self._calls.close(fd)
        try:
            self._calls.rmdir(name, dir_fd=parent_fd)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            raise StoreError(f"{path}: something was written here while it was removed; repeat") from error

    # Folders

    @contextlib.contextmanager
    def _folder(self, folder: str, *, create: bool = False, flags: int = _PATH_ONLY) -> Iterator[int]:
        """A descriptor of a folder below the root, reached without following a link."""
        parts = folder.split("/") if folder else []
        fd = self._open_root(create=create, flags=flags if not parts else _PATH_ONLY)
        try:
            for depth, part in enumerate(parts, start=1):
                above, path = "/".join(parts[: depth - 1]), self._path("/".join(parts[:depth]))
                wanted = flags if depth == len(parts) else _PATH_ONLY
                if create:
                    below_fd = self._open_or_make_folder(part, wanted, fd, path, above)
                else:
                    below_fd = self._open_folder(part, wanted, fd, path)
                fd, above_fd = below_fd, fd
                self._calls.close(above_fd)
            yield fd
        finally:
            self._calls.close(fd)

    def _open_folder(self, name: str, flags: int, parent_fd: int, path: str) -> int:
        try:
            return self._calls.open(name, flags | os.O_NOFOLLOW, dir_fd=parent_fd)
        except NotADirectoryError:
            # The kernel says the same of a link and of a file; only the first is an attack.
            if stat.S_ISLNK(self._calls.stat(name, dir_fd=parent_fd).st_mode):
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path) from None
            raise

    def _open_or_make_folder(self, name: str, flags: int, parent_fd: int, path: str, above: str) -> int:
        try:
            fd = self._open_folder(name, flags, parent_fd, path)
        except FileNotFoundError:
            try:
                self._calls.mkdir(name, dir_fd=parent_fd)
                self._ledger.note_created(above, name, is_folder=True)
            except FileExistsError:
                self._ledger.note_found(above, name)
            return self._open_folder(name, flags, parent_fd, path)
        self._ledger.note_found(above, name)
        return fd

    def _open_root(self, *, create: bool, flags: int) -> int:
        try:
            fd = self._calls.open(self._root, flags)
        except FileNotFoundError:
            if not create:
                raise
            self._make_root()
            return self._calls.open(self._root, flags)
        if create and os.path.dirname(self._root) != self._root:
            # Another rank may have made it a moment ago and not have come to the fsync.
            self._ledger.note_found(*os.path.split(self._root))
        return fd

    def _make_root(self) -> None:
        absent = []
        path = self._root
        while True:
            absent.append(path)
            path = os.path.dirname(path)
            try:
                self._calls.close(self._calls.open(path, _PATH_ONLY))
                break
            except FileNotFoundError:
                continue
        for path in reversed(absent):
            above, name = os.path.split(path)
            try:
                self._calls.mkdir(path)
                self._ledger.note_created(above, name, is_folder=True)
            except FileExistsError:
                self._ledger.note_found(above, name)
        self._made_root = True

    # Durability

    def _make_durable(self, prefix: str, *, below: bool) -> None:
        self._refuse_lost(prefix, below=below)
        for folder in self._ledger.unsettled(prefix, below=below):
            if folder.startswith("/"):
                self._fsync_above(folder)
                continue
            with self._folder(folder) as fd:
                self._fsync_folder(folder, fd)
        # Another thread's fsync may have failed meanwhile, and taken names of ours with it.
        self._refuse_lost(prefix, below=below)

    def _fsync_above(self, folder: str) -> None:
        """Make names in a folder above the root durable."""
        try:
            fd = self._calls.open(folder, _LIST)
        except PermissionError:
            if self._made_root:
                raise
            # Somebody else made the root, in a folder that this process may not even open.
            self._ledger.settle(folder, self._ledger.names(folder))
            return
        try:
            self._fsync_names(folder, fd)
        finally:
            self._calls.close(fd)

    def _fsync_folder(self, folder: str, walked_fd: int) -> None:
        """Make a folder's names durable, given a descriptor that may be good for walking only."""
        fd = self._calls.open(".", _LIST, dir_fd=walked_fd)
        try:
            self._fsync_names(folder, fd)
        finally:
            self._calls.close(fd)

    def _fsync_names(self, folder: str, fd: int) -> None:
        with self._ledger.syncing:
            names = self._ledger.names(folder)
            try:
                self._calls.fsync(fd)
            except OSError as error:
                # EINVAL: this file system has no fsync of folders at all; PostgreSQL's
                # fsync_fname takes it the same way.
                if error.errno != errno.EINVAL:
                    self._ledger.lose(folder, names, reason(error))
                    raise
            self._ledger.settle(folder, names)

    def _refuse_lost(self, prefix: str, *, below: bool) -> None:
        why = self._ledger.why_lost(prefix, below=below)
        if why is not None:
            raise StoreUnavailableError(
                f"{self._path(prefix)}: an fsync failed here before ({why}) and what it should have "
                f"covered may be gone; this attempt cannot commit: check the disk, and save again"
            )

    def _settle_commit(self, key: str, folder: str, folder_fd: int) -> None:
        """Make the name of an object durable that stands already."""
        try:
            self._fsync_folder(folder, folder_fd)
        except OSError as error:
            self._doubtful.add(key)
            raise OutcomeUnknownError(self._doubt(key, reason(error))) from error
        why = self._ledger.why_lost(key, below=False)
        if why is not None:
            # Another thread's fsync of this folder failed, and ours then had nothing left to report.
            self._doubtful.add(key)
            raise OutcomeUnknownError(self._doubt(key, why))

    def _doubt(self, key: str, why: str) -> str:
        return (
            f"{self._path(key)} was created, but not made durable ({why}): it may not survive a power "
            f"cut; open the root again to see, and check the disk"
        )

    # Publishing

    def _write_temporary(self, temporary: str, view: memoryview, folder_fd: int, key: str) -> None:
        fd = self._calls.open(temporary, _CREATE, dir_fd=folder_fd)
        try:
            try:
                _write_all(self._calls, fd, view)
                self._fsync_file(fd, key)
            finally:
                self._calls.close(fd)
        except BaseException:
            with contextlib.suppress(OSError):
                self._calls.unlink(temporary, dir_fd=folder_fd)
            raise

    def _publish(self, temporary: str, name: str, folder_fd: int, key: str) -> bool:
        """Give the temporary file its final name, and say whether that stood for nothing before."""
        try:
            self._link(temporary, name, folder_fd, key)
        except FileExistsError:
            return self._is_ours(temporary, name, folder_fd)
        except OSError as error:
            if error.errno not in MAYBE_DONE:
                raise
            raise OutcomeUnknownError(
                f"{self._path(key)}: {reason(error)} while it was given its name: it may stand or not; "
                f"open the root again to see"
            ) from error
        return True

    def _link(self, temporary: str, name: str, folder_fd: int, key: str) -> None:
        try:
            self._calls.link(temporary, name, dir_fd=folder_fd)
            return
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            refusal = error
        try:
            self._calls.rename_no_replace(temporary, name, dir_fd=folder_fd)
        except OSError as error:
            if error.errno not in NO_SAFE_RENAME:
                raise
            raise StoreError(
                f"{self._path(key)}: this file system can neither link a file ({reason(refusal)}) nor "
                f"rename one without replacing another ({reason(error)}), so nothing can be committed on "
                f"it safely; choose a root on another file system"
            ) from error

    def _is_ours(self, temporary: str, name: str, folder_fd: int) -> bool:
        """Whether a name that stands is the one just asked for: NFS may repeat a call that it did."""
        try:
            standing = self._calls.stat(name, dir_fd=folder_fd)
            written = self._calls.stat(temporary, dir_fd=folder_fd)
        except OSError:
            return False
        return (standing.st_dev, standing.st_ino) == (written.st_dev, written.st_ino)

    def _fsync_file(self, fd: int, key: str) -> None:
        try:
            self._calls.fsync(fd)
        except OSError as error:
            folder, name = _split(key)
            self._ledger.lose(folder, [name], reason(error))
            raise

    # Errors

    def _path(self, key: str) -> str:
        return os.path.join(self._root, *key.split("/")) if key else self._root

    @contextlib.contextmanager
    def _explaining(self, doing: str, key: str, *, reading: bool = False) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise explained(error, self._path(key), doing, reading=reading) from error


class LocalWriter:
    """A file being written at its final name."""

    def __init__(self, store: LocalStore, key: str, fd: int, length_bytes: int) -> None:
        self._store = store
        self._key = key
        self._fd: int | None = fd
        self._length_bytes = length_bytes
        self._written_bytes = 0
        self._has_failed = False
        self._is_finished = False

    def write(self, data: Buffer) -> None:
        fd = self._usable_fd()
        view = _bytes_of(data)
        if self._written_bytes + len(view) > self._length_bytes:
            self._has_failed = True
            raise StoreError(
                f"{self._store._path(self._key)}: {self._length_bytes} bytes were announced, and "
                f"{self._written_bytes + len(view)} were handed over; announce what is written"
            )
        try:
            with self._store._explaining("write", self._key):
                _write_all(self._store._calls, fd, view)
        except BaseException:
            # How much reached the file is unknown, so nothing may follow it.
            self._has_failed = True
            raise
        self._written_bytes += len(view)

    def finish(self) -> None:
        fd = self._usable_fd()
        if self._written_bytes != self._length_bytes:
            self._has_failed = True
            raise StoreError(
                f"{self._store._path(self._key)}: {self._length_bytes} bytes were announced, and only "
                f"{self._written_bytes} were handed over; write all of them before finish"
            )
        try:
            with self._store._explaining("make durable", self._key):
                self._store._fsync_file(fd, self._key)
                self._fd = None
                self._store._calls.close(fd)
        except BaseException:
            self._has_failed = True
            raise
        self._is_finished = True

    def abort(self) -> None:
        if self._is_finished:
            return
        fd, self._fd = self._fd, None
        self._has_failed = True
        with self._store._explaining("remove", self._key):
            if fd is not None:
                # What close reports of bytes that are given up does not matter.
                with contextlib.suppress(OSError):
                    self._store._calls.close(fd)
            folder, name = _split(self._key)
            with (
                contextlib.suppress(FileNotFoundError, NotADirectoryError),
                self._store._folder(folder) as folder_fd,
            ):
                self._store._calls.unlink(name, dir_fd=folder_fd)
        self._is_finished = True

    def _usable_fd(self) -> int:
        if self._fd is None or self._has_failed:
            raise StoreError(f"{self._store._path(self._key)}: its writer has ended or failed before")
        return self._fd

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
        # What went wrong first is what the caller must hear of.
        with contextlib.suppress(StoreError):
            self.abort()


class LocalReader:
    """A file open for reading; several threads may read at once."""

    def __init__(self, store: LocalStore, key: str, fd: int, size_bytes: int) -> None:
        self._store = store
        self._key = key
        self._fd: int | None = fd
        self._size_bytes = size_bytes

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def read_into(self, offset_bytes: int, buffer: memoryview) -> int:
        if self._fd is None:
            raise StoreError(f"{self._store._path(self._key)}: its reader was closed")
        view = _bytes_of(buffer)
        filled = 0
        with self._store._explaining("read", self._key, reading=True):
            while filled < len(view):
                # One call returns at most 2 GiB, and less where a signal or a network came between.
                count = self._store._calls.pread_into(self._fd, view[filled:], offset_bytes + filled)
                if count == 0:
                    break
                filled += count
        return filled

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            with self._store._explaining("close", self._key, reading=True):
                self._store._calls.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _split(key: str) -> tuple[str, str]:
    """The folder of a key (``""``: the root) and its last part."""
    folder, _, name = key.rpartition("/")
    return folder, name


def _bytes_of(data: Buffer) -> memoryview:
    """A flat view of a buffer's bytes, never a copy."""
    view = memoryview(data)
    if view.nbytes == 0:
        return memoryview(b"")
    return view if view.ndim == 1 and view.format == "B" else view.cast("B")


def _write_all(calls: OsCalls, fd: int, view: memoryview) -> None:
    written = 0
    while written < len(view):
        # A call may take less than it was given: 2 GiB at most, or what the disk still holds.
        count = calls.write(fd, view[written:] if written else view)
        if count == 0:
            raise OSError(errno.EIO, "the file system took no byte and reported no error")
        written += count


def _refuse_no_file(found: os.stat_result, path: str) -> None:
    if stat.S_ISREG(found.st_mode):
        return
    if stat.S_ISDIR(found.st_mode):
        raise ObjectNotFoundError(f"{path} is a folder, not an object")
    if stat.S_ISLNK(found.st_mode):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
    raise FormatError(f"{path} is a pipe, socket or device, not a file; remove it")


def _refuse_root_that_is_no_folder(root: str) -> None:
    try:
        found = os.stat(root)
    except FileNotFoundError:
        if os.path.islink(root):
            raise ConfigError(
                f"the root {root} is a symbolic link to nothing; make its target first"
            ) from None
    except NotADirectoryError:
        raise ConfigError(f"the root {root} lies under a file; choose a folder") from None
    except OSError:
        # What may not be looked at now is told at the first use, as the store error that it is.
        pass
    else:
        if not stat.S_ISDIR(found.st_mode):
            raise ConfigError(f"the root {root} is a file; a local store's root is a folder")
