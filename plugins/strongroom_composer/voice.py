"""How this front end speaks: through a logger below Composer's own, as ``python_log_level`` sets it."""

from __future__ import annotations

import logging
from typing import Final

from composer.utils import dist

from strongroom.frontend import LoggedVoice, Voice

__all__ = ["VOICE"]


def _is_first() -> bool:
    return int(dist.get_global_rank()) == 0


VOICE: Final[Voice] = LoggedVoice(logger=logging.getLogger("composer.strongroom"), is_first=_is_first)
"""Rank 0's."""
