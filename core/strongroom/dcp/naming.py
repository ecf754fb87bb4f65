"""How DCP names things, and how a checkpoint does: tensors, and steps as checkpoint ids."""

from __future__ import annotations

import os
from typing import Any

from strongroom import paths
from strongroom.errors import ConfigError
from strongroom.layout import MAX_STEP

__all__ = ["fqn_of", "is_step", "name_of", "step_of"]


def name_of(fqn: str) -> str:
    """The stored name of DCP's name for a tensor."""
    return paths.spell(paths.from_dotted(fqn))


def fqn_of(name: str) -> str:
    """DCP's name for a stored tensor: indices lose their brackets, as its flattening spells them."""
    return ".".join(
        part[1:-1] if part.startswith("[") and part[1:-1].isdecimal() else part for part in name.split(".")
    )


def step_of(value: Any) -> int:
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if isinstance(text, str) and text.isdecimal():
        text = int(text)
    if not isinstance(text, int) or isinstance(text, bool) or not 0 <= text <= MAX_STEP:
        raise ConfigError(
            f"checkpoint_id names a step here: a number from 0 to {MAX_STEP}, got {value!r:.80}"
        )
    return text


def is_step(value: Any) -> bool:
    """Whether a checkpoint id names a step."""
    try:
        step_of(value)
    except ConfigError:
        return False
    return True
