"""Jobs of several ranks under a framework, for tests: real processes over gloo, without its launcher.

::

    LAUNCHER = FrontEndLauncher(preloaded=("torch", "accelerate", ...), prepare=as_accelerate_rank)

    launcher.run(job, root, ranks=2)                 # what it returned on each rank; fails where one raised
    started = launcher.start(job, root, ranks=2)     # a `Job`: signal(rank, number), wait(...), outcomes()

Functions are module-level ones of files in the tests' folders: ranks import them by name. Ranks are forked
from one process that has imported everything, so that one costs a tenth of a second. A rank that hangs dumps
its stacks, is killed, and fails the test.
"""

from __future__ import annotations

import builtins
import contextlib
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import context, forkserver, popen_forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

_RANKS = Path(__file__).parents[1] / "ranks"
for folder in (str(_RANKS), str(Path(__file__).parent)):
    if folder not in sys.path:
        sys.path.insert(0, folder)

# torch looks up the name of each peer that it connects to; where names are slow, for 5 s a time by default.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

from launching import Job, Launcher, Outcome  # noqa: E402 - the folder must be known first

__all__ = ["FrontEndLauncher", "Job", "Outcome", "die", "rank", "warnings_are_errors", "world_size"]

_ALWAYS = (
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.nn.parallel",
    "strongroom.checkpointer",
    "strongroom.frontend",
)


class FrontEndLauncher(Launcher):
    """Starts ranks from a forkserver of its own, which has imported a framework.

    Args:
        preloaded: what it imports, besides torch and the core.
        prepare: runs on each rank before the function: a module-level function.
    """

    def __init__(self, preloaded: Sequence[str], prepare: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._prepare = prepare
        self._context = _Context((*_ALWAYS, *preloaded))

    def start(self, function: Callable[..., Any], *arguments: Any, ranks: int, **options: Any) -> Job:
        """Start ``function(*arguments, **options)`` on every rank of a gloo group."""
        path = os.environ.get("PYTHONPATH")
        return super().start(_as_rank, path, self._prepare, function, *arguments, ranks=ranks, **options)


def rank() -> int:
    """This process's rank."""
    return int(os.environ["RANK"])


def world_size() -> int:
    """How many ranks the job has; some frameworks delete ``WORLD_SIZE`` when they are done, not the group."""
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])


def die() -> None:
    """End this process as ``kill -9`` does, here and now."""
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def warnings_are_errors(expected: Sequence[str]) -> None:
    """On a rank as in a test: every warning is an error, but for these (``"ignore:MESSAGE:CATEGORY"``)."""
    warnings.resetwarnings()
    warnings.simplefilter("error")
    for spelled in expected:
        _, message, category = spelled.split(":")
        warnings.filterwarnings("ignore", message=message, category=_category(category))


def _as_rank(
    path: str | None,
    prepare: Callable[[], None] | None,
    function: Callable[..., Any],
    *arguments: Any,
    **options: Any,
) -> Any:
    import torch

    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    os.environ.pop("PYTHONPATH", None)
    if path is not None:
        os.environ["PYTHONPATH"] = path
    if prepare is not None:
        prepare()
    return function(*arguments, **options)


def _category(name: str) -> type[Warning]:
    found: type[Warning] = getattr(builtins, name or "Warning")
    return found


# --------------------------------------------------------------------------- a forkserver beside the others'


_SERVERS: list[forkserver.ForkServer] = []
"""One a launcher; a process knows its own by number, since servers do not pickle and processes do."""


class _Popen(popen_forkserver.Popen):
    def _launch(self, process_obj: BaseProcess) -> None:
        server = _SERVERS[process_obj.server]  # type: ignore[attr-defined]
        with _asking(server):
            with _this_path():
                server.ensure_running()
            super()._launch(process_obj)


class _Process(context.ForkServerProcess):
    server: int

    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Any:  # noqa: N802 - multiprocessing's name
        return _Popen(process_obj)


class _Context:
    """As much of a multiprocessing context as a job needs."""

    Pipe = staticmethod(multiprocessing.Pipe)

    def __init__(self, preloaded: Sequence[str]) -> None:
        server = forkserver.ForkServer()
        server.set_forkserver_preload(list(preloaded))
        self._server = len(_SERVERS)
        _SERVERS.append(server)

    def Process(self, **options: Any) -> BaseProcess:  # noqa: N802 - multiprocessing's name
        process = _Process(**options)
        process.server = self._server
        return process


@contextlib.contextmanager
def _asking(server: forkserver.ForkServer) -> Iterator[None]:
    """multiprocessing has one forkserver, whose imports are those of whoever was first."""
    theirs = forkserver.connect_to_new_process
    forkserver.connect_to_new_process = server.connect_to_new_process
    try:
        yield
    finally:
        forkserver.connect_to_new_process = theirs


@contextlib.contextmanager
def _this_path() -> Iterator[None]:
    """A forkserver is told what to import and, before Python 3.13, not where that is: it looks here."""
    theirs = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    try:
        yield
    finally:
        if theirs is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = theirs
