"""The callback, whichever of Lightning's two packages it is for: their events, handed to what acts on them.

It decides nothing about storage (`strongroom.Checkpointer` does), about when to save or whether to resume
(`strongroom.resume` does), and touches Lightning's insides only through `strongroom_lightning.seam`.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar, Final, Literal

from lightning_utilities.core.rank_zero import rank_zero_warn

from strongroom import Checkpointer, OnChange, Tier
from strongroom.errors import ConfigError, StrongroomError
from strongroom.frontend import Figures, Replacements, policy_seals, provenance_of
from strongroom.provenance.recording import places_of_secrets
from strongroom_lightning import contents, seam
from strongroom_lightning.arguments import Arguments
from strongroom_lightning.attributes import Attributes
from strongroom_lightning.by_hand import ByHand
from strongroom_lightning.escapes import guard
from strongroom_lightning.figures import log_figures, watch_figures
from strongroom_lightning.fit import Fit
from strongroom_lightning.namespace import Namespace
from strongroom_lightning.preempting import Preempting
from strongroom_lightning.ranking import STATE_KEY, Ranking
from strongroom_lightning.resuming import Resuming
from strongroom_lightning.strategies import check_strategy
from strongroom_lightning.uri import CheckpointUri

__all__ = ["Checkpointing"]

_DRAIN_S: Final = 10.0
"""How long a run that ends with an exception waits for a save that is being written."""


class Checkpointing(Attributes):
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
        filename: a label for each checkpoint, such as ``"{epoch:02d}-{val_loss:.2f}"``, kept as a tag of it.
        monitor: the name of a logged metric by which checkpoints are ranked; None ranks nothing.
        mode: ``"min"`` where low is good, ``"max"`` where high is.
        save_top_k: how many of the best stay besides the newest; -1: all, 0: none. None: one with
            ``monitor``, and without it what ``keep`` says.
        save_last: the newest checkpoint always stays, and is what ``ckpt_path="last"`` takes: whatever is
            given here, it says no more than that.
        auto_insert_metric_name: whether ``{val_loss:.2f}`` in ``filename`` becomes ``val_loss=0.31``.
        every_n_train_steps: save when the optimizer step (``trainer.global_step``) reaches a multiple. 0 as
            None.
        every_n_epochs: save after every so many epochs; where validation runs otherwise than once an epoch,
            after each validation of such an epoch. 0 as None, and no epoch's end is a reason to save.
        train_time_interval: save when that much time has passed since the last save.
        save_on_train_epoch_end: True: ``every_n_epochs`` means the epoch's end, whatever validation does;
            False: each validation.
        save_weights_only: checkpoints hold the model alone: nothing can be resumed from them.
        save_on_exception: when an exception ends the fit while a batch is being read, save the step before
            it. In the middle of a step nothing is saved: it would resume as something that never was.
        enable_version_counter: of no effect: a step is saved once.
        verbose: say of each ranked save which place it took.
        resume: ``"auto"`` resumes where there is a checkpoint, ``"must"`` makes its absence an error,
            ``"never"`` begins anew and leaves what is there alone. Only the first fit of a Trainer resumes.
        skip: how a resume inside an epoch passes over the batches that were trained on: ``"read"`` reads them
            again, ``"sampler"`` advances the sampler alone, which costs nothing and is inexact where reading
            itself draws or remembers (map-style data; others are read again, and that is told).
        running_metrics: keep the means that ``self.log`` is forming, and the states of torchmetrics, so that
            a resume inside an epoch ends it with the same epoch means. False leaves them out: for metrics
            that collect all predictions.
        keep: how many of the newest checkpoints stay, to resume from. None: all; where ``monitor`` or
            ``save_top_k`` lets some go, one.
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
        unencodable: what becomes of hyper-parameters and states of callbacks that no checkpoint can hold,
            such as functions: ``"warn"`` names them once and saves the rest, ``"refuse"`` is an error.
        preemption_signals: signals that tell a fit to stop: all ranks save after the same step, wait for the
            commit, and end with 128 and the signal's number. Under Slurm with requeueing on, its signal is
            one of them, and puts the job back into the queue. Empty: signals are left to Lightning.
        spot_notice: a function that says whether this host is about to be taken away, or why; it is asked
            on a thread of its own, on every rank. A notice stops the fit as a signal does.
        spot_notice_every_s: seconds between its answer and the next question.
        tolerate_failures: how many saves in a row may fail in the background, loudly, before that ends the
            fit.
        escapes: where the policy seals, what becomes of what else writes the run's state, such as a
            ``ModelCheckpoint`` or a finder: ``"seal"`` (as None) seals that too, ``"refuse"`` is an error,
            ``"warn"`` lets it write in the clear. Without a policy that seals it changes nothing.
        config: a policy's file that says everything for a platform: sealing, signing, audit, and by
            ``[storage]`` the root below which ``dirpath`` lies and the tiers. Stands for ``security``.
        log_saves: whether the Trainer's loggers are told what each save costs, as ``strongroom/...``.

    Raises:
        ConfigError: an argument that cannot work; from ``fit``, a Trainer that is not supported.
        StateMismatchError: from ``fit``: the checkpoint does not fit the model or its optimizers.
        StateEncodingError: from ``fit``: hyper-parameters, callbacks or hooks hold what has no safe encoding,
            and ``unencodable="refuse"``.
    """

    namespace: ClassVar[Namespace]
    """The package whose Trainers it works in."""

    def __init__(
        self,
        dirpath: str | os.PathLike[str],
        *,
        filename: str | None = None,
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
        save_top_k: int | None = None,
        save_last: bool | Literal["link"] | None = None,
        auto_insert_metric_name: bool = True,
        every_n_train_steps: int | None = None,
        every_n_epochs: int | None = None,
        train_time_interval: timedelta | None = None,
        save_on_train_epoch_end: bool | None = None,
        save_weights_only: bool = False,
        save_on_exception: bool = False,
        enable_version_counter: bool = True,
        verbose: bool = False,
        resume: Literal["auto", "never", "must"] = "auto",
        skip: Literal["read", "sampler"] = "read",
        running_metrics: bool = True,
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
        unencodable: Literal["warn", "refuse"] = "warn",
        preemption_signals: Sequence[str] = ("SIGTERM", "SIGUSR1"),
        spot_notice: Callable[[], bool | str | None] | None = None,
        spot_notice_every_s: float = 5.0,
        tolerate_failures: int = 0,
        escapes: Literal["seal", "refuse", "warn"] | None = None,
        config: str | os.PathLike[str] | None = None,
        log_saves: bool = True,
    ) -> None:
        super().__init__()
        self._arguments = Arguments.of(
            dirpath,
            filename=filename,
            monitor=monitor,
            mode=mode,
            save_top_k=save_top_k,
            save_last=save_last,
            auto_insert_metric_name=auto_insert_metric_name,
            save_on_train_epoch_end=save_on_train_epoch_end,
            save_weights_only=save_weights_only,
            save_on_exception=save_on_exception,
            verbose=verbose,
            every_n_train_steps=every_n_train_steps,
            every_n_epochs=every_n_epochs,
            train_time_interval=train_time_interval,
            resume=resume,
            skip=skip,
            running_metrics=running_metrics,
            keep=keep,
            security=security,
            digest=digest,
            timeout_s=timeout_s,
            max_fallback=max_fallback,
            provenance=provenance,
            on_change=on_change,
            retention_class=retention_class,
            run_id=run_id,
            launch=launch,
            replicate_to=replicate_to,
            accept_missing_tiers=accept_missing_tiers,
            reserve_bytes=reserve_bytes,
            scatter=scatter,
            accept_older=accept_older,
            unencodable=unencodable,
            preemption_signals=preemption_signals,
            spot_notice=spot_notice,
            spot_notice_every_s=spot_notice_every_s,
            tolerate_failures=tolerate_failures,
            escapes=escapes,
            config=config,
            log_saves=log_saves,
        )
        self._ranking = Ranking(self._arguments.ranking, self.dirpath)
        self._hyper_parameters: dict[str, Any] = {}
        self._clock: Callable[[], float] = time.monotonic
        self._replacements = Replacements()
        self._fit: Fit | None = None
        self._figures = Figures()
        self._by_hand = ByHand(self.namespace, self._arguments, self._open)
        self._last_trainer: weakref.ref[Any] | None = None
        self._left_at: int | None = None
        seam.ask_for_named(self.namespace, _named)

    def __getstate__(self) -> dict[str, Any]:
        # In another process, or in a copy, this Trainer is none that has trained.
        return {**self.__dict__, "_last_trainer": None}

    # ------------------------------------------------------------------------------ Lightning's hooks

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if policy_seals(self._arguments.options["security"]):
            others = [one for one in trainer.checkpoint_callbacks if not isinstance(one, Checkpointing)]
            options = self._arguments.options_elsewhere
            guard(trainer, self.namespace, others, self._arguments.escapes, options)
        if getattr(trainer, "fast_dev_run", False) or seam.is_only_tuning(trainer):
            return
        seam.check_supported(trainer, self.namespace)
        check_strategy(trainer, self.namespace)
        same = [one for one in trainer.callbacks if isinstance(one, Checkpointing)]
        if len(same) > 1:
            raise ConfigError(
                f"the Trainer has {len(same)} StrongroomCheckpoint callbacks; a run has one: combine their "
                f"intervals. What two ModelCheckpoints do, one for the best and one for the last, one of "
                f"ours does: monitor= and save_top_k= keep the best, keep= the newest. For a second metric, "
                f"or for weights alone, put Lightning's ModelCheckpoint beside it"
            )
        left = self._leave()
        if left is not None:  # another callback's error kept the end of that fit from this one
            left.preempting.end()
        is_first_run = self._last_trainer is None or self._last_trainer() is not trainer
        if stage == "fit":
            if is_first_run:
                self._ranking.begin_anew()
            self._fit = self._begin(trainer)
        resuming = Resuming(
            trainer,
            self.namespace,
            self._arguments,
            self._ranking,
            self._open,
            self._fit,
            is_first_run=is_first_run,
        )
        self._by_hand.take_over(trainer, self)
        resuming.watch(self._replacements.replace)
        if self._fit is not None:
            self._by_hand.fit_begins(self._fit)
            self._fit.watch(self._replacements.replace)
            watch_figures(self._figures, trainer, self._replacements.replace)
            self._fit.preempting.watch(self._replacements.replace)
            self._fit.preempting.begin()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        fit = self._leave()
        if fit is not None:
            self._last_trainer = weakref.ref(trainer)
            try:
                fit.preempting.leave()
                fit.checkpointer.close()
            finally:
                fit.preempting.end()
                log_figures(self._figures, trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        fit = self._fit
        if fit is None:
            self._leave()
            return
        self._last_trainer = weakref.ref(trainer)
        is_stop = fit.preempting.is_stop(exception)
        try:
            try:
                fit.saving.save_after(exception)
            finally:
                self._leave()
            fit.preempting.leave(exception)
            # A run that was told to stop has committed; what is left are copies, and they are worth the wait.
            fit.checkpointer.close(timeout_s=None if is_stop else _DRAIN_S)
        except StrongroomError as failure:
            if failure is not exception:  # what ends the run must not be hidden by what followed from it
                rank_zero_warn(
                    f"Strongroom: closing {self.dirpath} after {exception!r:.200} failed: {failure}"
                )
        finally:
            fit.preempting.end()
            log_figures(self._figures, trainer)

    # Not ``state_dict``: of two that have one Lightning complains, before ``setup`` could say what to do.

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        state = self._ranking.state_dict()
        if self._fit is not None and state:
            checkpoint[STATE_KEY] = state

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        fit = self._fit  # None: what is evaluated has no say in what is best
        if fit is not None and self.monitor is not None and checkpoint.get(STATE_KEY):
            self._ranking.load_state_dict(
                checkpoint[STATE_KEY], is_own=fit.saving.left_at is not None, steps=fit.saving.steps
            )

    # -------------------------------------------------------------------------------------------- one fit

    def _begin(self, trainer: Any) -> Fit:
        self._hyper_parameters = contents.hyper_parameters(trainer)
        secrets = places_of_secrets(self._hyper_parameters, "hyper_parameters")
        if secrets:
            rank_zero_warn(
                f"Strongroom: {', '.join(secrets)} of save_hyperparameters() look like secrets, and are part "
                f"of every checkpoint's state, as the module cannot be built without them; leave them out by "
                f"ignore=[...], and seal what has them"
            )
        return Fit(
            trainer,
            self.namespace,
            self._arguments,
            self._open(self.dirpath, events=(self._figures,) if self._arguments.log_saves else ()),
            self._ranking,
            is_tuning=lambda: all(one is not self for one in trainer.callbacks),
            clock=self._now,
            left_at=self._left_at,
            preempting=Preempting(trainer, self.namespace, self._arguments),
        )

    def _now(self) -> float:
        return self._clock()

    def _leave(self) -> Fit | None:
        """Let go of what belongs to one stage; the fit that it was, for whoever ends it."""
        self._replacements.undo()
        fit, self._fit = self._fit, None
        if fit is not None:
            self._left_at = fit.saving.left_at
            self._by_hand.fit_ends()
        return fit

    def _open(self, root: str, **more: Any) -> Checkpointer:
        keep = self._ranking.policy if self._arguments.is_own(root) else None
        told = {"keep": keep, "provenance": self._provenance, **self._arguments.options_for(root), **more}
        return Checkpointer(root, **told)

    def _provenance(self) -> dict[str, Any]:
        """What is said of the run, and what Lightning knows of it."""
        known = {"hyper_parameters": self._hyper_parameters} if self._hyper_parameters else {}
        return provenance_of(self._arguments, known)


def _named(trainer: Any, function: str, name: str) -> str | None:
    """What ``ckpt_path="best"`` and ``"last"`` stand for; None: that is Lightning's to say.

    "last" is the newest of our root. "best" is ours where we rank, or where nobody else does.
    """
    ours = next((one for one in trainer.callbacks if isinstance(one, Checkpointing)), None)
    if ours is None or trainer.fast_dev_run:
        return None
    if name == "last":
        return str(CheckpointUri(root=None, step=None, may_be_absent=True))
    if ours.monitor is None:
        others = [one for one in trainer.checkpoint_callbacks if one is not ours]
        return (
            None if others else ours.best_model_path or str(CheckpointUri(root=None, step=None, is_best=True))
        )
    return str(CheckpointUri(root=None, step=None, is_best=True))
