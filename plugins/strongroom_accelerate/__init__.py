"""The front end for raw loops on Hugging Face Accelerate: one object saves a run and resumes it by itself.

::

    accelerator = Accelerator()
    strongroom = Strongroom(accelerator, "runs/a", every_n_steps=100)  # before prepare()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    strongroom.resume()  # takes up the newest whole checkpoint, if there is one

It is imported when it is first used, since a program may have other front ends and no Accelerate.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strongroom_accelerate.attaching import Strongroom

_HOMES = {"Strongroom": "attaching"}

__all__ = ["Strongroom"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'strongroom_accelerate' has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(f"strongroom_accelerate.{home}"), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "accelerate":
            raise
        raise ModuleNotFoundError(
            "strongroom_accelerate needs the package accelerate (1.15 or newer), which is not "
            "installed; install Strongroom with its extra, strongroom[accelerate]",
            name=error.name,
        ) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
