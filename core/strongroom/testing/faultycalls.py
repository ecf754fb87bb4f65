"""Fail the nth system call of a local store, as a disk or a file system would.

::

    for number in itertools.count(1):
        calls = FaultyCalls(fail_at=number, error=errno.EIO)
        run(LocalStore(root, calls=calls))
        if not calls.reached:
            break
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection
from typing import TypeVar

from strongroom.stores.calls import OsCalls

__all__ = ["FaultyCalls"]

_Result = TypeVar("_Result")


class FaultyCalls(OsCalls):
    """`OsCalls` of which one, or each from one on, fails.

    Args:
        fail_at: which call fails, counted from 1 among those that ``only`` names; None: none.
        error: the errno it fails with.
        only: the names of the calls that count (``{"fsync"}``); None: every one.
        lasting: every counted call from then on fails too.
        done: the call is carried out before it fails, as when a network loses the answer.
        inner: who makes the calls.

    Attributes:
        log: ``(call, path or descriptor)`` for each counted call.
    """

    def __init__(
        self,
        *,
        fail_at: int | None = None,
        error: int,
        only: Collection[str] | None = None,
        lasting: bool = False,
        done: bool = False,
        inner: OsCalls | None = None,
    ) -> None:
        self.log: list[tuple[str, str | int]] = []
        self._fail_at = fail_at
        self._error = error
        self._only = only
        self._lasting = lasting
        self._done = done
        self._inner = inner or OsCalls()
        self._lock = threading.Lock()

    @property
    def reached(self) -> bool:
        """Whether the call that was to fail came."""
        return self._fail_at is not None and len(self.log) >= self._fail_at

    def open(self, path: str, flags: int, mode: int = 0o666, *, dir_fd: int | None = None) -> int:
        return self._call(
            "open", path, lambda: self._inner.open(path, flags, mode, dir_fd=dir_fd), undo=os.close
        )

    def close(self, fd: int) -> None:
        # A failed close has closed the descriptor all the same.
        self._call("close", fd, lambda: self._inner.close(fd), done=True)

    def write(self, fd: int, data: memoryview) -> int:
        return self._call("write", fd, lambda: self._inner.write(fd, data))

    def pread_into(self, fd: int, buffer: memoryview, offset_bytes: int) -> int:
        return self._call("pread_into", fd, lambda: self._inner.pread_into(fd, buffer, offset_bytes))

    def start_writeback(self, fd: int, offset_bytes: int, length_bytes: int) -> None:
        # A hint cannot fail, so it does not count.
        self._inner.start_writeback(fd, offset_bytes, length_bytes)

    def fsync(self, fd: int) -> None:
        self._call("fsync", fd, lambda: self._inner.fsync(fd))

    def mkdir(self, path: str, *, dir_fd: int | None = None) -> None:
        self._call("mkdir", path, lambda: self._inner.mkdir(path, dir_fd=dir_fd))

    def link(self, source: str, target: str, *, dir_fd: int) -> None:
        self._call("link", target, lambda: self._inner.link(source, target, dir_fd=dir_fd))

    def rename_no_replace(self, source: str, target: str, *, dir_fd: int) -> None:
        self._call(
            "rename_no_replace", target, lambda: self._inner.rename_no_replace(source, target, dir_fd=dir_fd)
        )

    def rename(self, source: str, target: str, *, dir_fd: int) -> None:
        self._call("rename", target, lambda: self._inner.rename(source, target, dir_fd=dir_fd))

    def lock(self, fd: int) -> None:
        # Nobody hears of its failure, so it does not count.
        self._inner.lock(fd)

    def unlink(self, path: str, *, dir_fd: int) -> None:
        self._call("unlink", path, lambda: self._inner.unlink(path, dir_fd=dir_fd))

    def rmdir(self, path: str, *, dir_fd: int) -> None:
        self._call("rmdir", path, lambda: self._inner.rmdir(path, dir_fd=dir_fd))

    def stat(self, path: str, *, dir_fd: int | None = None) -> os.stat_result:
        return self._call("stat", path, lambda: self._inner.stat(path, dir_fd=dir_fd))

    def fstat(self, fd: int) -> os.stat_result:
        return self._call("fstat", fd, lambda: self._inner.fstat(fd))

    def list_folder(self, fd: int) -> list[tuple[str, bool]]:
        return self._call("list_folder", fd, lambda: self._inner.list_folder(fd))

    def _call(
        self,
        name: str,
        target: str | int,
        make: Callable[[], _Result],
        *,
        undo: Callable[[_Result], None] | None = None,
        done: bool = False,
    ) -> _Result:
        if not self._fails(name, target):
            return make()
        if self._done or done:
            result = make()
            if undo is not None:
                # Nobody will learn of this descriptor, so nobody else can close it.
                undo(result)
        raise OSError(self._error, os.strerror(self._error), target if isinstance(target, str) else None)

    def _fails(self, name: str, target: str | int) -> bool:
        if self._only is not None and name not in self._only:
            return False
        with self._lock:
            self.log.append((name, target))
            number = len(self.log)
        if self._fail_at is None:
            return False
        return number >= self._fail_at if self._lasting else number == self._fail_at
