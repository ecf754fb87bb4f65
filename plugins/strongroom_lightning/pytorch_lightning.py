"""The callback for ``pytorch_lightning``, Lightning's other package.

::

    from strongroom_lightning.pytorch_lightning import StrongroomCheckpoint
"""

from __future__ import annotations

from typing import ClassVar

try:
    from pytorch_lightning.callbacks import Checkpoint
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "pytorch_lightning":
        raise
    raise ModuleNotFoundError(
        "strongroom_lightning.pytorch_lightning needs the package pytorch-lightning (2.5 or newer), which is "
        "not installed; install Strongroom with its extra: strongroom[pytorch-lightning]",
        name=error.name,
    ) from error

from strongroom_lightning.checkpointing import Checkpointing
from strongroom_lightning.loading import teach
from strongroom_lightning.namespace import PYTORCH_LIGHTNING, Namespace

__all__ = ["StrongroomCheckpoint"]

teach(PYTORCH_LIGHTNING)


class StrongroomCheckpoint(Checkpointing, Checkpoint):
    __doc__ = Checkpointing.__doc__

    namespace: ClassVar[Namespace] = PYTORCH_LIGHTNING
