"""What scheduled this process: a few variables by name, and never the environment as a whole.

Pure: the environment is handed in. A variable that is not listed here is not looked at.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

__all__ = ["ALLOWED", "CONTAINER_VARIABLES", "cluster_in", "container_in", "job_in"]

_SLURM: Final = (
    "SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_JOB_USER", "SLURM_JOB_ACCOUNT", "SLURM_JOB_PARTITION",
    "SLURM_JOB_QOS", "SLURM_JOB_NUM_NODES", "SLURM_JOB_NODELIST", "SLURM_NTASKS", "SLURM_STEP_ID",
    "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_RESTART_COUNT", "SLURM_CLUSTER_NAME",
)  # fmt: skip
_KUBERNETES: Final = (
    "POD_NAME", "POD_NAMESPACE", "POD_UID", "NAMESPACE", "NODE_NAME", "JOB_NAME", "JOB_COMPLETION_INDEX",
)  # fmt: skip
"""What manifests commonly pass on from the downward API."""
_TORCHELASTIC: Final = (
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "RANK", "WORLD_SIZE",
    "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME",
)  # fmt: skip

CONTAINER_VARIABLES: Final = ("CONTAINER_DIGEST", "IMAGE_DIGEST", "CONTAINER_IMAGE")
"""Where platforms say which image runs: a digest, or a reference that ends in one."""

_CLUSTER: Final = ("SLURM_CLUSTER_NAME", "CLUSTER_NAME")

_KUBERNETES_MARK: Final = "KUBERNETES_SERVICE_HOST"
"""Set in every pod; without it a variable called ``NAMESPACE`` says nothing of Kubernetes."""

ALLOWED: Final = frozenset(
    {*_SLURM, *_KUBERNETES, *_TORCHELASTIC, *CONTAINER_VARIABLES, *_CLUSTER, _KUBERNETES_MARK}
)

_LENGTH: Final = 512
"""Characters of a variable that are kept: node lists are long, and a job's name says enough by then."""

_DIGEST: Final = re.compile(r"(?:^|@)(sha256:[0-9a-f]{64})$")


def job_in(environment: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """The job by scheduler; only of those that this process runs under."""
    found = {
        "slurm": _taken(environment, _SLURM) if "SLURM_JOB_ID" in environment else {},
        "kubernetes": _taken(environment, _KUBERNETES) if _KUBERNETES_MARK in environment else {},
        "torchelastic": _taken(environment, _TORCHELASTIC) if "TORCHELASTIC_RUN_ID" in environment else {},
    }
    return {scheduler: values for scheduler, values in found.items() if values}


def cluster_in(environment: Mapping[str, str]) -> str | None:
    """The cluster's name, where the platform says it."""
    return next((value for value in _taken(environment, _CLUSTER).values() if value), None)


def container_in(environment: Mapping[str, str]) -> str | None:
    """The digest of the image that runs, as ``sha256:<hex>``, where the platform says it."""
    for name in CONTAINER_VARIABLES:
        found = _DIGEST.search(environment.get(name, "").strip())
        if found is not None:
            return found[1]
    return None


def _taken(environment: Mapping[str, str], names: tuple[str, ...]) -> dict[str, str]:
    return {
        # What is no valid Unicode is told as such: the name of a job is no reason to fail.
        name: environment[name][:_LENGTH].encode("utf-8", "backslashreplace").decode("utf-8")
        for name in names
        if name in environment
    }
