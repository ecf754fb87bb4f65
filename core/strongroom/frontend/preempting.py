"""How a run is told to stop, and how it ends once all of its ranks have saved.

While a run trains, the signals that ask to stop are ours: a handler takes a note and returns. All ranks then
stop after the same step (`strongroom.resume.StopVote`), save there, and leave together. What a framework is
told, its front end knows.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Sequence
from typing import Final

from strongroom.errors import RanksError
from strongroom.frontend.settings import RunSettings
from strongroom.frontend.voice import Voice
from strongroom.messages import Message
from strongroom.ranks import Ranks, Verdict
from strongroom.resume.failing import agree_to_save
from strongroom.resume.preemption import NoticeWatch, StopNotice, StopSignals
from strongroom.resume.requeue import requeue
from strongroom.resume.stopping import StopVote

__all__ = ["Preempted", "Preemption"]

_LOG: Final = logging.getLogger("strongroom")

_VOTE_S: Final = 60.0
"""How long ranks wait for each other's answer where to stop: threads give it, in the middle of a step too."""

_LEAVE_S: Final = 120.0
"""How long ranks wait for each other to leave together, rank 0's talk with Slurm included."""

_FAILED_S: Final = 10.0
"""How long a rank that failed waits to hear whether all have, and stand at the same step."""


class Preempted(SystemExit):
    """A run was told to stop, and is saved. Left alone it ends the process with the right status.

    Attributes:
        code: 128 and the signal's number; 0 where the job was put back into its queue.
        reason: by what it was told.
        step: the optimizer step that is saved; None: nothing was trained.
    """

    def __init__(self, code: int, *, reason: str, step: int | None) -> None:
        super().__init__(code)
        self.reason = reason
        self.step = step

    def __str__(self) -> str:
        stands = "nothing was trained" if self.step is None else f"step {self.step} is saved"
        return f"told to stop by {self.reason}: {stands}"


class Preemption:
    """One run's readiness to stop.

    Args:
        settings: which signals and notices tell it to.
        voice: the front end's.
        signals: in place of the settings' signals.
        requeue_signal: where this one told it to stop, Slurm is asked to begin the job again; None: for each
            signal, if the settings say so.
        ranks: who trains together; None: all of the job's.
    """

    def __init__(
        self,
        settings: RunSettings,
        voice: Voice,
        *,
        signals: Sequence[signal.Signals] | None = None,
        requeue_signal: signal.Signals | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self._voice = voice
        self._ranks = Ranks.of_this_process() if ranks is None else ranks
        self._vote = StopVote(self._ranks, timeout_s=min(_VOTE_S, settings.timeout_s))
        self._requeues = settings.requeue
        self._requeue_signal = requeue_signal
        self.owned = tuple(settings.preemption_signals if signals is None else signals)
        self._signals = StopSignals(self.owned, self._tell, rank=self._ranks.rank)
        self._watch: NoticeWatch | None = None
        if settings.spot_notice is not None:
            self._watch = NoticeWatch(
                settings.spot_notice,
                self._tell,
                lambda complaint: _LOG.warning("%s", complaint),
                every_s=settings.spot_notice_every_s,
                rank=self._ranks.rank,
            )
        self._is_told = False

    def begin(self) -> None:
        """Listen from now on; for all ranks.

        Raises:
            RanksError: the ranks cannot reach each other.
        """
        problem = self._signals.install()
        if problem is not None:
            self._voice.warn(problem)
        self._vote.begin()
        if self._watch is not None:
            self._watch.start()

    def own_signals(self) -> None:
        """Put the handlers on top once more, where a framework has put its own there meanwhile."""
        self._signals.install()

    def at_boundary(self) -> StopNotice | None:
        """Whether all ranks stop here, between two steps, and why.

        Raises:
            RanksError: another rank has failed, or does not answer.
        """
        return self._vote.at_boundary()

    def part(self, notice: StopNotice, saved: str) -> int:
        """Leave together with the other ranks, once each is done with its part of the save.

        Args:
            saved: what stands where, in words.

        Returns:
            The status with which this process is to end.
        """
        status, besides = notice.exit_status, ""
        is_wanted = notice.signal is not None and (self._requeues or notice.signal == self._requeue_signal)
        refused = self._leave_together(asks_slurm=is_wanted)
        if is_wanted:
            if refused is None:
                status, besides = 0, "; Slurm has put the job back into its queue"
            else:
                self._voice.warn(f"Slurm did not put the job back into its queue: {refused}")
        self._voice.info(
            f"told to stop by {notice.reason} (rank {notice.rank}): {saved}{besides}; "
            f"ending with status {status}"
        )
        return status

    @property
    def is_told(self) -> bool:
        """Whether this very process was told to stop."""
        return self._is_told

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
        self._vote.end(error)

    def end(self) -> None:
        """Leave signals to whoever had them before; harmless when repeated."""
        self._signals.remove()

    def _tell(self, notice: StopNotice) -> None:
        # In a signal's handler, perhaps.
        self._is_told = True
        self._vote.tell(notice)

    def _leave_together(self, *, asks_slurm: bool) -> str | None:
        """Wait until all ranks have come as far; on the way Slurm is asked. None, or what it refused.

        A launcher that sees one process end kills the others, and rank 0 may still be writing.
        """

        def decide(_: list[Message]) -> Verdict:
            return Verdict(shared=Message(members={"refused": requeue() if asks_slurm else None}))

        try:
            told, _ = self._ranks.lane("leaving").agree(
                "leaving together", Message, decide, timeout_s=_LEAVE_S
            )
        except RanksError as error:
            return str(error)
        refused = told.members["refused"]
        return None if refused is None else str(refused)
