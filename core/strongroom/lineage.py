"""Which checkpoint is the newest, and what falls back to what. Pure: no I/O, no clock.

The *current line* is derived from launches and commits, never stored: the newest launch that
has a commit, then its parent and what that launch had committed before it, and so on down.
Everything else is *superseded*: still restorable by step, never newest. `docs/format.md`,
clause 9.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from strongroom.layout import CheckpointName
from strongroom.manifest import CheckpointRef

__all__ = ["Line", "current_line", "next_launch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The run's history as it counts now.

    Attributes:
        newest_first: what a restore tries, in this order.
        superseded: every other commit, by launch and step, newest first.
        broken: why the line could not be followed further down, or None where it ends by
            itself. Launch records are create-once, so a gap is damage.
        broken_at: the launch whose record it is.
    """

    newest_first: tuple[CheckpointName, ...]
    superseded: tuple[CheckpointName, ...]
    broken: str | None
    broken_at: int | None = None

    @property
    def ranked(self) -> tuple[CheckpointName, ...]:
        """Every commit, those on the line before the superseded ones."""
        return self.newest_first + self.superseded


def current_line(
    commits: Collection[CheckpointName],
    parents: Mapping[int, CheckpointRef | None],
    damaged_launches: Mapping[int, str] | None = None,
) -> Line:
    """Derive the line.

    Args:
        commits: every committed checkpoint's name.
        parents: for each whole launch record, the checkpoint it took the run up from.
        damaged_launches: launch numbers whose record is there but wrong, with the reason.
    """
    by_launch: dict[int, list[CheckpointName]] = defaultdict(list)
    for name in commits:
        by_launch[name.launch].append(name)

    line: list[CheckpointName] = []
    broken: str | None = None
    broken_at: int | None = None
    launch = max(by_launch, default=None)
    up_to_step: int | None = None
    while launch is not None:
        line.extend(
            sorted(
                (name for name in by_launch[launch] if up_to_step is None or name.step <= up_to_step),
                reverse=True,
            )
        )
        if launch not in parents:
            broken = (damaged_launches or {}).get(launch, f"the record of launch {launch} is missing")
            broken_at = launch
            break
        parent = parents[launch]
        # A parent is of an older launch (the parser sees to it), so this ends.
        launch, up_to_step = (parent.launch, parent.step) if parent else (None, None)

    on_line = set(line)
    superseded = sorted((name for name in commits if name not in on_line), reverse=True)
    return Line(newest_first=tuple(line), superseded=tuple(superseded), broken=broken, broken_at=broken_at)


def next_launch(numbers: Collection[int]) -> int:
    """The number that a new writer claims: one above every number ever taken."""
    return max(numbers, default=0) + 1
