"""How much host memory a save may take for its copy, and what happens beyond it.

What fits is copied, and training goes on at once; what does not is written straight from
training's memory while training waits (`strongroom.streaming`): a slower save, never the kernel's
OOM killer.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from strongroom.errors import ConfigError
from strongroom.shards import ChunkSpec
from strongroom.workers import local_ranks

__all__ = ["MIN_BUDGET_BYTES", "Split", "available_bytes", "check_budget", "split"]

MIN_BUDGET_BYTES: Final = 16 << 20
"""The smallest budget that is worth having: what writing needs besides is about as much."""

_USABLE: Final = 0.8
"""Of what is available: training allocates too, and other processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A rank's chunks, by what happens to them.

    Attributes:
        staged: copied, then written in the background.
        streamed: written while training waits.
    """

    staged: tuple[ChunkSpec, ...]
    streamed: tuple[ChunkSpec, ...]

    @property
    def staged_bytes(self) -> int:
        return sum(spec.size_bytes for spec in self.staged)

    @property
    def streamed_bytes(self) -> int:
        return sum(spec.size_bytes for spec in self.streamed)


def split(specs: Sequence[ChunkSpec], budget_bytes: int | None) -> Split:
    """Fill a budget with the largest chunks that fit, so that the least is left to wait for.

    Args:
        specs: what this rank stores.
        budget_bytes: None: all fits.
    """
    if budget_bytes is None or sum(spec.size_bytes for spec in specs) <= budget_bytes:
        return Split(staged=tuple(specs), streamed=())
    left = budget_bytes
    fitting = set()
    for number in sorted(range(len(specs)), key=lambda number: (-specs[number].size_bytes, number)):
        if specs[number].size_bytes <= left:
            left -= specs[number].size_bytes
            fitting.add(number)
    return Split(
        staged=tuple(spec for number, spec in enumerate(specs) if number in fitting),
        streamed=tuple(spec for number, spec in enumerate(specs) if number not in fitting),
    )


def check_budget(budget_bytes: Any) -> int | None:
    """Return a budget if it is one: None, or a whole number of bytes that is large enough."""
    if budget_bytes is None:
        return None
    if not isinstance(budget_bytes, int) or isinstance(budget_bytes, bool) or budget_bytes < MIN_BUDGET_BYTES:
        raise ConfigError(
            f"memory_budget must be a whole number of bytes of at least {MIN_BUDGET_BYTES} (16 MiB), got "
            f"{budget_bytes!r}"
        )
    return budget_bytes


def available_bytes(
    environment: Mapping[str, str] = os.environ,
    proc: Path = Path("/proc"),
    cgroup: Path = Path("/sys/fs/cgroup"),
) -> int | None:
    """Host memory that this process may take without harm; None where the system does not tell.

    The kernel's own estimate (``MemAvailable`` of proc(5)) or what is left below the control
    group's limit (cgroup v2: ``memory.max``), whichever is less; shared evenly among the
    ``LOCAL_WORLD_SIZE`` processes of the job on this host, where the launcher tells.
    """
    found = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = (proc / "meminfo").read_text(encoding="ascii").splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    with contextlib.suppress(OSError, ValueError):
        limit = (cgroup / "memory.max").read_text(encoding="ascii").strip()
        if limit != "max":
            used = int((cgroup / "memory.current").read_text(encoding="ascii"))
            # Pages of files count as used, and are given back before anything is killed.
            statistics = dict(
                line.split() for line in (cgroup / "memory.stat").read_text(encoding="ascii").splitlines()
            )
            found.append(int(limit) - used + int(statistics.get("inactive_file", 0)))
    if not found:
        return None
    return int(max(0, min(found)) * _USABLE) // local_ranks(environment)
