"""What a fit saves between two optimizer steps: whether, what, and what follows where it is told to stop."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from strongroom import Checkpointer, PerRank
from strongroom.errors import ConfigError, SaveError, StrongroomError
from strongroom.handle import SaveHandle
from strongroom.resume import (
    DataPosition,
    LastSave,
    Moment,
    RngState,
    SharedClock,
    StopNotice,
    training_modes,
)
from strongroom_lightning import contents, metrics, seam
from strongroom_lightning.arguments import Arguments
from strongroom_lightning.data import TrainingData
from strongroom_lightning.encoding import Encoding
from strongroom_lightning.preempting import Preempting
from strongroom_lightning.ranking import STATE_KEY, Measured, Ranking
from strongroom_lightning.standing import Standing

__all__ = ["Ending", "Saving"]


@dataclass(frozen=True, kw_only=True)
class Ending:
    """Where training has come to its end. Lightning counts on from there, as if an epoch were over."""

    fit_loop: dict[str, Any]
    position: DataPosition | None
    rng: RngState


class Saving:
    """One fit's saves.

    Args:
        trainer: Lightning's.
        arguments: the callback's.
        checkpointer: of the run's root.
        ranking: of the run's checkpoints.
        data: the fit's.
        encoding: of users' values.
        preempting: how the fit is told to stop.
        clock: seconds, monotonic.
        left_at: the step of the run's root that training stands on; None where it stands on none.

    Attributes:
        ending: where training has come to its end: what follows are the last hooks. None before.
    """

    def __init__(
        self,
        trainer: Any,
        arguments: Arguments,
        checkpointer: Checkpointer,
        ranking: Ranking,
        *,
        data: TrainingData,
        encoding: Encoding,
        preempting: Preempting,
        clock: Callable[[], float],
        left_at: int | None,
    ) -> None:
        self._trainer = trainer
        self._arguments = arguments
        self.checkpointer = checkpointer
        self._ranking = ranking
        self._data = data
        self._encoding = encoding
        self._preempting = preempting
        self._clock = clock
        self.left_at = left_at
        self._intervals = arguments.intervals
        self._is_validated = False
        self._has_warned = False
        self._is_asked_for = False
        self._last: LastSave | None = None
        self._newest: SaveHandle | None = None
        self._standing: Standing | None = None
        self._shared_clock: SharedClock | None = None
        self.ending: Ending | None = None

    def begin(self) -> None:
        """Training is about to begin, here: intervals are measured from this place."""
        self._intervals = replace(
            self._intervals,
            after_validation=seam.saves_after_validation(
                self._trainer, self._arguments.save_on_train_epoch_end
            ),
        )
        self._last = LastSave.at(self.moment())

    def validated(self) -> None:
        """Validation is over; metrics of it are there."""
        self._is_validated = True

    def save_after_this_step(self) -> None:
        """Save as soon as the step that is under way is over, and let training wait until it stands."""
        self._is_asked_for = True

    def moment(self, *, is_epoch_end: bool = False, is_run_end: bool = False) -> Moment:
        return Moment(
            step=self._trainer.global_step,
            epochs_done=seam.epochs_done(self._trainer.fit_loop),
            clock_s=self._time(),
            is_epoch_end=is_epoch_end,
            is_run_end=is_run_end,
            is_validated=self._is_validated,
        )

    def between_steps(self, moment: Moment) -> None:
        """All that belongs to a step, or to an epoch, is over: save if it is due, or if told to stop."""
        notice = self._preempting.at_boundary()
        try:
            self._save_if_due(moment)
        except SaveError as earlier:
            if notice is None:
                raise
            # That of a save before this one: it is told now, and must not keep the last one away.
            rank_zero_warn(f"Strongroom: {earlier}. Saving step {moment.step} all the same")
        self.answer(notice, moment)
        self.stand(moment)

    def stand(self, moment: Moment) -> None:
        """Know this place, should the next batch fail to come."""
        looks = self._arguments.save_on_exception and self._last is not None
        rng = self._data.random_state() if looks else None
        self._standing = Standing.of(self._trainer, moment, rng)

    def save_after(self, error: BaseException) -> None:
        """After an error: save where training stood, if nothing has changed since, on any rank.

        Raises:
            StrongroomError: it could not be saved.
        """
        standing, last = self._standing, self._last
        is_wanted = self._arguments.save_on_exception or self._preempting.is_told
        # Our own errors say that saving is what failed, or that ranks are lost.
        if not is_wanted or isinstance(error, StrongroomError) or self._preempting.is_stop(error):
            return
        is_held = standing is not None and standing.is_held(self._trainer)
        why_not = self._preempting.agree_to_save(is_held)
        if why_not is not None or standing is None or last is None:
            stands = "there is no checkpoint yet" if self.left_at is None else f"step {self.left_at} stands"
            rank_zero_warn(f"Strongroom: nothing more is saved after {error!r:.200}: {why_not}; {stands}")
            return
        if standing.moment.step != last.step:
            self.save(standing.moment, rng=standing.rng)
            rank_zero_info(f"Strongroom: step {standing.moment.step} is saved after {error!r:.200}")
        if self._newest is not None:
            self._newest.result()

    def answer(self, notice: StopNotice | None, moment: Moment) -> None:
        """If told to stop: save where all ranks stand, see it committed, and end the fit."""
        if notice is None or self._last is None or moment.is_run_end:
            return
        root = self._arguments.dirpath
        if self._last.step != moment.step:
            try:
                self.save(moment)
            except SaveError as earlier:  # as above, where no save was due
                rank_zero_warn(f"Strongroom: {earlier}. Saving step {moment.step} all the same")
                self.save(moment)
        if self._newest is not None:
            self._newest.result()  # its failure ends the run in any case, also where failures are tolerated
        self.checkpointer.wait()
        saved = f"nothing was trained that {root} would have to hold"
        if self.left_at is not None:
            saved = f"step {self.left_at} of {root} is committed"
        self._preempting.stop(notice, saved)

    def steps(self) -> set[int]:
        """The steps that the run's root holds, as rank 0 sees it."""

        def look() -> list[int]:
            if not self._trainer.is_global_zero:
                return []
            return sorted({one.step for one in self.checkpointer.checkpoints()})

        return set(self.checkpointer.confer("which steps there are", look)[0])

    def save(
        self,
        moment: Moment,
        score: float | None = None,
        *,
        by_interval: bool = False,
        rng: RngState | None = None,
    ) -> None:
        """Save where training stands.

        Args:
            score: what was measured on these very weights of the metric that the run is ranked by.
            by_interval: it was due, and so is a ranked one where this has no score.
            rng: the random states to save, where these have moved on.
        """
        self._ranking.begin(
            moment.step, score, is_owed=by_interval
        )  # what the callback's state says is part of the save
        try:
            handle = self._save(moment, rng)
        except BaseException:
            self._ranking.give_up(moment.step)
            raise
        if handle is None:
            self._ranking.give_up(moment.step)
            return
        self._newest = handle
        self._ranking.follow(moment.step, handle)
        self._last, self.left_at = LastSave.at(moment), moment.step
        if self._arguments.verbose and score is not None:
            self._tell_of(moment, score)

    def _save_if_due(self, moment: Moment) -> None:
        """Save if it is due.

        With ``monitor``, a save that is due before the metric is there is not put off, since the run may need
        it; but once the metric is there, what it was measured on is saved too.
        """
        self._is_validated = False
        if moment.is_run_end and self.ending is None:
            self.ending = self._end()
        if self._last is None:
            return
        is_asked_for, self._is_asked_for = self._is_asked_for, False
        by_interval = self._intervals.decide(moment, self._last).save
        is_due = by_interval or is_asked_for
        measured = Measured()
        if self._ranking.rule.monitor is not None and (is_due or moment.is_validated or moment.is_epoch_end):
            measured = self._measure(moment)
            if measured.problem:
                raise ConfigError(measured.problem)
        is_late = self._ranking.is_behind and measured.score is not None and moment.step != self._last.step
        if is_due or is_late:
            self.save(moment, measured.score, by_interval=by_interval)
        if is_due and measured.is_missing:
            self._say_that_metric_is_missing(moment)
        if is_asked_for:
            self.checkpointer.wait()

    def _end(self) -> Ending:
        loop = copy.deepcopy(self._trainer.fit_loop.state_dict())
        position = self._data.position(tuple(loop["state_dict"].pop("combined_loader", ())))
        return Ending(fit_loop=loop, position=position, rng=self._data.random_state())

    def _time(self) -> float:
        """The same on every rank, where anything goes by it."""
        every = self._arguments.intervals.every
        if every is None or self._trainer.world_size == 1:
            return self._clock()
        if self._shared_clock is None:
            self._shared_clock = SharedClock(self._clock, self.checkpointer.confer, every.total_seconds())
        return self._shared_clock.read(self._trainer.global_step)

    def _measure(self, moment: Moment) -> Measured:
        """What rank 0 measures; metrics may differ by rank, and what is saved may not."""
        found = self._ranking.measure(self._metrics(moment))
        words = self.checkpointer.confer("what is monitored", found.to_word)
        return Measured.from_word(words[0])

    def _metrics(self, moment: Moment) -> dict[str, Any]:
        """What is logged, and what `ModelCheckpoint` adds to it."""
        counted = {"epoch": moment.epochs_done - moment.is_epoch_end, "step": moment.step}
        return {**counted, **self._trainer.callback_metrics}

    def _say_that_metric_is_missing(self, moment: Moment) -> None:
        monitor = self._ranking.rule.monitor
        told = (
            f"monitor={monitor!r} is not among what was logged: {', '.join(self._metrics(moment))}; "
            f"call self.log({monitor!r}, ...) in the module, or monitor one of these"
        )
        if seam.has_validated(self._trainer):
            raise ConfigError(told)
        if moment.is_epoch_end and not self._trainer.enable_validation and not self._has_warned:
            self._has_warned = True
            rank_zero_warn(f"Strongroom: {told}")

    def _save(self, moment: Moment, rng: RngState | None) -> SaveHandle | None:
        data = self._data
        rng = rng or data.random_state()
        weights_only = self._arguments.save_weights_only
        ranked = self._ranking.state_dict() if weights_only else {}
        state, loader_states = contents.gather(
            self._trainer,
            self._encoding.storable,
            self.checkpointer.confer,
            weights_only=weights_only,
            more={STATE_KEY: ranked} if ranked else None,
        )
        data.put_back(rng)  # a hook may draw; saving must not change the run
        position = data.position(loader_states)
        if position is None:
            return None
        if not weights_only:
            state["position"], state["rng"] = PerRank(position.to_state()), PerRank(rng.to_state())
            state["modes"] = PerRank(training_modes(self._trainer.lightning_module))
            if self._arguments.running_metrics:
                state["metrics"] = PerRank(metrics.capture(self._trainer))
        label = self._arguments.label
        return self.checkpointer.save(
            moment.step,
            state,
            metrics=contents.scalars(self._trainer.callback_metrics),
            tags=() if label is None else (label.fill(contents.scalars(self._metrics(moment))),),
            best=self._ranking.named_best(),
        )

    def _tell_of(self, moment: Moment, score: float) -> None:
        place, monitor = self._ranking.place(moment.step), self._ranking.rule.monitor
        rank = "not among the best that stay" if place is None else f"number {place} of the best"
        rank_zero_info(f"Strongroom: {monitor} is {score:.5g} at step {moment.step}, {rank}")
