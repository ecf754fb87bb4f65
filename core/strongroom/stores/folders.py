"""The folders of a local store: walked without following a link, made, made durable, removed.

Below the root every part of a path is opened from its folder's descriptor with O_NOFOLLOW, so
that a symbolic link planted there leads nowhere; the root itself may be one. Failures leave as
`OSError`, a link in the way as ELOOP; `strongroom.stores.local` turns them into store errors.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from typing import Final

from strongroom.errors import ConfigError, StoreError, StoreUnavailableError
from strongroom.stores.calls import OsCalls
from strongroom.stores.errnos import reason
from strongroom.stores.ledger import NameLedger

__all__ = ["LIST", "PATH_ONLY", "Folders", "refuse_root_that_is_no_folder", "split"]

PATH_ONLY: Final = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY
"""Walking a folder needs the right to search it, not to list it."""
LIST: Final = os.O_RDONLY | os.O_DIRECTORY

_MAX_DEPTH: Final = 256
"""Folders in folders that `Folders.remove` follows; keys are at most 512 characters."""


def split(key: str) -> tuple[str, str]:
    """The folder of a key (``""``: the root) and its last part."""
    folder, _, name = key.rpartition("/")
    return folder, name


class Folders:
    """One store's folders, by key; safe to use from several threads."""

    def __init__(self, root: str, calls: OsCalls) -> None:
        self.root = root
        self.calls = calls
        self.ledger = NameLedger()
        self._made_root = False

    def path(self, key: str) -> str:
        """Where a key lies, for people."""
        return os.path.join(self.root, *key.split("/")) if key else self.root

    def close(self, fd: int) -> None:
        """Close a folder's descriptor; it holds no bytes that an error here could lose."""
        with contextlib.suppress(OSError):
            self.calls.close(fd)

    @contextlib.contextmanager
    def open(self, folder: str, *, create: bool = False, flags: int = PATH_ONLY) -> Iterator[int]:
        """A descriptor of a folder below the root, reached without following a link."""
        parts = folder.split("/") if folder else []
        fd = self._open_root(create=create, flags=flags if not parts else PATH_ONLY)
        try:
            for depth, part in enumerate(parts, start=1):
                above, path = "/".join(parts[: depth - 1]), self.path("/".join(parts[:depth]))
                wanted = flags if depth == len(parts) else PATH_ONLY
                if create:
                    below_fd = self._open_or_make_below(part, wanted, fd, path, above)
                else:
                    below_fd = self._open_below(part, wanted, fd, path)
                fd, above_fd = below_fd, fd
                self.close(above_fd)
            yield fd
        finally:
            self.close(fd)

    def _open_below(self, name: str, flags: int, parent_fd: int, path: str) -> int:
        try:
            return self.calls.open(name, flags | os.O_NOFOLLOW, dir_fd=parent_fd)
        except NotADirectoryError:
            # The kernel says the same of a link and of a file; only the first is an attack.
            if stat.S_ISLNK(self.calls.stat(name, dir_fd=parent_fd).st_mode):
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path) from None
            raise

    def _open_or_make_below(self, name: str, flags: int, parent_fd: int, path: str, above: str) -> int:
        try:
            fd = self._open_below(name, flags, parent_fd, path)
        except FileNotFoundError:
            try:
                self.calls.mkdir(name, dir_fd=parent_fd)
                self.ledger.note_created(above, name, is_folder=True)
            except FileExistsError:
                self.ledger.note_found(above, name)
            return self._open_below(name, flags, parent_fd, path)
        self.ledger.note_found(above, name)
        return fd

    def _open_root(self, *, create: bool, flags: int) -> int:
        try:
            fd = self.calls.open(self.root, flags)
        except FileNotFoundError:
            if not create:
                raise
            self._make_root()
            return self.calls.open(self.root, flags)
        if create and os.path.dirname(self.root) != self.root:
            # Another rank may have made it a moment ago and not have come to the fsync.
            self.ledger.note_found(*os.path.split(self.root))
        return fd

    def _make_root(self) -> None:
        absent = []
        path = self.root
        while True:
            absent.append(path)
            path = os.path.dirname(path)
            try:
                self.close(self.calls.open(path, PATH_ONLY))
                break
            except FileNotFoundError:
                continue
        for path in reversed(absent):
            above, name = os.path.split(path)
            try:
                self.calls.mkdir(path)
                self.ledger.note_created(above, name, is_folder=True)
            except FileExistsError:
                self.ledger.note_found(above, name)
        self._made_root = True

    # Durability

    def make_durable(self, prefix: str, *, below: bool) -> None:
        """Make the names durable that lead to ``prefix``, and with ``below`` all under it as well."""
        self.refuse_lost(prefix, below=below)
        for folder in self.ledger.unsettled(prefix, below=below):
            if folder.startswith("/"):
                self._fsync_above(folder)
                continue
            with self.open(folder) as fd:
                self.fsync(folder, fd)
        # Another thread's fsync may have failed meanwhile, and taken names of ours with it.
        self.refuse_lost(prefix, below=below)

    def _fsync_above(self, folder: str) -> None:
        """Make names in a folder above the root durable."""
        try:
            fd = self.calls.open(folder, LIST)
        except PermissionError:
            if self._made_root:
                raise
            # Somebody else made the root, in a folder that this process may not even open.
            self.ledger.settle(folder, self.ledger.names(folder))
            return
        try:
            self._fsync_names(folder, fd)
        finally:
            self.close(fd)

    def fsync(self, folder: str, walked_fd: int) -> None:
        """Make one folder's names durable, given a descriptor that may be good for walking only."""
        fd = self.calls.open(".", LIST, dir_fd=walked_fd)
        try:
            self._fsync_names(folder, fd)
        finally:
            self.close(fd)

    def _fsync_names(self, folder: str, fd: int) -> None:
        with self.ledger.syncing:
            names = self.ledger.names(folder)
            try:
                self.calls.fsync(fd)
            except OSError as error:
                # EINVAL: this file system has no fsync of folders at all; PostgreSQL's
                # fsync_fname takes it the same way.
                if error.errno != errno.EINVAL:
                    self.ledger.lose(folder, names, reason(error))
                    raise
            self.ledger.settle(folder, names)

    def refuse_lost(self, prefix: str, *, below: bool) -> None:
        """Raise `StoreUnavailableError` where an fsync that ``prefix`` rests on failed before."""
        why = self.ledger.why_lost(prefix, below=below)
        if why is not None:
            raise StoreUnavailableError(
                f"{self.path(prefix)}: an fsync failed here before ({why}) and what it should have "
                f"covered may be gone; this attempt cannot commit: check the disk, and save again"
            )

    # Removing

    def remove(self, name: str, parent_fd: int, path: str, *, depth: int = 0) -> None:
        """Remove a folder with all that lies in it; a link in it is removed, never followed."""
        if depth > _MAX_DEPTH:
            raise StoreError(f"{path}: folders lie more than {_MAX_DEPTH} deep; remove them by hand")
        fd = self._open_below(name, LIST, parent_fd, path)
        try:
            entries = sorted(self.calls.list_folder(fd))
            for entry, is_folder in entries:
                if not is_folder:
                    with contextlib.suppress(FileNotFoundError):
                        self.calls.unlink(entry, dir_fd=fd)
            for entry, is_folder in entries:
                if is_folder:
                    with contextlib.suppress(FileNotFoundError):
                        self.remove(entry, fd, f"{path}/{entry}", depth=depth + 1)
        finally:
            self.close(fd)
        try:
            self.calls.rmdir(name, dir_fd=parent_fd)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            raise StoreError(f"{path}: something was written here while it was removed; repeat") from error


def refuse_root_that_is_no_folder(root: str) -> None:
    """Raise `ConfigError` where a root can never be a folder as things stand."""
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
