"""Slurm's requeue: the job that runs here goes back to the queue, and begins again by itself.

Slurm does it where it is asked to (``scontrol requeue``); the job must have been submitted so that it may be
requeued. What has to be safe by then is the caller's to see to.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from typing import Final

__all__ = ["requeue", "slurm_job"]

_JOB: Final = re.compile(r"[0-9]+(_[0-9]+)?")

_LIMIT_S: Final = 30.0
"""``scontrol`` answers within a second, or not at all while the controller is away."""


def slurm_job(environment: Mapping[str, str] = os.environ) -> str | None:
    """The job's number, ``ARRAY_TASK`` for a task of an array; None outside Slurm."""
    array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    job = f"{array}_{task}" if array and task else environment.get("SLURM_JOB_ID", "")
    return job if _JOB.fullmatch(job) else None


def requeue(environment: Mapping[str, str] = os.environ, *, limit_s: float = _LIMIT_S) -> str | None:
    """Put this job back into Slurm's queue; for one rank.

    Returns:
        None where Slurm accepted it, else why not.
    """
    job = slurm_job(environment)
    if job is None:
        return "SLURM_JOB_ID is not set to a job's number"
    command = ["scontrol", "requeue", job]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except FileNotFoundError:
        return f"{' '.join(command)}: there is no scontrol on PATH"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{' '.join(command)}: {error!s:.300}"
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()
        return f"{' '.join(command)} ended with {done.returncode}: {said or 'it says nothing'}"[:500]
    return None
