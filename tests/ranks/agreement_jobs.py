"""What ranks run in the tests of agreement: calls that differ, roots that differ, values that differ."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from fault_jobs import Fault, Switch, Told, TrippedStore, state_of, told

from strongroom import Checkpointer, PerRank
from strongroom.stores.local import LocalStore
from strongroom.stores.memory import MemoryStore
from strongroom.testing import Fault as StoreFault
from strongroom.testing import FaultyStore

TIMEOUT_S = 20.0


def different_steps(root: Path) -> list[Told]:
    with Checkpointer(root, timeout_s=TIMEOUT_S) as checkpointer:
        step = 5 if dist.get_rank() == 2 else 4
        outcome = told(lambda: checkpointer.save(step, state_of(step)).result(60).step)
        return [outcome, told(lambda: checkpointer.save(6, state_of(6)).result(60).step)]


def different_calls(root: Path) -> list[Told]:
    with Checkpointer(root, timeout_s=TIMEOUT_S) as checkpointer:

        def restore() -> int | None:
            restored = checkpointer.restore(state_of(0))
            return restored.step if restored else None

        def save() -> int:
            return checkpointer.save(4, state_of(4)).result(60).step

        outcome = told(restore if dist.get_rank() in (1, 3) else save)
        return [outcome, told(lambda: checkpointer.save(6, state_of(6)).result(60).step)]


def confer(root: Path) -> list[Any]:
    """Words of every rank while a save is under way; one that raises; two questions at once; words again."""
    rank = dist.get_rank()
    with Checkpointer(root, timeout_s=TIMEOUT_S) as checkpointer:
        handle = checkpointer.save(1, state_of(1))
        words = checkpointer.confer("ranks", lambda: {"rank": rank})
        handle.result(60)

        def raises() -> None:
            if rank == 2:
                raise ValueError("no word from here")

        failed = told(lambda: checkpointer.confer("who fails", raises))
        other = told(lambda: checkpointer.confer("this" if rank else "that", lambda: None))
        return [words, failed, other, checkpointer.confer("again", lambda: rank)]


def different_steps_to_restore(root: Path) -> list[Told]:
    with Checkpointer(root, timeout_s=TIMEOUT_S) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state_of(step)).result(60)

        def restore(step: int | None) -> int | None:
            restored = checkpointer.restore(state_of(0), step=step)
            return restored.step if restored else None

        outcome = told(lambda: restore(1 if dist.get_rank() == 3 else None))
        return [outcome, told(lambda: restore(1))]


def a_call_that_one_rank_cannot_make(root: Path) -> list[Told]:
    """What is wrong with one rank's arguments is everyone's error, and at once."""
    with Checkpointer(root, timeout_s=TIMEOUT_S) as checkpointer:
        odd = dist.get_rank() == 1
        outcomes = [
            told(lambda: checkpointer.save(-1 if odd else 4, state_of(4)).result(60).step),
            told(lambda: checkpointer.save(4, {"f": print} if odd else state_of(4)).result(60).step),
            told(lambda: checkpointer.restore(3 if odd else state_of(4)) and 0),  # type: ignore[arg-type]
            told(lambda: checkpointer.restore(state_of(4), step=-1 if odd else None) and 0),
        ]
        return [*outcomes, told(lambda: checkpointer.save(4, state_of(4)).result(60).step)]


def values_that_differ(root: Path, kind: str) -> list[Told]:
    mine = float(dist.get_rank() == 2)
    generator = torch.Generator()
    generator.manual_seed(int(mine))
    value: Any = {
        "number": {"deep": [1, {"lr": mine}]},
        "bool": {"deep": [1, {"lr": 1 if mine else True}]},
        "generator": generator,
        "array": np.full(3, int(mine)),
        "tensor": torch.full((3,), int(mine)),
        "key": {"lr": 1, **({"more": 1} if mine else {})},
        "order": dict(reversed([("a", 1), ("b", 2)]) if mine else [("a", 1), ("b", 2)]),
    }[kind]
    with Checkpointer(root, timeout_s=TIMEOUT_S) as checkpointer:
        outcome = told(lambda: checkpointer.save(1, {**state_of(1), "odd": value}).result(60).step)
        with_own = {**state_of(2), "odd": PerRank(value)}
        return [outcome, told(lambda: checkpointer.save(2, with_own).result(60).step)]


def own_roots(folder: Path, begun: bool) -> list[Told]:
    """Each rank has a folder of its own; ``begun``: rank 0's holds a run."""
    rank = dist.get_rank()
    with Checkpointer(folder / f"run{rank}", timeout_s=TIMEOUT_S) as checkpointer:
        outcomes = [told(lambda: checkpointer.save(1, state_of(1)).result(60).step)]
        if begun:
            outcomes.append(told(lambda: checkpointer.restore(state_of(0)) and 0))
        outcomes.append(told(lambda: checkpointer.save(2, state_of(2)).result(60).step))
        return outcomes


def memory_stores() -> list[Told]:
    with Checkpointer(MemoryStore(), timeout_s=TIMEOUT_S) as checkpointer:
        return [told(lambda: checkpointer.save(1, state_of(1)).result(60).step)]


def different_digests(root: Path) -> list[Told]:
    digest = "sha256" if dist.get_rank() == 1 else "blake3"
    with Checkpointer(root, digest=digest, timeout_s=TIMEOUT_S) as checkpointer:
        return [told(lambda: checkpointer.save(1, state_of(1)).result(60).step)]


