"""One fit, followed between two optimizer steps: where its data stand, what is due, what is saved."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from strongroom import Checkpointer, PerRank
from strongroom.errors import ConfigError, SaveError, StrongroomError
from strongroom.handle import SaveHandle
from strongroom.resume import (
    DataPosition,
    JobShape,
    LastSave,
    Moment,
    RngState,
    SharedClock,
    StopNotice,
    batches_behind,
    restore_modes,
    training_modes,
)
from strongroom_lightning import contents, metrics, seam
from strongroom_lightning.arguments import Arguments
from strongroom_lightning.data import TrainingData, tell_of_differences
from strongroom_lightning.encoding import Encoding
from strongroom_lightning.namespace import Namespace
from strongroom_lightning.preempting import Preempting
from strongroom_lightning.ranking import STATE_KEY, Measured, Ranking
from strongroom_lightning.standing import Standing
from strongroom_lightning.strategies import check_optimizers

__all__ = ["Ending", "Fit"]

_NOT_RESUMABLE: Final = "You're resuming from a checkpoint that ended before the epoch ended"
"""Lightning's warning about loaders that cannot say where they stand; ours need not be able to."""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """Where training has come to its end. Lightning counts on from there, as if an epoch were over."""

    fit_loop: dict[str, Any]
    position: DataPosition | None
    rng: RngState


