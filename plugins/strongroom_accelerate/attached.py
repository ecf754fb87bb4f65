"""A run that an Accelerator's calls are led to: what `strongroom_accelerate.Strongroom` does, and they do."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

from strongroom.errors import ConfigError
from strongroom.frontend import Replacements
from strongroom.handle import SaveHandle
from strongroom.resume import plan_resume
from strongroom_accelerate import calls, seam
from strongroom_accelerate.arguments import Arguments
from strongroom_accelerate.loaders import PreparedLoaders
from strongroom_accelerate.naming import StepNames, name_of
from strongroom_accelerate.run import Run
from strongroom_accelerate.standing import OptimizerSteps, Standing
from strongroom_accelerate.voice import VOICE

__all__ = ["AttachedRun"]

_LOG: Final = logging.getLogger("strongroom_accelerate")

_SEAT: Final = "_strongroom_run"


class AttachedRun:
    """One run, from the moment at which an Accelerator was given it.

    Args:
        accelerator: the program's.
        arguments: the user's.

    Attributes:
        standing: how far it has come.

    Raises:
        ConfigError: the Accelerator has such a run already.
    """

    def __init__(self, accelerator: Any, arguments: Arguments) -> None:
        other = getattr(accelerator, _SEAT, None)
        if other is not None:
            raise ConfigError(
                f"this Accelerator saves into {other.root} already; close() that Strongroom first, or use it"
            )
        self._accelerator = accelerator
        self._arguments = arguments
        self._loaders = PreparedLoaders(accelerator, arguments.skip)
        self.standing = Standing()
        self._names = StepNames()
        self._opened: Run | None = None
        self._told_to_load: str | None = None
        self._has_resumed = False
        self._has_trained = False
        self._is_uneven = False
        self._is_over = False
        self._counted: Any = None
        self._optimizers = OptimizerSteps(accelerator, self._loaders.are_trained_on)
        self._logged_at: int | None = None
        self._replacements = Replacements()
        setattr(accelerator, _SEAT, self)
        calls.attach(
            accelerator,
            self,
            self._replacements,
            security=arguments.options["security"],
            escapes=arguments.escapes,
        )
        self._loaders.followed()
        self.was_prepared()
        atexit.register(self._at_exit)

    @property
    def root(self) -> str:
        """Where it lies."""
        return self._arguments.root

    # --------------------------------------------------------------------------- what a program asks for

    def resume(self) -> bool:
        """As `strongroom_accelerate.Strongroom.resume`."""
        plan = plan_resume(
            self._arguments.resume,
            is_first_run=not (self._has_trained or self._has_resumed),
            steps_done=self.standing.steps,
            explicit=self._told_to_load,
        )
        found = self._run().restore(plan)
        self._has_resumed = self._has_resumed or found
        return found

    def step(self) -> SaveHandle | None:
        """As `strongroom_accelerate.Strongroom.step`."""
        run = self._run()
        if not self._optimizers.has_stepped():
            return None
        self._begin(run)
        standing = self.standing
        standing.step()
        self._loaders.are_trained_on()
        active = self._loaders.active()
        standing.training = active or standing.training
        if self._is_uneven:
            return None
        is_over = active is not None and seam.is_at_end(active.loader) and not standing.is_inside_epochs
        moment = run.moment(epochs=standing.epochs + is_over, is_epoch_end=is_over)
        handle = run.saves.between_steps(moment)
        self._tell_trackers()
        return handle

    def epochs(self, count: int) -> Iterator[int]:
        """As `strongroom_accelerate.Strongroom.epochs`."""
        if type(count) is not int or count < 0:
            raise ConfigError(f"epochs() takes how many epochs the run has; got {count!r}")
        standing = self.standing
        standing.epoch_begins()
        try:
            while standing.epochs < count:
                yield standing.epochs
                run = self._run()
                self._begin(run)
                standing.epoch_is_over()
                self._optimizers.check_none_is_pending()
                is_last = standing.epochs >= count
                run.saves.between_steps(run.moment(is_epoch_end=True, is_run_end=is_last))
                self._tell_trackers()
        finally:
            standing.is_inside_epochs = False

    def wait(self) -> None:
        """As `strongroom_accelerate.Strongroom.wait`."""
        if self._opened is not None:
            self._opened.checkpointer.wait()

    def close(self) -> None:
        """As `strongroom_accelerate.Strongroom.close`."""
        self.end(None)

    def save_last_step(self) -> None:
        """The program's ``with`` block is over, without an exception."""
        run = self._opened
        is_whole = self._accelerator._models and self._accelerator.sync_gradients
        if run is not None and self._has_trained and is_whole and not self._is_over:
            run.saves.between_steps(run.moment(is_run_end=True))

    def end(self, error: BaseException | None) -> None:
        """The run is over; a second call does nothing.

        Args:
            error: what ended it, if it did not end by itself.
        """
        if self._is_over:
            return
        self._is_over = True
        atexit.unregister(self._at_exit)
        try:
            if self._opened is not None:
                self._opened.saves.end(error)
                self._tell_trackers()
        finally:
            self._replacements.undo()
            self._loaders.release()
            delattr(self._accelerator, _SEAT)

    # ------------------------------------------------------------------------ what Accelerate's calls do

    def save_named(self, name: str | None, options: Mapping[str, Any]) -> SaveHandle:
        self._check_prepared()
        self._has_trained = True
        return self._run().save(name=name, options=options)

    def load_named(
        self, place: Any, options: Mapping[str, Any], native: Callable[[str], None] | None
    ) -> None:
        run = self._run()
        step: int | None = None
        said = "load_state()"
        if type(place) is int:
            step, said = place, f"load_state({place})"
        elif place is not None and not self._arguments.is_own(os.fspath(place)):
            name = name_of(place)
            said = f"load_state({name!r})"
            step = run.step_of(name)
            if step is None:
                if native is None or not os.path.isdir(name):
                    raise self._names.unknown(name, self.root)
                self._told_to_load = said
                native(name)
                return
        plan = plan_resume("must", is_first_run=True, steps_done=0)
        run.checkpointer.wait()
        run.restore(plan, step=step, options=options)
        self._told_to_load, self._has_resumed = said, True

    def preparing(self, loader: Any) -> AbstractContextManager[None]:
        return self._loaders.preparing(loader)

    def was_prepared(self) -> None:
        optimizers = seam.bare_optimizers(self._accelerator)
        self._optimizers.watch()
        first = optimizers[0] if optimizers else None
        if first is not None and first is not self._counted and hasattr(first, "register_step_post_hook"):
            self._counted = first
            standing = self.standing

            def count(*_: Any) -> None:
                standing.steps_of_optimizer += 1

            first.register_step_post_hook(count)

    def is_resumed(self, loader: Any) -> bool:
        return self._has_resumed and any(one.loader is loader for one in self._loaders.followed())

    @contextmanager
    def uneven(self) -> Iterator[None]:
        if not self._accelerator.multi_device:  # Accelerate joins nothing then
            yield
            return
        self._is_uneven = True
        try:
            yield
        finally:
            self._is_uneven = False
        if self._has_trained:
            # Here all ranks come by again, and those that had more batches have taken more steps.
            run = self._run()
            steps = run.checkpointer.confer("how many steps were taken", lambda: self.standing.steps)
            self.standing.catch_up(max(steps))
            run.saves.between_steps(run.moment())
            self._tell_trackers()

    def forget(self) -> None:
        self._loaders.followed()
        self.standing.begin_anew()
        self._counted = None
        self._optimizers.forget()
        self._has_trained = self._has_resumed = False
        self._told_to_load = None

    def note_log(self, step: int | None) -> None:
        self._logged_at = step

    # ----------------------------------------------------------------------------------------------- own

    def _run(self) -> Run:
        if self._is_over:
            raise ConfigError(f"this Strongroom of {self.root} was closed; make a new one to go on")
        if self._opened is None:
            self._opened = Run(self._accelerator, self._arguments, self._loaders, self.standing, self._names)
        return self._opened

    def _begin(self, run: Run) -> None:
        if self._has_trained:
            run.listen()
            return
        self._check_prepared()
        self._has_trained = True
        self.standing.begin_to_count()
        self._loaders.check_all_came()
        if not self._has_resumed:
            run.saves.begin(run.moment())
        run.listen()

    def _check_prepared(self) -> None:
        if not (self._accelerator._models or self._accelerator._optimizers):
            raise ConfigError("nothing to save: accelerator.prepare() was not called yet; call it first")

    def _tell_trackers(self) -> None:
        run = self._opened
        if run is None or not run.figures.are_new:
            return
        accelerator = self._accelerator
        trackers = accelerator.trackers if accelerator.is_main_process else ()
        step = self.standing.steps if self._logged_at is None else self._logged_at

        def of(tracker: Any) -> Callable[[Mapping[str, float]], None]:
            return lambda found: tracker.log(dict(found), step=step)

        run.figures.hand_to([(tracker.name, of(tracker)) for tracker in trackers], VOICE.warn)

    def _at_exit(self) -> None:
        """Nobody has closed it: the program has ended, or was ended by an error."""
        error: BaseException | None = getattr(sys, "last_value", None)
        try:
            self.end(error)
        except Exception as failure:  # noqa: BLE001 - the interpreter ends; nobody is there to catch it
            _LOG.error("the run in %s ended, and its last save failed: %s", self.root, failure)
