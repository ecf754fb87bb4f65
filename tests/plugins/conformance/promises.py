"""What every front end promises, in the words of the page; `test_promises.py` has a test for each."""

from __future__ import annotations

from typing import Final

__all__ = ["PROMISES"]

PROMISES: Final = {
    "resume": "A run goes on by itself from the newest checkpoint that is whole",
    "unchanged": "Saving changes nothing of the run",
    "intervals": "What the interval says is saved, in optimizer steps, also where batches are accumulated",
    "retention": "As many checkpoints stay as it was told",
    "preemption": "Told to stop on one rank, all ranks save the same step, end with 143, and go on exactly",
    "fall-back": "A damaged checkpoint is passed over, and that is told",
    "failure": "A save that fails in the background ends the run in words; what was committed stands",
    "one file": "One configuration file seals, signs and audits",
    "no plaintext": "Nothing that a sealed run writes, anywhere, holds a weight in the clear",
    "version": "A version of the framework that lacks what is needed is refused before anything is trained",
    "another's root": "A root that another front end wrote is refused, and left alone",
    "stall": "The framework's loggers are told how long each save held training up",
}
"""By a short name."""
