"""What a run saves between two optimizer steps: whether, when, and what follows where it is told to stop.

A front end reports where training stands, and gathers the state when it is asked to. Whether that is due is
`strongroom.resume.SaveIntervals`' to say, or the front end's own; how it is saved, the Checkpointer's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from strongroom.checkpointer import Checkpointer
from strongroom.errors import SaveError, StrongroomError
from strongroom.frontend.preempting import Preempted, Preemption
from strongroom.frontend.settings import RunSettings
from strongroom.frontend.voice import Voice
from strongroom.handle import SaveHandle
from strongroom.resume.clock import SharedClock
from strongroom.resume.intervals import LastSave, Moment, SaveIntervals
from strongroom.resume.preemption import StopNotice
from strongroom.resume.rng import Generator, RngState

__all__ = ["Gathered", "RunSaves"]

_DRAIN_S: Final = 10.0
"""How long a run that ends with an exception waits for a save that is being written."""


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """What is to be saved.

    Attributes:
        state: the whole of it.
        metrics: figures of this moment, for whoever lists the run.
        tags: labels of it.
        best: the steps that are the run's best now, the best first: `strongroom gc` keeps them.
    """

    state: Mapping[str, Any]
    metrics: Mapping[str, float] = field(default_factory=dict)
    tags: Sequence[str] = ()
    best: Sequence[int] = ()


class RunSaves:
    """One run's saves, from its first step to its end.

    Args:
        checkpointer: of the run's root; it is closed at the end.
        settings: the run's.
        preemption: how the run is told to stop.
        voice: the front end's.
        intervals: when to save.
        gather: gives the state at a moment, and these random states; users' code that it runs may draw.
        generators: what training draws from besides the global streams.
        left_at: the step of the run's root that training stands on; None where it stands on none.
        clock: seconds, monotonic.

    Attributes:
        left_at: the step saved or resumed last.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        settings: RunSettings,
        preemption: Preemption,
        voice: Voice,
        *,
        intervals: SaveIntervals,
        gather: Callable[[Moment, RngState], Gathered],
        generators: Callable[[], Mapping[str, Generator]] = dict,
        left_at: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.checkpointer = checkpointer
        self._settings = settings
        self._preemption = preemption
        self._voice = voice
        self._intervals = intervals
        self._gather = gather
        self._generators = generators
        self.left_at = left_at
        self._clock = clock
        self._last: LastSave | None = None
        self._newest: SaveHandle | None = None
        self._shared_clock: SharedClock | None = None
        self._is_over = False

    def moment(
        self,
        step: int,
        epochs_done: int,
        *,
        is_epoch_end: bool = False,
        is_run_end: bool = False,
        is_validated: bool = False,
    ) -> Moment:
        """A point at which the run could be saved, by a clock that all ranks share where one is needed."""
        return Moment(
            step=step,
            epochs_done=epochs_done,
            clock_s=self._time(step),
            is_epoch_end=is_epoch_end,
            is_run_end=is_run_end,
            is_validated=is_validated,
        )

    def begin(self, moment: Moment) -> None:
        """Training is about to begin, here: intervals are measured from this place.

        Raises:
            Preempted: the run was told to stop meanwhile.
        """
        self._last = LastSave.at(moment)
        self._answer(self._preemption.at_boundary(), moment)

    def between_steps(self, moment: Moment, *, due: bool | None = None) -> SaveHandle | None:
        """All that belongs to a step, or to an epoch, is over: save if it is due, or if told to stop.

        For all ranks, at the same moments.

        Args:
            due: whether to save, where the front end decides that; None: as the intervals say. A step is
                saved once, whoever decides.

        Returns:
            The save, if there was one.

        Raises:
            SaveError: the one before has failed.
            Preempted: the run was told to stop; it is saved.
        """
        notice = self._preemption.at_boundary()
        last, handle = self._last, None
        if last is None:
            last = self._last = LastSave.at(moment)
        is_due = due and moment.step != last.step
        if due is None:
            is_due = self._intervals.decide(moment, last).save
        if is_due:
            try:
                handle = self.save(moment)
            except SaveError as earlier:
                if notice is None:
                    raise
                # That of a save before this one: it is told now, and must not keep the last one away.
                self._voice.warn(f"{earlier}. Saving step {moment.step} all the same")
        self._answer(notice, moment)
        return handle

    def save(self, moment: Moment) -> SaveHandle:
        """Save where training stands, whatever is due; for all ranks. Saving changes nothing of the run.

        Raises:
            SaveError: the save before has failed; or this one has, before anything was written.
        """
        rng = RngState.capture(self._generators())
        try:
            gathered = self._gather(moment, rng)
        finally:
            rng.restore(self._generators())
        handle = self.checkpointer.save(
            moment.step,
            gathered.state,
            metrics=gathered.metrics,
            tags=gathered.tags,
            best=gathered.best,
        )
        self._newest, self._last, self.left_at = handle, LastSave.at(moment), moment.step
        return handle

    def wait(self) -> None:
        """Until the newest save is committed.

        Raises:
            SaveError: it failed.
        """
        if self._newest is not None:
            self._newest.result()

    def end(self, error: BaseException | None = None) -> None:
        """The run is over; a second call does nothing.

        Args:
            error: what ended it, if it did not end by itself. It is never hidden by what follows from it.

        Raises:
            SaveError, ReplicationError: without an error: the last save failed, or does not stand everywhere.
        """
        self._leave(error, self.checkpointer.close)

    def pause(self, error: BaseException | None = None) -> None:
        """As `end`, for a run that may train on in this process: the Checkpointer stays open, and stays the
        launch that it is.

        Args:
            error: as `end` has it.

        Raises:
            SaveError: without an error: the last save failed.
        """
        self._leave(error, self.checkpointer.wait)

    def _leave(self, error: BaseException | None, drain: Callable[[float | None], None]) -> None:
        if self._is_over:
            return
        self._is_over = True
        is_stop = isinstance(error, Preempted)
        try:
            self._preemption.leave(None if is_stop else error)
            # A run that was told to stop has committed; what is left are copies, and they are worth the wait.
            drain(None if error is None or is_stop else _DRAIN_S)
        except StrongroomError as failure:
            if error is None:
                raise
            if failure is not error:
                self._voice.warn(f"closing {self._settings.root} after {error!r:.200} failed: {failure}")
        finally:
            self._preemption.end()

    def _answer(self, notice: StopNotice | None, moment: Moment) -> None:
        """If told to stop: save where all ranks stand, see it committed, and end the run.

        Where the run ends here anyway, it ends as it would have.
        """
        if notice is None or self._last is None or moment.is_run_end:
            return
        if self._last.step != moment.step:
            try:
                self.save(moment)
            except SaveError as earlier:  # as above, where no save was due
                self._voice.warn(f"{earlier}. Saving step {moment.step} all the same")
                self.save(moment)
        self.wait()  # its failure ends the run in any case, also where failures are tolerated
        self.checkpointer.wait()
        root = self._settings.root
        saved = f"nothing was trained that {root} would have to hold"
        if self.left_at is not None:
            saved = f"step {self.left_at} of {root} is committed"
        status = self._preemption.part(notice, saved)
        raise Preempted(status, reason=notice.reason, step=self.left_at)

    def _time(self, step: int) -> float:
        every = self._intervals.every
        if every is None:
            return self._clock()
        if self._shared_clock is None:
            self._shared_clock = SharedClock(self._clock, self.checkpointer.confer, every.total_seconds())
        return self._shared_clock.read(step)
