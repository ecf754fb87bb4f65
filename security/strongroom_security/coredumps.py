"""Keeping a process's memory, and the keys in it, out of core dumps."""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Final

from strongroom.errors import ConfigError

__all__ = ["forbid_core_dumps"]

_PR_SET_DUMPABLE: Final = 4
"""prctl(2), <linux/prctl.h>."""


def forbid_core_dumps() -> None:
    """Dump no core of this process from now on; processes that it forks inherit that.

    On Linux the process also becomes undumpable: a crash handler that the kernel pipes cores to is not
    held by the limit. Other processes of the same user can then neither trace it nor read its memory
    (prctl(2)), so debuggers and sampling profilers cannot attach.

    Raises:
        ConfigError: the platform refused.
    """
    try:
        import resource
    except ImportError:
        raise ConfigError(
            f"core dumps cannot be turned off on {sys.platform}; take no_core_dumps out of the policy"
        ) from None
    try:
        # The hard limit too, so that nothing that runs later in this process raises it again.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except OSError as error:
        raise ConfigError(f"core dumps cannot be turned off: {error.strerror or error}") from error
    if not sys.platform.startswith("linux"):
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise ConfigError(f"core dumps cannot be turned off: {os.strerror(ctypes.get_errno())}")
