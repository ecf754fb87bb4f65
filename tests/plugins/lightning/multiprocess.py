"""Jobs of several ranks under Lightning, for tests: real processes over gloo, without torchrun.

::

    def job(root):  # in a module of its own in this folder: ranks import it by name
        trainer = lightning.Trainer(accelerator="cpu", devices=world_size(), strategy="ddp", ...)
        trainer.fit(...)
        return losses

    launcher.run(job, root, ranks=2)                 # what it returned on each rank; fails where one raised
    started = launcher.start(job, root, ranks=2)     # a `Job`: signal(rank, number), wait(...), outcomes()

To Lightning such a rank looks as one that a cluster has started (``LOCAL_RANK`` is set), in a job whose group
exists. Ranks are forked from one process that has imported everything, so that one costs a tenth of a second.
A rank that hangs dumps its stacks, is killed, and fails the test.
"""

from __future__ import annotations

import builtins
import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from multiprocessing import context, forkserver, popen_forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
_RANKS = _HERE.parents[1] / "ranks"
for folder in (str(_RANKS), str(_HERE)):
    if folder not in sys.path:
        sys.path.insert(0, folder)

# torch looks up the name of each peer that it connects to; where names are slow, for 5 s a time by default.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

from launching import Job, Launcher, Outcome  # noqa: E402 - the folder must be known first

__all__ = [
    "Job",
    "LightningLauncher",
    "Outcome",
    "die",
    "expected_warnings",
    "rank",
    "world_size",
]

_PRELOADED = (
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "torchmetrics",
    "lightning.pytorch",
    "strongroom.checkpointer",
    "strongroom.dcp",
    "strongroom_lightning",
)

expected_warnings = (
    "ignore:.*does not have many workers:",
    "ignore:.*multi-threaded, use of fork:DeprecationWarning",
    "ignore:DTensor random operators may not have complete support:UserWarning",
    "ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning",
    "ignore:The number of training batches:",
    "ignore:You defined a `validation_step` but have no `val_dataloader`:",
)
"""What Lightning says of small runs; every other warning is an error on a rank, as it is in a test."""


class LightningLauncher(Launcher):
    """Starts ranks from a forkserver of its own, which has imported Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self._context = _Context()

    def start(self, function: Callable[..., Any], *arguments: Any, ranks: int, **options: Any) -> Job:
        """Start ``function(*arguments, **options)`` on every rank of a gloo group."""
        return super().start(_as_rank, function, *arguments, ranks=ranks, **options)


def rank() -> int:
    """This process's rank."""
    return int(os.environ["RANK"])


def world_size() -> int:
    """How many ranks the job has; Lightning deletes ``WORLD_SIZE`` when a Trainer is done, not the group."""
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])


def die() -> None:
    """End this process as ``kill -9`` does, here and now."""
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def _as_rank(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """What runs on each rank: the function, once Lightning knows where it is."""
    import torch
    from lightning.fabric.utilities import rank_zero as of_fabric
    from lightning.pytorch.utilities import rank_zero as of_pytorch

    torch.set_num_threads(1)
    number = rank()
    os.environ["LOCAL_RANK"] = str(number)
    # Lightning reads the rank when it is imported, which here was long ago.
    of_fabric.rank_zero_only.rank = of_pytorch.rank_zero_only.rank = number
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.resetwarnings()
    warnings.simplefilter("error")
    for spelled in expected_warnings:
        _, message, category = spelled.split(":")
        warnings.filterwarnings("ignore", message=message, category=_category(category))
    return function(*arguments, **options)


def _category(name: str) -> type[Warning]:
    found: type[Warning] = getattr(builtins, name or "Warning")
    return found


# --------------------------------------------------------------------------- a forkserver beside the others'

_server = forkserver.ForkServer()
_server.set_forkserver_preload(list(_PRELOADED))


@contextlib.contextmanager
def _asking_our_server() -> Iterator[None]:
    """multiprocessing has one forkserver, whose imports are those of whoever was first."""
    theirs = forkserver.connect_to_new_process
    forkserver.connect_to_new_process = _server.connect_to_new_process
    try:
        yield
    finally:
        forkserver.connect_to_new_process = theirs


class _Popen(popen_forkserver.Popen):
    def _launch(self, process_obj: BaseProcess) -> None:
        with _asking_our_server():
            super()._launch(process_obj)


class _Process(context.ForkServerProcess):
    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Any:  # noqa: N802 - multiprocessing's name
        return _Popen(process_obj)


class _Context:
    """As much of a multiprocessing context as a job needs."""

    Process = _Process
    Pipe = staticmethod(multiprocessing.Pipe)
