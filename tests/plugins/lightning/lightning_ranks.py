"""Jobs of several ranks under Lightning, for tests.

To Lightning such a rank looks as one that a cluster has started (``LOCAL_RANK`` is set), in a job whose group
exists. How they are started, `processes` says.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

_HERE = Path(__file__).parent
for folder in (str(_HERE.parent), str(_HERE)):
    if folder not in sys.path:
        sys.path.insert(0, folder)

from processes import (  # noqa: E402 - the folder must be known first
    FrontEndLauncher,
    Job,
    Outcome,
    die,
    rank,
    warnings_are_errors,
    world_size,
)

__all__ = [
    "Job",
    "LightningLauncher",
    "Outcome",
    "die",
    "expected_warnings",
    "rank",
    "world_size",
]

_PRELOADED = (
    "torch.distributed.tensor.parallel",
    "torchmetrics",
    "lightning.pytorch",
    "strongroom.dcp",
    "strongroom_lightning",
)

expected_warnings = (
    "ignore:.*does not have many workers:",
    "ignore:.*multi-threaded, use of fork:DeprecationWarning",
    "ignore:DTensor random operators may not have complete support:UserWarning",
    "ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning",
    "ignore:The number of training batches:",
    "ignore:You defined a `validation_step` but have no `val_dataloader`:",
)
"""What Lightning says of small runs; every other warning is an error on a rank, as it is in a test."""


class LightningLauncher(FrontEndLauncher):
    """Starts ranks from a forkserver that has imported Lightning."""

    def __init__(self) -> None:
        super().__init__(_PRELOADED, as_lightning_rank)


def as_lightning_rank() -> None:
    """Tell Lightning, in this process, which rank it is."""
    from lightning.fabric.utilities import rank_zero as of_fabric
    from lightning.pytorch.utilities import rank_zero as of_pytorch

    # Lightning reads the rank when it is imported, which here was long ago.
    of_fabric.rank_zero_only.rank = of_pytorch.rank_zero_only.rank = rank()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings_are_errors(expected_warnings)