class Fit:
    """One fit, from its set-up to its end.

    Args:
        trainer: Lightning's.
        namespace: the package that it is of.
        arguments: the callback's.
        checkpointer: of the run's root; it is closed by whoever opened it.
        ranking: of the run's checkpoints.
        is_tuning: whether Lightning's finders are trying something out inside this fit, with the callbacks
            taken out meanwhile. What is trained then is thrown away: it must neither be saved nor move what
            is known of the data.
        clock: seconds, monotonic.
        left_at: the step of the run's root that training stands on; None where it stands on none.
        preempting: how the fit is told to stop.

    Attributes:
        encoding: of users' values.
        ending: where training has come to its end: what follows are the last hooks. None before.
        is_restoring: a checkpoint was chosen, and Lightning is still loading it.
        resumes_by_itself: the user named no checkpoint.
    """

    def __init__(
        self,
        trainer: Any,
        namespace: Namespace,
        arguments: Arguments,
        checkpointer: Checkpointer,
        ranking: Ranking,
        *,
        is_tuning: Callable[[], bool],
        clock: Callable[[], float],
        left_at: int | None,
        preempting: Preempting,
    ) -> None:
        self._trainer = trainer
        self._namespace = namespace
        self._arguments = arguments
        self.checkpointer = checkpointer
        self._ranking = ranking
        self._intervals = arguments.intervals
        self._is_validated = False
        self._has_warned = False
        self._is_tuning = is_tuning
        self._clock = clock
        self._data = TrainingData(trainer.fit_loop, arguments.skip)
        self._measured: Mapping[str, Any] | None = None
        self._modes: Mapping[str, Any] | None = None
        self._postponed: Moment | None = None
        self.encoding = Encoding(arguments.unencodable, namespace)
        self._last: LastSave | None = None
        self._job_before: JobShape | None = None
        self._shared_clock: SharedClock | None = None
        self._newest: SaveHandle | None = None
        self._standing: Standing | None = None
        self.preempting = preempting
        self._is_asked_for = False
        self.left_at = left_at
        self.ending: Ending | None = None
        self.is_restoring = False
        self.resumes_by_itself = False

    def watch(self, replace: seam.Replace) -> None:
        """Be told as the fit goes on."""
        fit_loop, epoch_loop = self._trainer.fit_loop, self._trainer.fit_loop.epoch_loop
        for owner, name, make in (
            (fit_loop, "_load_combined_loader_states", self._loaders_ready),
            (fit_loop, "on_run_start", self._run_start),
            (epoch_loop, "reset", self._epoch_reset),
            (epoch_loop, "on_run_start", self._epoch_start),
            (epoch_loop, "on_advance_end", self._batch_end),
            (fit_loop, "on_advance_end", self._epoch_end),
            (fit_loop, "on_run_end", self._run_end),
            (epoch_loop.val_loop, "run", self._validation),
        ):
            replace(owner, name, self._unless_tuning(make))

    def resume_from(
        self,
        position: DataPosition | None,
        rng: RngState | None,
        measured: Mapping[str, Any] | None = None,
        job: JobShape | None = None,
        modes: Mapping[str, Any] | None = None,
    ) -> None:
        """Let training go on from here, once Lightning has loaded the rest; without a position, its way.

        Args:
            job: which had come so far.
            measured: what `strongroom_lightning.metrics` gave, where the checkpoint has it.
            modes: what `strongroom.resume.training_modes` gave.
        """
        if position is not None and rng is not None:
            self._data.resume_from(position, rng)
            self._measured, self._modes = measured, modes
            self._job_before = job
        self.is_restoring = True

    @property
    def data(self) -> TrainingData:
        """Its training data."""
        return self._data

    def save_after_this_step(self) -> None:
        """Save as soon as the step that is under way is over, and let training wait until it stands."""
        self._is_asked_for = True

    def _unless_tuning(
        self, make: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def either(original: Callable[..., Any]) -> Callable[..., Any]:
            ours = make(original)

            def method(*args: Any, **kwargs: Any) -> Any:
                return (original if self._is_tuning() else ours)(*args, **kwargs)

            return method

        return either

    # --------------------------------------------------------------------------- what Lightning goes through

    def _loaders_ready(self, original: Callable[[], None]) -> Callable[[], None]:
        def load_combined_loader_states() -> None:
            original()
            # Nothing but the making of the iterator follows in Lightning.
            self._data.loaders_are_ready()

        return load_combined_loader_states

    def _run_start(self, original: Callable[[], None]) -> Callable[[], None]:
        def on_run_start() -> None:
            original()  # every on_train_start hook included
            check_optimizers(self._trainer)
            self.encoding.check(self._trainer)
            self._intervals = replace(
                self._intervals,
                after_validation=seam.saves_after_validation(
                    self._trainer, self._arguments.save_on_train_epoch_end
                ),
            )
            self._last = LastSave.at(self._moment())
            self.is_restoring = False
            if self.resumes_by_itself and seam.has_stopped_early(self._trainer, self._namespace):
                # Lightning would train one more epoch to find that out again, at every start.
                self._trainer.should_stop = True
                rank_zero_info(
                    "Strongroom: this run is already finished (early stopping ran out of patience at step "
                    f"{self._trainer.global_step} of {self._arguments.dirpath}): nothing to train. To train "
                    "on, leave the early stopping out, or pass ckpt_path='strongroom://latest'"
                )
            if self._data.is_resuming_inside_epoch:
                self._go_on_in_this_job()
                seam.repeat_epoch_settings(self._trainer, self._namespace)
            self._put_back_modes()
            measured, self._measured = self._measured, None
            if measured is not None:
                inside = self._data.is_resuming_inside_epoch
                tell_of_differences(metrics.restore(self._trainer, measured, inside_epoch=inside))
            self._ranking.pass_over(metrics.known(self._trainer))
            self._data.training_begins()
            here = self._moment()
            self._answer(self.preempting.at_boundary(), here)
            self._stand(here)

        return on_run_start

    def _go_on_in_this_job(self) -> None:
        """Where the data are divided among more or fewer than before, go on behind what those had taken."""
        before, now = self._job_before, contents.job_shape(self._trainer)
        if before is None or before.replicas == now.replicas:
            return
        at_once = self._trainer.accumulate_grad_batches
        position = self._data.move(lambda taken: batches_behind(taken, before, now, multiple_of=at_once)[0])
        seam.move_inside_epoch(self._trainer.fit_loop, position.batches)
        rank_zero_info(
            f"Strongroom: the data of epoch {position.epoch} were divided among {before.replicas} processes, "
            f"and are now among {now.replicas}, which go on from batch {position.batches}: model and "
            f"optimizers are exact, and what follows is not what it would have been"
        )

    def _put_back_modes(self) -> None:
        modes, self._modes = self._modes, None
        changed = 0 if modes is None else restore_modes(self._trainer.lightning_module, modes)
        if changed:
            rank_zero_info(
                f"Strongroom: {changed} parameters and parts of the module were frozen, or evaluating, "
                f"otherwise than in the checkpoint; they are now as they were there"
            )

    def _epoch_reset(self, original: Callable[[], None]) -> Callable[[], None]:
        def reset() -> None:
            if not self._data.is_resuming_inside_epoch:
                original()
                return
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=_NOT_RESUMABLE)
                original()

        return reset

    def _epoch_start(self, original: Callable[[Any], None]) -> Callable[[Any], None]:
        return lambda fetcher: self._data.epoch_begins(fetcher, original)

    def _batch_end(self, original: Callable[..., None]) -> Callable[..., None]:
        def on_advance_end(*args: Any) -> None:
            original(*args)
            fit_loop = self._trainer.fit_loop
            if seam.is_epoch_complete(fit_loop):
                return  # the epoch's end follows at once, and is the better moment
            is_over = seam.is_run_over(self._trainer)
            if is_over or seam.is_step_boundary(fit_loop):
                self._between_steps(self._moment(is_run_end=is_over))

        return on_advance_end

    def _epoch_end(self, original: Callable[[], None]) -> Callable[[], None]:
        def on_advance_end() -> None:
            original()
            self._data.epoch_is_over()
            is_over = seam.is_run_over(self._trainer)
            moment = self._moment(is_epoch_end=True, is_run_end=is_over)
            if is_over and seam.averages_at_end(self._trainer, self._namespace):
                self._postponed = moment
            else:
                self._between_steps(moment)

        return on_advance_end

    def _run_end(self, original: Callable[[], None]) -> Callable[[], None]:
        def on_run_end() -> None:
            original()  # every on_train_end hook included
            moment, self._postponed = self._postponed, None
            if moment is not None:
                self._between_steps(moment)

        return on_run_end

    def _validation(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            results = original(*args, **kwargs)
            self._is_validated = seam.has_validated(self._trainer) and not self._trainer.sanity_checking
            return results

        return run

    # --------------------------------------------------------------------------------------------- saving

    def _time(self) -> float:
        """The same on every rank, where anything goes by it."""
        every = self._arguments.intervals.every
        if every is None or self._trainer.world_size == 1:
            return self._clock()
        if self._shared_clock is None:
            self._shared_clock = SharedClock(self._clock, self.checkpointer.confer, every.total_seconds())
        return self._shared_clock.read(self._trainer.global_step)

    def _moment(self, *, is_epoch_end: bool = False, is_run_end: bool = False) -> Moment:
        return Moment(
            step=self._trainer.global_step,
            epochs_done=seam.epochs_done(self._trainer.fit_loop),
            clock_s=self._time(),
            is_epoch_end=is_epoch_end,
            is_run_end=is_run_end,
            is_validated=self._is_validated,
        )

    def _between_steps(self, moment: Moment) -> None:
        """All that belongs to a step, or to an epoch, is over: save if it is due, or if told to stop."""
        notice = self.preempting.at_boundary()
        try:
            self._save_if_due(moment)
        except SaveError as earlier:
            if notice is None:
                raise
            # That of a save before this one: it is told now, and must not keep the last one away.
            rank_zero_warn(f"Strongroom: {earlier}. Saving step {moment.step} all the same")
        self._answer(notice, moment)
        self._stand(moment)

    def _stand(self, moment: Moment) -> None:
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
        is_wanted = self._arguments.save_on_exception or self.preempting.is_told
        # Our own errors say that saving is what failed, or that ranks are lost.
        if not is_wanted or isinstance(error, StrongroomError) or self.preempting.is_stop(error):
            return
        is_held = standing is not None and standing.is_held(self._trainer)
        why_not = self.preempting.agree_to_save(is_held)
        if why_not is not None or standing is None or last is None:
            stands = "there is no checkpoint yet" if self.left_at is None else f"step {self.left_at} stands"
            rank_zero_warn(f"Strongroom: nothing more is saved after {error!r:.200}: {why_not}; {stands}")
            return
        if standing.moment.step != last.step:
            self.save(standing.moment, rng=standing.rng)
            rank_zero_info(f"Strongroom: step {standing.moment.step} is saved after {error!r:.200}")
        if self._newest is not None:
            self._newest.result()

    def _answer(self, notice: StopNotice | None, moment: Moment) -> None:
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
        self.preempting.stop(notice, saved)

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

    def _measure(self, moment: Moment) -> Measured:
        """What rank 0 measures; metrics may differ by rank, and what is saved may not."""
        found = self._ranking.measure(self._metrics(moment))
        words = self.checkpointer.confer("what is monitored", found.to_word)
        return Measured.from_word(words[0])

    def steps(self) -> set[int]:
        """The steps that the run's root holds, as rank 0 sees it."""

        def look() -> list[int]:
            if not self._trainer.is_global_zero:
                return []
            return sorted({one.step for one in self.checkpointer.checkpoints()})

        return set(self.checkpointer.confer("which steps there are", look)[0])

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

    def _save(self, moment: Moment, rng: RngState | None) -> SaveHandle | None:
        data = self._data
        rng = rng or data.random_state()
        weights_only = self._arguments.save_weights_only
        ranked = self._ranking.state_dict() if weights_only else {}
        state, loader_states = contents.gather(
            self._trainer,
            self.encoding.of,
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
        )

    def _tell_of(self, moment: Moment, score: float) -> None:
        place, monitor = self._ranking.place(moment.step), self._ranking.rule.monitor
        rank = "not among the best that stay" if place is None else f"number {place} of the best"
        rank_zero_info(f"Strongroom: {monitor} is {score:.5g} at step {moment.step}, {rank}")