class SlowStore(LocalStore):
    """Slow at the writing of rank 3's shards."""

    def open_writer(self, key: str, *, length_bytes: int) -> Any:
        if dist.get_rank() == 3 and key.endswith(".safetensors"):
            time.sleep(1.0)
        return super().open_writer(key, length_bytes=length_bytes)


def busy(root: Path) -> list[tuple[str | None, int]]:
    """What three quick calls of ``save`` come to on each rank, where one is slow to write."""
    with Checkpointer(SlowStore(root), timeout_s=TIMEOUT_S, when_busy="skip") as checkpointer:
        handles = [checkpointer.save(step, state_of(step)) for step in (1, 2, 3)]
        handles[0].result(60)
        dist.barrier()
        checkpointer.wait()
        handles.append(checkpointer.save(4, state_of(4)))
        return [(handle.skipped, handle.result(60).step) for handle in handles]


def store_faults(root: Path, rank: int, operation: str, fault: str) -> list[Told]:
    store: Any = LocalStore(root)
    if dist.get_rank() == rank:
        store = FaultyStore(store, fail_at=1, fault=StoreFault[fault], lasting=True, only=[operation])
    checkpointer = Checkpointer(store, timeout_s=TIMEOUT_S)
    outcome = told(lambda: checkpointer.save(2, state_of(2)).result(60).step)
    checkpointer.close()
    return [outcome]


def two_checkpointers(root: Path) -> list[int]:
    """Two at once, with a root each; and each goes on where the other has failed."""
    first = Checkpointer(root / "a", timeout_s=TIMEOUT_S)
    second = Checkpointer(root / "b", timeout_s=TIMEOUT_S)
    handles = [one.save(step, state_of(step)) for step in (1, 2) for one in (first, second)]
    steps = [handle.result(60).step for handle in handles]
    first.close()
    steps.append(second.save(3, state_of(3)).result(60).step)
    second.close()
    return steps


def a_part_of_the_job(root: Path) -> list[Any]:
    """Ranks 1 and 3 save together, rank 0 alone, and rank 2 is in no group."""
    pair = dist.new_group([1, 3])
    alone = dist.new_group([0])
    rank = dist.get_rank()
    if rank == 2:
        return [told(lambda: Checkpointer(root / "x", process_group=pair).close() or 0).error]
    group, mine = (alone, root / "alone") if rank == 0 else (pair, root / "pair")
    state = {"t": torch.ones(3), "mine": PerRank(rank)}
    with Checkpointer(mine, process_group=group, timeout_s=TIMEOUT_S) as checkpointer:
        checkpointer.save(1, state).result(60)
        restored = checkpointer.restore({"t": torch.zeros(3), "mine": None})
        assert restored is not None
        return [restored.state["mine"]]


def without_the_group(root: Path) -> list[Any]:
    """The job's group is used to meet and never again."""
    checkpointer = Checkpointer(root, timeout_s=TIMEOUT_S)
    checkpointer.save(1, {"t": torch.ones(3)}).result(60)
    late = Checkpointer(root / "late", timeout_s=TIMEOUT_S)
    dist.destroy_process_group()
    outcome = told(lambda: late.save(1, {"t": torch.ones(3)}).result(60).step)
    step = checkpointer.save(2, {"t": torch.ones(3)}).result(60).step
    checkpointer.close()
    return [step, outcome.error]


def one_that_calls_alone(root: Path) -> list[Told]:
    """Rank 0 saves, as in a script that does so on one rank only."""
    checkpointer = Checkpointer(root, timeout_s=1.0)
    if dist.get_rank() != 0:
        return []
    return [told(lambda: checkpointer.save(1, state_of(1)).result(60).step)]


def one_that_is_late_by_a_call(root: Path) -> list[Told]:
    """A rank that comes to a call when the others have given it up already, again and again."""
    checkpointer = Checkpointer(root, timeout_s=1.0)
    checkpointer.save(1, state_of(1)).result(60)
    outcomes = []
    for step in (2, 3):
        dist.barrier()
        if dist.get_rank() == (step % 2) * 2:  # rank 0, then rank 2
            time.sleep(3.5)
        outcomes.append(told(lambda step=step: checkpointer.save(step, state_of(step)).result(60).step))  # type: ignore[misc]
    dist.barrier()
    outcomes.append(told(lambda: checkpointer.save(9, state_of(9)).result(60).step))
    checkpointer.close()
    return outcomes


def a_fork(root: Path) -> list[Any]:
    """A child of rank 1 (a loader's worker, say) leaves its parent's connection alone."""
    with Checkpointer(root, timeout_s=TIMEOUT_S) as checkpointer:
        checkpointer.save(1, state_of(1)).result(60)
        status = 0
        if dist.get_rank() == 1:
            pid = os.fork()
            if pid == 0:
                outcome = told(lambda: checkpointer.save(2, state_of(2)).step)
                checkpointer.close()
                os._exit(0 if outcome.error == "ConfigError" else 1)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return [status, checkpointer.save(2, state_of(2)).result(60).step]


def own_roots_that_a_first_try_did_not_find(folder: Path) -> list[Told]:
    """The launch is claimed, and the others have given up meanwhile; then all try again."""
    switch = Switch(Fault(kind="slow", place="put_if_absent launches/.*", rank=0, slow_s=3.0))
    switch.is_armed = True
    store = TrippedStore(folder / f"run{dist.get_rank()}", switch)
    checkpointer = Checkpointer(store, timeout_s=1.0)
    outcomes = []
    for step in (1, 2):
        dist.barrier()
        outcomes.append(told(lambda step=step: checkpointer.save(step, state_of(step)).result(60).step))  # type: ignore[misc]
    dist.barrier()
    checkpointer.close()
    return outcomes
