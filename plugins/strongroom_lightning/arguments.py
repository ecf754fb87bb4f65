"""What a user gives the callback, checked once: pure, and before any Trainer exists."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from strongroom.errors import ConfigError
from strongroom.frontend import RunSettings, check_flags, check_interval
from strongroom.resume import SaveIntervals
from strongroom_lightning.label import Label
from strongroom_lightning.ranking import RankingRule

__all__ = ["Arguments"]


@dataclass(frozen=True, kw_only=True)
class Arguments(RunSettings):
    """The callback's arguments, in the terms of the core: what every front end takes, and Lightning's own.

    Attributes:
        intervals: when to save.
        save_on_train_epoch_end: whether ``every_n_epochs`` means the epoch's end or each validation; None: as
            validation is set up.
        ranking: what is ranked, and how many stay.
        label: what each checkpoint is called; None: nothing besides its step.
        save_weights_only: checkpoints hold the model alone.
        save_on_exception: whether a run that ends by an exception is saved.
        save_last: as it was given.
        verbose: whether it is said what each ranked save came to.
        running_metrics: means that are being formed, and the metrics' states, are part of a checkpoint.
    """

    intervals: SaveIntervals
    save_on_train_epoch_end: bool | None
    ranking: RankingRule
    label: Label | None
    save_weights_only: bool
    save_on_exception: bool
    save_last: bool | str | None
    verbose: bool
    running_metrics: bool

    @property
    def dirpath(self) -> str:
        """The run's root."""
        return self.root

    @classmethod
    def of(
        cls,
        dirpath: str | os.PathLike[str],
        *,
        filename: str | None,
        monitor: str | None,
        mode: str,
        save_top_k: int | None,
        save_last: bool | str | None,
        auto_insert_metric_name: bool,
        save_on_train_epoch_end: bool | None,
        save_weights_only: bool,
        save_on_exception: bool,
        verbose: bool,
        every_n_train_steps: int | None,
        every_n_epochs: int | None,
        train_time_interval: timedelta | None,
        running_metrics: bool,
        **options: Any,
    ) -> Arguments:
        """Check what the callback was given.

        Args:
            options: of `strongroom.frontend.RunOptions`.

        Raises:
            ConfigError: a value that cannot work, or two that exclude each other.
        """
        check_flags(
            auto_insert_metric_name=auto_insert_metric_name,
            save_weights_only=save_weights_only,
            save_on_exception=save_on_exception,
            verbose=verbose,
            running_metrics=running_metrics,
        )
        if save_on_train_epoch_end is not None:
            check_flags(save_on_train_epoch_end=save_on_train_epoch_end)
        every_n_train_steps = check_interval("every_n_train_steps", every_n_train_steps)
        every_n_epochs = check_interval("every_n_epochs", every_n_epochs)
        if every_n_train_steps is None and every_n_epochs is None and train_time_interval is None:
            every_n_epochs = 1
        if not (save_last is None or save_last == "link" or isinstance(save_last, bool)):
            raise ConfigError(f"save_last must be True, False, 'link' or None; got {save_last!r}")
        run = RunSettings.read(dirpath, options, root_name="dirpath")
        return cls(
            **vars(run),
            # 0 is how Lightning's users switch an interval off.
            intervals=SaveIntervals(
                every_n_steps=None if every_n_train_steps == 0 else every_n_train_steps,
                every_n_epochs=None if every_n_epochs == 0 else every_n_epochs,
                every=train_time_interval,
            ),
            save_on_train_epoch_end=save_on_train_epoch_end,
            ranking=RankingRule.of(monitor=monitor, mode=mode, save_top_k=save_top_k, keep=run.keep),
            label=None if filename is None else Label.of(filename, inserts_names=auto_insert_metric_name),
            save_weights_only=save_weights_only,
            save_on_exception=save_on_exception,
            save_last=save_last,
            verbose=verbose,
            running_metrics=running_metrics,
        )
