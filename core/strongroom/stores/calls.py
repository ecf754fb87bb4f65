"""The system calls that a local store makes, and nothing else: the seam for tests.

Every effect of `strongroom.stores.local` on a file system goes through one `OsCalls`. A fault
test or a simulated disk (`strongroom.testing`) takes its place. Each method is one call, raises
`OSError` as the kernel reports it, and resumes after a signal.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import sys
from collections.abc import Callable
from typing import Final

__all__ = ["OsCalls"]

_RENAME_NOREPLACE: Final = 1
"""<linux/fs.h>."""
_SYNC_FILE_RANGE_WRITE: Final = 2
"""<linux/fs.h>."""
_HAS_DIRECT: Final = sys.platform.startswith("linux") and hasattr(os, "O_DIRECT")
_DIRECT_FILE_SYSTEMS: Final = frozenset({0xEF53, 0x58465342})
"""ext4 and XFS, by <linux/magic.h>. On a network every direct write would wait for its answer."""
_SYS_RENAMEAT2: Final = {"x86_64": 316, "aarch64": 276, "riscv64": 276, "ppc64le": 357, "s390x": 347}
"""Linux's syscall tables, for a C library that lacks the wrapper (glibc before 2.28, musl)."""


class OsCalls:
    """The real calls. Names are relative to ``dir_fd``, a folder's descriptor, where one is given."""

    def open(self, path: str, flags: int, mode: int = 0o666, *, dir_fd: int | None = None) -> int:
        return os.open(path, flags | os.O_CLOEXEC, mode, dir_fd=dir_fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def write(self, fd: int, data: memoryview) -> int:
        return os.write(fd, data)

    def pread_into(self, fd: int, buffer: memoryview, offset_bytes: int) -> int:
        return os.preadv(fd, [buffer], offset_bytes)

    def start_writeback(self, fd: int, offset_bytes: int, length_bytes: int) -> None:
        """Ask the kernel to begin writing a range out; a hint that promises nothing and never fails.

        With this one flag Linux waits for nothing and takes no error away from a later `fsync`.
        """
        if _sync_file_range is not None:
            _sync_file_range(fd, offset_bytes, length_bytes, _SYNC_FILE_RANGE_WRITE)

    def set_direct(self, fd: int, *, wanted: bool) -> bool:
        """Let writes to a file pass the page cache by, or no longer; whether they do so now.

        Only on file systems where that is known to be the faster way; refused elsewhere.
        """
        if not _HAS_DIRECT or (wanted and _file_system(fd) not in _DIRECT_FILE_SYSTEMS):
            return False
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if wanted else flags & ~os.O_DIRECT)
        except OSError:
            # A mount may refuse what its file system can do.
            return False
        return wanted

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def mkdir(self, path: str, *, dir_fd: int | None = None) -> None:
        os.mkdir(path, 0o777, dir_fd=dir_fd)

    def link(self, source: str, target: str, *, dir_fd: int) -> None:
        os.link(source, target, src_dir_fd=dir_fd, dst_dir_fd=dir_fd, follow_symlinks=False)

    def rename_no_replace(self, source: str, target: str, *, dir_fd: int) -> None:
        """`EEXIST` where ``target`` stands; `ENOSYS` or `EINVAL` where the system cannot do it."""
        while True:
            code = _renameat2(dir_fd, source, target)
            # ctypes does not resume an interrupted call as the os module does (PEP 475).
            if code != errno.EINTR:
                break
        if code:
            raise OSError(code, os.strerror(code), source, None, target)

    def rename(self, source: str, target: str, *, dir_fd: int) -> None:
        """In the place of what stands at ``target``."""
        os.rename(source, target, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)

    def lock(self, fd: int) -> None:
        """Keep others who lock this open folder out until it is closed; nothing where that cannot be done."""
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)

    def unlink(self, path: str, *, dir_fd: int) -> None:
        os.unlink(path, dir_fd=dir_fd)

    def rmdir(self, path: str, *, dir_fd: int) -> None:
        os.rmdir(path, dir_fd=dir_fd)

    def stat(self, path: str, *, dir_fd: int | None = None) -> os.stat_result:
        """Of the name itself: a symbolic link is not followed."""
        return os.stat(path, dir_fd=dir_fd, follow_symlinks=False)

    def fstat(self, fd: int) -> os.stat_result:
        return os.fstat(fd)

    def statvfs(self, path: str) -> os.statvfs_result:
        """Of the file system on which a path lies; a symbolic link is followed."""
        return os.statvfs(path)

    def list_folder(self, fd: int) -> list[tuple[str, bool]]:
        """Each name in an open folder, and whether it is a folder itself (not a link to one)."""
        with os.scandir(fd) as entries:
            return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]


def _file_system(fd: int) -> int:
    """The magic number of the file system that an open file lies on; 0 where it cannot be told."""
    call = getattr(ctypes.CDLL(None), "fstatfs", None)
    # The number comes first, as a long, in the `struct statfs` of every 64-bit Linux but s390x.
    if call is None or ctypes.sizeof(ctypes.c_long) != 8 or platform.machine() == "s390x":
        return 0
    found = (ctypes.c_long * 64)()
    return int(found[0]) if call(fd, found) == 0 else 0


def _find_sync_file_range() -> Callable[[int, int, int, int], int] | None:
    call = getattr(ctypes.CDLL(None), "sync_file_range", None) if sys.platform.startswith("linux") else None
    if call is not None:
        call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return call


_sync_file_range = _find_sync_file_range()


def _renameat2(dir_fd: int, source: str, target: str) -> int:
    """Rename within a folder unless the target stands; return 0 or an errno."""
    if not sys.platform.startswith("linux"):
        return errno.ENOSYS
    libc = ctypes.CDLL(None, use_errno=True)
    old, new = os.fsencode(source), os.fsencode(target)
    call = getattr(libc, "renameat2", None)
    if call is not None:
        call.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
        failed = call(dir_fd, old, dir_fd, new, _RENAME_NOREPLACE) != 0
    else:
        number = _SYS_RENAMEAT2.get(platform.machine())
        if number is None:
            return errno.ENOSYS
        libc.syscall.restype = ctypes.c_long
        arguments = (
            ctypes.c_long(number),
            ctypes.c_long(dir_fd),
            ctypes.c_char_p(old),
            ctypes.c_long(dir_fd),
            ctypes.c_char_p(new),
            ctypes.c_ulong(_RENAME_NOREPLACE),
        )
        failed = libc.syscall(*arguments) != 0
    return ctypes.get_errno() if failed else 0
