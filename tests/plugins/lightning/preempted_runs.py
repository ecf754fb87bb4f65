"""Runs that are told to stop, on one rank or several: real processes, real signals. Importable by name."""

from __future__ import annotations

import logging
import os
import resource
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning_ranks
import rank_runs
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

__all__ = ["At", "Notice", "cannot_write", "fails", "fails_reading", "slowly", "stops_itself", "told"]


class At(Callback):
    """Does something when the run comes to a place, on some ranks.

    Args:
        place: a hook's name; for ``on_train_batch_start`` with the batch, counted over the whole run:
            ``"on_train_batch_start:4"``; for others with how many times it has come before.
        act: what.
        ranks: where; None: on all.
    """

    def __init__(self, place: str, act: Callable[[], None], ranks: Sequence[int] | None = None) -> None:
        self.hook, _, number = place.partition(":")
        self.number = int(number or 0)
        self.act = act
        self.ranks = ranks
        self.count = 0
        setattr(self, self.hook, self._come)

    def _come(self, *args: Any, **kwargs: Any) -> None:
        count, self.count = self.count, self.count + 1
        if count == self.number and (self.ranks is None or lightning_ranks.rank() in self.ranks):
            self.act()


def send(*numbers: int) -> Callable[[], None]:
    """Signals to this very process, one after the other."""

    def act() -> None:
        for number in numbers:
            os.kill(os.getpid(), number)

    return act


class Notice:
    """A notice that this host goes away, from a moment on and on some ranks."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = ranks
        self.has_come = False

    def come(self) -> None:
        self.has_come = True
        time.sleep(0.3)  # asked for every 0.05 s

    def __call__(self) -> str | None:
        return "spot: 12:02" if self.has_come and lightning_ranks.rank() in self.ranks else None


def told(
    root: Path,
    place: str = "on_train_batch_start:4",
    *,
    numbers: Sequence[int] = (signal.SIGTERM,),
    whom: Sequence[int] | None = None,
    notice: bool = False,
    checkpoint: dict[str, Any] | None = None,
    callbacks: Sequence[Callable[[], Callback]] = (),
    slurm: dict[str, str] | None = None,
    full: bool = False,
    every: int = 1000,
    **options: Any,
) -> dict[str, Any]:
    """Train, and be told to stop at a place.

    Args:
        place: as `At` has it.
        numbers: signals that come there; or, with ``notice``, a user's function that knows of one.
        whom: the ranks that are told; None: all.
        slurm: as a job of Slurm's that may be requeued, with this environment.
        full: from then on no file can grow.
        every: at how many steps it saves in any case.

    Returns:
        ``status``: what the process would have ended with (None: the fit came to its end); ``error``: what
        else it raised; ``step``: where it was; ``received``: what ``trainer.received_sigterm`` says;
        ``handler``: whether signals are as before.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    arguments = {"every_n_train_steps": every, **(checkpoint or {})}
    act: Callable[[], None] = send(*numbers)
    if notice:
        spot = Notice(whom or ())
        arguments |= {"spot_notice": spot, "spot_notice_every_s": 0.05}
        act, whom = spot.come, None
    seen = _Seen()
    if full:
        send_all, hard = act, resource.getrlimit(resource.RLIMIT_FSIZE)[1]

        def act() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
            send_all()

    if slurm is not None:
        os.environ.update(slurm)
        options["plugins"] = [_slurm()]
    at = At(place, act, whom)
    found = outcome(
        lambda: rank_runs.train(
            root, checkpoint=arguments, callbacks=[lambda: at, lambda: seen, *callbacks], **options
        )
    )
    found["step"] = seen.trainer.global_step
    found["received"] = seen.trainer.received_sigterm
    found["losses"] = seen.trainer.lightning_module.losses
    found["handlers"] = all(signal.getsignal(number) == one for number, one in before.items())
    return found


