"""Jobs of several ranks for tests: real processes over gloo, started without torchrun.

torchrun kills the survivors when one rank dies, and what the survivors then do is what many of
these tests are about.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

__all__ = ["Job", "Launcher", "Outcome"]

LIMIT_S = 120.0


@dataclass(frozen=True)
class Outcome:
    """How one rank ended.

    Attributes:
        value: what its function returned.
        error: the type's name and the text of what it raised; None: nothing.
        exit_code: of the process; negative: the signal that ended it.
    """

    value: Any
    error: tuple[str, str] | None
    exit_code: int | None


class Launcher:
    """Starts ranks from a forkserver that has imported everything already."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(
            [
                "torch",
                "torch.distributed",
                "torch.distributed.checkpoint",
                "torch.distributed.tensor",
                "torch.distributed.fsdp",
                "torch.nn.parallel",
                "numpy",
                "strongroom.dcp",
                "strongroom.checkpointer",
                "strongroom.testing",
            ]
        )
        self._jobs: list[Job] = []

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *_: object) -> None:
        for job in self._jobs:
            job.kill()

    def start(self, function: Callable[..., Any], *arguments: Any, ranks: int, **options: Any) -> Job:
        """Start ``function(*arguments, **options)`` on every rank of a gloo group."""
        # Those that have ended are let go of: each held some of this process's file descriptors.
        ended = [job for job in self._jobs if not job.is_running]
        for job in ended:
            job.kill()
            self._jobs.remove(job)
        job = Job(self._context, function, arguments, options, ranks)
        self._jobs.append(job)
        return job

    def run(self, function: Callable[..., Any], *arguments: Any, ranks: int, **options: Any) -> list[Any]:
        """What the function returned on each rank; fails the test where one raised or died."""
        outcomes = self.start(function, *arguments, ranks=ranks, **options).outcomes()
        for rank, outcome in enumerate(outcomes):
            assert outcome.error is None, f"rank {rank}: {outcome.error[0]}: {outcome.error[1]}"
            assert outcome.exit_code == 0, f"rank {rank} ended with {outcome.exit_code}"
        return [outcome.value for outcome in outcomes]


class Job:
    """One group of processes."""

    def __init__(
        self, context: Any, function: Any, arguments: tuple[Any, ...], options: dict[str, Any], ranks: int
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        meeting_point = str(Path(self._folder.name) / "meeting")
        self._pipes: list[Connection] = []
        self._told: dict[int, Any] = {}
        self.processes = []
        for rank in range(ranks):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_run_rank,
                args=(theirs, function, arguments, options, rank, ranks, meeting_point),
            )
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self.processes.append(process)

    @property
    def is_running(self) -> bool:
        return any(process.is_alive() for process in self.processes)

    def signal(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.processes[rank].pid, number)

    def wait(self, ranks: Iterable[int], limit_s: float = LIMIT_S) -> dict[int, Outcome]:
        """How some ranks ended; the others go on. What hangs dumps its stacks and fails the test."""
        deadline = time.monotonic() + limit_s
        listed = list(ranks)
        waiting = {self._pipes[rank]: rank for rank in listed if rank not in self._told}
        while waiting and time.monotonic() < deadline:
            for pipe in wait(list(waiting), timeout=max(0.0, deadline - time.monotonic())):
                rank = waiting.pop(pipe)
                self._told[rank] = (None, None)
                with contextlib.suppress(EOFError, ConnectionResetError):
                    self._told[rank] = pipe.recv()
        for rank in listed:
            self.processes[rank].join(max(0.0, deadline - time.monotonic()))
        hanging = [rank for rank in listed if self.processes[rank].is_alive()]
        if hanging:
            for rank in hanging:
                self.signal(rank, signal.SIGUSR1)
            time.sleep(1)
            self.kill()
        assert not hanging, f"ranks {hanging} hang (their stacks are on stderr)"
        return {
            rank: Outcome(*self._told.get(rank, (None, None)), exit_code=self.processes[rank].exitcode)
            for rank in listed
        }

    def outcomes(self, limit_s: float = LIMIT_S) -> list[Outcome]:
        """How every rank ended; one that does not in time dumps its stacks, is killed, and fails the test."""
        outcomes = self.wait(range(len(self.processes)), limit_s)
        self.kill()
        return list(outcomes.values())

    def kill(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()


def _wait_for_all(store: Any, ranks: int) -> None:
    """Wait until every rank has made the group.

    gloo lets a rank go on once it is connected itself. Were it to end then, the ranks that are still at it
    would find the connection closed, and would not begin.
    """
    store.add("ranks-in-the-group", 1)
    while store.add("ranks-in-the-group", 0) < ranks:
        time.sleep(0.005)


def _run_rank(
    pipe: Connection,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    options: dict[str, Any],
    rank: int,
    ranks: int,
    meeting_point: str,
) -> None:
    import torch.distributed as dist

    faulthandler.register(signal.SIGUSR1, file=sys.__stderr__, all_threads=True)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), OMP_NUM_THREADS="1")
    store = dist.FileStore(meeting_point, ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    _wait_for_all(store, ranks)
    try:
        told = function(*arguments, **options), None
    except BaseException as error:  # noqa: BLE001 - told to the test
        told = None, (type(error).__name__, "".join(traceback.format_exception(error)))
    pipe.send(told)
    pipe.close()
    # A group whose ranks died cannot be left in an orderly way.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # a file, and this rank may have made its disk full
            stream.flush()
    os._exit(0)
