"""The front end for raw loops on Hugging Face Accelerate: one object saves a run and resumes it by itself.

::

    accelerator = Accelerator()
    strongroom = Strongroom(accelerator, "runs/a", every_n_steps=100)  # before prepare()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    strongroom.resume()  # takes up the newest whole checkpoint, if there is one

It is imported when it is first used, since a program may have other front ends and no Accelerate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from strongroom.deferring import deferred

if TYPE_CHECKING:
    from strongroom_accelerate.attaching import Strongroom

_HOMES = {"Strongroom": "attaching"}

__all__ = ["Strongroom"]


_NEEDS = (
    "the package accelerate (1.15 or newer), which is not installed; install Strongroom with its extra, "
    "strongroom[accelerate]"
)


def __getattr__(name: str) -> Any:
    return deferred(__name__, _HOMES, name, framework=("accelerate",), needs=_NEEDS)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
