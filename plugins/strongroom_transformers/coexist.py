"""Beside the Trainer's own checkpoints: it writes its folders as ever, and each is sealed into a run's root.

For engines whose state only they can write (DeepSpeed, FSDP1), and for who wants the Trainer's files to stay
what they are. What `StrongroomCallback` promises of exactness is then the Trainer's to keep; that what was
sealed is whole, authentic and unread is kept as ever.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from transformers import Trainer, TrainerCallback
from typing_extensions import Self, Unpack

from strongroom.errors import ConfigError
from strongroom.frontend import (
    Figures,
    Gathered,
    Preempted,
    Preemption,
    RunOptions,
    RunSaves,
    RunSettings,
    check_flags,
    open_run,
    policy_seals,
    replace_for_good,
)
from strongroom.handle import SaveHandle
from strongroom.loading import load
from strongroom.resume import Moment, RngState, SaveIntervals, plan_resume
from strongroom_transformers import escapes, figures, retaining, seam
from strongroom_transformers.arguments import Asked, asked_for, keep_limit
from strongroom_transformers.folders import FOLDER_PART, agree_on, put_down, taken_up
from strongroom_transformers.progress import latest
from strongroom_transformers.provenance import known_of
from strongroom_transformers.trackers import Trackers
from strongroom_transformers.voice import VOICE

__all__ = ["SealedFolders", "unseal"]

_MARK: Final = "_strongroom_callback"


class SealedFolders(TrainerCallback):  # type: ignore[misc]  # of a package without types here
    """Seals each folder that the Trainer saves, and lets ``train()`` go on from the newest sealed one.

    ::

        trainer = Trainer(model=model, args=args, train_dataset=dataset)
        SealedFolders("s3://bucket/runs/a", config="strongroom.toml").attach(trainer)
        trainer.train()

    When the Trainer saves is as its arguments say. A folder stands in ``output_dir`` in the clear until its
    checkpoint is committed, and longer with ``keep_folders=True``; what is sealed says the policy. To resume,
    it is laid down in a private folder, which is removed after the first step.

    Args:
        root: the run's, a path or a URI.
        keep_folders: whether the Trainer's folders stay where they are. Default False: each is removed once
            its checkpoint is committed.
        scratch: where folders are laid down to be taken up; None: the machine's own place for such.
        options: as `strongroom.frontend.RunOptions` has them.

    Raises:
        ConfigError: an option cannot work.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        keep_folders: bool = False,
        scratch: str | os.PathLike[str] | None = None,
        **options: Unpack[RunOptions],
    ) -> None:
        check_flags(keep_folders=keep_folders)
        self.settings = RunSettings.read(root, options, known=("keep_folders", "scratch"))
        self._keeps = keep_folders
        self._scratch = scratch
        self._trainer: Any = None
        self._run: _Run | None = None
        self._trackers: Trackers | None = None

    def attach(self, trainer: Any) -> Self:
        """Follow this Trainer's saves; for good.

        Raises:
            ConfigError: it is no Trainer, has such a callback, or was given what cannot stand beside this.
        """
        if not isinstance(trainer, Trainer):
            raise ConfigError(f"attach() takes a transformers.Trainer, got a {type(trainer).__qualname__}")
        if self._trainer is not None or getattr(trainer, _MARK, None) is not None:
            raise ConfigError("this Trainer, or this callback, has one already; give each one of its own")
        seam.check_supported(trainer)
        _check_arguments(trainer.args, self.settings)
        setattr(trainer, _MARK, self)
        self._trainer = trainer
        trainer.add_callback(self)
        for name, make in (
            ("train", self._train),
            ("_save_checkpoint", self._save),
            ("_maybe_log_save_evaluate", self._log_save_evaluate),
            ("_load_best_model", self._best),
            ("_finalize_training", self._finalize),
        ):
            replace_for_good(trainer, name, make)
        escapes.guard(trainer, self.settings, own_saves_pass=True)
        return self

    # ---------------------------------------------------------------------------- what the Trainer tells of

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Training is about to begin."""
        self._current.begins()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The Trainer has read all that it resumed from."""
        self._current.has_resumed()
        if self._trackers is not None:
            self._trackers.check()

    @property
    def _current(self) -> _Run:
        if self._run is None:
            raise ConfigError(
                "SealedFolders is not attached to the Trainer that trains; call attach(trainer)"
            )
        return self._run

    # ------------------------------------------------------------------------------ what takes others' places

    def _train(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def train(*args: Any, **kwargs: Any) -> Any:
            given = seam.bind(original, *args, **kwargs)
            _check_arguments(self._trainer.args, self.settings)
            self._trackers = Trackers(self._trainer, self.settings, writes_folders=True)
            self._trackers.check()
            if given.get("trial") is not None or self._trainer.hp_search_backend is not None:
                raise ConfigError(
                    "a hyper-parameter search trains many runs, and each wants a root of its own; search "
                    "without Strongroom, and attach it for the run that you keep"
                )
            asked = asked_for(given.pop("resume_from_checkpoint", None), self.settings)
            run = self._run = _Run(self._trainer, self.settings, keeps=self._keeps, scratch=self._scratch)
            try:
                folder = run.resumes(asked) if asked.native is None else asked.native
                if folder is not None:
                    given["resume_from_checkpoint"] = folder
                result = seam.call(original, given)
            except BaseException as error:
                run.end(error)
                raise
            else:
                run.end()
            finally:
                run.has_resumed()
                self._run = None
            return result

        return train

    def _save(self, original: Callable[..., None]) -> Callable[..., None]:
        def _save_checkpoint(*args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)
            if self._run is not None:
                self._run.folder_is_written()

        return _save_checkpoint

    def _log_save_evaluate(self, original: Callable[..., None]) -> Callable[..., None]:
        def _maybe_log_save_evaluate(*args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)
            self._current.between_steps()

        return _maybe_log_save_evaluate

    def _finalize(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def _finalize_training(*args: Any, **kwargs: Any) -> Any:
            if self._keeps:
                return original(*args, **kwargs)
            self._current.settle()
            with escapes.leaving_folders_alone(self._trainer.args):
                return original(*args, **kwargs)

        return _finalize_training

    def _best(self, original: Callable[..., None]) -> Callable[..., None]:
        def _load_best_model() -> None:
            with self._current.best_folder():
                original()

        return _load_best_model


def unseal(
    root: str | os.PathLike[str],
    to: str | os.PathLike[str],
    *,
    step: int | None = None,
    security: Any = None,
) -> Path:
    """Lay down a folder that was sealed, as the Trainer wrote it; for one process.

    Args:
        root: the run's.
        to: the folder to make; it must not exist, and nobody else may read it.
        step: this one; None: the newest whole one.
        security: a policy, or its file; None reads ``STRONGROOM_CONFIG``.

    Returns:
        The folder, which ``train(resume_from_checkpoint=...)`` takes.

    Raises:
        CheckpointNotFoundError: there is none.
        StateMismatchError: the root holds checkpoints of something else.
        StoreError: the folder is there, or cannot be written.
        IntegrityError, NoKeyError, ...: as `strongroom.Checkpointer.restore`.
    """
    restored = load(root, step=step, security=security)
    folder = Path(to).absolute()
    put_down(restored.state, folder)
    return folder


class _Run:
    """One call of ``train()``."""

    def __init__(
        self, trainer: Any, settings: RunSettings, *, keeps: bool, scratch: str | os.PathLike[str] | None
    ) -> None:
        self._trainer = trainer
        self._settings = settings
        self._keeps = keeps
        self._scratch = scratch
        self._scores = retaining.scores_for(trainer.args)
        self._preemption = Preemption(settings, VOICE)
        self._figures = Figures()
        limit = keep_limit(settings, trainer.args)
        self._checkpointer = open_run(
            settings,
            known=lambda: known_of(trainer),
            keep=None if limit is None else retaining.KeepAsTrainer(limit=limit, scores=self._scores),
            events=[self._figures],
        )
        self._saves = RunSaves(
            self._checkpointer,
            settings,
            self._preemption,
            VOICE,
            intervals=SaveIntervals(at_run_end=False),  # the Trainer says when
            gather=self._gather,
        )
        self._laid_down: list[Path] = []
        self._written = -1
        self._committing: list[tuple[SaveHandle, Path]] = []
        self._asked_for: Path | None = None

    # ---------------------------------------------------------------------------------------------- resuming

    def resumes(self, asked: Asked) -> str | None:
        """The folder that the Trainer is to resume from; None: it begins anew."""
        plan = plan_resume(asked.mode, is_first_run=True, steps_done=0)
        root = self._settings.root
        if not plan.restore:
            VOICE.info(f"nothing is restored from {root}: {plan.reason}")
            return None
        found = self._lay_down(asked.step)
        if found is None:
            VOICE.info(plan.nothing_found(root))
            return None
        folder, step, scores = found
        self._scores.replace(scores)
        self._saves.left_at = step
        # A run that was killed may have left it in the clear, committed as it is.
        self._remove(Path(self._trainer._get_output_dir(trial=None)) / f"checkpoint-{step}")
        VOICE.info(f"resuming from step {step} of {root}")
        return str(folder)

    def has_resumed(self) -> None:
        """What was laid down is of no more use."""
        while self._laid_down:
            shutil.rmtree(self._laid_down.pop(), ignore_errors=True)

    def _lay_down(self, step: int | None) -> tuple[Path, int, dict[int, float]] | None:
        """A sealed folder in a private place of this host, made by the first rank of each host."""
        is_first = os.environ.get("LOCAL_RANK", "0") in ("0", "-1")
        restored = self._checkpointer.restore(
            None if is_first else {FOLDER_PART: None},
            step=step,
            accept_older=self._settings.accept_older,
            only=None if is_first else (FOLDER_PART,),
        )
        if restored is None:
            return None
        for skipped, reason in restored.skipped:
            VOICE.warn(f"step {skipped} of {self._settings.root} is damaged and was skipped: {reason}")
        about = restored.state.get(FOLDER_PART)
        name = about.get("name", "checkpoint") if isinstance(about, dict) else "checkpoint"
        host = os.uname().nodename

        def make() -> list[str]:
            if not is_first:
                return [host, ""]
            private = Path(tempfile.mkdtemp(prefix="strongroom-", dir=self._scratch))
            self._laid_down.append(private)
            put_down(restored.state, private / name)
            return [host, str(private / name)]

        made = dict(one for one in self._checkpointer.confer("where a folder was laid down", make) if one[1])
        if host not in made:
            raise ConfigError(
                "no rank of this host has LOCAL_RANK=0; start the job by torchrun or accelerate"
            )
        scores = about.get("scores", {}) if isinstance(about, dict) else {}
        return Path(made[host]), restored.step, dict(scores)

    # ------------------------------------------------------------------------------------------------ saving

    def begins(self) -> None:
        """Every step from here on can be saved."""
        self._preemption.begin()
        self._saves.begin(self._moment())

    def folder_is_written(self) -> None:
        """The Trainer has saved the step that it stands at."""
        self._written = self._trainer.state.global_step

    def between_steps(self) -> None:
        """A step is over, with all that belongs to it."""
        is_due = self._written == self._trainer.state.global_step
        handle = self._saves.between_steps(self._moment(), due=is_due)
        if handle is not None:
            self._committing.append((handle, self._folder()))
        self._remove_committed()
        self._tell_trackers()

    def _tell_trackers(self) -> None:
        if self._settings.log_saves and self._figures.are_new:
            figures.hand_over(self._figures, self._trainer)

    def _gather(self, moment: Moment, rng: RngState) -> Gathered:
        trainer = self._trainer
        if self._written != trainer.state.global_step:
            trainer._save_checkpoint(trainer.model_wrapped, None)  # told to stop, where none was due
            self._asked_for = self._folder()
        retaining.note_best(self._scores, trainer.state)
        files = agree_on(self._folder(), self._checkpointer.confer)
        state = taken_up(self._folder(), files, scores=self._scores.by_step())
        return Gathered(state=state, metrics=latest(trainer.state))

    def _moment(self) -> Moment:
        state = self._trainer.state
        return self._saves.moment(
            state.global_step,
            int(state.epoch or 0),
            is_run_end=state.global_step >= state.max_steps and self._written == state.global_step,
        )

    def _folder(self) -> Path:
        trainer = self._trainer
        return Path(trainer._get_output_dir(trial=None)) / f"checkpoint-{trainer.state.global_step}"

    def settle(self) -> None:
        """Until what was saved is committed, and its folders are gone."""
        self._saves.wait()
        self._remove_committed()

    def _remove_committed(self) -> None:
        """What is committed need not stand in the clear any longer."""
        waiting = []
        for handle, folder in self._committing:
            if not handle.done():
                waiting.append((handle, folder))
            elif not handle.has_failed:
                self._remove(folder)
        self._committing = waiting

    def _remove(self, folder: Path) -> None:
        if not self._keeps and self._trainer.args.should_save:
            shutil.rmtree(folder, ignore_errors=True)

    @contextlib.contextmanager
    def best_folder(self) -> Iterator[None]:
        """For a time the best model's folder is there, laid down again if it was removed."""
        state = self._trainer.state
        self._saves.wait()
        named, step = state.best_model_checkpoint, state.best_global_step
        gone = self._checkpointer.confer("whether the best folder is there", lambda: os.path.isdir(named))
        if all(gone) or step is None:
            yield
            return
        found = self._lay_down(step)
        if found is not None:
            state.best_model_checkpoint = str(found[0])
        try:
            yield
        finally:
            state.best_model_checkpoint = named
            self.has_resumed()

    def end(self, error: BaseException | None = None) -> None:
        """It is over.

        Raises:
            SaveError, ReplicationError: without an error: the last save failed, or does not stand everywhere.
        """
        try:
            self._saves.end(error)
            if error is None:
                self._tell_trackers()
        finally:
            self._remove_committed()
            if self._asked_for is not None and isinstance(error, Preempted):
                self._remove(self._asked_for)


def _check_arguments(args: Any, settings: RunSettings) -> None:
    keep_limit(settings, args)
    if getattr(args, "enable_jit_checkpoint", False):
        raise ConfigError(
            "enable_jit_checkpoint=True saves on each rank by itself when SIGTERM comes; here all ranks save "
            "after the same step then: leave it False"
        )
    if args.save_only_model:
        raise ConfigError(
            "save_only_model=True leaves the optimizer out of the Trainer's folders: a run resumed from one "
            "would begin with a new one, without a word; leave it False"
        )
    if args.push_to_hub and policy_seals(settings.options["security"]):
        raise ConfigError(
            "push_to_hub=True uploads what the Trainer saves, in the clear, and this run is sealed; leave it "
            "out, or use StrongroomCallback(root, release='safetensors')"
        )
