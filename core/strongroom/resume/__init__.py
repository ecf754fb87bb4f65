"""What every front end needs to resume exactly: random states, data position, intervals, the choice.

`rng` captures and restores random number generators; `position` says where in the data a run stood and
brings an iterator back there; `intervals` decides when to save; `mode` decides whether to restore. Nothing
here reads or writes a checkpoint, and nothing here knows Lightning, Composer, Accelerate or the Hugging
Face Trainer: a front end translates its framework's events into these terms.
"""

from __future__ import annotations

from strongroom.resume.intervals import LastSave, Moment, SaveDecision, SaveIntervals
from strongroom.resume.mode import ResumeMode, ResumePlan, plan_resume
from strongroom.resume.position import DataPosition, replay
from strongroom.resume.rng import Generator, RngState, generators_of

__all__ = [
    "DataPosition",
    "Generator",
    "LastSave",
    "Moment",
    "ResumeMode",
    "ResumePlan",
    "RngState",
    "SaveDecision",
    "SaveIntervals",
    "generators_of",
    "plan_resume",
    "replay",
]
