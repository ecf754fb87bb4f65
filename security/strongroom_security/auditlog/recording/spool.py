"""Where segments wait on this machine until the sink has them: a folder for each writer, held by its process.

::

    <spool>/<sink>/<writer>/lock             locked (flock) for as long as the writer's process lives
                            000001.jsonl     a segment that is closed and not yet in the sink
                            000002.open      the one that is being written

It owns names, rights and locks; what stands in a segment is not its business. A folder that nobody locks is a
dead process's, and `Spool.orphans` hands it over to exactly one who asks. The lock tells which machine its
process is on: locks need not hold between machines that share a file system, so another machine's folder
counts as a dead process's only once nothing has happened in it for a day.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import socket
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Final

from strongroom import chance
from strongroom_security.auditlog.format.lines import check_writer

__all__ = ["Spool", "WriterFolder", "default_base", "find_spool", "networked", "temporary_base"]

_LOG: Final = logging.getLogger("strongroom")

_LOCK: Final = "lock"
_OPEN: Final = re.compile(r"([0-9]{6,9})\.open")
_CLOSED: Final = re.compile(r"([0-9]{6,9})\.jsonl")
_WRITER: Final = re.compile(r"[0-9a-f]{32}")
_DAMAGED: Final = "damaged"
_ABANDONED_S: Final = 24 * 3600.0
"""After which another machine's folder, in which nothing happens, is taken for a dead process's."""
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_LOCK_BYTES: Final = 1024
_MODE: Final = 0o700
_FILE_MODE: Final = 0o600


def default_base(environment: Mapping[str, str]) -> Path | None:
    """Where spools are unless a policy says; None: the environment names no place that could be it."""
    state = environment.get("XDG_STATE_HOME", "")
    if os.path.isabs(state):
        return Path(state) / "strongroom" / "audit"
    home = environment.get("HOME", "")
    return Path(home) / ".local" / "state" / "strongroom" / "audit" if os.path.isabs(home) else None


def temporary_base() -> Path:
    """Where spools are that have no better place: lost when the machine starts again."""
    return Path(tempfile.gettempdir()) / f"strongroom-audit-{os.geteuid()}"


class WriterFolder:
    """One writer's folder, locked by this process. `release` lets it go."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path: Final = path
        self.writer: Final = path.name
        self._lock: int | None = lock
        self._is_named = False

    def open_path(self, number: int) -> Path:
        return self.path / f"{number:06d}.open"

    def closed_path(self, number: int) -> Path:
        return self.path / f"{number:06d}.jsonl"

    def create(self, number: int) -> int:
        """Begin a segment's file; its descriptor, which every write appends by, and which reads it."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        return os.open(self.open_path(number), flags, _FILE_MODE)

    def close_segment(self, number: int) -> None:
        """Say that a segment's file is whole."""
        self.open_path(number).rename(self.closed_path(number))

    def put_closed(self, number: int, data: bytes) -> None:
        """Put a closed segment where an open one stands, at once."""
        place = self.path / f".{number:06d}.new"
        descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, _FILE_MODE)
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        place.rename(self.closed_path(number))
        self.remove_open(number)

    def remove(self, number: int) -> None:
        """Forget a segment."""
        self.closed_path(number).unlink(missing_ok=True)
        self.remove_open(number)

    def remove_open(self, number: int) -> None:
        self.open_path(number).unlink(missing_ok=True)

    def sync(self, number: int) -> None:
        """Return once a segment is on stable storage, name included."""
        path = self.closed_path(number)
        places = [path if path.exists() else self.open_path(number), self.path]
        if not self._is_named:
            places += [self.path.parent, self.path.parent.parent]
        for place in places:
            descriptor = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        self._is_named = True

    def put_aside(self, number: int, *, is_closed: bool) -> None:
        """Keep a damaged segment as it is, out of the way of those that are sent."""
        kept = self.path.parent / _DAMAGED
        kept.mkdir(mode=_MODE, exist_ok=True)
        place = self.closed_path(number) if is_closed else self.open_path(number)
        place.rename(kept / f"{self.writer}-{number:06d}.jsonl")

    def segments(self) -> list[tuple[int, bool]]:
        """The numbers of its segments, in order, and whether each is closed."""
        found: dict[int, bool] = {}
        for name in os.listdir(self.path):
            closed, is_open = _CLOSED.fullmatch(name), _OPEN.fullmatch(name)
            if closed is not None:
                found[int(closed[1])] = True
            elif is_open is not None:
                found.setdefault(int(is_open[1]), False)
        return sorted(found.items())

    def read(self, number: int, *, is_closed: bool) -> bytes:
        return (self.closed_path(number) if is_closed else self.open_path(number)).read_bytes()

    def release(self) -> None:
        """Let it go; without segments it is removed. Fine when repeated."""
        lock, self._lock = self._lock, None
        if lock is None:
            return
        with contextlib.suppress(OSError):
            if not self.segments():
                for name in os.listdir(self.path):
                    (self.path / name).unlink()
                self.path.rmdir()
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_UN)  # a child that was forked meanwhile has it, too
        os.close(lock)

    def disown(self) -> None:
        """After a fork, in the child: the folder stays the parent's."""
        lock, self._lock = self._lock, None
        if lock is not None:
            with contextlib.suppress(OSError):
                os.close(lock)


