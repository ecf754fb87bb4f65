"""What an errno of a file system means to a caller: one of the store errors, and what to do.

`OSError` never leaves a local store; what leaves is made here.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from typing import Final

from strongroom.errors import (
    AccessDeniedError,
    FormatError,
    ObjectExistsError,
    ObjectNotFoundError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
    StrongroomError,
)

__all__ = ["MAYBE_DONE", "NO_LINKS", "NO_SAFE_RENAME", "explained", "explaining", "reason"]

NO_LINKS: Final = frozenset(
    {errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
)
"""What file systems without hard links answer to one (FAT, some FUSE and overlay ones)."""

NO_SAFE_RENAME: Final = frozenset({errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP})
"""What answers a rename without replacing where the kernel or the file system has none (NFS)."""

MAYBE_DONE: Final = frozenset({errno.EIO, errno.ETIMEDOUT, errno.ESTALE, errno.ECONNRESET, errno.ENOTCONN})
"""After these a network file system may have carried a call out, or may do so yet."""

_DENIED: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_ABSENT: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG})
"""ENAMETOOLONG: a name that a file system cannot hold stands for no object on it."""
_NO_DESCRIPTORS: Final = frozenset({errno.EMFILE, errno.ENFILE})


def reason(error: OSError) -> str:
    """``No space left on device (ENOSPC)``."""
    code = error.errno or 0
    return f"{os.strerror(code)} ({errno.errorcode.get(code, code)})"


def explained(error: OSError, path: str, doing: str, *, reading: bool) -> StrongroomError:
    """The error to raise for one that a system call gave.

    Args:
        error: as the call raised it.
        path: what was to be read or written.
        doing: a verb for the message: ``cannot <doing> <path>``.
        reading: whether an absent object is an answer (`ObjectNotFoundError`), and a link in
            the way is damage (`FormatError`).
    """
    what = f"cannot {doing} {path}: {reason(error)}"
    code = error.errno
    if code == errno.ELOOP:
        told = (
            f"cannot {doing} {path}: {error.filename or path} is a symbolic link; none is followed below a "
            f"run's root, since it could lead out of it; put the real one there"
        )
        return FormatError(told) if reading else StoreError(told)
    if code in _ABSENT and reading:
        return ObjectNotFoundError(f"{path} does not exist")
    if code == errno.EEXIST:
        return ObjectExistsError(f"{what}; an object is never overwritten: write it under another name")
    if code == errno.ENOENT:
        return StoreError(
            f"{what}; its folder is not there: it cannot be made, or was removed meanwhile. Check the path "
            "and the mount, and let nothing else clean up there"
        )
    if code in (errno.ENOTDIR, errno.EISDIR):
        return StoreError(f"{what}; a file stands where a folder is needed: remove it")
    if code == errno.ENAMETOOLONG:
        return StoreError(f"{what}; choose a root whose path is shorter")
    if code in _DENIED:
        return AccessDeniedError(
            f"{what}; check who may {'read' if reading else 'write'} there, and the mount"
        )
    if code in _FULL:
        return StoreFullError(f"{what}; free space, or raise the quota or file size limit, and try again")
    if code in _NO_DESCRIPTORS:
        return StoreUnavailableError(f"{what}; raise the limit of open files (ulimit -n)")
    return StoreUnavailableError(
        f"{what}; this says nothing about the bytes: check the disk or mount, and try again"
    )


@contextlib.contextmanager
def explaining(path: str, doing: str, *, reading: bool = False) -> Iterator[None]:
    """Turn an `OSError` inside the block into its store error, as `explained`."""
    try:
        yield
    except OSError as error:
        raise explained(error, path, doing, reading=reading) from error
