"""The callback: Lightning's events, translated into saves and one restore.

It decides nothing about storage (`strongroom.Checkpointer` does), about when to save or whether to resume
(`strongroom.resume` does), and touches Lightning's insides only through `strongroom_lightning.seam`.
"""

from __future__ import annotations

import os
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from strongroom import Checkpointer, KeepLast, OnChange, Tier, tree
from strongroom.errors import (
    CheckpointNotFoundError,
    ConfigError,
    IntegrityError,
    StateMismatchError,
    StrongroomError,
)
from strongroom.provenance.recording import places_of_secrets
from strongroom.resume import LastSave, Moment, ResumeMode, SaveIntervals, plan_resume
from strongroom.resume.mode import check_resume_mode
from strongroom_lightning import contents, seam
from strongroom_lightning.data import TrainingData
from strongroom_lightning.uri import CheckpointUri

__all__ = ["StrongroomCheckpoint"]

_DRAIN_S: Final = 10.0
"""How long a run that ends with an exception waits for a save that is being written."""

_NOT_RESUMABLE: Final = "You're resuming from a checkpoint that ended before the epoch ended"
"""Lightning's warning about loaders that cannot say where they stand; ours need not be able to."""


class StrongroomCheckpoint(Checkpoint):
    """Save a run through Strongroom, and resume it by itself.

    ``trainer.fit(model)``, without ``ckpt_path``, takes up the newest whole checkpoint in ``dirpath``: the
    weights, optimizers, schedulers, loops, callbacks, random states and the place in the data, so that what
    follows is what the uninterrupted run would have done. A ``ckpt_path`` given to ``fit`` wins; it may
    also be ``"strongroom://latest"`` or ``"strongroom://ROOT#step=N"``.

    Checkpoints are saved between optimizer steps, in the background, whenever one of the intervals has
    passed, and when training ends. With no interval given, at the end of every epoch. A save that failed in
    the background raises at the next one, or when the fit ends.

    Args:
        dirpath: the run's root: a path, or a ``file://`` or ``s3://`` URI. One run, one root.
        every_n_train_steps: save when the optimizer step (``trainer.global_step``) reaches a multiple.
        every_n_epochs: save after every so many epochs.
        train_time_interval: save when that much time has passed since the last save.
        resume: ``"auto"`` resumes where there is a checkpoint, ``"must"`` makes its absence an error,
            ``"never"`` begins anew and leaves what is there alone. Only the first fit of a Trainer resumes.
        keep: how many checkpoints to keep; None keeps all.
        security: a policy, or its file; None reads ``STRONGROOM_CONFIG``.
        digest: ``"blake3"`` or ``"sha256"``; None takes the policy's, or BLAKE3.
        timeout_s: seconds within which a save must have committed.
        max_fallback: how many damaged checkpoints a resume may skip before it is an error.
        provenance: where the run comes from, such as ``{"data": {"version": "2026-11"}}``, or a function
            that returns it. The hyper-parameters of the module and the datamodule are added by themselves.
        on_change: what a resume does where the program has other data, code or hyper-parameters than the
            checkpoint was saved with: ``OnChange(data="refuse", code="warn", ...)``.
        retention_class: a name that goes into each manifest, for rules of retention to go by.
        run_id: the run's id where the platform gives one; a root of another run is refused.
        launch: the number of this start where the platform gives one, for a job that may not look at the
            root.
        replicate_to: further tiers, the fastest first, as roots or `strongroom.Tier` values: what was
            committed is copied to each in the background. The end of a fit waits for it, ``timeout_s`` at
            most.
        accept_missing_tiers: go on without a tier that is out of reach, where what is newest may be.
        reserve_bytes: what is to stay free on the root's file system.
        scatter: over how many folders a checkpoint's shards are spread, for a bucket; None: over none.
        accept_older: resume although more than ``max_fallback`` checkpoints are damaged, or the root is an
            older one than the policy's floor remembers. For one start, once it is known why.

    Raises:
        ConfigError: an argument that cannot work; from ``fit``, a Trainer that is not supported.
        StateMismatchError: from ``fit``: the checkpoint does not fit the model or its optimizers.
        StateEncodingError: from ``fit``: hyper-parameters, callbacks or hooks hold what has no safe encoding.
    """

    def __init__(
        self,
        dirpath: str | os.PathLike[str],
        *,
        every_n_train_steps: int | None = None,
        every_n_epochs: int | None = None,
        train_time_interval: timedelta | None = None,
        resume: Literal["auto", "never", "must"] = "auto",
        keep: int | None = None,
        security: Any = None,
        digest: Literal["blake3", "sha256"] | None = None,
        timeout_s: float = 1800.0,
        max_fallback: int = 3,
        provenance: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None = None,
        on_change: OnChange | None = None,
        retention_class: str | None = None,
        run_id: str | None = None,
        launch: int | None = None,
        replicate_to: Sequence[str | os.PathLike[str] | Tier] = (),
        accept_missing_tiers: bool = False,
        reserve_bytes: int = 0,
        scatter: int | None = None,
        accept_older: bool = False,
    ) -> None:
        super().__init__()
        if every_n_train_steps is None and every_n_epochs is None and train_time_interval is None:
            every_n_epochs = 1
        self.dirpath = os.fspath(dirpath)
        self.resume: ResumeMode = check_resume_mode(resume)
        self._intervals = SaveIntervals(
            every_n_steps=every_n_train_steps, every_n_epochs=every_n_epochs, every=train_time_interval
        )
        self._options: dict[str, Any] = {
            "keep": None if keep is None else KeepLast(count=keep),
            "security": security,
            "digest": digest,
            "timeout_s": timeout_s,
            "max_fallback": max_fallback,
            "on_change": on_change,
            "retention_class": retention_class,
            "run_id": run_id,
            "launch": launch,
            "replicate_to": replicate_to,
            "accept_missing_tiers": accept_missing_tiers,
            "reserve_bytes": reserve_bytes,
            "scatter": scatter,
            "provenance": self._provenance,
        }
        self._given = provenance
        self._accept_older = accept_older
        self._hyper_parameters: dict[str, Any] = {}
        self._clock: Callable[[], float] = time.monotonic
        self._replacements = seam.Replacements()
        self._checkpointer: Checkpointer | None = None
        self._last_trainer: weakref.ref[Trainer] | None = None
        self._left_at: int | None = None
        self._forget()

    def _forget(self) -> None:
        """What belongs to one fit."""
        self._restored: dict[str, Any] | None = None
        self._is_restoring = False
        self._resumes_by_itself = False
        self._data: TrainingData | None = None
        self._last: LastSave | None = None

    @property
    def best_model_path(self) -> str:
        """Empty: this callback ranks nothing, so Lightning's ``ckpt_path="best"`` says that there is none."""
        return ""

    # ------------------------------------------------------------------------------ Lightning's hooks

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if getattr(trainer, "fast_dev_run", False) or seam.is_only_tuning(trainer):
            return
        seam.check_supported(trainer)
        same = [one for one in trainer.callbacks if isinstance(one, StrongroomCheckpoint)]  # type: ignore[attr-defined]
        if len(same) > 1:
            raise ConfigError(
                f"the Trainer has {len(same)} StrongroomCheckpoint callbacks; a run has one: "
                f"combine their intervals"
            )
        self._replacements.undo()
        self._forget()
        replace, connector = self._replacements.replace, trainer._checkpoint_connector
        is_fit = stage == "fit"
        replace(connector, "resume_start", lambda original: self._resume_start(trainer, original, is_fit))
        replace(trainer.strategy, "load_checkpoint", self._load_checkpoint)
        if not is_fit:
            return
        fit_loop, epoch_loop, strategy = trainer.fit_loop, trainer.fit_loop.epoch_loop, trainer.strategy
        unless_tuning = self._unless_tuning
        replace(strategy, "load_model_state_dict", lambda original: self._load_model(trainer, original))
        replace(
            strategy, "load_optimizer_state_dict", lambda original: self._load_optimizers(trainer, original)
        )
        replace(fit_loop, "_load_combined_loader_states", unless_tuning(trainer, self._loaders_ready))
        replace(
            fit_loop,
            "on_run_start",
            unless_tuning(trainer, lambda original: self._run_start(trainer, original)),
        )
        replace(epoch_loop, "reset", unless_tuning(trainer, self._epoch_reset))
        replace(epoch_loop, "on_run_start", unless_tuning(trainer, self._epoch_start))
        replace(
            epoch_loop,
            "on_advance_end",
            unless_tuning(trainer, lambda original: self._batch_end(trainer, original)),
        )
        replace(
            fit_loop,
            "on_advance_end",
            unless_tuning(trainer, lambda original: self._epoch_end(trainer, original)),
        )
        self._data = TrainingData(fit_loop)
        self._hyper_parameters = contents.hyper_parameters(trainer)
        secrets = places_of_secrets(self._hyper_parameters, "hyper_parameters")
        if secrets:
            rank_zero_warn(
                f"Strongroom: {', '.join(secrets)} of save_hyperparameters() look like secrets, and are part "
                f"of every checkpoint's state, as the module cannot be built without them; leave them out by "
                f"ignore=[...], and seal what has them"
            )
        self._checkpointer = self._open(self.dirpath)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._replacements.undo()
        self._forget()
        checkpointer, self._checkpointer = self._checkpointer, None
        if checkpointer is not None:
            self._last_trainer = weakref.ref(trainer)
            checkpointer.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._replacements.undo()
        self._forget()
        checkpointer, self._checkpointer = self._checkpointer, None
        if checkpointer is None:
            return
        self._last_trainer = weakref.ref(trainer)
        try:
            checkpointer.close(timeout_s=_DRAIN_S)
        except StrongroomError as failure:
            if failure is not exception:  # what ends the run must not be hidden by what followed from it
                rank_zero_warn(
                    f"Strongroom: closing {self.dirpath} after {exception!r:.200} failed: {failure}"
                )

    def _unless_tuning(
        self, trainer: Trainer, make: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Lightning's finders run the fit loop on trial inside a fit, with the callbacks taken out meanwhile.

        What is trained then is thrown away: it must neither be saved nor move what is known of the data.
        """

        def either(original: Callable[..., Any]) -> Callable[..., Any]:
            ours = make(original)

            def method(*args: Any, **kwargs: Any) -> Any:
                is_ours = any(one is self for one in trainer.callbacks)  # type: ignore[attr-defined]
                return (ours if is_ours else original)(*args, **kwargs)

            return method

        return either

    # -------------------------------------------------------------------------------------- restoring

    def _open(self, root: str) -> Checkpointer:
        if root == self.dirpath:
            return Checkpointer(root, **self._options)
        # Another run's, which is only read: it has tiers, a name and a turn of its own.
        own = {"accept_missing_tiers", "keep", "launch", "replicate_to", "reserve_bytes", "run_id"}
        return Checkpointer(root, **{key: value for key, value in self._options.items() if key not in own})

    def _provenance(self) -> dict[str, Any]:
        """What is said of the run, and what Lightning knows of it."""
        given = self._given() if callable(self._given) else self._given or {}
        known = {"hyper_parameters": self._hyper_parameters} if self._hyper_parameters else {}
        return {**known, **given}

    def _resume_start(
        self, trainer: Trainer, original: Callable[..., None], is_fit: bool
    ) -> Callable[..., None]:
        def resume_start(checkpoint_path: Any = None, *args: Any, **kwargs: Any) -> None:
            uri = None if checkpoint_path is None else CheckpointUri.parse(str(checkpoint_path))
            if uri is not None:
                checkpoint_path = self._restore_named(uri, is_fit)
            elif is_fit:
                checkpoint_path = self._restore_newest(trainer, checkpoint_path)
            original(checkpoint_path, *args, **kwargs)

        return resume_start

    def _restore_newest(self, trainer: Trainer, checkpoint_path: Any) -> Any:
        is_first_run = self._last_trainer is None or self._last_trainer() is not trainer
        plan = plan_resume(
            self.resume,
            is_first_run=is_first_run,
            steps_done=trainer.global_step,
            explicit=None if not checkpoint_path else f"ckpt_path={str(checkpoint_path)!r}",
        )
        if not plan.restore:
            rank_zero_info(f"Strongroom: nothing is restored from {self.dirpath}: {plan.reason}")
            if not is_first_run and not checkpoint_path and self._left_at is not None:
                self._stay_on_line(self._left_at)
            return checkpoint_path
        restored = self._writer().restore(accept_older=self._accept_older)
        if restored is None:
            rank_zero_info(f"Strongroom: {plan.nothing_found(self.dirpath)}")
            return checkpoint_path
        finders = seam.finders(trainer)
        if finders:
            raise ConfigError(
                f"{self.dirpath} holds step {restored.step} to resume from, and {finders[0]} would search "
                "anew and undo that: leave it out of a run that resumes (and keep what it found), or use "
                "resume='never'"
            )
        self._take_up(restored, self.dirpath)
        self._resumes_by_itself = True
        self._say_if_finished(trainer, restored.step)
        return str(CheckpointUri(root=self.dirpath, step=restored.step))

    def _stay_on_line(self, step: int) -> None:
        """Let what a further fit saves descend from what the last one saved: restore nothing of it."""
        try:
            # A step that this very run has saved.
            self._writer().restore(
                {"nothing": torch.zeros(0)}, step=step, strict=False, only=(), accept_older=True
            )
        except (IntegrityError, CheckpointNotFoundError) as error:
            rank_zero_warn(f"Strongroom: a new line of checkpoints begins in {self.dirpath}: {error}")

    def _restore_named(self, uri: CheckpointUri, is_fit: bool) -> str:
        root = uri.root or self.dirpath
        if os.path.realpath(root) == os.path.realpath(self.dirpath):
            root = self.dirpath
        if is_fit and root == self.dirpath:
            restored = self._writer().restore(step=uri.step, accept_older=self._accept_older)
        else:
            with self._open(root) as reader:
                restored = reader.restore(step=uri.step, accept_older=self._accept_older)
        if restored is None:
            raise CheckpointNotFoundError(f"ckpt_path={str(uri)!r}: {root} holds no committed checkpoint")
        self._take_up(restored, root)
        return str(CheckpointUri(root=root, step=restored.step))

    def _take_up(self, restored: Any, root: str) -> None:
        for step, reason in restored.skipped:
            rank_zero_warn(f"Strongroom: step {step} of {root} is damaged and was skipped: {reason}")
        rank_zero_info(f"Strongroom: resuming from step {restored.step} of {root}")
        self._restored, position, rng = contents.restored_parts(restored.state, restored.step, root)
        if self._data is not None:
            self._data.resume_from(position, rng)
        self._is_restoring = True
        self._left_at = restored.step if root == self.dirpath else None

    def _say_if_finished(self, trainer: Trainer, step: int) -> None:
        loops = (self._restored or {})["loops"]["fit_loop"]
        epochs = loops["epoch_progress"]["current"]["processed"]
        if trainer.max_steps != -1 and step >= trainer.max_steps:
            limit = f"max_steps={trainer.max_steps}"
        elif trainer.max_epochs not in {None, -1} and epochs >= (trainer.max_epochs or 0):
            limit = f"max_epochs={trainer.max_epochs}"
        else:
            return
        rank_zero_info(
            f"Strongroom: this run is already finished ({limit} was reached at step {step} of "
            f"{self.dirpath}): nothing to train. Raise the limit to train on; for a new run, use another "
            f"dirpath or resume='never'"
        )

    def _load_checkpoint(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def load_checkpoint(checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
            restored, self._restored = self._restored, None  # Lightning lets go of it once all is loaded
            return original(checkpoint_path, *args, **kwargs) if restored is None else restored

        return load_checkpoint

    def _load_model(self, trainer: Trainer, original: Callable[..., None]) -> Callable[..., None]:
        def load_model_state_dict(checkpoint: Any, *args: Any, **kwargs: Any) -> None:
            try:
                original(checkpoint, *args, **kwargs)
            except RuntimeError as error:
                if not self._is_restoring:
                    raise
                own = trainer.lightning_module.state_dict()
                problem = f"the model does not fit the checkpoint in {self.dirpath}"
                raise contents.check_fits(checkpoint["state_dict"], own, problem, error) from error

        return load_model_state_dict

    def _load_optimizers(self, trainer: Trainer, original: Callable[..., None]) -> Callable[..., None]:
        def load_optimizer_state_dict(checkpoint: Any, *args: Any, **kwargs: Any) -> None:
            if not self._is_restoring:
                original(checkpoint, *args, **kwargs)
                return
            saved, own = len(checkpoint["optimizer_states"]), len(trainer.strategy.optimizers)
            advice = "restore the code and settings of that run, or use resume='never' to begin anew"
            if saved != own:
                raise StateMismatchError(
                    f"the checkpoint in {self.dirpath} holds {saved} optimizers, and this run has {own}; "
                    f"{advice}"
                )
            try:
                original(checkpoint, *args, **kwargs)
            except (ValueError, KeyError) as error:
                raise StateMismatchError(
                    f"the optimizers do not fit the checkpoint in {self.dirpath} ({error}); {advice}"
                ) from error

        return load_optimizer_state_dict

    # -------------------------------------------------------------------------- the fit's progress

    def _loaders_ready(self, original: Callable[[], None]) -> Callable[[], None]:
        def load_combined_loader_states() -> None:
            original()
            # Nothing but the making of the iterator follows in Lightning.
            self._fit_data().loaders_are_ready()

        return load_combined_loader_states

    def _run_start(self, trainer: Trainer, original: Callable[[], None]) -> Callable[[], None]:
        def on_run_start() -> None:
            original()  # every on_train_start hook included
            tree.capture(contents.known_at_start(trainer), rank=0)
            self._last = LastSave.at(self._moment(trainer))
            self._is_restoring = False
            if self._resumes_by_itself and seam.has_stopped_early(trainer):
                # Lightning would train one more epoch to find that out again, at every start.
                trainer.should_stop = True
                rank_zero_info(
                    "Strongroom: this run is already finished (early stopping ran out of patience at step "
                    f"{trainer.global_step} of {self.dirpath}): nothing to train. To train on, leave "
                    "the early stopping out, or pass ckpt_path='strongroom://latest'"
                )
            if self._fit_data().is_resuming_inside_epoch:
                seam.repeat_epoch_settings(trainer)
            self._fit_data().training_begins()

        return on_run_start

    def _epoch_reset(self, original: Callable[[], None]) -> Callable[[], None]:
        def reset() -> None:
            if not self._fit_data().is_resuming_inside_epoch:
                original()
                return
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=_NOT_RESUMABLE)
                original()

        return reset

    def _epoch_start(self, original: Callable[[Any], None]) -> Callable[[Any], None]:
        return lambda fetcher: self._fit_data().epoch_begins(fetcher, original)

    def _batch_end(self, trainer: Trainer, original: Callable[..., None]) -> Callable[..., None]:
        def on_advance_end(*args: Any) -> None:
            original(*args)
            fit_loop = trainer.fit_loop
            if seam.is_epoch_complete(fit_loop):
                return  # the epoch's end follows at once, and is the better moment
            is_over = seam.is_run_over(trainer)
            if is_over or seam.is_step_boundary(fit_loop):
                self._save_if_due(trainer, self._moment(trainer, is_run_end=is_over))

        return on_advance_end

    def _epoch_end(self, trainer: Trainer, original: Callable[[], None]) -> Callable[[], None]:
        def on_advance_end() -> None:
            original()
            self._fit_data().epoch_is_over()
            is_over = seam.is_run_over(trainer)
            self._save_if_due(trainer, self._moment(trainer, is_epoch_end=True, is_run_end=is_over))

        return on_advance_end

    def _fit_data(self) -> TrainingData:
        if self._data is None:
            raise ConfigError("StrongroomCheckpoint works inside trainer.fit() alone")
        return self._data

    # ----------------------------------------------------------------------------------------- saving

    def _moment(self, trainer: Trainer, *, is_epoch_end: bool = False, is_run_end: bool = False) -> Moment:
        return Moment(
            step=trainer.global_step,
            epochs_done=seam.epochs_done(trainer.fit_loop),
            clock_s=self._clock(),
            is_epoch_end=is_epoch_end,
            is_run_end=is_run_end,
        )

    def _save_if_due(self, trainer: Trainer, moment: Moment) -> None:
        if self._last is None or not self._intervals.decide(moment, self._last).save:
            return
        data = self._fit_data()
        rng = data.random_state()
        state, loader_states = contents.gather(trainer)
        data.put_back(rng)  # a hook may draw; saving must not change the run
        position = data.position(loader_states)
        if position is None:
            return
        state["position"], state["rng"] = position.to_state(), rng.to_state()
        self._writer().save(moment.step, state, metrics=_scalars(trainer.callback_metrics))
        self._last, self._left_at = LastSave.at(moment), moment.step

    def _writer(self) -> Checkpointer:
        if self._checkpointer is None:
            raise ConfigError("StrongroomCheckpoint works inside trainer.fit() alone")
        return self._checkpointer


def _scalars(metrics: dict[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in metrics.items()
        if not isinstance(value, torch.Tensor) or value.numel() == 1
    }
