"""Where the program runs, and as whom."""

from __future__ import annotations

import os
import platform
import pwd
import socket
from collections.abc import Mapping
from typing import Any

from strongroom.provenance.job import cluster_in

__all__ = ["collect_host"]


def collect_host(environment: Mapping[str, str]) -> dict[str, Any]:
    """The host's name, the operating system, the user and, where it is known, the cluster."""
    found: dict[str, Any] = {
        "name": socket.gethostname(),
        "system": f"{platform.system()} {platform.release()}",
        "user": _user(),
    }
    cluster = cluster_in(environment)
    if cluster is not None:
        found["cluster"] = cluster
    return found


def _user() -> str:
    """By the system's word and not by ``USER``, which anyone sets; by number where no name is known."""
    number = os.getuid()
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)
