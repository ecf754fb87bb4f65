"""When to save: pure decisions with their reasons; the clock is read by whoever asks.

A front end reports each `Moment` at which it could save (between two optimizer steps, at an epoch's end,
at the run's end) and is told whether to, and why. Saving is its own affair.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from strongroom.errors import ConfigError

__all__ = ["LastSave", "Moment", "SaveDecision", "SaveIntervals"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A point at which a run could be saved.

    Attributes:
        step: optimizer steps done since the run's very beginning.
        epochs_done: whole epochs done since then.
        clock_s: a monotonic clock's reading, in seconds.
        is_epoch_end: an epoch has just ended.
        is_run_end: training goes no further.
        is_validated: validation has run since the step before.
    """

    step: int
    epochs_done: int
    clock_s: float
    is_epoch_end: bool = False
    is_run_end: bool = False
    is_validated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LastSave:
    """What later decisions are measured from: the last save of this run, or where training began."""

    step: int
    epochs_done: int
    clock_s: float

    @classmethod
    def at(cls, moment: Moment) -> LastSave:
        return cls(step=moment.step, epochs_done=moment.epochs_done, clock_s=moment.clock_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveDecision:
    """Whether to save, and the reason in words."""

    save: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveIntervals:
    """Save whenever one of the given intervals has passed, and at the run's end.

    Steps and epochs are counted from the run's very beginning, so that a resumed run saves at the steps
    at which the uninterrupted one would have. What is due is found by crossing a multiple, not by
    meeting one: a front end whose counter moves by two (several optimizers) misses nothing.

    ``every`` is measured from the last save. Where several processes train together, one of them must
    decide for all: their clocks differ.

    With ``after_validation`` what ``every_n_epochs`` means is not the epoch's end but the end of every
    validation within that epoch, be it one, several or none.
    """

    every_n_steps: int | None = None
    every_n_epochs: int | None = None
    every: timedelta | None = None
    at_run_end: bool = True
    after_validation: bool = False

    def __post_init__(self) -> None:
        for name in ("every_n_steps", "every_n_epochs"):
            count = getattr(self, name)
            if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
                raise ConfigError(f"{name} must be a whole number of at least 1, or None; got {count!r}")
        every: object = self.every
        if every is not None and not (isinstance(every, timedelta) and every > timedelta()):
            raise ConfigError(f"a time interval must be a timedelta above zero, or None; got {every!r}")

    def decide(self, moment: Moment, last: LastSave) -> SaveDecision:
        """Say whether to save at ``moment``; never twice at one step."""
        if moment.step == last.step:
            return SaveDecision(save=False, reason=f"step {moment.step} is where the last save stands")
        reasons = []
        if _crossed(self.every_n_steps, last.step, moment.step):
            reasons.append(f"every {_counted(self.every_n_steps, 'step')}")
        if self.after_validation:
            if moment.is_validated and self._is_epochs_turn(moment):
                reasons.append(f"a validation, every {_counted(self.every_n_epochs, 'epoch')}")
        elif moment.is_epoch_end and _crossed(self.every_n_epochs, last.epochs_done, moment.epochs_done):
            reasons.append(f"every {_counted(self.every_n_epochs, 'epoch')}")
        if self.every is not None and moment.clock_s - last.clock_s >= self.every.total_seconds():
            reasons.append(f"{self.every} since the last save")
        if self.at_run_end and moment.is_run_end:
            reasons.append("training ends")
        return SaveDecision(save=bool(reasons), reason=", ".join(reasons) or "nothing is due")

    def _is_epochs_turn(self, moment: Moment) -> bool:
        """Whether the epoch that the moment is in, or has just ended, is one of the every-so-many."""
        number = moment.epochs_done + (not moment.is_epoch_end)  # from 1
        return self.every_n_epochs is not None and number % self.every_n_epochs == 0


def _crossed(interval: int | None, before: int, now: int) -> bool:
    """Whether a multiple of ``interval`` lies in ``(before, now]``."""
    return interval is not None and now // interval > before // interval


def _counted(count: int | None, noun: str) -> str:
    return noun if count == 1 else f"{count} {noun}s"
