"""One Trainer's run: taken up while the Trainer is built, and followed through its fits to its end."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final

from strongroom import Checkpointer
from strongroom.errors import ConfigError, StateMismatchError, StrongroomError
from strongroom.frontend import Encoding, Figures, Place, open_run, restore_run
from strongroom.resume import described, plan_resume
from strongroom_composer import contents, seam
from strongroom_composer.arguments import Arguments
from strongroom_composer.escapes import sealed_start
from strongroom_composer.fit import Fit, Resumption
from strongroom_composer.voice import VOICE

__all__ = ["Run"]

_DRAWN_NAME: Final = re.compile(r"\d{9,}-[a-z]+-[a-z-]+")
"""What a run is called that nobody gave a name: seconds and two words, another one at each start."""

_CLOSE_S: Final = 10.0
"""How long a Trainer that is closed in the middle of something waits for a save that is being written."""


class Run:
    """One Trainer's run.

    Args:
        trainer: Composer's.
        ours: our callback.
        arguments: the callback's, with the run's name filled in.
        is_named: whether its root has the run's name in it.
    """

    def __init__(self, trainer: Any, ours: Any, arguments: Arguments, *, is_named: bool) -> None:
        # Weakly: Composer closes a Trainer when nothing refers to it any more.
        self._trainer = weakref.ref(trainer)
        self._state = trainer.state
        self._ours = ours
        self.arguments = arguments
        self._is_named = is_named
        self._figures = Figures()
        self._encoding = Encoding(arguments.unencodable, VOICE)
        self._is_due = seam.interval(arguments.save_interval)
        self._checkpointer: Checkpointer | None = None
        self._resumption: Resumption | None = None
        self._left_at: int | None = None
        self._fit: Fit | None = None
        self._has_broken = False

    # ----------------------------------------------------------------------------------- the Trainer is built

    def load(self) -> None:
        """Take up the newest whole checkpoint, over whatever ``load_path`` has loaded."""
        state, checkpointer = self._state, self._open()
        plan = plan_resume(self.arguments.resume, is_first_run=True, steps_done=0)
        try:
            restored = restore_run(
                checkpointer,
                self.arguments,
                contents.template(state),
                plan,
                VOICE,
                written_by="StrongroomCheckpoint of strongroom_composer",
                own_part=contents.OWN_PART,
            )
        except StateMismatchError as error:
            if contents.OWN_PART not in error.missing:
                self._explain_by_algorithms(checkpointer, error)
            raise
        if restored is None:
            sealed = sealed_start(state)
            if sealed is not None:
                raise ConfigError(
                    f"{sealed} is sealed by Strongroom, and Composer cannot load it; unpack it by tar, take "
                    f"its weights out by `strongroom export`, and give load_path= these"
                )
            self._say_if_never_found()
            return
        if state.load_path is not None:
            VOICE.info(f"what load_path={state.load_path!r} loaded is replaced: the run has come further")
        seam.forget_native_resume(self._trainer())
        saved = restored.state[contents.OWN_PART]
        contents.restore_at_load(state, self._ours, saved, VOICE.warn)
        groups = [group for optimizer in state.optimizers for group in optimizer.param_groups]
        self._resumption = Resumption(
            place=Place.from_state(restored.state),
            saved=saved,
            measured=restored.state["measured"] or {},
            groups=[{key: value for key, value in group.items() if key != "params"} for group in groups],
            is_new_rank=bool(restored.missing),
        )
        self._left_at = restored.step

    def _explain_by_algorithms(self, checkpointer: Checkpointer, error: StateMismatchError) -> None:
        """Where the model differs since an algorithm that changes it is missing, say that."""
        try:
            found = checkpointer.restore({contents.OWN_PART: None}, only=contents.OWN_PART, stand_in=0)
        except StrongroomError:
            return
        if found is not None:
            saved = (found.state.get(contents.OWN_PART) or {}).get("algorithms") or {}
            try:
                contents.check_algorithms(self._state, saved)
            except StateMismatchError as better:
                raise better from error

    def _say_if_never_found(self) -> None:
        state = self._state
        if self._is_named and _DRAWN_NAME.fullmatch(state.run_name):
            VOICE.warn(
                f"the root {self.arguments.root} has the run's name in it, and {state.run_name} looks drawn: "
                f"the next start will draw another one and find nothing; give the Trainer a run_name"
            )

    # ---------------------------------------------------------------------------------------------- it trains

    def arguments_of(self, told: Mapping[str, Any]) -> dict[str, Any]:
        """What ``fit`` is to be given: a run that was resumed is not counted from 0 once more.

        Raises:
            ConfigError: what this Trainer has saved would be counted from 0.
        """
        if not told.get("reset_time") or self._left_at is None:
            return dict(told)
        stands = f"step {self._left_at} of {self.arguments.root}"
        if self._resumption is None:
            raise ConfigError(
                f"fit(reset_time=True) counts steps from 0 again, and this run has come to {stands}: what it "
                f"saved then would never be the newest. Let what follows be a run of its own, in a Trainer "
                f"with another root; or train on by fit(duration=...)"
            )
        VOICE.info(f"reset_time=True resets nothing: the run goes on from {stands}, and was reset before")
        duration = told.get("duration")
        if duration is not None:
            self._state.max_duration = seam.duration_of(duration)
        return {**told, "reset_time": False, "duration": None}

    def is_finished(self, told: Mapping[str, Any]) -> bool:
        """Whether a ``fit`` with these arguments would have nothing to train, as the run is at its end."""
        if self._resumption is None or told.get("duration"):
            return False
        if not seam.is_over(self._state):
            return False
        VOICE.info(
            f"this run is already finished ({self._state.max_duration} were reached at step {self._left_at} "
            f"of {self.arguments.root}): nothing to train. Raise max_duration to train on; for a new run, "
            f"use another root or resume='never'"
        )
        return True

    def fit_begins(self) -> None:
        """``fit`` has begun."""
        checkpointer = self._checkpointer
        if checkpointer is None:
            checkpointer = self._open()
        resumption, self._resumption = self._resumption, None
        self._has_broken = False
        self._fit = Fit(
            self._state,
            self._ours,
            self.arguments,
            checkpointer,
            self._encoding,
            self._is_due,
            left_at=self._left_at,
            resumption=resumption,
        )
        self._fit.begin()

    def checkpoint(self, event: Any, logger: Any, *, is_epoch_end: bool = False) -> None:
        """One of Composer's checkpoint events."""
        if self._fit is not None:
            self._fit.between_steps(event, is_epoch_end=is_epoch_end)
            self._log(logger)

    def epoch_is_over(self) -> None:
        """Composer's loop has left an epoch's iterator."""
        if self._fit is not None:
            self._fit.epoch_is_over()

    def trains(self, is_training: bool) -> None:
        """Training reads its data from now on, or something else does."""
        if self._fit is not None:
            self._fit.trains(is_training)

    def fit_ends(self, logger: Any, error: BaseException | None = None) -> None:
        """``fit`` is over, or broken off.

        Raises:
            SaveError: without an error: the last save failed.
        """
        fit, self._fit = self._fit, None
        if fit is None:
            return
        self._has_broken = error is not None
        try:
            fit.end(error)
        finally:
            self._left_at = fit.saves.left_at
            self._log(logger)

    # ------------------------------------------------------------------------------------------------ its end

    def close(self, logger: Any) -> None:
        """The Trainer is closed, perhaps in the middle of a step: nothing is saved any more."""
        if self._fit is not None:
            self.fit_ends(logger, BrokenOffError("the Trainer was closed while it trained"))
        checkpointer, self._checkpointer = self._checkpointer, None
        if checkpointer is not None:
            checkpointer.close(timeout_s=_CLOSE_S if self._has_broken else None)

    def _open(self) -> Checkpointer:
        events = (self._figures,) if self.arguments.log_saves else ()
        self._checkpointer = open_run(self.arguments, known=self._known, events=events)
        return self._checkpointer

    def _known(self) -> dict[str, Any]:
        """What Composer knows of where the run comes from."""
        trainer = self._trainer()
        found = {} if trainer is None else seam.hyper_parameters(trainer)
        return {"hyper_parameters": described(dict(found))} if found else {}

    def _log(self, logger: Any) -> None:
        """Give the Trainer's loggers what was noted since."""
        if not self._figures.are_new:
            return
        step = int(self._state.timestamp.batch)

        def of(destination: Any) -> Callable[[Mapping[str, float]], None]:
            return lambda found: destination.log_metrics(dict(found), step)

        self._figures.hand_to([(type(one).__name__, of(one)) for one in logger.destinations], VOICE.warn)


class BrokenOffError(Exception):
    """A Trainer was closed while it trained."""
