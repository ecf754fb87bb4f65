"""The front end for the Hugging Face Trainer: one callback saves a run and resumes it by itself.

::

    trainer = Trainer(model=model, args=args, train_dataset=dataset)
    StrongroomCallback("runs/a").attach(trainer)
    trainer.train()  # goes on from the newest whole checkpoint in runs/a, if there is one

It is imported when it is first used, since a program may have other front ends and no transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from strongroom.deferring import deferred

if TYPE_CHECKING:
    from strongroom_transformers.callback import StrongroomCallback
    from strongroom_transformers.coexist import SealedFolders, unseal
    from strongroom_transformers.mixin import StrongroomTrainerMixin

_HOMES = {
    "SealedFolders": "coexist",
    "StrongroomCallback": "callback",
    "StrongroomTrainerMixin": "mixin",
    "unseal": "coexist",
}

__all__ = ["SealedFolders", "StrongroomCallback", "StrongroomTrainerMixin", "unseal"]


_NEEDS = (
    "the package transformers (5.24 or newer), which is not installed; install Strongroom with its extra, "
    "strongroom[transformers]"
)


def __getattr__(name: str) -> Any:
    return deferred(__name__, _HOMES, name, framework=("transformers", "accelerate"), needs=_NEEDS)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
