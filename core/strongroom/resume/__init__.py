"""What every front end needs to resume exactly, and to stop in time: random states, data position, and more.

`rng` captures and restores random number generators; `position` says where in the data a run stood and
brings an iterator back there, by reading or by `skipping`, with what `datasets` remember, and `jobs` where
another number of processes goes on; `intervals` decides when to save, by a `clock` that all ranks share;
`mode` decides whether to restore; `dividing` marks what each rank has of its own.
`preemption` is told that a run must end soon, `stopping` agrees among ranks where, `requeue` lets Slurm begin
it again, `failing` says whether a run that failed can still be saved. `losses` finds what cannot be stored
before a save, and `rebuilding` deals with it after a restore. Nothing here reads or writes a checkpoint, and
nothing here knows Lightning, Composer, Accelerate or the Hugging Face Trainer: a front end translates its
framework's events into these terms.
"""

from __future__ import annotations

from strongroom.resume.clock import SharedClock
from strongroom.resume.datasets import dataset_states, load_dataset_states
from strongroom.resume.failing import agree_to_save
from strongroom.resume.intervals import LastSave, Moment, SaveDecision, SaveIntervals
from strongroom.resume.jobs import JobShape, batches_behind
from strongroom.resume.losses import Loss, encodable
from strongroom.resume.mode import ResumeMode, ResumePlan, plan_resume
from strongroom.resume.modes import restore_modes, training_modes
from strongroom.resume.position import DataPosition, replay
from strongroom.resume.preemption import NoticeWatch, SpotNotice, StopNotice, StopSignals, check_signals
from strongroom.resume.rebuilding import described, has_stand_ins, rebuild
from strongroom.resume.requeue import requeue, slurm_job
from strongroom.resume.rng import Generator, RngState, generators_of
from strongroom.resume.skipping import SkipMode, reason_to_read, skipping
from strongroom.resume.stopping import StopVote

__all__ = [
    "DataPosition",
    "Generator",
    "JobShape",
    "LastSave",
    "Loss",
    "Moment",
    "NoticeWatch",
    "ResumeMode",
    "ResumePlan",
    "RngState",
    "SaveDecision",
    "SaveIntervals",
    "SharedClock",
    "SkipMode",
    "SpotNotice",
    "StopNotice",
    "StopSignals",
    "StopVote",
    "agree_to_save",
    "batches_behind",
    "check_signals",
    "dataset_states",
    "described",
    "encodable",
    "generators_of",
    "has_stand_ins",
    "load_dataset_states",
    "plan_resume",
    "reason_to_read",
    "rebuild",
    "replay",
    "requeue",
    "restore_modes",
    "skipping",
    "slurm_job",
    "training_modes",
]
