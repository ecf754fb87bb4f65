"""Jobs of several ranks under Composer, for tests; how they are started, `processes` says.

To Composer such a rank looks as one that torchrun has started: the group exists, ``NODE_RANK`` is not set.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

_HERE = Path(__file__).parent
for folder in (str(_HERE.parent), str(_HERE)):
    if folder not in sys.path:
        sys.path.insert(0, folder)

from processes import FrontEndLauncher, warnings_are_errors, world_size  # noqa: E402 - as above

__all__ = [
    "COMPOSERS_OWN_WARNINGS",
    "PRELOADED",
    "ComposerLauncher",
    "as_composer_rank",
    "leave_the_processor_alone",
]

PRELOADED = ("composer", "composer.algorithms", "torchmetrics.classification", "strongroom_composer.callback")

COMPOSERS_OWN_WARNINGS = (
    "ignore:.*GradScaler:",
    "ignore:.*lr_scheduler.step.*:UserWarning",
    "ignore:.*multi-threaded, use of fork:DeprecationWarning",
    "ignore:FSDP2 Config.APIs are experimental:UserWarning",
    "ignore:DTensor random operators may not have complete support:UserWarning",
)
"""What Composer and its libraries say of small runs; every other warning is an error."""


class ComposerLauncher(FrontEndLauncher):
    """Starts ranks from a forkserver that has imported Composer."""

    def __init__(self) -> None:
        super().__init__(PRELOADED, as_composer_rank)


def as_composer_rank() -> None:
    """Tell Composer, in this process, of what kind of job it is part."""
    os.environ["LOCAL_WORLD_SIZE"] = str(world_size())
    os.environ.pop("NODE_RANK", None)
    logging.getLogger("composer").setLevel(logging.ERROR)
    warnings_are_errors(COMPOSERS_OWN_WARNINGS)
    leave_the_processor_alone()


def leave_the_processor_alone() -> None:
    """Composer starts a process for every Trainer that measures the processor for a second, and logs it."""
    from composer.utils import collect_env

    collect_env.get_cpu_model = lambda: "a processor"
