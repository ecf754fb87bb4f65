"""How a fit is told to stop, and how it ends once all of its ranks have saved.

For the time of a fit the signals that ask to stop are ours. Lightning's own handlers talk to other ranks, or
save, inside the handler, and hang where it comes in the middle of a step; ours take a note. All ranks then
stop after the same step (`strongroom.resume.StopVote`), and Lightning is told by its own exception.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final, NoReturn

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from strongroom.errors import RanksError
from strongroom.messages import Message
from strongroom.ranks import Ranks, Verdict
from strongroom.resume import NoticeWatch, StopNotice, StopSignals, StopVote, agree_to_save, requeue
from strongroom_lightning import seam
from strongroom_lightning.arguments import Arguments
from strongroom_lightning.namespace import Namespace
from strongroom_lightning.replacing import Replace

__all__ = ["Preempting"]

_LOG: Final = logging.getLogger("strongroom")

_VOTE_S: Final = 60.0
"""How long ranks wait for each other's answer where to stop: threads give it, in the middle of a step too."""

_LEAVE_S: Final = 120.0
"""How long ranks wait for each other to leave together, rank 0's talk with Slurm included."""

_FAILED_S: Final = 10.0
"""How long a rank that failed waits to hear whether all have, and stand at the same step."""


class Preempting:
    """One fit's readiness to stop.

    Args:
        trainer: Lightning's.
        namespace: the package that it is of.
        arguments: the callback's.
    """

    def __init__(self, trainer: Any, namespace: Namespace, arguments: Arguments) -> None:
        self._trainer = trainer
        self._namespace = namespace
        self._ranks = Ranks.of_this_process()
        self._vote = StopVote(self._ranks, timeout_s=min(_VOTE_S, arguments.timeout_s))
        signals = arguments.preemption_signals
        # With no signals of its own it leaves Slurm's to Lightning too.
        self._requeue_signal = seam.requeue_signal(trainer) if signals else None
        if self._requeue_signal is not None:
            signals = tuple(dict.fromkeys((*signals, self._requeue_signal)))
        self._signals = StopSignals(signals, self._tell, rank=self._ranks.rank)
        self._owned = signals
        self._watch: NoticeWatch | None = None
        if arguments.spot_notice is not None:
            self._watch = NoticeWatch(
                arguments.spot_notice,
                self._tell,
                lambda complaint: _LOG.warning("%s", complaint),
                every_s=arguments.spot_notice_every_s,
                rank=self._ranks.rank,
            )
        self._is_told = False
        self._ends_with: BaseException | None = None

    def watch(self, replace: Replace) -> None:
        """Be there when Lightning puts its handlers in place."""
        if self._owned:
            replace(self._trainer._signal_connector, "register_signal_handlers", self._register)

    def begin(self) -> None:
        """Listen from now on; for all ranks.

        Raises:
            RanksError: the ranks cannot reach each other.
        """
        problem = self._signals.install()
        if problem is not None:
            rank_zero_warn(f"Strongroom: {problem}")
        self._vote.begin()
        if self._watch is not None:
            self._watch.start()

    def at_boundary(self) -> StopNotice | None:
        """Whether all ranks stop here, between two steps, and why.

        Raises:
            RanksError: another rank has failed, or does not answer.
        """
        return self._vote.at_boundary()

    def stop(self, notice: StopNotice, saved: str) -> NoReturn:
        """End the fit on every rank, once each is done with its part of the save.

        Args:
            saved: what stands where, in words.

        Raises:
            SIGTERMException: Lightning's, with the exit status of the process.
        """
        status, besides = notice.exit_status, ""
        refused = self._leave_together(notice)
        if notice.signal is not None and notice.signal == self._requeue_signal:
            if refused is None:
                status, besides = 0, "; Slurm has put the job back into its queue"
            else:
                rank_zero_warn(f"Strongroom: Slurm did not put the job back into its queue: {refused}")
        rank_zero_info(
            f"Strongroom: told to stop by {notice.reason} (rank {notice.rank}): {saved}{besides}; "
            f"ending with status {status}"
        )
        seam.note_sigterm(self._trainer)
        self._ends_with = seam.sigterm_exception(self._namespace, status)
        raise self._ends_with

    @property
    def is_told(self) -> bool:
        """Whether this very process was told to stop."""
        return self._is_told

    def is_stop(self, exception: BaseException) -> bool:
        """Whether it is how `stop` ended the fit."""
        return exception is self._ends_with

    def agree_to_save(self, is_at_boundary: bool) -> str | None:
        """After an error, on ranks that failed: None where all save what they stand at, or why not."""
        return agree_to_save(self._ranks, self._vote.passed if is_at_boundary else None, within_s=_FAILED_S)

    def leave(self, error: BaseException | None = None) -> None:
        """No boundary follows on this rank; signals are noted still, and end nothing that is being written.

        Args:
            error: why, where it is this rank's alone; the others are told.
        """
        if self._watch is not None:
            self._watch.stop()
        self._vote.end(None if error is None or self.is_stop(error) else error)

    def end(self) -> None:
        """Leave signals to whoever had them before; harmless when repeated."""
        self._signals.remove()

    def _tell(self, notice: StopNotice) -> None:
        # In a signal's handler, perhaps.
        self._is_told = True
        self._vote.tell(notice)

    def _register(self, original: Callable[[], None]) -> Callable[[], None]:
        def register_signal_handlers() -> None:
            original()
            seam.disown_signals(self._trainer, self._owned)
            self._signals.install()

        return register_signal_handlers

    def _leave_together(self, notice: StopNotice) -> str | None:
        """Wait until all ranks have come as far; on the way Slurm is asked. None, or what it refused.

        A launcher that sees one process end kills the others, and rank 0 may still be writing.
        """

        def decide(_: list[Message]) -> Verdict:
            wanted = notice.signal is not None and notice.signal == self._requeue_signal
            return Verdict(shared=Message(members={"refused": requeue() if wanted else None}))

        try:
            told, _ = self._ranks.lane("leaving").agree(
                "leaving together", Message, decide, timeout_s=_LEAVE_S
            )
        except RanksError as error:
            return str(error)
        refused = told.members["refused"]
        return None if refused is None else str(refused)
