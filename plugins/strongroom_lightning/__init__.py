"""The front end for Lightning: one callback saves a run through Strongroom and resumes it by itself.

::

    trainer = L.Trainer(callbacks=[StrongroomCheckpoint("runs/a", every_n_train_steps=100)])
    trainer.fit(model, datamodule)  # resumes by itself if runs/a holds a whole checkpoint

This callback is for ``lightning.pytorch``; ``strongroom_lightning.pytorch_lightning`` has the one for
``pytorch_lightning``. Each is imported when it is first used, since a program has one of the two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from strongroom.deferring import deferred

if TYPE_CHECKING:
    from strongroom_lightning.callback import StrongroomCheckpoint

_HOMES = {"StrongroomCheckpoint": "callback"}

__all__ = ["StrongroomCheckpoint"]


_NEEDS = (
    "the package lightning (2.5 or newer), which is not installed; install Strongroom with its extra, "
    "strongroom[lightning]. For the package pytorch-lightning, the extra is strongroom[pytorch-lightning], "
    "and the callback is strongroom_lightning.pytorch_lightning.StrongroomCheckpoint"
)


def __getattr__(name: str) -> Any:
    return deferred(__name__, _HOMES, name, framework=("lightning",), needs=_NEEDS)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
