"""Files that hold keys: created once, for this user alone, and refused where others could reach them.

It knows nothing of what stands in such a file. An error names the file and what is wrong with it, and
never shows what it holds: a file is judged before a byte of it is read, and no frame that an error passes
through holds any, since there are crash reporters that send every frame's variables away.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

from strongroom.errors import ConfigError

__all__ = ["create_private", "create_public", "in_others_reach", "read_private", "read_public"]

_PRIVATE_MODE: Final = 0o600
_PUBLIC_MODE: Final = 0o644


def create_private(path: Path, data: bytes) -> None:
    """Create a file that only its owner can read; its bytes and its name survive a power cut on return.

    Raises:
        ConfigError: it exists, cannot be written, or lies where modes have no effect.
    """
    _create(path, data, _PRIVATE_MODE)


def create_public(path: Path, data: bytes) -> None:
    """As `create_private`, for a file that anyone may read and its owner alone may write."""
    _create(path, data, _PUBLIC_MODE)


def read_private(path: Path, *, limit_bytes: int) -> bytes:
    """The bytes of a file that nobody but its owner (this user, or root) can read or write.

    Where it is root's, a group that this process is in may read it: so Kubernetes hands a secret to a
    container that does not run as root. It hands it over by way of links, which are followed: what is
    checked is the file that is read.

    Raises:
        ConfigError: it is absent or no file, too long, of another owner, or others may read or write it.
    """
    return _read(path, limit_bytes, _check_private)


def _check_private(path: Path, status: os.stat_result) -> None:
    user = os.geteuid()
    groups = {os.getegid(), *os.getgroups()}
    if in_others_reach(status.st_mode, status.st_uid, status.st_gid, user=user, groups=groups):
        raise ConfigError(
            f"the key file {path} has mode {stat.S_IMODE(status.st_mode):04o}, so others than its owner can "
            f"reach the key; make it 0600, and replace the key if it was ever in others' reach"
        )
    if status.st_uid not in (user, 0):
        raise ConfigError(
            f"the key file {path} belongs to user {status.st_uid}, who could replace it; it must belong to "
            f"root or to the user who reads it, {user}"
        )


def in_others_reach(mode: int, owner: int, group: int, *, user: int, groups: Collection[int]) -> bool:
    """Whether a mode lets anyone but a file's owner reach it, or a group to which root hands it.

    Args:
        mode, owner, group: the file's.
        user, groups: this process's.
    """
    others = stat.S_IMODE(mode) & 0o077
    is_handed = owner == 0 != user and group in groups
    return others not in ((0, 0o040) if is_handed else (0,))


def read_public(path: Path, *, limit_bytes: int) -> bytes:
    """The bytes of a file that not everybody can write: who replaces a public key reads what is sealed to it
    from then on, or is believed what they sign.

    Raises:
        ConfigError: it is absent, no file, too long, or anyone may write it.
    """
    return _read(path, limit_bytes, _check_public)


def _check_public(path: Path, status: os.stat_result) -> None:
    if status.st_mode & stat.S_IWOTH:
        raise ConfigError(
            f"anyone may write the public key file {path}, and who replaces it can read what is sealed to it "
            f"from then on, or is believed what they sign; take that right away, and compare the key with "
            f"the one that was given out"
        )


def _create(path: Path, data: bytes, mode: int) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    except FileExistsError:
        raise ConfigError(
            f"{path} exists; a key is never written over, since what it sealed would be lost, and what it "
            f"signs believed no more. Choose another name, or move the file away"
        ) from None
    except OSError as error:
        raise ConfigError(f"the key file {path} cannot be created: {error.strerror or error}") from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), mode)  # the process's mask may have taken more away
            found = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if found & 0o077 & ~mode:
                raise ConfigError(
                    f"{path} got mode {found:04o} where {mode:04o} was asked for; keep keys on a file "
                    f"system that has owners and modes"
                )
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        _make_name_durable(path.parent)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise ConfigError(f"the key file {path} cannot be written: {error.strerror or error}") from error
    except ConfigError:
        path.unlink(missing_ok=True)
        raise


def _make_name_durable(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(path: Path, limit_bytes: int, check: Callable[[Path, os.stat_result], None]) -> bytes:
    try:
        # Without O_NONBLOCK a named pipe would be waited for until somebody writes to it.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ConfigError(f"the key file {path} is not there") from None
    except OSError as error:
        raise ConfigError(f"the key file {path} cannot be read: {error.strerror or error}") from error
    except ValueError:  # a zero character, with which no file is named
        raise ConfigError(
            f"the key file {str(path)!r:.200} cannot be read: no file has such a name"
        ) from None
    try:
        # What is checked is the open file, so that it cannot be exchanged in between.
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"the key file {path} is not a file")
        check(path, status)
        if (data := _bytes_of(descriptor, limit_bytes)) is not None:
            return data
    except OSError as error:
        raise ConfigError(f"the key file {path} cannot be read: {error.strerror or error}") from error
    finally:
        os.close(descriptor)
    raise ConfigError(f"the key file {path} is longer than {limit_bytes} bytes, so it holds no key")


def _bytes_of(descriptor: int, limit_bytes: int) -> bytes | None:
    """What an open file holds; None where that is longer than it may be."""
    with os.fdopen(descriptor, "rb", closefd=False) as file:
        data = file.read(limit_bytes + 1)
    return data if len(data) <= limit_bytes else None
