"""One fit, followed from its set-up to its end: what Lightning goes through, told to what acts on it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, Final

from lightning_utilities.core.rank_zero import rank_zero_info

from strongroom import Checkpointer
from strongroom.frontend.replacing import Replace
from strongroom.resume import (
    DataPosition,
    JobShape,
    Moment,
    RngState,
    batches_behind,
    restore_modes,
)
from strongroom_lightning import contents, metrics, seam
from strongroom_lightning.arguments import Arguments
from strongroom_lightning.data import TrainingData, tell_of_differences
from strongroom_lightning.encoding import Encoding
from strongroom_lightning.namespace import Namespace
from strongroom_lightning.preempting import Preempting
from strongroom_lightning.ranking import Ranking
from strongroom_lightning.saving import Saving
from strongroom_lightning.strategies import check_optimizers

__all__ = ["Fit"]

_NOT_RESUMABLE: Final = "You're resuming from a checkpoint that ended before the epoch ended"
"""Lightning's warning about loaders that cannot say where they stand; ours need not be able to."""


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
        saving: what it saves.
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
        self._is_tuning = is_tuning
        self._data = TrainingData(trainer.fit_loop, arguments.skip)
        self._measured: Mapping[str, Any] | None = None
        self._modes: Mapping[str, Any] | None = None
        self._postponed: Moment | None = None
        self.encoding = Encoding(arguments.unencodable, namespace)
        self._job_before: JobShape | None = None
        self.preempting = preempting
        self.saving = Saving(
            trainer,
            arguments,
            checkpointer,
            ranking,
            data=self._data,
            encoding=self.encoding,
            preempting=preempting,
            clock=clock,
            left_at=left_at,
        )
        self.is_restoring = False
        self.resumes_by_itself = False

    def watch(self, replace: Replace) -> None:
        """Be told as the fit goes on."""
        fit_loop, epoch_loop = self._trainer.fit_loop, self._trainer.fit_loop.epoch_loop
        for owner, name, make in (
            (fit_loop, "setup_data", self._setup_data),
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

    def _setup_data(self, original: Callable[[], None]) -> Callable[[], None]:
        return lambda: self._data.make_loaders(original)

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
            self._check_encodable()
            self.saving.begin()
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
            here = self.saving.moment()
            self.saving.answer(self.preempting.at_boundary(), here)
            self.saving.stand(here)

        return on_run_start

    def _check_encodable(self) -> None:
        """Whether all that exists by now can be saved; looking, which is users' code, changes no run."""
        rng = RngState.capture()
        self.encoding.check(self._trainer)
        contents.check_storable(
            self._trainer, self._namespace, weights_only=self._arguments.save_weights_only
        )
        rng.restore()

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
                with seam.counting_no_batch(self._trainer.fit_loop):
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
                self.saving.between_steps(self.saving.moment(is_run_end=is_over))

        return on_advance_end

    def _epoch_end(self, original: Callable[[], None]) -> Callable[[], None]:
        def on_advance_end() -> None:
            original()
            self._data.epoch_is_over()
            is_over = seam.is_run_over(self._trainer)
            moment = self.saving.moment(is_epoch_end=True, is_run_end=is_over)
            if is_over and seam.averages_at_end(self._trainer, self._namespace):
                self._postponed = moment
            else:
                self.saving.between_steps(moment)

        return on_advance_end

    def _run_end(self, original: Callable[[], None]) -> Callable[[], None]:
        def on_run_end() -> None:
            original()  # every on_train_end hook included
            moment, self._postponed = self._postponed, None
            if moment is not None:
                self.saving.between_steps(moment)

        return on_run_end

    def _validation(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            results = original(*args, **kwargs)
            if seam.has_validated(self._trainer) and not self._trainer.sanity_checking:
                self.saving.validated()
            return results

        return run
