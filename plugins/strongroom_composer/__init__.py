"""The front end for MosaicML Composer: one callback saves a run through Strongroom and resumes it by itself.

::

    trainer = Trainer(model=model, ..., callbacks=[StrongroomCheckpoint("runs/a", save_interval="100ba")])
    trainer.fit()  # goes on from the newest whole checkpoint in runs/a, if there is one

It is imported when it is first used, since a program may have other front ends and no Composer.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strongroom_composer.callback import StrongroomCheckpoint

_HOMES = {"StrongroomCheckpoint": "callback"}

__all__ = ["StrongroomCheckpoint"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'strongroom_composer' has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(f"strongroom_composer.{home}"), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "composer":
            raise
        raise ModuleNotFoundError(
            "strongroom_composer needs the package mosaicml (0.32.1 or newer), which is not "
            "installed; install Strongroom with its extra, strongroom[composer]",
            name=error.name,
        ) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
