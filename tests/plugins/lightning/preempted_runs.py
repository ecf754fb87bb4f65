"""Runs that are told to stop, on one rank or several: real processes, real signals. Importable by name."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import multiprocess
import rank_runs
from lightning.pytorch.callbacks import Callback

__all__ = ["At", "Notice", "slowly", "told"]


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
        if count == self.number and (self.ranks is None or multiprocess.rank() in self.ranks):
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
        return "spot: 12:02" if self.has_come and multiprocess.rank() in self.ranks else None


def told(
    root: Path,
    place: str = "on_train_batch_start:4",
    *,
    numbers: Sequence[int] = (signal.SIGTERM,),
    whom: Sequence[int] | None = None,
    notice: bool = False,
    checkpoint: dict[str, Any] | None = None,
    callbacks: Sequence[Callable[[], Callback]] = (),
    slurm: bool = False,
    every: int = 1000,
    **options: Any,
) -> dict[str, Any]:
    """Train, and be told to stop at a place.

    Args:
        place: as `At` has it.
        numbers: signals that come there; or, with ``notice``, a user's function that knows of one.
        whom: the ranks that are told; None: all.
        slurm: as a job of Slurm's that may be requeued.
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
    at = At(place, act, whom)
    seen = _Seen()
    if slurm:
        options["plugins"] = [_slurm()]
    found: dict[str, Any] = {"status": None, "error": None}
    try:
        found |= rank_runs.train(
            root, checkpoint=arguments, callbacks=[lambda: at, lambda: seen, *callbacks], **options
        )
    except SystemExit as error:
        found["status"] = error.code
        found["kind"] = type(error).__name__
    except BaseException as error:  # noqa: BLE001 - told to the test
        found["error"] = f"{type(error).__name__}: {error}"
    found["step"] = seen.trainer.global_step
    found["received"] = seen.trainer.received_sigterm
    found["losses"] = seen.trainer.lightning_module.losses
    found["handlers"] = all(signal.getsignal(number) == one for number, one in before.items())
    return found


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
            return multiprocess.world_size()

        def global_rank(self) -> int:
            return multiprocess.rank()

        def local_rank(self) -> int:
            return multiprocess.rank()

        def node_rank(self) -> int:
            return 0

        def validate_settings(self, num_devices: int, num_nodes: int) -> None: ...

    return Slurm()