class Spool:
    """The folders of all writers that wait for one sink.

    Args:
        base: the spool; it is made where it is not there.
        sink: its URI.
    """

    def __init__(self, base: Path, sink: str) -> None:
        self.path: Final = base / hashlib.sha256(sink.encode("utf-8", "surrogateescape")).hexdigest()[:16]
        self._base = base
        self.is_slow = False
        """Whether a write here was waited for too long; who sets it writes beside the program from then
        on."""

    def prepare(self) -> None:
        """Make the spool, and find out whether it can be written to.

        Raises:
            OSError: it cannot.
        """
        self._make()
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise PermissionError(f"{self.path} cannot be written to")

    def begin(self, writer: str) -> WriterFolder:
        """A new writer's folder, made and locked at once.

        Raises:
            OSError: it cannot be made. `FileExistsError`: there is one of this writer.
        """
        check_writer(writer)
        self._make()
        place = Path(tempfile.mkdtemp(prefix=".new-", dir=self.path))
        try:
            lock = os.open(place / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _FILE_MODE)
        except OSError:
            place.rmdir()
            raise
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(lock, f"{socket.gethostname()} {_boot_id()}\n".encode()[:_LOCK_BYTES])
            # Only what is locked gets its name: nobody may take it for a dead process's in between.
            target = self.path / writer
            try:
                place.rename(target)
            except OSError as error:
                if target.is_dir():
                    raise FileExistsError(f"the spool has a writer {writer} already") from error
                raise
        except BaseException:
            os.close(lock)
            (place / _LOCK).unlink(missing_ok=True)
            place.rmdir()
            raise
        return WriterFolder(target, lock)

    def orphans(self, *, of_any_host: bool = False) -> Iterator[WriterFolder]:
        """The folders of processes that have died, one by one; each is locked, and to be released.

        Args:
            of_any_host: take other machines' as well, however short a while ago something happened in them.
        """
        try:
            names = os.listdir(self.path)
        except OSError:
            return
        # Drawn anew each time, so that one which cannot be sent is not always in front of the others.
        chance.shuffle(names)
        for name in names:
            folder = self._take(self.path / name, of_any_host) if _WRITER.fullmatch(name) else None
            if folder is not None:
                yield folder

    @staticmethod
    def _take(path: Path, of_any_host: bool) -> WriterFolder | None:
        try:
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            if not of_any_host and not _may_be_judged(path, lock):
                os.close(lock)  # whether its process lives cannot be told from here
                return None
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)  # its process lives
            return None
        if os.fstat(lock).st_nlink == 0:
            os.close(lock)  # somebody else was here, and is done with it
            return None
        return WriterFolder(path, lock)

    def _make(self) -> None:
        self._base.mkdir(mode=_MODE, parents=True, exist_ok=True)
        self.path.mkdir(mode=_MODE, exist_ok=True)
        for folder in (self._base, self.path):
            found = folder.stat()
            # In a folder like /tmp others may make things, and remove none of ours.
            is_shared = folder is self._base and found.st_mode & stat.S_ISVTX
            if not is_shared and (found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o022):
                raise PermissionError(
                    f"{folder} can be written by others, who could take events away before they are in the "
                    f"log; have it for this user alone (chmod 700)"
                )


