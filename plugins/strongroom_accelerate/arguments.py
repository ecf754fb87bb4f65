"""What a user gives `Strongroom`, checked once: pure, and before anything is touched."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from strongroom.errors import ConfigError
from strongroom.frontend import RunSettings, check_interval
from strongroom.resume import SaveIntervals

__all__ = ["Arguments"]


@dataclass(frozen=True, kw_only=True)
class Arguments(RunSettings):
    """What every front end takes, and Accelerate's own.

    Attributes:
        intervals: when to save.
        scratch: where files are that an engine or a hook writes, until they stand in a checkpoint; None: a
            temporary folder of this host.
    """

    intervals: SaveIntervals
    scratch: str | None

    @classmethod
    def of(
        cls,
        root: str | os.PathLike[str],
        *,
        every_n_steps: int | None,
        every_n_epochs: int | None,
        every: timedelta | None,
        scratch: str | os.PathLike[str] | None,
        **options: Any,
    ) -> Arguments:
        """Check what was given.

        Args:
            options: of `strongroom.frontend.RunOptions`.

        Raises:
            ConfigError: a value that cannot work, or two that exclude each other.
        """
        steps = check_interval("every_n_steps", every_n_steps)
        epochs = check_interval("every_n_epochs", every_n_epochs)
        place: Any = None if scratch is None else os.fspath(scratch)
        if place is not None and (type(place) is not str or "://" in place):
            raise ConfigError(f"scratch must be a folder that every rank sees, or None; got {scratch!r}")
        own = ("every_n_steps", "every_n_epochs", "every", "scratch")
        return cls(
            **vars(RunSettings.read(root, options, known=own)),
            intervals=SaveIntervals(every_n_steps=steps or None, every_n_epochs=epochs or None, every=every),
            scratch=None if place is None else os.path.abspath(os.path.expanduser(place)),
        )