def outcome(act: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What it returned, or how it ended.

    Returns:
        besides: ``status`` of a ``SystemExit`` and its ``kind``, ``error``, ``took_s``; what Strongroom
        ``warned`` of and ``logged``.
    """
    found: dict[str, Any] = {"status": None, "error": None}
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("strongroom").addHandler(handler)
    began = time.monotonic()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            found |= act()
        except SystemExit as error:
            found |= {"status": error.code, "kind": type(error).__name__}
        except BaseException as error:  # noqa: BLE001 - told to the test
            found["error"] = f"{type(error).__name__}: {error}"
    found["took_s"] = time.monotonic() - began
    found["warned"] = [str(one.message) for one in warned if "Strongroom" in str(one.message)]
    found["logged"] = [record.getMessage() for record in records]
    return found


def fails(
    root: Path,
    place: str,
    *,
    whom: Sequence[int] | None = None,
    every: int = 1000,
    save_on_exception: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Train, and raise at a place, on some ranks."""

    def act() -> None:
        raise ValueError("as the test wants it")

    arguments = {"every_n_train_steps": every, "save_on_exception": save_on_exception}
    at = At(place, act, whom)
    return outcome(lambda: rank_runs.train(root, checkpoint=arguments, callbacks=[lambda: at], **options))


class Broken(rank_runs.Numbers):
    """Cannot be read on in the middle of a batch, and has drawn noise for part of it by then."""

    def __init__(self, size: int, samples: int) -> None:
        super().__init__(size)
        self.left = samples

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        self.left -= 1
        if self.left < 0:
            raise OSError("the disk is gone")
        return sample


def fails_reading(root: Path, batch: int, *, save_on_exception: bool, **options: Any) -> dict[str, Any]:
    """Train on data of which a batch, counted from 1, cannot be read."""
    arguments = {"every_n_train_steps": 1000, "save_on_exception": save_on_exception}
    data = Broken(24 * lightning_ranks.world_size(), 4 * batch - 2)
    return outcome(
        lambda: rank_runs.train(
            root, checkpoint=arguments, loader=lambda: DataLoader(data, 4, shuffle=True), **options
        )
    )


class Cancelled(rank_runs.Numbers):
    """Sends the signal to the job and to this worker of its loader, as Slurm does, while training waits."""

    def __init__(self, size: int, samples: int) -> None:
        super().__init__(size)
        self.left = samples
        self.job = os.getpid()

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        self.left -= 1
        if self.left == 0:
            time.sleep(1.0)
            os.kill(self.job, signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
        return sample


def by_a_worker(data: Any = None) -> DataLoader[Any]:
    return DataLoader(
        data or rank_runs.Numbers(24),
        4,
        shuffle=True,
        num_workers=1,
        prefetch_factor=1,
        multiprocessing_context="fork",  # as programs have it; a rank of a test would ask its forkserver
    )


def loses_its_worker(root: Path, batch: int, **options: Any) -> dict[str, Any]:
    """Train until a job's end takes the loader's worker away while it reads a batch, counted from 1."""
    data = Cancelled(24, 4 * batch - 2)
    arguments = {"every_n_train_steps": 1000}
    return outcome(
        lambda: rank_runs.train(root, checkpoint=arguments, loader=lambda: by_a_worker(data), **options)
    )


def stops_itself(root: Path, step: int, **options: Any) -> dict[str, Any]:
    """Train, and let a callback stop training after a step."""

    class Enough(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            trainer.should_stop = trainer.global_step == step

    arguments = {"every_n_train_steps": 1000}
    return outcome(lambda: rank_runs.train(root, checkpoint=arguments, callbacks=[Enough], **options))


def cannot_write(root: Path, *, tolerate: int, **options: Any) -> dict[str, Any]:
    """Train where the save of step 3 cannot write: no file may grow meanwhile."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    class Full(Callback):
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            fit = trainer.checkpoint_callback._fit
            deadline = time.monotonic() + 30
            while (
                fit.saving._newest is not None
                and not fit.saving._newest.done()
                and time.monotonic() < deadline
            ):
                time.sleep(0.01)
            soft = 0 if trainer.global_step == 2 else limits[0]
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, limits[1]))

    arguments = {"every_n_train_steps": 1, "tolerate_failures": tolerate}
    return outcome(lambda: rank_runs.train(root, checkpoint=arguments, callbacks=[Full], **options))


class slowly(Callback):  # noqa: N801 - reads as what it does
    """Steps that take a while: half a second may pass until all ranks know."""

    def on_train_batch_start(self, *args: Any) -> None:
        time.sleep(0.2)


class _Seen(Callback):
    """Knows the Trainer."""

    trainer: Any = None

    def setup(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        self.trainer = trainer


def _slurm() -> Any:
    """What Lightning makes of a job of Slurm's, in processes that Slurm did not start."""
    from lightning.fabric.plugins.environments import SLURMEnvironment

    class Slurm(SLURMEnvironment):
        @staticmethod
        def _validate_srun_used() -> None: ...

        @staticmethod
        def _validate_srun_variables() -> None: ...

        def world_size(self) -> int:
            return lightning_ranks.world_size()

        def global_rank(self) -> int:
            return lightning_ranks.rank()

        def local_rank(self) -> int:
            return lightning_ranks.rank()

        def node_rank(self) -> int:
            return 0

        def validate_settings(self, num_devices: int, num_nodes: int) -> None: ...

    return Slurm()
