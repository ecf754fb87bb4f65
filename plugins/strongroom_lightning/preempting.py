"""How a fit is told to stop, and how it ends once all of its ranks have saved.

For the time of a fit the signals that ask to stop are ours. Lightning's own handlers talk to other ranks, or
save, inside the handler, and hang where it comes in the middle of a step; ours take a note. All ranks then
stop after the same step (`strongroom.frontend.Preemption`), and Lightning is told by its own exception.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from strongroom.frontend import Preemption, Replace
from strongroom.resume import StopNotice
from strongroom_lightning import seam
from strongroom_lightning.arguments import Arguments
from strongroom_lightning.namespace import Namespace
from strongroom_lightning.voice import VOICE

__all__ = ["Preempting"]


class Preempting(Preemption):
    """One fit's readiness to stop.

    Args:
        trainer: Lightning's.
        namespace: the package that it is of.
        arguments: the callback's.
    """

    def __init__(self, trainer: Any, namespace: Namespace, arguments: Arguments) -> None:
        self._trainer = trainer
        self._namespace = namespace
        signals = arguments.preemption_signals
        # With no signals of its own it leaves Slurm's to Lightning too.
        slurms = seam.requeue_signal(trainer) if signals else None
        if slurms is not None:
            signals = tuple(dict.fromkeys((*signals, slurms)))
        super().__init__(arguments, VOICE, signals=signals, requeue_signal=slurms)
        self._ends_with: BaseException | None = None

    def watch(self, replace: Replace) -> None:
        """Be there when Lightning puts its handlers in place."""
        if self.owned:
            replace(self._trainer._signal_connector, "register_signal_handlers", self._register)

    def stop(self, notice: StopNotice, saved: str) -> NoReturn:
        """End the fit on every rank, once each is done with its part of the save.

        Args:
            saved: what stands where, in words.

        Raises:
            SIGTERMException: Lightning's, with the exit status of the process.
        """
        status = self.part(notice, saved)
        seam.note_sigterm(self._trainer)
        self._ends_with = seam.sigterm_exception(self._namespace, status)
        raise self._ends_with

    def is_stop(self, exception: BaseException) -> bool:
        """Whether it is how `stop` ended the fit."""
        return exception is self._ends_with

    def leave(self, error: BaseException | None = None) -> None:
        """No boundary follows on this rank; signals are noted still, and end nothing while it is written."""
        super().leave(None if error is None or self.is_stop(error) else error)

    def _register(self, original: Callable[[], None]) -> Callable[[], None]:
        def register_signal_handlers() -> None:
            original()
            seam.disown_signals(self._trainer, self.owned)
            self.own_signals()

        return register_signal_handlers
