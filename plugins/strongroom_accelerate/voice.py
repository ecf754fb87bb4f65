"""How this front end speaks: as Accelerate does, by a logger that is silent on all ranks but the main one."""

from __future__ import annotations

from typing import Final

from accelerate.logging import get_logger

from strongroom.frontend import LoggedVoice

__all__ = ["VOICE"]

VOICE: Final = LoggedVoice(
    logger=get_logger("strongroom_accelerate"),
    # Accelerate's adapter asks that itself.
    is_first=lambda: True,
)
