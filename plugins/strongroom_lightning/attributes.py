"""The attributes by which Lightning's users know `ModelCheckpoint`, with the same meaning."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import yaml  # type: ignore[import-untyped]  # Lightning brings it

from strongroom_lightning.label import Label

if TYPE_CHECKING:
    import torch

    from strongroom_lightning.arguments import Arguments
    from strongroom_lightning.ranking import Ranking

__all__ = ["Attributes"]


class Attributes:
    """What was given, and what has become of it.

    Paths are ``strongroom://ROOT#step=N``, which ``ckpt_path`` takes. They tell of committed checkpoints
    only: a save that is still being written is in none of them yet.
    """

    _arguments: Arguments
    _ranking: Ranking
    _best_elsewhere = ""

    @property
    def dirpath(self) -> str:
        """The run's root."""
        return self._arguments.dirpath

    @property
    def filename(self) -> str | None:
        """The pattern of the checkpoints' labels."""
        label = self._arguments.label
        return None if label is None else label.pattern

    @property
    def monitor(self) -> str | None:
        """The metric by which checkpoints are ranked."""
        return self._arguments.ranking.monitor

    @property
    def mode(self) -> str:
        """Whether low or high is good."""
        return self._arguments.ranking.mode

    @property
    def save_top_k(self) -> int:
        """How many of the best stay; -1: all."""
        best = self._arguments.ranking.best
        given = self._arguments.ranking.save_top_k
        return given if given is not None else -1 if best is None or self.monitor is None else best

    @property
    def save_weights_only(self) -> bool:
        """Whether checkpoints hold the model alone."""
        return self._arguments.save_weights_only

    @property
    def save_on_exception(self) -> bool:
        """Whether a run that ends by an exception is saved."""
        return self._arguments.save_on_exception

    @property
    def save_last(self) -> bool | str | None:
        """As it was given; there is always a last one."""
        return self._arguments.save_last

    @property
    def verbose(self) -> bool:
        """Whether it is said what each ranked save came to."""
        return self._arguments.verbose

    @property
    def every_n_epochs(self) -> int | None:
        """After how many epochs is saved; None: no epoch's end is a reason."""
        return self._arguments.intervals.every_n_epochs

    @property
    def every_n_train_steps(self) -> int | None:
        """After how many optimizer steps is saved."""
        return self._arguments.intervals.every_n_steps

    @property
    def train_time_interval(self) -> timedelta | None:
        """After how much time is saved."""
        return self._arguments.intervals.every

    @property
    def best_model_path(self) -> str:
        """The best checkpoint; without ``monitor`` the newest. Empty where there is none."""
        return self._ranking.best_model_path or self._best_elsewhere

    @best_model_path.setter
    def best_model_path(self, path: str) -> None:
        """Lightning tells by this what processes have done that it started for the fit alone."""
        self._best_elsewhere = path

    @property
    def best_model_score(self) -> torch.Tensor | None:
        """The best checkpoint's score."""
        return self._ranking.best_model_score

    @property
    def best_k_models(self) -> dict[str, torch.Tensor]:
        """The best checkpoints that stay, the best first, with their scores."""
        return self._ranking.best_k_models

    @property
    def kth_best_model_path(self) -> str:
        """The worst of the best, once there are as many as may stay."""
        return self._ranking.kth_best_model_path

    @property
    def kth_value(self) -> torch.Tensor:
        """Its score: what the next one has to beat."""
        return self._ranking.kth_value

    @property
    def current_score(self) -> torch.Tensor | None:
        """What was measured last for a save."""
        return self._ranking.current_score

    @property
    def last_model_path(self) -> str:
        """The newest checkpoint that this run has committed, or was taken up from."""
        return self._ranking.last_model_path

    def format_checkpoint_name(self, metrics: dict[str, float], filename: str | None = None) -> str:
        """The label that a checkpoint with such metrics has.

        Raises:
            ConfigError: ``filename`` is no pattern.
        """
        label = self._arguments.label
        if filename is not None or label is None:
            inserts_names = True if label is None else label.inserts_names
            label = Label.of(filename, inserts_names=inserts_names)
        return label.fill({name: float(value) for name, value in metrics.items()})

    def to_yaml(self, filepath: str | os.PathLike[str]) -> None:
        """Write `best_k_models` to a file."""
        scores = {path: score.item() for path, score in self.best_k_models.items()}
        Path(filepath).write_text(yaml.safe_dump(scores, sort_keys=False), encoding="utf-8")
