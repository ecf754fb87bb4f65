"""What dead processes of this machine left in a spool for other sinks than the one that is asked about.

A spool has a folder for each sink, by a digest of its URI, so that which sink it is cannot be told from here:
only the folder, and how much waits there.
"""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path
from typing import Final

from strongroom_security.auditlog.recording.spool import Spool

__all__ = ["waiting_elsewhere"]

_SINK: Final = re.compile(r"[0-9a-f]{16}")
_SEGMENT: Final = re.compile(r"([0-9]{6,9})\.(open|jsonl)")


def waiting_elsewhere(spool: Spool) -> dict[Path, int]:
    """How many segments wait for each other sink, by its folder; what cannot be looked into is left out."""
    found: dict[Path, int] = {}
    for folder in _folders(spool.path.parent):
        if folder != spool.path and _SINK.fullmatch(folder.name) is not None:
            count = sum(_waiting(writer) for writer in _folders(folder))
            if count:
                found[folder] = count
    return found


def _folders(path: Path) -> list[Path]:
    try:
        return sorted(Path(each.path) for each in os.scandir(path) if each.is_dir(follow_symlinks=False))
    except OSError:
        return []


def _waiting(writer: Path) -> int:
    """The segments in a writer's folder; none where its process lives, and will send them itself."""
    try:
        lock = os.open(writer / "lock", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return 0
    try:
        # Shared, so that whoever else only looks is not taken for its process.
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return len({match[1] for name in os.listdir(writer) if (match := _SEGMENT.fullmatch(name))})
    except OSError:
        return 0
    finally:
        os.close(lock)
