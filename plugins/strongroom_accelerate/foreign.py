"""What others save of a run in files of their own: engines (DeepSpeed, Megatron-LM), and hooks of a program.

An engine has model and optimizer in a form that it alone can read, and saves and loads them itself; here that
goes to and comes from a private folder, whose files are part of the checkpoint. Hooks of
``register_save_state_pre_hook`` and ``register_load_state_pre_hook`` are given such a folder too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from strongroom.errors import StateMismatchError
from strongroom.resume.dividing import Confer
from strongroom_accelerate import seam
from strongroom_accelerate.folder import read_files, scratch_folder, with_files
from strongroom_accelerate.voice import VOICE

__all__ = ["ForeignFiles"]

T = TypeVar("T")

_ENGINES: Final = "engine"
_HOOKS: Final = "hooks"


class ForeignFiles:
    """One run's.

    Args:
        accelerator: which knows the engine and the hooks.
        scratch: where the folders are made; None: among this host's temporary files.
    """

    def __init__(self, accelerator: Any, scratch: str | None) -> None:
        self._accelerator = accelerator
        self._scratch = scratch
        self._has_told = False

    @property
    def are_written(self) -> bool:
        """Whether a save of this run writes any."""
        return seam.has_engine(self._accelerator) or bool(self._accelerator._save_model_state_pre_hook)

    def take(self, confer: Confer, options: Mapping[str, Any], use: Callable[[dict[str, Any]], T]) -> T:
        """Let engines and hooks write, and hand the files over while they are there; for all ranks.

        Args:
            confer: how the ranks talk.
            options: what ``save_state`` was given besides, for the engine.
            use: takes the files; what it returns is returned.
        """
        accelerator = self._accelerator
        if not self.are_written:
            return use({})
        with scratch_folder(self._scratch, confer, is_first=accelerator.is_main_process) as folder:
            if seam.has_engine(accelerator):
                self._tell()
                self._save_engines(folder, options)
            hooks = list(accelerator._save_model_state_pre_hook.values())
            if hooks:
                os.makedirs(f"{folder}/{_HOOKS}", exist_ok=True)
                models = [] if seam.has_engine(accelerator) else accelerator._models
                weights = [one.state_dict() for one in models]
                for hook in hooks:
                    hook(accelerator._models, weights, f"{folder}/{_HOOKS}")
            confer("engines and hooks have written", lambda: None)
            return use(read_files(folder, confer))

    def give_back(self, files: Mapping[str, Any], confer: Confer, options: Mapping[str, Any]) -> None:
        """Let engines and hooks read what they wrote; for all ranks.

        Raises:
            StateMismatchError: an engine saved nothing there.
        """
        accelerator = self._accelerator
        hooks = list(accelerator._load_model_state_pre_hook.values())
        is_needed = seam.has_engine(accelerator)
        if is_needed and not any(name.startswith(f"{_ENGINES}/") for name in files):
            raise StateMismatchError(
                f"this run's {accelerator.distributed_type.value} engine has saved nothing in the "
                f"checkpoint, which another way of training wrote; resume with the settings that saved it"
            )
        if not is_needed and not (hooks and files):
            return

        def use(folder: str) -> None:
            if is_needed:
                self._load_engines(folder, options)
            os.makedirs(f"{folder}/{_HOOKS}", exist_ok=True)
            for hook in hooks:
                # A copy: natively what is taken out of it is not loaded; here all is loaded already.
                hook(list(accelerator._models), f"{folder}/{_HOOKS}")

        with_files(
            files,
            self._scratch,
            confer,
            use,
            is_first=accelerator.is_main_process,
            writes=accelerator.is_main_process if self._scratch else accelerator.is_local_main_process,
        )

    def _save_engines(self, folder: str, options: Mapping[str, Any]) -> None:
        for number, engine in enumerate(self._accelerator._models):
            if self._is_deepspeed:
                engine.save_checkpoint(f"{folder}/{_ENGINES}", _tag(number), **options)
            else:
                engine.save_checkpoint(f"{folder}/{_ENGINES}")

    def _load_engines(self, folder: str, options: Mapping[str, Any]) -> None:
        for number, engine in enumerate(self._accelerator._models):
            if self._is_deepspeed:
                engine.load_checkpoint(f"{folder}/{_ENGINES}", _tag(number), **options)
            else:
                engine.load_checkpoint(f"{folder}/{_ENGINES}")

    @property
    def _is_deepspeed(self) -> bool:
        return bool(self._accelerator.distributed_type.value == "DEEPSPEED")

    def _tell(self) -> None:
        if not self._has_told:
            self._has_told = True
            where = self._scratch or "a temporary folder of this host"
            VOICE.info(
                f"{self._accelerator.distributed_type.value} saves model and optimizer itself, to {where}, "
                f"while training waits; its files are then stored in the checkpoint, and wiped there"
            )


def _tag(number: int) -> str:
    return "pytorch_model" if number == 0 else f"pytorch_model_{number}"
