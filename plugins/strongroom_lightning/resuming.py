"""What a stage restores: chosen where Lightning chooses, and given to it in its own form.

Lightning's own restore then does the rest: callbacks, loops, schedulers, hooks, messages. Its methods are
replaced for one stage where it picks a checkpoint, where it reads one, and where it loads the weights and the
optimizers: there a checkpoint that does not fit is told in words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from strongroom import Checkpointer
from strongroom.errors import CheckpointNotFoundError, ConfigError, IntegrityError, StateMismatchError
from strongroom.frontend.replacing import Replace
from strongroom.resume import JobShape, RngState, plan_resume
from strongroom_lightning import contents, seam
from strongroom_lightning.arguments import Arguments
from strongroom_lightning.encoding import in_programs_values
from strongroom_lightning.fit import Fit
from strongroom_lightning.namespace import Namespace
from strongroom_lightning.ranking import Ranking, best_of
from strongroom_lightning.uri import CheckpointUri

__all__ = ["Resuming"]


class Resuming:
    """What one stage of a Trainer (a fit, a validation, a test, a prediction) takes up.

    Args:
        trainer: Lightning's.
        namespace: the package that it is of.
        arguments: the callback's.
        ranking: of the run's checkpoints.
        open_root: opens a root for reading.
        fit: the fit that is being set up; None in the other stages, which restore only what they are told to.
        is_first_run: this Trainer has not trained yet.
    """

    def __init__(
        self,
        trainer: Any,
        namespace: Namespace,
        arguments: Arguments,
        ranking: Ranking,
        open_root: Callable[[str], Checkpointer],
        fit: Fit | None,
        *,
        is_first_run: bool,
    ) -> None:
        self._trainer = trainer
        self._namespace = namespace
        self._arguments = arguments
        self._ranking = ranking
        self._root = arguments.dirpath
        self._open = open_root
        self._fit = fit
        self._is_first_run = is_first_run
        self._restored: dict[str, Any] | None = None
        self._has_chosen = False

    def watch(self, replace: Replace) -> None:
        """Be asked where Lightning chooses, reads and loads."""
        strategy = self._trainer.strategy
        replace(self._trainer._checkpoint_connector, "resume_start", self._resume_start)
        replace(strategy, "load_checkpoint", self._load_checkpoint)
        if self._fit is not None:
            replace(strategy, "load_model_state_dict", self._load_model)
            replace(strategy, "load_optimizer_state_dict", self._load_optimizers)

    # ------------------------------------------------------------------------------- which checkpoint

    def _resume_start(self, original: Callable[..., None]) -> Callable[..., None]:
        def resume_start(checkpoint_path: Any = None, *args: Any, **kwargs: Any) -> None:
            is_again, self._has_chosen = self._has_chosen, True
            uri = None if is_again else CheckpointUri.of(checkpoint_path)
            if is_again:
                pass  # a finder takes back its own trial, inside of this stage
            elif uri is not None:
                checkpoint_path = self._restore_named(uri)
            elif self._fit is not None:
                checkpoint_path = self._restore_newest(self._fit, checkpoint_path)
            original(checkpoint_path, *args, **kwargs)

        return resume_start

    def _restore_newest(self, fit: Fit, checkpoint_path: Any) -> Any:
        plan = plan_resume(
            self._arguments.resume,
            is_first_run=self._is_first_run,
            steps_done=self._trainer.global_step,
            explicit=None if not checkpoint_path else f"ckpt_path={str(checkpoint_path)!r}",
        )
        if not plan.restore:
            rank_zero_info(f"Strongroom: nothing is restored from {self._root}: {plan.reason}")
            if not self._is_first_run and not checkpoint_path and fit.saving.left_at is not None:
                self._stay_on_line(fit, fit.saving.left_at)
            return checkpoint_path
        restored = self._read(fit.checkpointer)
        if restored is None:
            rank_zero_info(f"Strongroom: {plan.nothing_found(self._root)}")
            return checkpoint_path
        finders = seam.finders(self._trainer, self._namespace)
        if finders:
            raise ConfigError(
                f"{self._root} holds step {restored.step} to resume from, and {finders[0]} would search "
                "anew and undo that: leave it out of a run that resumes (and keep what it found), or use "
                "resume='never'"
            )
        self._take_up(restored, self._root)
        fit.resumes_by_itself = True
        self._say_if_finished(restored.step)
        return str(CheckpointUri(root=self._root, step=restored.step))

    def _read(self, checkpointer: Checkpointer, step: int | None = None) -> Any:
        return contents.restore(
            self._trainer,
            checkpointer,
            step,
            resumes=self._fit is not None,
            accept_older=self._arguments.accept_older,
        )

    def _stay_on_line(self, fit: Fit, step: int) -> None:
        """Let what a further fit saves descend from what the last one saved: restore nothing of it."""
        try:
            # A step that this very run has saved.
            fit.checkpointer.restore(
                {"nothing": torch.zeros(0)}, step=step, strict=False, only=(), accept_older=True
            )
        except (IntegrityError, CheckpointNotFoundError) as error:
            rank_zero_warn(f"Strongroom: a new line of checkpoints begins in {self._root}: {error}")

    def _restore_named(self, uri: CheckpointUri) -> str | None:
        root = uri.root or self._root
        if self._arguments.is_own(root):
            root = self._root
        step = self._best_step(root, uri) if uri.is_best else uri.step
        if self._fit is not None and root == self._root:
            restored = self._read(self._fit.checkpointer, step)
        else:
            with self._open(root) as reader:
                restored = self._read(reader, step)
        if restored is None and uri.may_be_absent:
            rank_zero_warn(
                f"Strongroom: ckpt_path='last', but {root} holds no checkpoint: nothing is restored"
            )
            return None
        if restored is None:
            raise CheckpointNotFoundError(f"ckpt_path={str(uri)!r}: {root} holds no committed checkpoint")
        uri.check(restored.checkpoint)
        self._take_up(restored, root)
        return str(CheckpointUri(root=root, step=restored.step))

    def _best_step(self, root: str, uri: CheckpointUri) -> int:
        """The best step of a root: as this process has ranked it, or as its newest checkpoint says."""
        known = self._ranking.best_steps()[:1] if root == self._root else []
        with self._open(root) as reader:
            # By rank 0: the others have not heard of what was removed meanwhile.
            known = reader.confer("what is best", lambda: known)[0]
            step = known[0] if known else best_of(reader, accept_older=self._arguments.accept_older)
        if step is None:
            raise CheckpointNotFoundError(
                f"ckpt_path={str(uri)!r}: {root} holds no checkpoint that was ranked; give the callback "
                "monitor=..., or take strongroom://latest"
            )
        return step

    def _take_up(self, restored: Any, root: str) -> None:
        for step, reason in restored.skipped:
            rank_zero_warn(f"Strongroom: step {step} of {root} is damaged and was skipped: {reason}")
        rank_zero_info(f"Strongroom: resuming from step {restored.step} of {root}")
        found, position, rng, measured = contents.restored_parts(
            restored.state, restored.step, root, resumes=self._fit is not None
        )
        self._restored = in_programs_values(found, self._namespace, self._trainer)
        if self._fit is not None:
            if position is None:
                rank_zero_warn(
                    f"Strongroom: step {restored.step} of {root} was saved while a step was under way, by "
                    f"hand or by another callback, and where its data stood is not known: this resume is "
                    f"Lightning's own, not exact"
                )
            if restored.missing and rng is not None:
                # Rank 0's would have this rank, which there was not, draw the same noise as rank 0.
                rng, measured = RngState.capture(), None
            job = restored.state.get("job")
            self._fit.resume_from(
                position,
                rng,
                measured,
                None if job is None else JobShape.from_state(job),
                restored.state.get("modes"),
            )
            self._fit.saving.left_at = restored.step if root == self._root else None
            if root == self._root:
                self._ranking.stand_on(restored.step)

    def _say_if_finished(self, step: int) -> None:
        trainer = self._trainer
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
            f"{self._root}): nothing to train. Raise the limit to train on; for a new run, use another "
            f"dirpath or resume='never'"
        )

    # ----------------------------------------------------------------------------- into Lightning's hands

    def _load_checkpoint(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def load_checkpoint(checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
            restored, self._restored = self._restored, None  # Lightning lets go of it once all is loaded
            return original(checkpoint_path, *args, **kwargs) if restored is None else restored

        return load_checkpoint

    def _load_model(self, original: Callable[..., None]) -> Callable[..., None]:
        def load_model_state_dict(checkpoint: Any, *args: Any, **kwargs: Any) -> None:
            try:
                original(checkpoint, *args, **kwargs)
            except RuntimeError as error:
                if not self._is_restoring:
                    raise
                own = self._trainer.lightning_module.state_dict()
                problem = f"the model does not fit the checkpoint in {self._root}"
                raise contents.check_fits(checkpoint["state_dict"], own, problem, error) from error

        return load_model_state_dict

    def _load_optimizers(self, original: Callable[..., None]) -> Callable[..., None]:
        def load_optimizer_state_dict(checkpoint: Any, *args: Any, **kwargs: Any) -> None:
            if not self._is_restoring:
                original(checkpoint, *args, **kwargs)
                return
            saved, own = len(checkpoint["optimizer_states"]), len(self._trainer.strategy.optimizers)
            advice = "restore the code and settings of that run, or use resume='never' to begin anew"
            if saved != own:
                raise StateMismatchError(
                    f"the checkpoint in {self._root} holds {saved} optimizers, and this run has {own}; "
                    f"{advice}"
                )
            try:
                original(checkpoint, *args, **kwargs)
            except (ValueError, KeyError) as error:
                raise StateMismatchError(
                    f"the optimizers do not fit the checkpoint in {self._root} ({error}); {advice}"
                ) from error

        return load_optimizer_state_dict

    @property
    def _is_restoring(self) -> bool:
        return self._fit is not None and self._fit.is_restoring