@cache
def _boot_id() -> str:
    """Of the kernel that this process's locks are held by: the same in all containers of a machine."""
    try:
        return _BOOT_ID.read_text("ascii").strip()
    except (OSError, ValueError):
        return "-"


def _may_be_judged(path: Path, lock: int) -> bool:
    """Whether a lock that can be had here says that its process is dead.

    Locks hold within one machine. One of the same name has started again since, and its processes are gone.
    """
    host, _, boot = os.pread(lock, _LOCK_BYTES, 0).decode("utf-8", "replace").strip().rpartition(" ")
    if not host or host == socket.gethostname() or (boot != "-" and boot == _boot_id()):
        return True
    newest = max((entry.stat().st_mtime for entry in os.scandir(path)), default=0.0)
    return newest + _ABANDONED_S < time.time()


_MOUNTS: Final = Path("/proc/self/mounts")
_KIND: Final = 2
_NETWORK_KINDS: Final = frozenset(
    {
        "nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "fuse", "gpfs", "ceph", "beegfs", "9p", "afs",
        "glusterfs", "wekafs", "pvfs2", "orangefs", "panfs",
    }
)  # fmt: skip
"""File systems that are another machine's, or may be."""
_LOCAL_KINDS: Final = frozenset({"fuse.fuse-overlayfs", "fuse.lxcfs", "fuseblk"})


def networked(path: Path) -> str | None:
    """The kind of file system that a folder is on, where it is one that can hang with a network; None:
    local."""
    try:
        table = _MOUNTS.read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        return None
    here, found = os.path.realpath(path), ("", "")
    for line in table:
        fields = line.split(" ")
        if len(fields) > _KIND and len(fields[1]) >= len(found[0]):
            at = fields[1].replace("\\040", " ")
            if here == at or here.startswith(at.rstrip("/") + "/"):
                found = (at, fields[_KIND])
    if found[1] in _LOCAL_KINDS:
        return None
    return found[1] if found[1].partition(".")[0] in _NETWORK_KINDS else None


def _warn_of_a_network(spool: Spool) -> None:
    kind = networked(spool.path)
    if kind is not None:
        _LOG.warning(
            "the audit log's spool %s is on %s: while that hangs, events wait in memory alone, and a call "
            "may wait for it once; name a folder on this machine's own disk by spool in [audit]",
            spool.path,
            kind,
        )


def find_spool(folder: Path | None, sink: str) -> Spool | None:
    """The spool for a sink, in the first place that can be written to; None: there is none.

    Args:
        folder: where the policy has it; None: where such things usually are.
    """
    if folder is not None:
        spool = Spool(folder, sink)
        try:
            spool.prepare()
        except OSError as error:
            # It may come to be writable, and what waits in memory then goes there.
            _LOG.warning("the audit log's spool takes nothing: %s; events wait in memory alone", error)
        else:
            _warn_of_a_network(spool)
        return spool
    usual, last = default_base(os.environ), temporary_base()
    problems = []
    for base in (usual, last):
        if base is None:
            continue
        spool = Spool(base, sink)
        try:
            spool.prepare()
        except OSError as error:
            problems.append(str(error))
            continue
        if base == last:
            _LOG.warning(
                "the audit log's events wait in %s, which a restart of this machine empties%s; name another "
                "folder by spool in [audit]",
                spool.path,
                f" ({problems[0]})" if problems else "",
            )
        _warn_of_a_network(spool)
        return spool
    _LOG.warning(
        "the audit log has no spool (%s): events wait in memory alone, and are lost with this process; name "
        "a folder by spool in [audit]",
        "; ".join(problems),
    )
    return None
