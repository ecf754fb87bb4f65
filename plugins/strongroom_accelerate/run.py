"""One run under an Accelerator: what is opened, saved and restored of it, once something asks for that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from strongroom import Checkpointer, KeepLast
from strongroom.errors import RanksDisagreeError, RanksMissingError, StateMismatchError
from strongroom.frontend import (
    Encoding,
    Figures,
    Gathered,
    Place,
    Preemption,
    RunSaves,
    loader_generators,
    open_run,
    restore_run,
)
from strongroom.handle import SaveHandle
from strongroom.resume import Moment, RngState
from strongroom.resume.mode import ResumePlan
from strongroom_accelerate import contents, seam
from strongroom_accelerate.arguments import Arguments
from strongroom_accelerate.foreign import ForeignFiles
from strongroom_accelerate.loaders import PreparedLoaders
from strongroom_accelerate.naming import StepNames
from strongroom_accelerate.standing import Standing
from strongroom_accelerate.voice import VOICE

__all__ = ["Run"]

_MEETING_S: Final = 300.0
"""How long ranks wait for each other where a save begins: what one alone does in between, such as writing a
report, takes no longer."""

_ADVICE: Final = (
    "Every rank must call step(), save(), resume(), save_state() and load_state(), and not the main one "
    "alone: take the call out of `if accelerator.is_main_process:`"
)


class Run:
    """One run's root, opened.

    Args:
        accelerator: the program's.
        arguments: the user's.
        loaders: what was prepared of them.
        standing: how far the run has come.
        names: of its steps.

    Attributes:
        foreign: what engines and hooks save in files of their own.
        files: these, while they are being saved.
        options: of this save, for an engine.
        figures: what saves cost.
        checkpointer: of the root.
        saves: what is saved between two steps.
    """

    def __init__(
        self,
        accelerator: Any,
        arguments: Arguments,
        loaders: PreparedLoaders,
        standing: Standing,
        names: StepNames,
    ) -> None:
        self._accelerator = accelerator
        self._arguments = arguments
        self._loaders = loaders
        self._standing = standing
        self._names = names
        self._encoding = Encoding(
            arguments.unencodable,
            VOICE,
            advice="They are in the state of a scheduler, or of an object of register_for_checkpointing().",
        )
        self.foreign = ForeignFiles(accelerator, arguments.scratch)
        self.options: Mapping[str, Any] = {}
        self._tags: Sequence[str] = ()
        self.files: Mapping[str, Any] = {}
        self.figures = Figures()
        limit = accelerator.project_configuration.total_limit
        is_limited = arguments.keep is None and seam.names_by_itself(accelerator) and limit is not None
        self.checkpointer: Checkpointer = open_run(
            arguments,
            known=lambda: seam.known_of_run(accelerator),
            keep=KeepLast(count=limit) if is_limited else None,
            events=(self.figures,) if arguments.log_saves else (),
        )
        self._preemption = Preemption(arguments, VOICE)
        self._listens = False
        self.saves = self._make_saves(None)

    def listen(self) -> None:
        """Heed signals and notices from now on: somebody comes to a boundary again and again."""
        if not self._listens:
            self._listens = True
            self._preemption.begin()

    # ------------------------------------------------------------------------------------------- it is saved

    def moment(
        self, *, epochs: int | None = None, is_epoch_end: bool = False, is_run_end: bool = False
    ) -> Moment:
        """Where the run stands now."""
        standing = self._standing
        return self.saves.moment(
            standing.steps,
            standing.epochs if epochs is None else epochs,
            is_epoch_end=is_epoch_end,
            is_run_end=is_run_end,
        )

    def save(self, *, name: str | None = None, options: Mapping[str, Any] | None = None) -> SaveHandle:
        """Save where training stands; for all ranks.

        Args:
            name: of this step.
            options: for an engine.
        """
        step = self._standing.steps
        if name is not None:
            self._names.note(name, step)
        self._tags, self.options = () if name is None else (name,), options or {}
        try:
            handle = self.saves.save(self.moment())
        finally:
            self._tags, self.options = (), {}
        if handle.skipped is not None and name is not None:
            VOICE.info(
                f"step {step} is saved already; {name!r} means it from now on, and in the next checkpoint"
            )
        return handle

    def _gather(self, moment: Moment, rng: RngState) -> Gathered:
        accelerator, standing = self._accelerator, self._standing
        place = Place.of(self._loaders.followed(), accelerator._models, seam.job_shape(accelerator), rng=rng)
        counted = {
            **standing.to_state(),
            "training": self._loaders.number_of(standing.training),
            "iteration": accelerator.project_configuration.iteration,
            "names": self._names.to_state(),
            "seeds": self._loaders.seeds(),
        }
        state = contents.gather(
            accelerator,
            place,
            self._encoding,
            self.checkpointer.confer,
            counted=counted,
            files=self.files,
        )
        return Gathered(state=state, tags=self._tags)

    def meet(self, about: str) -> None:
        """Find out soon, and in words, if not all ranks have come."""
        try:
            self.checkpointer.confer(
                about, lambda: None, timeout_s=min(_MEETING_S, self._arguments.timeout_s)
            )
        except RanksMissingError as error:
            raise RanksMissingError(f"{error}. {_ADVICE}", ranks=error.ranks, phase=error.phase) from error
        except RanksDisagreeError as error:
            raise RanksDisagreeError(f"{error}. {_ADVICE}", ranks=error.ranks, phase=error.phase) from error

    # ---------------------------------------------------------------------------------------- it is restored

    def restore(
        self, plan: ResumePlan, *, step: int | None = None, options: Mapping[str, Any] | None = None
    ) -> bool:
        """Take up a checkpoint, if the plan says so; for all ranks.

        Args:
            step: this one; None: the newest whole one.
            options: for an engine.

        Returns:
            whether one was.
        """
        accelerator = self._accelerator
        self.meet("restoring")
        restored = restore_run(
            self.checkpointer,
            self._arguments,
            contents.template(accelerator) if plan.restore else {},
            plan,
            VOICE,
            written_by="Strongroom for Accelerate",
            own_part=contents.OWN_PART,
            step=step,
        )
        if restored is None:
            self._begin(None)
            return False
        state = restored.state
        self.foreign.give_back(state["files"], self.checkpointer.confer, options or {})
        counted = contents.load(accelerator, state[contents.OWN_PART])
        accelerator.project_configuration.iteration = counted["iteration"]
        self._names.learn(counted["names"])
        try:
            place = Place.from_state(state)
            notes = self._loaders.resume_from(
                place, counted["seeds"], accelerator._models, is_new_rank=bool(restored.missing)
            )
        except KeyError as error:
            raise StateMismatchError(
                f"step {restored.step} of {self._arguments.root} lacks {error}; restore it with the release "
                f"that wrote it"
            ) from error
        for note in dict.fromkeys(notes):
            VOICE.warn(f"the resumed run may differ from an uninterrupted one: {note}")
        followed, number = self._loaders.followed(), counted["training"]
        is_there = number is not None and number < len(followed)
        self._standing.load(counted, followed[number] if is_there else None)
        self._begin(restored.step)
        return True

    def step_of(self, name: str) -> int | None:
        """The step that a name means; for all ranks."""
        self.checkpointer.wait()
        found = self._names.step_of(name)
        if found is None:
            # Another process has saved it: the newest checkpoint knows its names.
            newest = self.checkpointer.restore(
                {contents.OWN_PART: None},
                only=(contents.OWN_PART,),
                strict=False,
                accept_older=self._arguments.accept_older,
                stand_in=0,
            )
            if newest is not None and contents.OWN_PART in newest.state:
                self._names.learn(newest.state[contents.OWN_PART]["counted"]["names"])
                found = self._names.step_of(name)
        return found

    def _begin(self, left_at: int | None) -> None:
        """Training goes on from here."""
        if left_at is not None:
            self.saves = self._make_saves(left_at)
        self.saves.begin(self.moment())

    def _make_saves(self, left_at: int | None) -> RunSaves:
        return _Saves(
            self.checkpointer,
            self._arguments,
            self._preemption,
            VOICE,
            intervals=self._arguments.intervals,
            gather=self._gather,
            generators=lambda: loader_generators(self._loaders.followed()),
            left_at=left_at,
            run=self,
        )


class _Saves(RunSaves):
    """Saves, around which an engine or a hook writes its files."""

    def __init__(self, *arguments: Any, run: Run, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._run = run

    def save(self, moment: Moment) -> SaveHandle:
        run = self._run
        run.meet(f"saving step {moment.step}")
        if not run.foreign.are_written:
            return super().save(moment)
        rng = RngState.capture()

        def save(files: dict[str, Any]) -> SaveHandle:
            rng.restore()  # hooks are users' code
            run.files = files
            try:
                return super(_Saves, self).save(moment)
            finally:
                run.files = {}

        return run.foreign.take(run.checkpointer.confer, run.options, save)
