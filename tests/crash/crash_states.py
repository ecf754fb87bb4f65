"""What the crash tests save, how a new process looks at what a crash left, and what counts as wrong.

`state_at` is the one place where a checkpoint's content comes from, and it depends on nothing but
the step and the writer: whatever is restored can be held against it, bit for bit, by anybody.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from strongroom import Checkpointer
from strongroom.catalog import Catalog
from strongroom.config import Clock
from strongroom.layout import COMMIT, DATA, MANIFEST
from strongroom.opened import open_checkpoint
from strongroom.signing import NO_GUARD
from strongroom.stores.base import Store

__all__ = [
    "TestClock",
    "age",
    "assert_is_state_at",
    "assert_newest_is",
    "assert_whole",
    "leftovers",
    "numbers_from",
    "state_at",
    "steps_seen",
]


def state_at(step: int, *, writer: int = 0) -> dict[str, Any]:
    """A few hundred bytes of training state that no other step or writer has."""
    seeded = torch.Generator().manual_seed(1_000_003 * writer + step)
    return {
        "weights": torch.randn(7, 9, generator=seeded),
        "moments": {"exp_avg": torch.randn(31, generator=seeded).to(torch.bfloat16)},
        "extra": {"step": step, "writer": writer, "loss": 1.0 / (step + 1), "order": (step, b"\0\xff")},
    }


def assert_is_state_at(state: Any, step: int, *, writer: int = 0) -> None:
    """Hold a restored state against what was saved, bit for bit."""
    expected = state_at(step, writer=writer)
    assert state["extra"] == expected["extra"]
    _assert_same_bits(state["weights"], expected["weights"])
    _assert_same_bits(state["moments"]["exp_avg"], expected["moments"]["exp_avg"])
    assert state.keys() == expected.keys()


def _assert_same_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def steps_seen(root: Store | Path) -> list[int]:
    """What a new process lists, newest first."""
    return [checkpoint.step for checkpoint in Checkpointer(root).checkpoints()]


def assert_newest_is(root: Store | Path, step: int | None, *, writer: int = 0) -> None:
    """A new process restores this step, bit for bit and without skipping any; None: there is none."""
    restored = Checkpointer(root).restore()
    if step is None:
        assert restored is None
        return
    assert restored is not None
    assert (restored.step, restored.skipped) == (step, ())
    assert_is_state_at(restored.state, step, writer=writer)


def assert_whole(root: Store | Path, *, writer: int = 0) -> list[int]:
    """Everything that a new process lists restores bit for bit, and the newest one by itself; the steps."""
    steps = steps_seen(root)
    for step in steps[1:]:
        restored = Checkpointer(root).restore(step=step)
        assert restored is not None
        assert_is_state_at(restored.state, step, writer=writer)
    assert_newest_is(root, steps[0] if steps else None, writer=writer)
    return steps


def leftovers(store: Store) -> set[str]:
    """Keys of checkpoint folders that belong to no committed checkpoint."""
    history = Catalog(store).history()
    wanted: set[str] = set()
    for name, commit in history.commits.items():
        files = open_checkpoint(store, commit, NO_GUARD).files
        wanted |= {f"{name.folder}/{DATA}/{path}" for path in (*files, MANIFEST)}
        wanted.add(f"{name.folder}/{COMMIT}")
    return {key for key in _keys(store, "") if key.startswith("step-")} - wanted


def _keys(store: Store, prefix: str) -> Iterator[str]:
    for name in store.list_names(prefix):
        key = f"{prefix}/{name}" if prefix else name
        if name.endswith("/"):
            yield from _keys(store, key.removesuffix("/"))
        else:
            yield key


def age(root: Path, hours: int = 2) -> None:
    """As if everything under a root had been written hours ago."""
    for path in root.rglob("*"):
        found = path.lstat()
        then_ns = found.st_mtime_ns - hours * 3600 * 10**9
        os.utime(path, ns=(then_ns, then_ns), follow_symlinks=False)


class TestClock:
    """A clock that stands still until a test moves it, for a checkpointer and for its store."""

    __test__ = False

    def __init__(self) -> None:
        self.seconds = 1_700_000_000

    def now_ns(self) -> int:
        return self.seconds * 10**9

    @property
    def clock(self) -> Clock:
        return Clock(now_ns=self.now_ns, monotonic=lambda: float(self.seconds))


def numbers_from(start: int) -> Any:
    """Instead of random attempts and run ids, such that a failing run can be had again."""
    numbers = itertools.count(start)
    return lambda count: f"{next(numbers):0{2 * count}x}"
