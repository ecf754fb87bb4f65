"""Crash tests run other processes, all forked from one that has imported torch already."""

from __future__ import annotations

import multiprocessing
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# What another process runs must be importable there by name.
sys.path.insert(0, str(Path(__file__).parent))

from crash_processes import WAIT_S, Child


@pytest.fixture(scope="session")
def _nursery() -> Any:
    context = multiprocessing.get_context("forkserver")
    # A child imports what its parent runs as, too: pytest.
    context.set_forkserver_preload(
        [
            "pytest",
            "hypothesis",
            "numpy.ma",
            "torch.distributed.checkpoint",
            "torch.distributed.tensor",
            "strongroom.dcp",
            "strongroom.checkpointer",
        ]
    )
    return context


@pytest.fixture
def start(_nursery: Any) -> Iterator[Callable[..., Child]]:
    """Starts ``job(*arguments, pipe)`` in a process of its own; none outlives the test."""
    children: list[Child] = []

    def begin(job: Callable[..., None], *arguments: Any) -> Child:
        ours, theirs = _nursery.Pipe()
        process = _nursery.Process(target=job, args=(*arguments, theirs))
        process.start()
        # Only the child holds the other end now, so that its death is heard.
        theirs.close()
        child = Child(process, ours)
        children.append(child)
        return child

    yield begin
    for child in children:
        child.process.kill()
        child.process.join(WAIT_S)
        child.process.close()
        child.pipe.close()


@pytest.fixture
def randomness() -> random.Random:
    """Seeded by ``STRONGROOM_CRASH_SEED`` or by chance; a failing test prints which."""
    seed = int(os.environ.get("STRONGROOM_CRASH_SEED") or random.SystemRandom().randrange(2**32))
    print(f"again with STRONGROOM_CRASH_SEED={seed}")  # noqa: T201
    return random.Random(seed)
