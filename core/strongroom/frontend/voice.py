"""How a front end speaks: as its framework does, once for all ranks of a job."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

__all__ = ["LoggedVoice", "Voice"]


class Voice(Protocol):
    """Where sentences go that are for whoever watches the run; ranks other than the first are silent."""

    def info(self, text: str) -> None:
        """Say what is as it should be."""

    def warn(self, text: str) -> None:
        """Say what somebody should look at."""


@dataclass(frozen=True, kw_only=True)
class LoggedVoice:
    """Speaks through a logger, by name: a framework's own format says no more than that the framework speaks.

    Attributes:
        logger: the front end's.
        is_first: whether this process speaks for the job; asked each time, since a job may not have begun.
    """

    logger: logging.Logger
    is_first: Callable[[], bool]

    def info(self, text: str) -> None:
        if self.is_first():
            self.logger.info("Strongroom: %s", text)

    def warn(self, text: str) -> None:
        if self.is_first():
            self.logger.warning("Strongroom: %s", text)
