"""The front end for MosaicML Composer: one callback saves a run through Strongroom and resumes it by itself.

::

    trainer = Trainer(model=model, ..., callbacks=[StrongroomCheckpoint("runs/a", save_interval="100ba")])
    trainer.fit()  # goes on from the newest whole checkpoint in runs/a, if there is one

It is imported when it is first used, since a program may have other front ends and no Composer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from strongroom.deferring import deferred

if TYPE_CHECKING:
    from strongroom_composer.callback import StrongroomCheckpoint

_HOMES = {"StrongroomCheckpoint": "callback"}

__all__ = ["StrongroomCheckpoint"]


_NEEDS = (
    "the package mosaicml (0.32.1 or newer), which is not installed; install Strongroom with its extra, "
    "strongroom[composer]"
)


def __getattr__(name: str) -> Any:
    return deferred(__name__, _HOMES, name, framework=("composer",), needs=_NEEDS)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
