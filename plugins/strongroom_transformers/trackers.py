"""Trackers that upload a model by themselves: refused, in words, where they could not or must not.

Some of transformers' integrations upload each folder that the Trainer saves, and some write the model once
more when training ends, on a Trainer of their own making that nobody guards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from strongroom.errors import ConfigError
from strongroom.frontend import RunSettings, policy_seals
from strongroom_transformers.voice import VOICE

__all__ = ["Trackers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Uploading:
    """One kind of tracker.

    Attributes:
        attribute: what says whether it uploads, and what.
        uploads_folders: by that attribute's value: it takes the folders that the Trainer saves.
        advice: how it is told not to.
    """

    attribute: str
    uploads_folders: Callable[[Any], bool]
    advice: str


def _always(_: Any) -> bool:
    return True


_UPLOADING: Final = {
    "ClearMLCallback": _Uploading(
        attribute="_log_model", uploads_folders=_always, advice="set CLEARML_LOG_MODEL=FALSE"
    ),
    "DVCLiveCallback": _Uploading(
        attribute="_log_model", uploads_folders=lambda value: value == "all", advice="leave log_model out"
    ),
    "FlyteCallback": _Uploading(
        attribute="sync_checkpoints", uploads_folders=_always, advice="give it sync_checkpoints=False"
    ),
    "MLflowCallback": _Uploading(
        attribute="_log_artifacts", uploads_folders=_always, advice="set HF_MLFLOW_LOG_ARTIFACTS=FALSE"
    ),
    "NeptuneCallback": _Uploading(
        attribute="_log_checkpoints", uploads_folders=_always, advice="leave log_checkpoints out"
    ),
    "WandbCallback": _Uploading(
        attribute="_log_model",
        uploads_folders=lambda value: getattr(value, "value", value) == "checkpoint",
        advice="set WANDB_LOG_MODEL=false",
    ),
}


class Trackers:
    """Those of one Trainer.

    Args:
        trainer: the Trainer.
        settings: the run's.
        writes_folders: the Trainer's own checkpoints are written as ever.
    """

    def __init__(self, trainer: Any, settings: RunSettings, *, writes_folders: bool = False) -> None:
        self._trainer = trainer
        self._settings = settings
        self._writes_folders = writes_folders
        self._told: set[str] = set()

    def check(self) -> None:
        """Refuse one that would upload what is not there, or what is sealed.

        Some make up their mind when training begins: to be asked before that, and after.

        Raises:
            ConfigError: says why, and what to do.
        """
        for callback in self._trainer.callback_handler.callbacks:
            for kind in type(callback).__mro__:
                uploading = _UPLOADING.get(kind.__name__)
                value = None if uploading is None else getattr(callback, uploading.attribute, None)
                if uploading is not None and getattr(value, "is_enabled", value):
                    self._check(kind.__name__, uploading, takes_folders=uploading.uploads_folders(value))

    def _check(self, name: str, uploading: _Uploading, *, takes_folders: bool) -> None:
        if takes_folders and not self._writes_folders:
            raise ConfigError(
                f"{name} uploads the folders that the Trainer saves, and StrongroomCallback saves none; "
                f"{uploading.advice}. For a second place of a run's checkpoints there is replicate_to="
            )
        if name in self._told or not policy_seals(self._settings.options["security"]):
            return
        said = f"{name} uploads the model in the clear, and this run's checkpoints are sealed"
        if self._settings.escapes != "warn":
            raise ConfigError(f"{said}; {uploading.advice}, or allow it with escapes='warn'")
        self._told.add(name)
        VOICE.warn(f"{said}; escapes='warn' lets it")
