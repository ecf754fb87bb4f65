"""How this front end speaks: through a logger of transformers, on rank 0."""

from __future__ import annotations

import os
from typing import Final

from transformers.utils import logging

from strongroom.frontend import LoggedVoice, Voice

__all__ = ["VOICE"]

# Below the library's own logger, so that its verbosity, its handlers and its format are ours too.
VOICE: Final[Voice] = LoggedVoice(
    logger=logging.get_logger("transformers.strongroom"),
    is_first=lambda: os.environ.get("RANK", "0") == "0",
)
