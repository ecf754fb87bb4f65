"""One fit, followed between two optimizer steps: where its data stand, what is due, what is saved."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Final

import torch
from lightning_utilities.core.rank_zero import rank_zero_info

from strongroom import Checkpointer, PerRank, tree
from strongroom.resume import DataPosition, LastSave, Moment, RngState
from strongroom_lightning import contents, seam
from strongroom_lightning.arguments import Arguments
from strongroom_lightning.data import TrainingData
from strongroom_lightning.namespace import Namespace

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
        is_tuning: whether Lightning's finders are trying something out inside this fit, with the callbacks
            taken out meanwhile. What is trained then is thrown away: it must neither be saved nor move what
            is known of the data.
        clock: seconds, monotonic.
        left_at: the step of the run's root that training stands on; None where it stands on none.

    Attributes:
        is_restoring: a checkpoint was chosen, and Lightning is still loading it.
        resumes_by_itself: the user named no checkpoint.
    """

    def __init__(
        self,
        trainer: Any,
        namespace: Namespace,
        arguments: Arguments,
        checkpointer: Checkpointer,
        *,
        is_tuning: Callable[[], bool],
        clock: Callable[[], float],
        left_at: int | None,
    ) -> None:
        self._trainer = trainer
        self._namespace = namespace
        self._arguments = arguments
        self.checkpointer = checkpointer
        self._is_tuning = is_tuning
        self._clock = clock
        self._data = TrainingData(trainer.fit_loop)
        self._last: LastSave | None = None
        self.left_at = left_at
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
        ):
            replace(owner, name, self._unless_tuning(make))

    def resume_from(self, position: DataPosition, rng: RngState) -> None:
        """Let training go on from here, once Lightning has loaded the rest."""
        self._data.resume_from(position, rng)
        self.is_restoring = True

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
            tree.capture(contents.known_at_start(self._trainer), rank=0)
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
                seam.repeat_epoch_settings(self._trainer, self._namespace)
            self._data.training_begins()

        return on_run_start

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
            self._between_steps(self._moment(is_epoch_end=True, is_run_end=is_over))

        return on_advance_end

    # --------------------------------------------------------------------------------------------- saving

    def _moment(self, *, is_epoch_end: bool = False, is_run_end: bool = False) -> Moment:
        return Moment(
            step=self._trainer.global_step,
            epochs_done=seam.epochs_done(self._trainer.fit_loop),
            clock_s=self._clock(),
            is_epoch_end=is_epoch_end,
            is_run_end=is_run_end,
        )

    def _between_steps(self, moment: Moment) -> None:
        """All that belongs to a step, or to an epoch, is over: save if it is due."""
        if self._last is None or not self._arguments.intervals.decide(moment, self._last).save:
            return
        self.save(moment)

    def save(self, moment: Moment) -> None:
        """Save where training stands."""
        data = self._data
        rng = data.random_state()
        state, loader_states = contents.gather(self._trainer)
        data.put_back(rng)  # a hook may draw; saving must not change the run
        position = data.position(loader_states)
        if position is None:
            return
        state["position"], state["rng"] = PerRank(position.to_state()), PerRank(rng.to_state())
        self.checkpointer.save(moment.step, state, metrics=_scalars(self._trainer.callback_metrics))
        self._last, self.left_at = LastSave.at(moment), moment.step


def _scalars(metrics: dict[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in metrics.items()
        if not isinstance(value, torch.Tensor) or value.numel() == 1
    }
