"""The callback for ``lightning.pytorch``."""

from __future__ import annotations

from typing import ClassVar

from lightning.pytorch.callbacks import Checkpoint

from strongroom_lightning.checkpointing import Checkpointing
from strongroom_lightning.loading import teach
from strongroom_lightning.namespace import LIGHTNING, Namespace

__all__ = ["StrongroomCheckpoint"]

teach(LIGHTNING)


class StrongroomCheckpoint(Checkpointing, Checkpoint):
    __doc__ = Checkpointing.__doc__

    namespace: ClassVar[Namespace] = LIGHTNING
