"""The arguments of ``strongroom replicate``, apart from its work."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

__all__ = ["add_replicate"]


def add_replicate(
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
    replicate = command(commands, "replicate", "copy checkpoints to another tier, and verify them there")
    chosen = replicate.add_mutually_exclusive_group()
    chosen.add_argument("step", metavar="STEP", nargs="?", type=natural, help="default: the newest")
    chosen.add_argument("--all", action="store_true", help="every committed checkpoint, the newest first")
    replicate.add_argument(
        "--to",
        metavar="TARGET",
        required=True,
        help="the other tier's root, as ROOT; made where it is not there",
    )
    replicate.add_argument(
        "--verify",
        action="store_true",
        help="read there again what was verified there before; exit status 1 where it is damaged",
    )
    replicate.add_argument(
        "--max-bytes-per-second",
        metavar="N",
        type=natural,
        help="how fast it is sent at most (default: as fast as it goes)",
    )
