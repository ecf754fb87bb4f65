"""How many threads this process reads and writes with, so that the ranks of one host share its processors.

Reading is bound by the processor, which verifies and copies; writing by the disk, which is best kept
busy by more threads than there are processors: most of them wait.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

__all__ = ["LOCAL_RANKS", "MAX_WORKERS", "local_ranks", "processors", "reading_workers", "writing_workers"]

MAX_WORKERS: Final = 4
"""Threads of one rank at most: more do not help one disk."""

LOCAL_RANKS: Final = "LOCAL_WORLD_SIZE"
"""The variable by which torchrun and other launchers tell how many ranks share this host."""


def processors() -> int:
    """Those that this process may use: a container's or a scheduler's share counts, not the machine."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return os.cpu_count() or 1


def local_ranks(environment: Mapping[str, str] = os.environ) -> int:
    """How many ranks of the job share this host; 1 where nobody says."""
    said = environment.get(LOCAL_RANKS, "")
    return max(1, int(said)) if said.isascii() and said.isdecimal() and len(said) < 7 else 1


def reading_workers(cores: int | None = None, ranks: int | None = None) -> int:
    """Threads that read, verify and copy: one a processor that falls to this rank."""
    return _share(cores or processors(), ranks or local_ranks())


def writing_workers(cores: int | None = None, ranks: int | None = None) -> int:
    """Threads that hash and write: two a processor that falls to this rank."""
    return _share(2 * (cores or processors()), ranks or local_ranks())


def _share(threads: int, ranks: int) -> int:
    return max(1, min(MAX_WORKERS, threads // ranks))
