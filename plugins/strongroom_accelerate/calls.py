"""Accelerate's own calls, in the terms of a Strongroom: what a script that knows none of it goes through.

``save_state`` and ``load_state`` keep their arguments. What else of an Accelerator moves a run, or writes its
state, is led through here as well, on the one instance, and put back at the end.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol

from strongroom.errors import ConfigError
from strongroom.frontend import EscapePolicy, Replacements, policy_seals
from strongroom.handle import SaveHandle
from strongroom_accelerate import seam
from strongroom_accelerate.naming import name_of
from strongroom_accelerate.voice import VOICE

__all__ = ["Attached", "attach"]

_WRITERS = ("save", "save_model")
"""What of an Accelerator writes a run's state in the clear, besides ``save_state``."""


class Attached(Protocol):
    """What Accelerate's calls are led to."""

    def save_named(self, name: str | None, options: Mapping[str, Any]) -> SaveHandle:
        """Save, as ``save_state`` was asked to."""

    def load_named(
        self, place: Any, options: Mapping[str, Any], native: Callable[[str], None] | None
    ) -> None:
        """Restore, as ``load_state`` was asked to."""

    def preparing(self, loader: Any) -> AbstractContextManager[None]:
        """A loader is being prepared."""

    def was_prepared(self) -> None:
        """An optimizer was prepared."""

    def is_resumed(self, loader: Any) -> bool:
        """Whether the loader goes on by itself where the run stood."""

    def uneven(self) -> AbstractContextManager[None]:
        """Ranks have different numbers of batches meanwhile."""

    def forget(self) -> None:
        """The Accelerator has let go of all that was prepared."""

    def note_log(self, step: int | None) -> None:
        """The program has told its trackers something, as of this step."""

    def close(self) -> None:
        """The run is over."""


def attach(
    accelerator: Any, run: Attached, replacements: Replacements, *, security: Any, escapes: EscapePolicy
) -> None:
    """Lead an Accelerator's calls to a run."""
    replace = replacements.replace
    replace(accelerator, "save_state", lambda _: _save_state(accelerator, run))
    replace(accelerator, "load_state", lambda original: _load_state(run, original, security, escapes))
    replace(accelerator, "prepare_data_loader", lambda original: _prepare_data_loader(run, original))
    replace(accelerator, "prepare_optimizer", lambda original: _prepare_optimizer(run, original))
    replace(accelerator, "skip_first_batches", lambda original: _skip_first_batches(run, original))
    replace(accelerator, "join_uneven_inputs", lambda original: _join_uneven_inputs(run, original))
    replace(accelerator, "free_memory", lambda original: _free_memory(run, original))
    replace(accelerator, "log", lambda original: _log(run, original))
    replace(accelerator, "end_training", lambda original: _end_training(run, original))
    if policy_seals(security):
        for name in _WRITERS:
            replace(accelerator, name, partial(_write, name, escapes))


def _save_state(accelerator: Any, run: Attached) -> Callable[..., SaveHandle]:
    def save_state(
        output_dir: Any = None, safe_serialization: bool = True, **save_model_func_kwargs: Any
    ) -> SaveHandle:
        settings = accelerator.project_configuration
        if seam.names_by_itself(accelerator):
            number = settings.iteration
            output_dir = os.path.join(settings.project_dir or "", "checkpoints", f"checkpoint_{number}")
        if not accelerator.sync_gradients:
            VOICE.warn(
                f"save_state({output_dir!r}) came between two steps of the optimizer: gradients that are "
                f"being accumulated are in no checkpoint, and a run that is resumed from it lacks these "
                f"batches; save where accelerator.sync_gradients is True"
            )
        # Natively the next number stands nowhere, and a run that was resumed begins at 0 again.
        settings.iteration += 1
        try:
            return run.save_named(None if output_dir is None else name_of(output_dir), save_model_func_kwargs)
        except BaseException:
            settings.iteration -= 1
            raise

    return save_state


def _load_state(
    run: Attached, original: Callable[..., None], security: Any, escapes: EscapePolicy
) -> Callable[..., None]:
    def load_state(input_dir: Any = None, load_kwargs: Any = None, **load_model_func_kwargs: Any) -> None:
        def native(folder: str) -> None:
            said = f"{folder} was written by Accelerate itself: nothing in it is sealed, signed or verified"
            if policy_seals(security):
                if escapes == "refuse":
                    raise ConfigError(
                        f"{said}, and this run's policy seals; resume from the run's root, or allow it by "
                        f"escapes='warn'"
                    )
                VOICE.warn(f"{said}, though this run's policy seals")
            else:
                VOICE.info(f"{said}; it is loaded as Accelerate does, and where its data stood is not known")
            original(folder, load_kwargs, **load_model_func_kwargs)

        run.load_named(input_dir, load_model_func_kwargs, native)

    return load_state


def _prepare_data_loader(run: Attached, original: Callable[..., Any]) -> Callable[..., Any]:
    def prepare_data_loader(data_loader: Any, *arguments: Any, **options: Any) -> Any:
        with run.preparing(data_loader):
            return original(data_loader, *arguments, **options)

    return prepare_data_loader


def _prepare_optimizer(run: Attached, original: Callable[..., Any]) -> Callable[..., Any]:
    def prepare_optimizer(*arguments: Any, **options: Any) -> Any:
        prepared = original(*arguments, **options)
        run.was_prepared()
        return prepared

    return prepare_optimizer


def _skip_first_batches(run: Attached, original: Callable[..., Any]) -> Callable[..., Any]:
    def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
        if run.is_resumed(dataloader):
            if num_batches:
                VOICE.info(
                    f"skip_first_batches({num_batches}) skips nothing: the loader goes on by itself where "
                    f"the run stood"
                )
            return dataloader
        return original(dataloader, num_batches=num_batches) if num_batches else dataloader

    return skip_first_batches


def _join_uneven_inputs(run: Attached, original: Callable[..., Any]) -> Callable[..., Any]:
    @contextmanager
    def join_uneven_inputs(*arguments: Any, **options: Any) -> Iterator[None]:
        with run.uneven(), original(*arguments, **options):
            yield

    return join_uneven_inputs


def _free_memory(run: Attached, original: Callable[..., Any]) -> Callable[..., Any]:
    def free_memory(*objects: Any) -> Any:
        released = original(*objects)
        run.forget()
        return released

    return free_memory


def _log(run: Attached, original: Callable[..., None]) -> Callable[..., None]:
    def log(values: Any, step: int | None = None, log_kwargs: Any = None) -> None:
        original(values, step=step, log_kwargs=log_kwargs)
        run.note_log(step)

    return log


def _end_training(run: Attached, original: Callable[..., None]) -> Callable[..., None]:
    def end_training() -> None:
        run.close()  # its ranks still can talk
        original()

    return end_training


def _write(name: str, escapes: EscapePolicy, original: Callable[..., Any]) -> Callable[..., Any]:
    def write(*arguments: Any, **options: Any) -> Any:
        said = f"accelerator.{name}() writes in the clear, and this run's checkpoints are sealed"
        if escapes != "warn":
            raise ConfigError(
                f"{said}. Save by the run's Strongroom, and release what is committed by `strongroom "
                f"export`; or allow it by escapes='warn'"
            )
        VOICE.warn(f"{said}; escapes='warn' lets it")
        return original(*arguments, **options)

    return write
