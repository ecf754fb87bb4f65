"""The callback: Composer's events, handed to what acts on them."""

from __future__ import annotations

import os
import weakref
from typing import Any

from composer import Callback
from composer.core import Event
from typing_extensions import Unpack

from strongroom.errors import ConfigError
from strongroom.frontend import RunOptions
from strongroom_composer import parallelism, seam
from strongroom_composer.arguments import Arguments
from strongroom_composer.escapes import guard
from strongroom_composer.run import Run

__all__ = ["StrongroomCheckpoint"]


class StrongroomCheckpoint(Callback):  # type: ignore[misc]  # Composer's classes have no types here
    """Save a run through Strongroom, and resume it by itself.

    A Trainer with this callback takes up the newest whole checkpoint in ``root`` while it is built, without
    ``load_path`` or ``autoresume``: the weights, optimizers, schedulers, algorithms, callbacks, timestamp,
    random states and the place in the data, so that what ``fit`` trains is what the uninterrupted run would
    have trained. What is there wins over ``load_path``, which so serves for pretrained weights.

    Checkpoints are saved at Composer's checkpoint events, in the background, sharded where the model is. A
    save that failed in the background raises at the next one, or when ``fit`` ends.

    Args:
        root: the run's root: a path, or a ``file://`` or ``s3://`` URI. ``{run_name}`` in it is filled in,
            as Composer fills it into ``save_folder``. One run, one root.
        save_interval: when to save, as Composer's ``save_interval``: a time string such as ``"100ba"`` or
            ``"1ep"``, a number of epochs, a ``Time``, or a function of state and event. The end of training
            is saved besides, but by a function.
        num_checkpoints_to_keep: how many of the newest stay; -1 (the default): all.
        options: of `strongroom.frontend.RunOptions`; ``keep`` is another name of the one before.

    Raises:
        ConfigError: an argument that cannot work; from the Trainer, one that is not supported.
        StateMismatchError: from the Trainer: the checkpoint does not fit the model or its optimizers.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        save_interval: Any = "1ep",
        num_checkpoints_to_keep: int | None = None,
        **options: Unpack[RunOptions],
    ) -> None:
        super().__init__()
        seam.interval(save_interval)
        self._arguments = Arguments.of(
            root, save_interval=save_interval, num_checkpoints_to_keep=num_checkpoints_to_keep, **options
        )
        self._run: Run | None = None
        parallelism.watch()

    @property
    def root(self) -> str:
        """The run's root, with the run's name once a Trainer has given it one."""
        return self._arguments.root if self._run is None else self._run.arguments.root

    # -------------------------------------------------------------------------------------- Composer's events

    def init(self, state: Any, logger: Any) -> None:
        seam.check_supported(state)
        parallelism.check(state)
        if sum(isinstance(one, StrongroomCheckpoint) for one in state.callbacks) > 1:
            raise ConfigError(
                "the Trainer has more than one StrongroomCheckpoint; a run has one: give save_interval a "
                "function of state and event to combine intervals, and replicate_to=[...] for another place"
            )
        trainer = seam.trainer_of(state)
        arguments = self._arguments.in_run(lambda text: seam.fill(text, state.run_name))
        guard(trainer, self, arguments)
        is_named = "{run_name" in self._arguments.root
        self._run = Run(trainer, self, arguments, is_named=is_named)
        _watch_fit(trainer, self._run)
        # What other callbacks see when they are told that all is loaded is what was resumed.
        state.callbacks.remove(self)
        state.callbacks.insert(0, self)

    def after_load(self, state: Any, logger: Any) -> None:
        parallelism.check_wrapped(state)
        self._current.load()
        self._come_last(state)

    def fit_start(self, state: Any, logger: Any) -> None:
        self._come_last(state)
        self._current.fit_begins()

    def batch_checkpoint(self, state: Any, logger: Any) -> None:
        self._current.checkpoint(Event.BATCH_CHECKPOINT, logger)

    def epoch_end(self, state: Any, logger: Any) -> None:
        self._current.epoch_is_over()

    def epoch_checkpoint(self, state: Any, logger: Any) -> None:
        self._current.checkpoint(Event.EPOCH_CHECKPOINT, logger, is_epoch_end=True)

    def iteration_end(self, state: Any, logger: Any) -> None:
        # Also one that ends inside an epoch is followed by a new iterator.
        self._current.epoch_is_over()

    def iteration_checkpoint(self, state: Any, logger: Any) -> None:
        self._current.checkpoint(Event.ITERATION_CHECKPOINT, logger)

    def eval_start(self, state: Any, logger: Any) -> None:
        self._trains(False)

    def eval_end(self, state: Any, logger: Any) -> None:
        self._trains(True)

    def predict_start(self, state: Any, logger: Any) -> None:
        self._trains(False)

    def predict_end(self, state: Any, logger: Any) -> None:
        self._trains(True)

    def fit_end(self, state: Any, logger: Any) -> None:
        self._current.fit_ends(logger)

    def close(self, state: Any, logger: Any) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.close(logger)

    # ----------------------------------------------------------------------------------------------- the rest

    @property
    def _current(self) -> Run:
        if self._run is None:
            raise ConfigError("this StrongroomCheckpoint was closed with its Trainer; build a Trainer anew")
        return self._run

    def _trains(self, is_training: bool) -> None:
        if self._run is not None:
            self._run.trains(is_training)

    def _come_last(self, state: Any) -> None:
        """What other callbacks do at an event is part of what is saved there, and what they draw is over."""
        state.callbacks.remove(self)
        state.callbacks.append(self)


def _watch_fit(trainer: Any, run: Run) -> None:
    """Be told of what ends a fit, which no event tells, and of one that has nothing to train.

    Weakly: Composer closes a Trainer when nothing refers to it any more.
    """
    found, original, logger = weakref.ref(trainer), type(trainer).fit, trainer.logger

    def fit(*args: Any, **kwargs: Any) -> Any:
        told = run.arguments_of(kwargs)
        if run.is_finished(told):
            return None
        try:
            return original(found(), *args, **told)
        except BaseException as error:
            run.fit_ends(logger, error)
            raise

    trainer.fit = fit
