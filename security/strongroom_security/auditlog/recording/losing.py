"""What could not be recorded: counted where it happens, and told in the log once there is room for that."""

from __future__ import annotations

import threading
from collections import Counter

from strongroom.auditing import Act, Action, Outcome, Phase
from strongroom_security.auditlog.recording.sending import Teller

__all__ = ["NO_OPERATION", "Losses"]

NO_OPERATION = "0" * 16
"""The operation of what the log tells of itself."""


class Losses:
    """Counts what was lost, by run and kind; used by all threads, and by handlers of signals."""

    def __init__(self) -> None:
        self.total = 0
        self._lock = threading.RLock()
        self._untold: Counter[tuple[str | None, str]] = Counter()
        self._teller = Teller("the audit log has no room left for", "the audit log has room again")

    def __bool__(self) -> bool:
        return bool(self._untold)

    def add(self, run: str | None, kind: str, count: int = 1) -> None:
        with self._lock:
            self._untold[run, kind] += count
            self.total += count
        self._teller.failing(f"{kind}; what is lost is counted, and told in the log later")

    def again(self, act: Act) -> None:
        """What was to be told finds no room, either: it is told later."""
        with self._lock:
            for name, count in act.details.items():
                if name != "lost_events":
                    self._untold[act.run, name.removeprefix("lost_")] += int(count)

    def take(self) -> list[Act]:
        """The acts that tell of all that is not told yet; one for each run."""
        with self._lock:
            lost, self._untold = self._untold, Counter()
        acts = []
        for run in dict.fromkeys(run for run, _ in lost):
            kinds = {f"lost_{kind}": count for (each, kind), count in lost.items() if each == run}
            total = sum(kinds.values())
            acts.append(
                Act(
                    action=Action.AUDIT,
                    phase=Phase.OBSERVED,
                    outcome=Outcome.FAILURE,
                    operation=NO_OPERATION,
                    run=run,
                    reason=f"{total} events were lost: no room, a spool removed, or a failure",
                    details={"lost_events": total, **kinds},
                )
            )
        return acts

    def told(self) -> None:
        self._teller.working()
