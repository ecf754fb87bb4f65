"""One fit, from its start to its end: Composer's events, told to what saves, resumes and stops a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from strongroom import Checkpointer
from strongroom.frontend import (
    Encoding,
    Gathered,
    Place,
    Preempted,
    Preemption,
    RunSaves,
    loader_generators,
)
from strongroom.resume import (
    DataPosition,
    Generator,
    JobShape,
    Moment,
    RngState,
    SaveIntervals,
    batches_behind,
)
from strongroom.resume.following import FollowedLoader
from strongroom_composer import contents, metrics, seam
from strongroom_composer.arguments import Arguments, Interval
from strongroom_composer.voice import VOICE

__all__ = ["Fit", "Resumption"]


@dataclass(frozen=True, kw_only=True)
class Resumption:
    """What was restored while the Trainer was built, and is put back once it trains.

    Attributes:
        place: where the run stood.
        saved: all else that Composer puts into a checkpoint.
        measured: what was measured.
        groups: the optimizers' settings.
        is_new_rank: there was no such rank.
    """

    place: Place
    saved: Mapping[str, Any]
    measured: Mapping[str, Any]
    groups: list[dict[str, Any]]
    is_new_rank: bool

    @property
    def position(self) -> DataPosition:
        """Of the training data."""
        return self.place.positions[0]


class Fit:
    """One fit.

    Args:
        state: Composer's.
        ours: our callback.
        arguments: the callback's.
        checkpointer: of the run's root; it outlives the fit.
        encoding: of users' values.
        is_due: whether to save, of Composer's state and event.
        left_at: the step of the run's root that training stands on; None where it stands on none.
        resumption: what to go on from; None: from where training stands in memory.
    """

    def __init__(
        self,
        state: Any,
        ours: Any,
        arguments: Arguments,
        checkpointer: Checkpointer,
        encoding: Encoding,
        is_due: Interval,
        *,
        left_at: int | None,
        resumption: Resumption | None,
    ) -> None:
        self._state = state
        self._ours = ours
        self._arguments = arguments
        self._checkpointer = checkpointer
        self._encoding = encoding
        self._is_due = is_due
        self._resumption = resumption
        self._preemption = Preemption(arguments, VOICE)
        self.saves = RunSaves(
            checkpointer,
            arguments,
            self._preemption,
            VOICE,
            intervals=SaveIntervals(),
            gather=self._gather,
            generators=self._generators,
            left_at=left_at,
        )
        self._loader: FollowedLoader | None = None
        self._is_training = True
        self._undo: list[Callable[[], None]] = []
        self._put_handlers_back: Callable[[], None] = lambda: None

    # -------------------------------------------------------------------------------------- Composer's events

    def begin(self) -> None:
        """``fit`` has begun; its loaders, schedulers and evaluators are known."""
        self._put_handlers_back = seam.set_handlers_aside(self._preemption.owned)
        self._preemption.begin()
        self._undo.append(seam.begin_at_training(self._state, self._training_begins))
        if self._resumption is not None:
            self._undo.append(seam.pass_over_nothing(self._state))
            self._restore(self._resumption)

    def between_steps(self, event: Any, *, is_epoch_end: bool = False) -> None:
        """A checkpoint event: all that belongs to a step, an epoch or an iteration is over."""
        self.saves.between_steps(self._moment(is_epoch_end=is_epoch_end), due=self._decide(event))

    def epoch_is_over(self) -> None:
        """Composer asks the epoch's iterator for no more, and passes over batches again as it does."""
        if self._loader is not None:
            self._loader.break_off()
        self._put_back()

    def trains(self, is_training: bool) -> None:
        """Whether what is read from now on is trained on: an evaluation may have the same loader."""
        self._is_training = is_training

    def end(self, error: BaseException | None = None) -> None:
        """The fit is over; a second call does nothing.

        Args:
            error: what ended it, if it did not end by itself.

        Raises:
            SaveError: without an error: the last save failed.
        """
        self._put_back()
        loader, self._loader = self._loader, None
        if loader is not None:
            loader.release()
        try:
            if isinstance(error, Preempted):
                self.saves.end(error)
            else:
                self.saves.pause(error)
        finally:
            self._put_handlers_back()

    # ----------------------------------------------------------------------------------------------- to go on

    def _restore(self, resumption: Resumption) -> None:
        state = self._state
        contents.restore_at_fit(state, resumption.saved, resumption.measured, resumption.groups, VOICE.warn)
        dataset, saved = seam.dataset_of(state), resumption.saved["dataset"]
        if self._goes_on_by_itself(resumption):
            dataset.load_state_dict(saved)
        elif saved is not None or seam.keeps_own_place(dataset):
            VOICE.warn(
                "the training data keep their own place (state_dict(num_samples, from_beginning)) now or "
                "when the checkpoint was saved, and not both: the epoch is read again from its beginning"
            )

    def _goes_on_by_itself(self, resumption: Resumption) -> bool:
        keeps = seam.keeps_own_place(seam.dataset_of(self._state))
        return keeps and resumption.saved["dataset"] is not None

    def _training_begins(self) -> None:
        """Nothing draws, and no loader is asked, between here and the first batch but what the loop does."""
        state = self._state
        loader = self._loader = FollowedLoader(
            state.dataloader,
            skip=self._arguments.skip,
            limit=lambda: seam.limit_of(state),
            is_trained_from=lambda: self._is_training,
            info=VOICE.info,
            warn=VOICE.warn,
        )
        resumption, self._resumption = self._resumption, None
        if resumption is None:
            loader.resume_from(DataPosition(epoch=int(state.timestamp.epoch)), RngState.capture())
        else:
            self._go_on(loader, resumption)
        self.saves.begin(self._moment())

    def _go_on(self, loader: FollowedLoader, resumption: Resumption) -> None:
        state, place = self._state, resumption.place
        job = seam.job_shape(state)
        taken = resumption.position.batches
        if taken and job.replicas != place.job.replicas:
            taken, _ = batches_behind(taken, place.job, job)
            state.timestamp = state.timestamp.copy(batch_in_epoch=taken)
        of_evaluation = {
            name: one for name, one in place.rng.generators.items() if name.startswith(_EVALUATION)
        }
        notes: tuple[str, ...] = ()
        if not resumption.is_new_rank:
            notes = replace(place.rng, generators=of_evaluation).restore(seam.eval_generators(state))
        notes += place.restore(
            [loader],
            [seam.bare_model(state)],
            job,
            is_new_rank=resumption.is_new_rank,
            reads=not self._goes_on_by_itself(resumption),
        )
        for note in dict.fromkeys(notes):
            VOICE.warn(f"the resumed run may differ from an uninterrupted one: {note}")
        if taken:
            self._undo.append(seam.expect_no_batches())
        else:
            self._put_back()

    def _put_back(self) -> None:
        while self._undo:
            self._undo.pop()()

    # ------------------------------------------------------------------------------------------------ to save

    def _decide(self, event: Any) -> bool:
        """Rank 0 decides for all where a program's own function is asked: it may go by what a rank sees."""

        def decide() -> bool:
            return bool(self._is_due(self._state, event))

        if not callable(self._arguments.save_interval) or self._job.world_size == 1:
            return decide()
        return bool(self._checkpointer.confer("whether to save", decide)[0])

    def _moment(self, *, is_epoch_end: bool = False) -> Moment:
        timestamp = self._state.timestamp
        return self.saves.moment(
            int(timestamp.batch),
            int(timestamp.epoch),
            is_epoch_end=is_epoch_end,
            is_run_end=seam.is_over(self._state),
        )

    def _gather(self, moment: Moment, rng: RngState) -> Gathered:
        state = self._state
        place = Place.of(self._loaders, [seam.bare_model(state)], self._job, rng=rng)
        return Gathered(
            state=contents.gather(state, self._ours, place, self._encoding, self._checkpointer.confer),
            metrics=metrics.scalars(state),
        )

    def _generators(self) -> dict[str, Generator]:
        return {**loader_generators(self._loaders), **seam.eval_generators(self._state)}

    @property
    def _loaders(self) -> list[FollowedLoader]:
        return [] if self._loader is None else [self._loader]

    @property
    def _job(self) -> JobShape:
        return seam.job_shape(self._state)


_EVALUATION = "eval"
"""How the names of the evaluation's generators begin."""
