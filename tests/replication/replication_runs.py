"""Runs to copy, how a root is looked at, and who listens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from strongroom import Checkpointer
from strongroom.catalog import Catalog
from strongroom.config import Clock
from strongroom.layout import CheckpointName
from strongroom.stores.base import Store
from strongroom.stores.memory import MemoryStore

__all__ = ["Listener", "MovedClock", "name_of", "save", "state_at", "steps_of", "without_notes"]


def state_at(step: int, *, length: int = 1000) -> dict[str, Any]:
    seeded = torch.Generator().manual_seed(step)
    return {"weights": torch.randn(length, generator=seeded), "extra": {"step": step}}


def save(root: Store | Path, *steps: int, length: int = 1000, resumes: bool = False) -> None:
    """One process's life: it saves these steps."""
    with Checkpointer(root) as checkpointer:
        if resumes:
            checkpointer.restore()
        for step in steps:
            checkpointer.save(step, state_at(step, length=length)).result()


def name_of(root: Store, step: int) -> CheckpointName:
    return Catalog(root).history().at_step(step)


def steps_of(root: Store) -> list[int]:
    return [checkpoint.step for checkpoint in Catalog(root).history().checkpoints()]


def without_notes(root: MemoryStore) -> dict[str, bytes]:
    """All that a root in memory holds but the notes about copies."""
    return {key: data for key, data in root.contents().items() if not key.startswith("replication/")}


class Listener:
    """An event sink that keeps what it hears."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def emit(self, event: Any) -> None:
        self.heard.append(event)

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.heard if type(event) is kind]


class MovedClock:
    """A clock that stands still until a test moves it."""

    def __init__(self) -> None:
        self.seconds = 1_800_000_000.0

    @property
    def clock(self) -> Clock:
        return Clock(now_ns=lambda: int(self.seconds * 10**9), monotonic=lambda: self.seconds)
