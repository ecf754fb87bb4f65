"""Which code runs: the commit, what differs from it, and the script that was started.

It asks ``git`` as a program, which reads, takes no lock and reaches for no network. Of what a repository's
configuration names it runs the filters alone that say whether a file has changed. All of it has bounds of
time and size; what does not fit into them, and a repository that git refuses to look at because it is another
user's, is told as ``"unknown"``.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from strongroom.scrubbing import without_userinfo

__all__ = ["UNKNOWN", "Entry", "collect_code", "entry_of_this_process", "explain_changes"]

UNKNOWN: Final = "unknown"
"""What could not be found out in the time, or of that much."""

_MAX_CHANGED: Final = 10_000
_MAX_CHANGED_BYTES: Final = 256 << 20
_MAX_ENTRY_BYTES: Final = 16 << 20
_MAX_OUTPUT_BYTES: Final = 16 << 20
_PIECE_BYTES: Final = 1 << 20

_LEFT_OUT: Final = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_NAMESPACE", "GIT_PREFIX", "GIT_TRACE")
"""Variables of a git that started this process, as a hook does: they speak of its repository."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The script that was started, and where to look for its repository.

    Attributes:
        path: its file; None: there is none, as in a notebook.
        folder: the working directory.
    """

    path: Path | None
    folder: Path


def entry_of_this_process() -> Entry:
    """The script that this process began with, as far as it is known."""
    found = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        folder = Path.cwd()
    except OSError:
        # The working directory was removed, or may not be looked up.
        folder = Path(os.sep)
    return Entry(path=folder / found if isinstance(found, str) else None, folder=folder)


def collect_code(entry: Entry, environment: Mapping[str, str], *, within_s: float) -> dict[str, Any]:
    """The code as it is now; members are absent where there is no repository, or no script.

    Args:
        within_s: seconds for all of it.
    """
    until = time.monotonic() + within_s
    found: dict[str, Any] = {}
    if entry.path is not None:
        digest = _digest_of_file(entry.path, _MAX_ENTRY_BYTES, until)
        found["entry"] = {"name": entry.path.name, "digest": digest or UNKNOWN}
    for folder in (entry.path.parent if entry.path is not None else None, entry.folder):
        if folder is None:
            continue
        git = _Git(folder, environment, until)
        top = git.line("rev-parse", "--show-toplevel")
        if top:
            found |= _repository(git, Path(top))
            if entry.path is not None and entry.path.is_relative_to(top):
                found["entry"]["name"] = str(entry.path.relative_to(top))
            break
        if any((above / ".git").exists() for above in (folder, *folder.parents)):
            found |= dict.fromkeys(("commit", "is_dirty", "changes"), UNKNOWN)
            break
    return found


def _repository(git: _Git, top: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"commit": git.line("rev-parse", "--verify", "--quiet", "HEAD") or UNKNOWN}
    branch = git.line("symbolic-ref", "--quiet", "--short", "HEAD")
    if branch:
        found["branch"] = branch
    remote = git.line("config", "--get", "remote.origin.url")
    if remote:
        found["repository"] = without_userinfo(remote)
    told = git.output(
        "-C", str(top), "status", "--porcelain=v1", "-z", "--untracked-files=all", "--no-renames",
        "--ignore-submodules=none",
    )  # fmt: skip
    if told is None:
        return {**found, "is_dirty": UNKNOWN, "changes": UNKNOWN}
    entries = [item for item in told.split(b"\0") if item]
    found["is_dirty"] = bool(entries)
    if entries:
        found["changed_files"] = len(entries)
        found["changes"] = _digest_of_changes(top, entries, git.until) or UNKNOWN
    return found


def explain_changes(path: bytes, content: str) -> bytes:
    """One line of what the digest of the changes is over.

    Args:
        path: of a file that differs from the commit or is not in it, from the top of the repository.
        content: SHA-256 of the file as hex digits, of a symbolic link's target, or ``deleted``.
    """
    return content.encode() + b"  " + path + b"\0"


def _digest_of_changes(top: Path, entries: Sequence[bytes], until: float) -> str | None:
    """SHA-256 over the changed and untracked files, by path; None where they are too many or too large."""
    if len(entries) > _MAX_CHANGED:
        return None
    whole = hashlib.sha256()
    left = _MAX_CHANGED_BYTES
    # Two letters say how the file stands, in the index and beside it; only what is there now counts.
    for path in sorted(entry[3:] for entry in entries):
        place = top / os.fsdecode(path)
        try:
            status = place.lstat()
        except OSError:
            content = "deleted"
        else:
            if stat.S_ISLNK(status.st_mode):
                content = hashlib.sha256(os.fsencode(os.readlink(place))).hexdigest()
            elif stat.S_ISREG(status.st_mode):
                left -= status.st_size
                found = _digest_of_file(place, status.st_size, until) if left >= 0 else None
                if found is None:
                    return None
                content = found.removeprefix("sha256:")
            else:
                # A submodule's folder, a socket, a pipe: nothing to read.
                content = "special"
        whole.update(explain_changes(path, content))
    return f"sha256:{whole.hexdigest()}"


def _digest_of_file(path: Path, limit_bytes: int, until: float) -> str | None:
    """None where it is larger, cannot be read, or is not read in time."""
    digest = hashlib.sha256()
    read = 0
    try:
        # Not blocking: what is a pipe by now must not be waited for.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with open(descriptor, "rb", buffering=0) as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return None
            while piece := file.read(_PIECE_BYTES):
                read += len(piece)
                if read > limit_bytes or time.monotonic() > until:
                    return None
                digest.update(piece)
    except OSError:
        return None
    return f"sha256:{digest.hexdigest()}"


class _Git:
    """``git``, asked about one folder; silent where there is none, or it takes too long."""

    def __init__(self, folder: Path, environment: Mapping[str, str], until: float) -> None:
        self.until = until
        self._folder = folder
        self._environment = {name: value for name, value in environment.items() if name not in _LEFT_OUT} | {
            "GIT_OPTIONAL_LOCKS": "0",
            "GIT_NO_LAZY_FETCH": "1",
            "GIT_TERMINAL_PROMPT": "0",
            "GIT_ASKPASS": "",
            "LC_ALL": "C",
        }

    def line(self, *arguments: str) -> str | None:
        """What it says on one line; None where it fails."""
        told = self.output(*arguments)
        if told is None:
            return None
        # What is no valid Unicode could not be recorded.
        return told.decode("utf-8", "backslashreplace").removesuffix("\n")

    def output(self, *arguments: str) -> bytes | None:
        left_s = self.until - time.monotonic()
        if left_s <= 0:
            return None
        program = shutil.which("git", path=self._environment.get("PATH"))
        if program is None:
            return None
        # A repository may name programs that git runs to look at it: none is.
        safe = ("-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}")
        command = [program, "-C", os.fspath(self._folder), *safe, *arguments]
        try:
            # No pipe: a process that another thread forks meanwhile, a loader's worker, would hold its other
            # end open, and reading would end only with that. Python's fork for a child has such a pipe too:
            # it spawns instead where the program's path is whole and no descriptor has to be closed.
            with tempfile.TemporaryFile() as told_into:
                running = subprocess.Popen(
                    command,
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=told_into,
                    stderr=subprocess.DEVNULL,
                    close_fds=False,
                )
                try:
                    running.wait(timeout=left_s)
                except subprocess.TimeoutExpired:
                    running.kill()
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        running.wait(timeout=1.0)
                    return None
                told_into.seek(0)
                told = told_into.read(_MAX_OUTPUT_BYTES + 1)
        except (OSError, ValueError):
            return None
        return told if running.returncode == 0 and len(told) <= _MAX_OUTPUT_BYTES else None
