"""Events as they stand in a log, for tests of what is made of them: spelled as a log does, and read back."""

from __future__ import annotations

from typing import Any

from strongroom.auditing import Act, Action, Outcome, Phase
from strongroom.layout import CheckpointName
from strongroom_security.auditlog.format.events import Actor, Recorded, event_of, recorded_of

__all__ = [
    "DAY",
    "HOUR",
    "MINUTE",
    "NOW",
    "ROLE",
    "ROOT",
    "RUN",
    "SECOND",
    "TRAINER",
    "VALIDATOR",
    "Log",
    "name",
]

SECOND = 1000
MINUTE = 60 * SECOND
HOUR = 60 * MINUTE
DAY = 24 * HOUR
NOW = 1_796_000_000 * SECOND
"""In 2026."""

RUN = "run-a"
ROOT = "s3://bucket/runs/run-a"
ROLE = "arn:aws:sts::111122223333:assumed-role/trainer-writer/job-7"
TRAINER = Actor(
    user="root",
    uid="0",
    pid=1,
    process="python",
    host="node-1",
    ip="192.0.2.1",
    identity=ROLE,
    role="trainer-writer",
)
VALIDATOR = Actor(
    user="root",
    uid="0",
    pid=2,
    process="python",
    host="node-2",
    ip="192.0.2.2",
    identity="arn:aws:sts::111122223333:assumed-role/validator-reader/job-8",
    role="validator-reader",
)


def name(step: int, launch: int = 1) -> CheckpointName:
    """A checkpoint's name; of a step and launch always the same."""
    return CheckpointName(step=step, launch=launch, attempt=f"{launch:08x}{step:08x}")


class Log:
    """Events, one after another, of one writer or several.

    Attributes:
        events: all of them, in the order in which they were told.
    """

    def __init__(self) -> None:
        self.events: list[Recorded] = []

    def tell(
        self,
        action: Action,
        phase: Phase = Phase.FINISHED,
        outcome: Outcome | None = None,
        *,
        at: int,
        by: Actor = TRAINER,
        operation: str | None = None,
        checkpoint: CheckpointName | None = None,
        run: str | None = RUN,
        root: str = ROOT,
        writer: str = "a" * 32,
        reason: str | None = None,
        **details: Any,
    ) -> str:
        """Add an event; its id."""
        seq = len(self.events) + 1
        if outcome is None:
            outcome = Outcome.SUCCESS if phase in (Phase.FINISHED, Phase.OBSERVED) else Outcome.UNKNOWN
        act = Act(
            action=action,
            phase=phase,
            outcome=outcome,
            operation=operation or f"{seq:016x}",
            root=root,
            run=run,
            checkpoint=checkpoint,
            reason=reason,
            details=details,
        )
        value = event_of(act, by, writer=writer, seq=seq, prev="0" * 64, time_ms=at)
        self.events.append(recorded_of(value, "an event"))
        return self.events[-1].id

    def save(self, step: int, *, at: int, launch: int = 1, by: Actor = TRAINER, **more: Any) -> str:
        """A save that came off within a second; the id of its end."""
        which = name(step, launch)
        self.tell(
            Action.SAVE,
            Phase.STARTED,
            at=at - SECOND,
            by=by,
            checkpoint=which,
            operation=which.attempt,
            **more,
        )
        return self.tell(Action.SAVE, at=at, by=by, checkpoint=which, operation=which.attempt, **more)

    def read(
        self, step: int, *, at: int, by: Actor = VALIDATOR, action: Action = Action.RESTORE, launch: int = 1
    ) -> str:
        """A read that came off within a second; the id of its intent."""
        operation = f"{len(self.events) + 1:016x}"
        which = name(step, launch)
        told = self.tell(action, Phase.INTENDED, at=at, by=by, checkpoint=which, operation=operation)
        self.tell(action, at=at + SECOND, by=by, checkpoint=which, operation=operation)
        return told
