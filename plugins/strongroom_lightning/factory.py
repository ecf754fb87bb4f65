"""The callback without a line of code: in every Trainer of a process whose environment asks for it.

Lightning asks the entry points ``lightning.pytorch.callbacks_factory`` and
``pytorch_lightning.callbacks_factory`` for callbacks whenever a Trainer is made. Ours answer with none,
unless ``STRONGROOM_LIGHTNING_ROOT`` names a run's root.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from strongroom.errors import ConfigError

if TYPE_CHECKING:
    from strongroom_lightning.checkpointing import Checkpointing

__all__ = ["OPTIONS", "ROOT", "for_lightning", "for_pytorch_lightning"]

ROOT: Final = "STRONGROOM_LIGHTNING_ROOT"
"""The run's root. Unset or empty: there is no callback."""

OPTIONS: Final = "STRONGROOM_LIGHTNING_OPTIONS"
"""Further arguments of the callback, as a JSON object."""


def for_lightning() -> list[Checkpointing]:
    """What Lightning is to add to a Trainer of ``lightning.pytorch``."""
    root = os.environ.get(ROOT)
    if not root:
        return []
    from strongroom_lightning.callback import StrongroomCheckpoint

    return [StrongroomCheckpoint(root, **_options(os.environ, StrongroomCheckpoint))]


def for_pytorch_lightning() -> list[Checkpointing]:
    """What Lightning is to add to a Trainer of ``pytorch_lightning``."""
    root = os.environ.get(ROOT)
    if not root:
        return []
    from strongroom_lightning.pytorch_lightning import StrongroomCheckpoint

    return [StrongroomCheckpoint(root, **_options(os.environ, StrongroomCheckpoint))]


def _options(environment: Mapping[str, str], kind: type) -> dict[str, Any]:
    text = environment.get(OPTIONS)
    if not text:
        return {}
    try:
        options: dict[str, Any] = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{OPTIONS} is not JSON: {error}") from None
    known = list(inspect.signature(kind).parameters)[1:]
    is_object = isinstance(options, dict)
    unknown = [name for name in options if name not in known] if is_object else [text[:40]]
    if unknown:
        raise ConfigError(
            f'{OPTIONS} must be a JSON object such as {{"every_n_train_steps": 100}}, of arguments of '
            f"StrongroomCheckpoint; {', '.join(map(repr, unknown))} is none"
        )
    return options
