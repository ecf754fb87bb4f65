"""The arguments of ``strongroom gc``, apart from its work."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

__all__ = ["add_gc"]


def add_gc(
    commands: Any,
    command: Callable[[Any, str, str], argparse.ArgumentParser],
    natural: Callable[[str], int],
) -> None:
    """Add the command.

    Args:
        commands: what `argparse` adds commands to.
        command: adds one that takes a run, as all commands do it.
        natural: the type of a number.
    """
    gc = command(commands, "gc", "remove what died, and with --keep-last old checkpoints, and say why")
    gc.add_argument(
        "--keep-last",
        metavar="N",
        type=natural,
        help="checkpoints that stay, the newest first (default: all of them)",
    )
    gc.add_argument(
        "--keep-best",
        metavar="N",
        type=natural,
        help="with --keep-last: of what the run itself names as its best, how many stay (default: all)",
    )
    gc.add_argument(
        "--unreplicated",
        action="store_true",
        help="of a root that is copied to other tiers: also what is verified on none of them",
    )
    gc.add_argument("--dry-run", action="store_true", help="say what would be removed, and remove nothing")
