"""A double of the auditor: keeps what it is told in a list, and refuses when it is told to."""

from __future__ import annotations

import threading
from collections.abc import Callable

from strongroom.auditing import Act, Action, Outcome, Phase
from strongroom.errors import AuditError
from strongroom.layout import CheckpointName

__all__ = ["RecordingAuditor"]


class RecordingAuditor:
    """Fills `strongroom.auditing.Auditor` for tests.

    Args:
        knows: what it says of whether a checkpoint's commit is on record; None: it cannot tell.

    Attributes:
        acts: what it was told, in order; what it refused is not among it.
        refuses: whether it accepts no intent.
        secured: for how many seconds it was given each time it was to see things out of the process.
        on_intent: called with each intent before it is accepted, by whoever intends.
    """

    is_on = True

    def __init__(self, *, knows: Callable[[str, CheckpointName], bool | None] | None = None) -> None:
        self.acts: list[Act] = []
        self.refuses = False
        self.secured: list[float] = []
        self.closed: list[float] = []
        self.on_intent: Callable[[Act], None] = lambda _: None
        self._knows = knows
        self._lock = threading.Lock()

    def record(self, act: Act) -> None:
        with self._lock:
            self.acts.append(act)

    def intend(self, act: Act) -> None:
        """As `Auditor.intend`.

        Raises:
            AuditError: it was told to refuse.
        """
        self.on_intent(act)
        if self.refuses:
            raise AuditError(f"{act.action.value} of {act.checkpoint} could not be put on record first")
        self.record(act)

    def secure(self, *, within_s: float) -> None:
        self.secured.append(within_s)

    def close(self, *, within_s: float) -> None:
        self.closed.append(within_s)

    def knows(self, run: str, checkpoint: CheckpointName) -> bool | None:
        return None if self._knows is None else self._knows(run, checkpoint)

    def of(self, action: Action, phase: Phase | None = None, outcome: Outcome | None = None) -> list[Act]:
        """What was told of an action, in order."""
        with self._lock:
            acts = list(self.acts)
        return [
            act
            for act in acts
            if act.action is action and phase in (None, act.phase) and outcome in (None, act.outcome)
        ]

    @property
    def told(self) -> list[tuple[str, str, str]]:
        """Action, phase and outcome of each record, in order."""
        with self._lock:
            return [(act.action.value, act.phase.value, act.outcome.value) for act in self.acts]
