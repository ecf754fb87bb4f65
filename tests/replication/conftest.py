"""What the tests of replication share: runs in memory, a clock that they move, and who listens."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from replication_runs import Listener, MovedClock
from replication_stores import Bucket, Watched

from strongroom.errors import ReplicationError
from strongroom.replication import Replicator, Target
from strongroom.stores.base import Store
from strongroom.stores.memory import MemoryStore


@pytest.fixture
def source() -> MemoryStore:
    return MemoryStore("first")


@pytest.fixture
def target() -> Watched:
    return Watched(MemoryStore("second"))


@pytest.fixture
def bucket() -> Bucket:
    return Bucket()


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
def clock() -> MovedClock:
    return MovedClock()


@pytest.fixture
def begin() -> Iterator[Callable[..., Replicator]]:
    """Builds replicators whose pauses are short; none outlives its test."""
    begun: list[Replicator] = []

    def build(source: Store, *targets: Store | Target, **options: Any) -> Replicator:
        made = [each if isinstance(each, Target) else Target(store=each) for each in targets]
        replicator = Replicator(source, made, pause_s=lambda failures: 0.01, **options)
        begun.append(replicator)
        return replicator

    yield build
    for replicator in begun:
        try:
            replicator.close(0)
        except ReplicationError:
            continue
