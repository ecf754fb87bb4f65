"""A store in a folder of a file system: durable by fsync, atomic by link, closed to symbolic links.

It owns the order in which bytes and names reach the disk. Three rules carry it:

- A file is durable once it was fsynced *and* its folder was, and that folder's folder, up to
  one that existed before. A failed fsync is never tried again: the kernel may have dropped the
  pages and report success the next time, so what it should have covered is lost for good.
- An object that commits something appears whole or not at all: it is written and fsynced
  under a hidden name, then linked to its final one, which fails where that stands.
- Below the root every part of a path is opened from its folder's descriptor and no symbolic
  link is followed, so that one planted there leads nowhere. The root itself may be a link.

Folders are `strongroom.stores.folders`'s, one open file is `strongroom.stores.files`'s, and the
system calls are `strongroom.stores.calls`'s.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

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
from strongroom.stores.errnos import MAYBE_DONE, NO_LINKS, NO_SAFE_RENAME, explaining, reason
from strongroom.stores.files import (
    LocalReader,
    LocalWriter,
    bytes_of,
    fsync_file,
    refuse_no_file,
    write_all,
)
from strongroom.stores.folders import LIST, Folders, refuse_root_that_is_no_folder, split
from strongroom.stores.offers import Space

__all__ = ["LocalReader", "LocalStore", "LocalWriter"]

_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
"""O_NONBLOCK: opening a planted pipe must not wait for its other end."""


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
        refuse_root_that_is_no_folder(self._root)
        self._calls = calls or OsCalls()
        self._folders = Folders(self._root, self._calls)
        self._doubtful: set[str] = set()

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
        self._folders.refuse_lost(key, below=False)
        folder, name = split(key)
        with (
            explaining(self._path(key), "create"),
            self._folders.open(folder, create=True) as folder_fd,
        ):
            fd = self._calls.open(name, _CREATE, dir_fd=folder_fd)
        self._folders.ledger.note_created(folder, name)
        return LocalWriter(self._folders, key, fd, length_bytes)

    def put(self, key: str, data: Buffer) -> None:
        view = bytes_of(data)
        with self.open_writer(key, length_bytes=len(view)) as writer:
            writer.write(view)
            writer.finish()

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        check_key(key)
        view = bytes_of(data)
        folder, name = split(key)
        why = self._folders.ledger.why_lost(key, below=False)
        if why is not None and key in self._doubtful:
            # Asking again could answer "it stands" of a name that the disk has lost.
            raise OutcomeUnknownError(self._doubt(key, why))
        self._folders.refuse_lost(key, below=False)
        with (
            explaining(self._path(key), "create"),
            self._folders.open(folder, create=True) as folder_fd,
        ):
            # First, so that no power cut can leave this object without what it commits.
            self._folders.make_durable(folder, below=folder != "")
            temporary = temporary_name(name, secrets.token_hex(8))
            self._write_temporary(temporary, view, folder_fd, key)
            try:
                created = self._publish(temporary, folder_fd, key)
            finally:
                # It may be gone (renamed), or stay behind: hidden, and removed with its folder.
                with contextlib.suppress(OSError):
                    self._calls.unlink(temporary, dir_fd=folder_fd)
            self._folders.ledger.note_created(folder, name)
            self._settle_name(key, folder, folder_fd)
        return created

    def replace(self, key: str, data: Buffer, *, version: str | None) -> bool:
        """Put an object in another's place; see `strongroom.stores.offers.Replacing`.

        On one machine, and where the file system's locks reach further, exactly one of two callers that saw
        the same version is answered True.
        """
        if version is None:
            return self.put_if_absent(key, data)
        check_key(key)
        self._folders.refuse_lost(key, below=False)
        folder, _ = split(key)
        with explaining(self._path(key), "replace"):
            try:
                with self._folders.open(folder) as folder_fd:
                    return self._replace(key, bytes_of(data), folder_fd, version)
            except FileNotFoundError:
                return False

    def _replace(self, key: str, view: memoryview, folder_fd: int, version: str) -> bool:
        folder, name = split(key)
        temporary = temporary_name(name, secrets.token_hex(8))
        self._write_temporary(temporary, view, folder_fd, key)
        try:
            lock_fd = self._calls.open(".", LIST, dir_fd=folder_fd)
            try:
                self._calls.lock(lock_fd)
                found = self._calls.stat(name, dir_fd=folder_fd)
                refuse_no_file(found, self._path(key))
                if _version(found) != version:
                    return False
                self._rename(temporary, name, folder_fd, key)
            finally:
                self._folders.close(lock_fd)
        finally:
            # It may have its final name by now.
            with contextlib.suppress(OSError):
                self._calls.unlink(temporary, dir_fd=folder_fd)
        self._folders.ledger.note_created(folder, name)
        self._settle_name(key, folder, folder_fd)
        return True

    def _rename(self, temporary: str, name: str, folder_fd: int, key: str) -> None:
        try:
            self._calls.rename(temporary, name, dir_fd=folder_fd)
        except OSError as error:
            if error.errno not in MAYBE_DONE and error.errno != errno.ENOENT:
                raise
            raise OutcomeUnknownError(
                f"{self._path(key)}: {reason(error)} while it was replaced: the old or the new may stand; "
                f"read it again to see"
            ) from error

    def make_durable(self, prefix: str) -> None:
        prefix = check_prefix(prefix)
        with explaining(self._path(prefix), "make durable"):
            self._folders.make_durable(prefix, below=True)

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
        folder, name = split(key)
        with explaining(self._path(key), "open", reading=True):
            with self._folders.open(folder) as folder_fd:
                fd = self._calls.open(name, _READ, dir_fd=folder_fd)
            try:
                found = self._calls.fstat(fd)
                refuse_no_file(found, self._path(key))
            except BaseException:
                self._calls.close(fd)
                raise
        return LocalReader(self._folders, key, fd, found.st_size)

    def stat(self, key: str) -> ObjectInfo:
        check_key(key)
        folder, name = split(key)
        with (
            explaining(self._path(key), "look at", reading=True),
            self._folders.open(folder) as folder_fd,
        ):
            found = self._calls.stat(name, dir_fd=folder_fd)
            refuse_no_file(found, self._path(key))
        return ObjectInfo(
            size_bytes=found.st_size,
            version=_version(found),
            modified_ns=found.st_mtime_ns,
        )

    def list_names(self, prefix: str) -> list[str]:
        prefix = check_prefix(prefix)
        try:
            with (
                explaining(self._path(prefix), "list", reading=True),
                self._folders.open(prefix, flags=LIST) as folder_fd,
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
        folder, name = split(key)
        with explaining(self._path(key), "delete"):
            try:
                with self._folders.open(folder) as folder_fd:
                    with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                        self._calls.unlink(name, dir_fd=folder_fd)
                    # Also where it was absent: whoever removed it may have died before this.
                    self._folders.fsync(folder, folder_fd)
            except (FileNotFoundError, NotADirectoryError):
                return

    def delete_tree(self, prefix: str) -> None:
        prefix = check_prefix(prefix)
        if not prefix:
            raise ConfigError(f"delete_tree never removes a whole root; remove {self._root} by hand")
        folder, name = split(prefix)
        with explaining(self._path(prefix), "delete"):
            try:
                with self._folders.open(folder) as folder_fd:
                    with contextlib.suppress(FileNotFoundError):
                        self._folders.remove(name, folder_fd, self._path(prefix))
                    self._folders.ledger.forget(prefix)
                    self._folders.fsync(folder, folder_fd)
            except (FileNotFoundError, NotADirectoryError):
                return

    # What is offered besides

    def details(self, prefix: str) -> Mapping[str, ObjectInfo]:
        """Every file in a folder and below; see `strongroom.stores.offers.Detailing`."""
        prefix = check_prefix(prefix)
        found: dict[str, ObjectInfo] = {}
        for name in self.list_names(prefix):
            key = f"{prefix}/{name}" if prefix else name
            # What is no key is nothing of Strongroom's.
            with contextlib.suppress(ObjectNotFoundError, ConfigError):
                if name.endswith("/"):
                    found.update(self.details(key))
                else:
                    found[key] = self.stat(key)
        return found

    def space(self) -> Space:
        """How full the file system is on which the root lies, or will lie.

        What is reserved for others counts as used, and so do quotas where the file system says so.
        """
        path = self._root
        with explaining(path, "measure"):
            while True:
                try:
                    found = self._calls.statvfs(path)
                    break
                except FileNotFoundError:
                    path = os.path.dirname(path)
        if not found.f_blocks:
            raise StoreError(f"the file system of {self._root} does not say how large it is")
        used = found.f_blocks - found.f_bfree
        return Space(
            total_bytes=(used + found.f_bavail) * found.f_frsize, free_bytes=found.f_bavail * found.f_frsize
        )

    # Publishing

    def _write_temporary(self, temporary: str, view: memoryview, folder_fd: int, key: str) -> None:
        fd = self._calls.open(temporary, _CREATE, dir_fd=folder_fd)
        try:
            try:
                write_all(self._calls, fd, view)
                fsync_file(self._folders, fd, key)
            finally:
                self._calls.close(fd)
        except BaseException:
            with contextlib.suppress(OSError):
                self._calls.unlink(temporary, dir_fd=folder_fd)
            raise

    def _publish(self, temporary: str, folder_fd: int, key: str) -> bool:
        """Give the temporary file its final name, and say whether nothing stood there before."""
        _, name = split(key)
        try:
            self._link(temporary, name, folder_fd, key)
        except FileExistsError:
            return self._is_ours(temporary, name, folder_fd, key)
        except OSError as error:
            # ENOENT: what a repeated rename finds after the first one was done.
            if error.errno not in MAYBE_DONE and error.errno != errno.ENOENT:
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
                f"rename one without replacing another ({reason(error)}), so nothing can be committed "
                f"on it safely; choose a root on another file system"
            ) from error

    def _is_ours(self, temporary: str, name: str, folder_fd: int, key: str) -> bool:
        """Whether a name that stands is the one just asked for: NFS may repeat a call that it did."""
        try:
            written = self._calls.stat(temporary, dir_fd=folder_fd)
            standing = self._calls.stat(name, dir_fd=folder_fd)
        except OSError as error:
            if error.errno == errno.ENOENT:
                # Whoever was faster has removed it since; this call did not create it.
                return False
            raise OutcomeUnknownError(
                f"{self._path(key)}: something stands there, and {reason(error)} while it was looked at; "
                f"open the root again to see"
            ) from error
        if stat.S_ISLNK(standing.st_mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), self._path(key))
        if not stat.S_ISREG(standing.st_mode):
            raise OSError(errno.EEXIST, os.strerror(errno.EEXIST), self._path(key))
        return (standing.st_dev, standing.st_ino) == (written.st_dev, written.st_ino)

    def _settle_name(self, key: str, folder: str, folder_fd: int) -> None:
        """Make the name of an object durable that stands already."""
        try:
            self._folders.fsync(folder, folder_fd)
        except OSError as error:
            self._doubtful.add(key)
            raise OutcomeUnknownError(self._doubt(key, reason(error))) from error
        why = self._folders.ledger.why_lost(key, below=False)
        if why is not None:
            # Another thread's fsync of this folder failed, and ours then had nothing left to report.
            self._doubtful.add(key)
            raise OutcomeUnknownError(self._doubt(key, why))

    def _doubt(self, key: str, why: str) -> str:
        return (
            f"{self._path(key)} was created, but not made durable ({why}): it may not survive a power "
            f"cut; open the root again to see, and check the disk"
        )

    def _path(self, key: str) -> str:
        return self._folders.path(key)


def _version(found: os.stat_result) -> str:
    return f"{found.st_ino:x}-{found.st_size:x}-{found.st_mtime_ns:x}-{found.st_ctime_ns:x}"
