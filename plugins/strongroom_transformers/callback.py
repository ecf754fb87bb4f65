"""The callback: attached to a Trainer, it takes the place of its save and of its resume."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from transformers import Trainer, TrainerCallback
from typing_extensions import Self, Unpack

from strongroom import Checkpointer
from strongroom.config import choose_digest, load_policy
from strongroom.errors import ConfigError
from strongroom.frontend import RunOptions, open_run, replace_for_good
from strongroom_transformers import contents, escapes, seam
from strongroom_transformers.arguments import Asked, asked_for, check_training_arguments, read_options
from strongroom_transformers.beginning import Beginning
from strongroom_transformers.best import load_best
from strongroom_transformers.hub import Release, Releases, check_hub, check_release
from strongroom_transformers.peft import BaseRule, ModelWeights, check_base_rule
from strongroom_transformers.provenance import known_of
from strongroom_transformers.refusals import check_trainer
from strongroom_transformers.trackers import Trackers
from strongroom_transformers.training import OnCommit, Training

__all__ = ["StrongroomCallback"]

_MARK = "_strongroom_callback"


class StrongroomCallback(TrainerCallback):  # type: ignore[misc]  # of a package without types here
    """Saves a Trainer's run, and resumes it by itself.

    ::

        trainer = Trainer(model=model, args=args, train_dataset=dataset)
        StrongroomCallback("runs/a").attach(trainer)
        trainer.train()

    When it saves, and how many checkpoints stay, the Trainer's arguments say: ``save_strategy``,
    ``save_steps``, ``save_total_limit``, ``load_best_model_at_end``, ``metric_for_best_model``,
    ``greater_is_better``. What
    ``train(resume_from_checkpoint=...)`` is given says what it goes on from: None, the newest whole
    checkpoint if there is one; True, that there must be one; False, none; ``"strongroom://ROOT#step=N"``,
    that one; the path of a folder that the Trainer wrote, that one, by the Trainer itself.

    Given among ``Trainer(callbacks=[...])`` it attaches itself.

    Args:
        root: the run's, a path or a URI.
        base: where the model has adapters (PEFT), what becomes of the weights below them: ``"digest"``
            (the default) names them by their digest, and a resume onto other ones is an error;
            ``"store"`` stores them with every save.
        release: with ``"safetensors"``, a run whose policy seals its checkpoints may publish its weights on
            the Hub all the same, in that form. Default None: it may not.
        options: as `strongroom.frontend.RunOptions` has them.

    Attributes:
        weights: what of the model is stored.
        on_commit: functions that are told of the Trainer and of each checkpoint that was committed, on every
            rank, between two steps or when training is over.

    Raises:
        ConfigError: an option cannot work.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        base: BaseRule = "digest",
        release: Release | None = None,
        **options: Unpack[RunOptions],
    ) -> None:
        self.settings = read_options(root, options)
        self._release = check_release(release)
        options_of_run = self.settings.options
        algorithm = choose_digest(options_of_run["digest"], load_policy(options_of_run["security"]))
        self.weights: contents.Weights = ModelWeights(check_base_rule(base), algorithm)
        self.on_commit: list[OnCommit] = []
        self._trainer: Any = None
        self._training: Training | None = None
        self._asked = Asked(mode=self.settings.resume)
        self._beginning: Beginning | None = None
        self._trackers: Trackers | None = None
        self._again: tuple[int | None] | None = None

    # ---------------------------------------------------------------------------------------- being attached

    def attach(self, trainer: Any) -> Self:
        """Take the place of this Trainer's save and resume; for good.

        Raises:
            ConfigError: it is no Trainer, or one that cannot be saved so; or another callback is attached.
        """
        if not isinstance(trainer, Trainer):
            raise ConfigError(f"attach() takes a transformers.Trainer, got a {type(trainer).__qualname__}")
        if self._trainer is trainer:
            return self
        if self._trainer is not None:
            raise ConfigError(
                "this StrongroomCallback is attached to another Trainer; give each Trainer one of its own, "
                "with a root of its own"
            )
        if getattr(trainer, _MARK, None) is not None:
            raise ConfigError("this Trainer has a StrongroomCallback already; one is enough")
        seam.check_supported(trainer)
        check_trainer(trainer)
        check_training_arguments(trainer.args, self.settings)
        check_hub(trainer.args, self.settings, self._release)
        setattr(trainer, _MARK, self)
        self._trainer = trainer
        if not any(callback is self for callback in trainer.callback_handler.callbacks):
            trainer.add_callback(self)
        for owner, name, make in (
            (trainer, "train", self._train),
            (trainer, "_inner_training_loop", self._loop),
            (trainer, "set_initial_training_values", self._values),
            (trainer, "_init_training_state", self._state),
            (trainer, "_prepare_for_training", self._prepare),
            (trainer, "_evaluate", self._evaluate),
            (trainer, "_run_epoch", self._epoch),
            (trainer, "_maybe_log_save_evaluate", self._log_save_evaluate),
            (trainer, "_finalize_training", self._finalize),
            (trainer, "_save_checkpoint", self._save),
            (trainer, "_load_rng_state", self._rng_state),
            (trainer, "_load_best_model", self._best),
            (trainer.callback_handler, "on_epoch_begin", self._epoch_begin),
            (trainer.callback_handler, "on_save", self._on_save),
        ):
            replace_for_good(owner, name, make)
        escapes.guard(trainer, self.settings)
        releases = Releases(trainer, self.settings, self._release)
        releases.guard()
        self.on_commit.append(releases.is_committed)
        return self

    # ---------------------------------------------------------------------------- what the Trainer tells of

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A Trainer that was given this callback is being made."""
        self.attach(seam.found_trainer())

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Training is about to begin."""
        self._current.begins()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """An optimizer step is over."""
        self._current.step_ends()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """An epoch is over."""
        self._current.epoch_ends()

    @property
    def _current(self) -> Training:
        if self._training is None:
            if self._trainer is not None:
                raise ConfigError(
                    "nothing is being trained, and what train() saves needs to know where it is"
                )
            raise ConfigError(
                "StrongroomCallback is not attached to the Trainer that trains; call attach(trainer) before "
                "train()"
            )
        return self._training

    # ------------------------------------------------------------------------------ what takes others' places

    def _train(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def train(*args: Any, **kwargs: Any) -> Any:
            given = seam.bind(original, *args, **kwargs)
            trainer = self._trainer
            if given.get("trial") is not None or trainer.hp_search_backend is not None:
                raise ConfigError(
                    "a hyper-parameter search trains many runs with one Trainer, and each wants a root of "
                    "its own; search without Strongroom, and attach it for the run that you keep"
                )
            check_training_arguments(trainer.args, self.settings)
            self._trackers = Trackers(trainer, self.settings)
            self._trackers.check()
            self._asked = asked_for(given.pop("resume_from_checkpoint", None), self.settings)
            if self._asked.native is not None:
                given["resume_from_checkpoint"] = self._asked.native
            self._again = self._beginning = None
            if trainer.args.auto_find_batch_size and self._asked.native is None:
                self._take_batch_size()
            try:
                return seam.call(original, given)
            finally:
                self._beginning = None

        return train

    def _take_batch_size(self) -> None:
        """Begin with the batch size that the run had found, which must be known before its data are."""
        if self._asked.mode == "never":
            return
        with self._reader() as checkpointer:
            restored = checkpointer.restore(
                {contents.OWN_PART: None},
                only=(contents.OWN_PART,),
                step=self._asked.step,
                stand_in=0,
                accept_older=self.settings.accept_older,
            )
        if restored is not None and contents.OWN_PART in restored.state:
            found = restored.state[contents.OWN_PART]["state"]["train_batch_size"]
            if isinstance(found, int):
                self._trainer._train_batch_size = found

    def _reader(self) -> Checkpointer:
        trainer = self._trainer
        return open_run(self.settings, known=lambda: known_of(trainer))

    def _loop(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _inner_training_loop(*args: Any, **kwargs: Any) -> Any:
            trainer = self._trainer
            if trainer.args.auto_find_batch_size:
                if self._beginning is None:
                    self._beginning = Beginning(trainer)
                else:
                    self._beginning.put_back(trainer)
            training = self._training = Training(
                trainer,
                self.settings,
                self._asked,
                weights=self.weights,
                on_commit=self.on_commit,
                again=self._again,
            )
            try:
                result = original(*args, **kwargs)
            except BaseException as error:
                training.end(error)
                raise
            else:
                training.end()
            finally:
                self._training, self._again = None, (training.resumed_from,)
            return result

        return _inner_training_loop

    def _values(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def set_initial_training_values(args: Any, dataloader: Any) -> Any:
            if self._training is not None:
                self._training.loader_is(dataloader)
            return original(args, dataloader)

        return set_initial_training_values

    def _state(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def _init_training_state(*args: Any, **kwargs: Any) -> Any:
            prepare = self._trainer._prepare_for_training
            return self._current.sets_up(original, prepare, seam.bind(original, *args, **kwargs))

        return _init_training_state

    def _prepare(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def _prepare_for_training(*args: Any, **kwargs: Any) -> Any:
            prepared = None if self._training is None else self._training.take_prepared()
            return original(*args, **kwargs) if prepared is None else prepared

        return _prepare_for_training

    def _evaluate(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def _evaluate(*args: Any, **kwargs: Any) -> Any:
            given = seam.bind(original, *args, **kwargs)
            is_at_start = given.get("skip_scheduler", False)
            if is_at_start and self._training is not None and self._training.resumed_from is not None:
                return None  # the run was evaluated at its start; callbacks would count another one
            return original(*args, **kwargs)

        return _evaluate

    def _epoch_begin(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def on_epoch_begin(*args: Any, **kwargs: Any) -> Any:
            self._current.epoch_begins()
            if self._trackers is not None:
                self._trackers.check()
            return original(*args, **kwargs)

        return on_epoch_begin

    def _epoch(self, original: Callable[..., None]) -> Callable[..., None]:
        def _run_epoch(*args: Any, **kwargs: Any) -> None:
            self._current.runs_epoch(original, seam.bind(original, *args, **kwargs))

        return _run_epoch

    def _log_save_evaluate(self, original: Callable[..., None]) -> Callable[..., None]:
        def _maybe_log_save_evaluate(*args: Any, **kwargs: Any) -> None:
            self._current.logs_saves_evaluates(lambda: original(*args, **kwargs))

        return _maybe_log_save_evaluate

    def _save(self, original: Callable[..., None]) -> Callable[..., None]:
        def _save_checkpoint(*args: Any, **kwargs: Any) -> None:
            self._current.save_is_asked_for()

        return _save_checkpoint

    def _on_save(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def on_save(args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            if self._training is not None and self._training.holds_back(control):
                return control
            return original(args, state, control, **kwargs)

        return on_save

    def _rng_state(self, original: Callable[..., None]) -> Callable[..., None]:
        def _load_rng_state(checkpoint: Any) -> None:
            if checkpoint != seam.RESUMED:
                original(checkpoint)

        return _load_rng_state

    def _finalize(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def _finalize_training(*args: Any, **kwargs: Any) -> Any:
            given = seam.bind(original, *args, **kwargs)
            given["start_time"] -= self._current.seconds_before()
            with escapes.leaving_folders_alone(self._trainer.args):
                return seam.call(original, given)

        return _finalize_training

    def _best(self, original: Callable[..., None]) -> Callable[..., None]:
        def _load_best_model() -> None:
            named = self._trainer.state.best_model_checkpoint
            best = asked_for(named, self.settings)
            if best.native is not None:
                original()  # found before this run was ours
                return
            self._current.wait()
            with self._reader() as checkpointer:
                load_best(checkpointer, self._trainer, self.weights, best.step, named)

        return _load_best_model
