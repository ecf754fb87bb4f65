"""One run of a Trainer's loop, from its set-up to its end, told to what acts on it.

A Trainer saves at the end of a step and begins an epoch by asking its loader anew; what belongs to an epoch's
last step, the epoch's own evaluation among it, comes after that step. So a save that is due at an epoch's
last step waits for the epoch's end, and a resumed run begins with the next epoch, having missed nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from transformers.trainer_utils import SaveStrategy

from strongroom import Checkpoint
from strongroom.errors import ConfigError
from strongroom.frontend import (
    Encoding,
    Figures,
    Gathered,
    Place,
    Preemption,
    RunSaves,
    RunSettings,
    loader_generators,
    open_run,
    restore_run,
)
from strongroom.handle import SaveHandle
from strongroom.ranking import Scores
from strongroom.restore import Restored
from strongroom.resume import DataPosition, Moment, ResumePlan, RngState, SaveIntervals, plan_resume
from strongroom.resume.following import FollowedLoader
from strongroom_transformers import contents, figures, progress, retaining, seam
from strongroom_transformers.arguments import Asked, keep_limit, name_of
from strongroom_transformers.provenance import known_of
from strongroom_transformers.voice import VOICE

__all__ = ["Training"]

_ADVICE = "The Trainer's state and its callbacks' states should be of plain values."

OnCommit = Callable[[Any, Checkpoint], None]
"""Is told of the Trainer and a checkpoint that was committed, between two steps or at the end."""


class Training:
    """One run of the loop.

    Args:
        trainer: the Trainer.
        settings: the run's.
        asked: what it is to go on from.
        weights: what of the model is stored.
        on_commit: who is told of each commit, on every rank, on the training thread.
        again: this is another try, with a smaller batch, of what had begun from a step, or from none.

    Attributes:
        resumed_from: the step that was restored; None: none was.
    """

    def __init__(
        self,
        trainer: Any,
        settings: RunSettings,
        asked: Asked,
        *,
        weights: contents.Weights,
        on_commit: list[OnCommit],
        again: tuple[int | None] | None = None,
    ) -> None:
        self._trainer = trainer
        self._settings = settings
        self._asked = asked
        self._weights = weights
        self._on_commit = on_commit
        self._again = again
        self._encoding = Encoding(settings.unencodable, VOICE, advice=_ADVICE)
        self._scores: Scores = retaining.scores_for(trainer.args)
        self._figures = Figures()
        self._loader: FollowedLoader | None = None
        self._preemption: Preemption | None = None
        self._saves: RunSaves | None = None
        self._prepared: Any = None
        self._committing: list[SaveHandle] = []
        self._ends = 0  # epochs of the whole run
        self._epoch = 0
        self._resumes_in: int | None = None
        self._goes_back_in: tuple[int, int] | None = None  # epoch and batch, where the Trainer has resumed
        self._rng: RngState | None = None
        self._loss: Mapping[str, Any] | None = None
        self._elapsed_s, self._began_s = 0.0, time.monotonic()
        self._is_epoch_end = self._is_inside = self._is_due = False
        self.resumed_from: int | None = None

    # --------------------------------------------------------------------------------------------- its set-up

    def loader_is(self, loader: Any) -> None:
        """This is what it trains on."""
        self._loader = FollowedLoader(
            loader,
            stock=seam.stock_loader(loader),
            skip=self._settings.skip,
            generators=lambda: seam.loader_generators(loader),
            info=VOICE.info,
            warn=VOICE.warn,
        )

    def sets_up(
        self, original: Callable[..., tuple[int, int]], prepare: Callable[..., Any], given: dict[str, Any]
    ) -> tuple[int, int]:
        """The Trainer makes its state, which is restored into: the epoch and the batch to begin with."""
        loader = self._followed
        begins: tuple[int, int] = seam.call(original, given)
        self._ends = given["num_train_epochs"]
        self._prepared = prepare(given["max_steps"], loader.loader, given["resume_from_checkpoint"])
        restored = self._open_and_restore()
        if restored is not None:
            return self._take_up(restored, given)
        if self._asked.native is not None:
            self._resumes_in, self._goes_back_in = begins[0], begins
        return begins

    def take_prepared(self) -> Any:
        """What the Trainer prepared, once; None where it has not."""
        prepared, self._prepared = self._prepared, None
        return prepared

    def _open_and_restore(self) -> Restored | None:
        settings, trainer, scores = self._settings, self._trainer, self._scores
        limit = keep_limit(settings, trainer.args)
        checkpointer = open_run(
            settings,
            known=lambda: known_of(trainer),
            keep=None if limit is None else retaining.KeepAsTrainer(limit=limit, scores=scores),
            events=[self._figures],
        )
        loader = self._followed
        self._preemption = Preemption(settings, VOICE)
        self._saves = RunSaves(
            checkpointer,
            settings,
            self._preemption,
            VOICE,
            intervals=SaveIntervals(at_run_end=False),  # the Trainer says when
            gather=self._gather,
            generators=lambda: loader_generators([loader]),
        )
        plan, step = self._plan()
        restored = restore_run(
            checkpointer,
            settings,
            contents.template(trainer, self._weights),
            plan,
            VOICE,
            written_by="StrongroomCallback of strongroom_transformers",
            own_part=contents.OWN_PART,
            step=step,
        )
        if restored is not None:
            self.resumed_from = self._saves.left_at = restored.step
        return restored

    def _plan(self) -> tuple[ResumePlan, int | None]:
        if self._again is None:
            asked = self._asked
            plan = plan_resume(asked.mode, is_first_run=True, steps_done=0, explicit=asked.native)
            return plan, asked.step
        (step,) = self._again
        reason = "training begins again with a smaller batch"
        return ResumePlan(restore=step is not None, required=step is not None, reason=reason), step

    def _take_up(self, restored: Restored, given: Mapping[str, Any]) -> tuple[int, int]:
        trainer, loader = self._trainer, self._followed
        state, max_steps = restored.state, given["max_steps"]
        contents.put_back(trainer, self._weights, state)
        saved = state[contents.OWN_PART]
        progress.restored(trainer, saved, max_steps, VOICE)
        trainer.state.init_training_references(trainer, max_steps, self._ends, given["trial"])
        self._scores.replace(saved["scores"])
        self._name_best()
        self._loss, self._elapsed_s = saved["loss"], saved["elapsed_s"]
        seam.set_sampler_seed(loader.loader, state["sampler_seed"])
        place = Place.from_state(state)
        if trainer.args.ignore_data_skip:
            place = replace(place, positions=tuple(DataPosition(epoch=one.epoch) for one in place.positions))
        is_new = any(name.startswith("rng") for name in restored.missing)
        notes = place.restore(
            [loader],
            [trainer.model],
            contents.job_shape(trainer),
            is_new_rank=is_new,
            multiple_of=trainer.args.gradient_accumulation_steps,
        )
        for note in notes:
            VOICE.warn(f"the resumed run may differ from an uninterrupted one: {note}")
        position = loader.goes_back_to or place.positions[0]
        if not position.batches and not is_new:
            self._rng = place.rng
        self._resumes_in = position.epoch
        if trainer.state.global_step >= max_steps:
            VOICE.info(
                f"this run is already finished (step {trainer.state.global_step} of {max_steps}): nothing to "
                f"train. To train on, give it more steps; to begin anew, train(resume_from_checkpoint=False)"
            )
            self._resumes_in = self._ends
            return self._ends, 0
        return position.epoch, position.batches

    def _name_best(self) -> int | None:
        """The best checkpoint goes by the name that the root has here and now, wherever it was before."""
        state = self._trainer.state
        best, named = retaining.best_of(self._scores, state), state.best_model_checkpoint
        if best is not None:
            state.best_model_checkpoint = name_of(self._settings.root, best)
        elif named is not None and not os.path.isdir(named):
            VOICE.warn(f"the best checkpoint, {named}, is not there any more; the best from here on counts")
            state.best_model_checkpoint = None
        return best

    @property
    def _followed(self) -> FollowedLoader:
        if self._loader is None:
            raise ConfigError("this Trainer's loop told us of no training data; it is not the one we know")
        return self._loader

    # -------------------------------------------------------------------------------------- while it trains

    def begins(self) -> None:
        """The loop has set its counters to zero, and every epoch follows."""
        if self._loss is not None:
            progress.put_back_losses(self._trainer, self._loss)
        self._began_s = time.monotonic()
        if self._preemption is not None and self._saves is not None:
            self._preemption.begin()
            self._saves.begin(self._moment())

    def epoch_begins(self) -> None:
        """Whoever draws from here on draws as in the run that was never interrupted."""
        self._is_epoch_end = False
        rng, self._rng = self._rng, None
        if rng is not None:
            rng.of_part("loader0.").restore(self._followed.generators())

    def runs_epoch(self, original: Callable[..., None], given: dict[str, Any]) -> None:
        """One epoch; the one that the run was broken off in goes on from there."""
        self._epoch = given["epoch"]
        if self._epoch != self._resumes_in:
            seam.call(original, given)
            return
        loader = self._followed
        if self._goes_back_in is None:
            given["resume_from_checkpoint"] = seam.RESUMED
        else:  # the Trainer has resumed: we follow its loader from there
            epoch, batches = self._goes_back_in
            now = RngState.capture(loader.generators())
            start = now if batches else None
            loader.resume_from(DataPosition(epoch=epoch, batches=batches, epoch_start=start), now)
        with seam.passing_over_is_ours(loader.loader):
            seam.call(original, given)

    def step_ends(self) -> None:
        """An optimizer step is over; the Trainer logs, evaluates and saves next."""
        self._is_epoch_end = False

    def epoch_ends(self) -> None:
        """An epoch is over; the Trainer logs, evaluates and saves next."""
        self._is_epoch_end = True

    def logs_saves_evaluates(self, original: Callable[[], None]) -> None:
        """What the Trainer does after a step, or an epoch; a save that it asks for comes last."""
        is_end = self._is_epoch_end
        if is_end and not self._stops_inside:
            self._followed.break_off()
        self._is_inside = True
        try:
            original()
        finally:
            self._is_inside = False
        if is_end or not self._epoch_is_about_to_end:
            self._between_steps(is_epoch_end=is_end)

    def save_is_asked_for(self) -> None:
        """The Trainer would save now."""
        if self._is_inside:
            self._is_due = True
        elif self._saves is not None and self._saves.left_at != self._trainer.state.global_step:
            self._note(self._saves.save(self._moment()))

    def holds_back(self, control: Any) -> bool:
        """Whether ``on_save`` is to wait, since what was asked for is not saved yet."""
        if self._is_inside:
            control.should_save = False
        return self._is_inside

    @property
    def _stops_inside(self) -> bool:
        """Training stops with batches of this epoch left, which a longer run would go on with."""
        loader = self._followed
        is_full = loader.length is not None and loader.taken >= loader.length
        return bool(self._trainer.control.should_training_stop) and not is_full

    @property
    def _epoch_is_about_to_end(self) -> bool:
        control = self._trainer.control
        is_last = self._trainer.state.epoch is not None and self._trainer.state.epoch >= self._epoch + 1
        return bool(control.should_epoch_stop or control.should_training_stop or is_last)

    def _between_steps(self, *, is_epoch_end: bool) -> None:
        trainer = self._trainer
        is_over = trainer.control.should_training_stop or self._epoch + 1 >= self._ends
        is_run_end = is_epoch_end and is_over
        due, self._is_due = self._is_due, False
        due = due or (is_run_end and trainer.args.save_strategy != SaveStrategy.NO)
        moment = self._moment(is_epoch_end=is_epoch_end, is_run_end=is_run_end)
        saves = self._saves
        handle = None if saves is None else saves.between_steps(moment, due=due)
        if handle is not None:
            self._note(handle)
            handler = trainer.callback_handler
            trainer.control = handler.on_save(trainer.args, trainer.state, trainer.control)
        self._tell()

    def _moment(self, *, is_epoch_end: bool = False, is_run_end: bool = False) -> Moment:
        saves = self._saves
        if saves is None:
            raise ConfigError("nothing is being trained; call train()")
        return saves.moment(
            self._trainer.state.global_step,
            self._epoch + is_epoch_end,
            is_epoch_end=is_epoch_end,
            is_run_end=is_run_end,
        )

    def _gather(self, moment: Moment, rng: RngState) -> Gathered:
        trainer, loader = self._trainer, self._followed
        retaining.note_best(self._scores, trainer.state)
        best = self._name_best()
        job = contents.job_shape(trainer)
        elapsed_s = self._elapsed_s + time.monotonic() - self._began_s

        def own() -> dict[str, Any]:
            scores = self._scores.by_step()
            return progress.gathered(trainer, self._encoding, elapsed_s=elapsed_s, scores=scores)

        state = contents.gathered(
            trainer,
            self._weights,
            Place.of([loader], [trainer.model], job, rng=rng),
            seam.sampler_seed(loader.loader),
            self._encoding,
            own,
            self._open.checkpointer.confer,
        )
        named = () if best is None else (best,)
        return Gathered(state=state, metrics=progress.latest(trainer.state), best=named)

    @property
    def _open(self) -> RunSaves:
        if self._saves is None:
            raise ConfigError("nothing is being trained; call train()")
        return self._saves

    # ------------------------------------------------------------------------------------------------ its end

    def wait(self) -> None:
        """Until what was saved is committed."""
        self._open.wait()

    def end(self, error: BaseException | None = None) -> None:
        """It is over.

        Args:
            error: what ended it, if it did not end by itself.

        Raises:
            SaveError, ReplicationError: without an error: the last save failed, or does not stand everywhere.
        """
        try:
            if self._saves is not None:
                self._saves.end(error)
                if error is None:
                    self._tell()
        finally:
            if self._loader is not None:
                self._loader.release()

    def seconds_before(self) -> float:
        """How long the run had trained when this loop began."""
        return self._elapsed_s

    def _note(self, handle: SaveHandle) -> None:
        if handle.skipped is None:
            self._committing.append(handle)

    def _tell(self) -> None:
        """Whoever listens is told of what was committed, and the run's trackers of what it cost."""
        while self._committing and self._committing[0].done():
            handle = self._committing.pop(0)
            if not handle.has_failed:
                for listener in self._on_commit:
                    listener(self._trainer, handle.result())
        if self._settings.log_saves and self._figures.are_new:
            figures.hand_over(self._figures, self._trainer)
