"""What events come to on record: each event of a run as an `Act`, and the sink that hands them on.

`act_of` and `observed` are pure. A restore tells its own end (`strongroom.auditing.Activity`), and how full a
store is is nobody's act: those events come to nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any, Final

from strongroom import errors
from strongroom.auditing import (
    Act,
    Action,
    Auditor,
    Detail,
    Knowing,
    Outcome,
    Phase,
    listed,
    new_operation,
    outcome_of_kind,
)
from strongroom.catalog import History
from strongroom.events import (
    CheckpointCommitted,
    CheckpointRemoved,
    CheckpointReplicated,
    CheckpointSkipped,
    Event,
    LaunchClaimed,
    OrphanRemoved,
    RemovalFailed,
    RemovalStarted,
    ReplicationFailed,
    SaveFailed,
    SaveRefused,
    SaveSkipped,
    SaveStarted,
)
from strongroom.layout import CheckpointName
from strongroom.manifest import Commit
from strongroom.reasons import reason_in

__all__ = ["MAX_OBSERVED", "ActSink", "act_of", "observed", "outcome_named", "reconcile"]

MAX_OBSERVED: Final = 1_000
"""Commits of earlier launches that are told of one by one when a launch begins."""


def act_of(event: Event, root: str) -> Act | None:
    """What an event comes to; None: it is no act, or is told elsewhere.

    Args:
        root: of the run, where the event does not say which tier it is about.
    """
    make = _ACTS.get(type(event))
    return None if make is None else make(event, root)


def outcome_named(error: str) -> Outcome:
    """Whether an error, by the name of its class, is a refusal or a failure."""
    kind = getattr(errors, error, None) if error in errors.__all__ else None
    return Outcome.FAILURE if kind is None else outcome_of_kind(kind)


def _ms(seconds: float) -> int:
    # Records hold no fractions.
    return max(0, round(seconds * 1000))


def _launch(event: LaunchClaimed, root: str) -> Act:
    details: dict[str, Detail] = {"launch": event.launch, **listed("kms_request_id", event.requests)}
    if event.parent_step is not None:
        details["parent_step"] = event.parent_step
    return _done(Action.LAUNCH, event, root, details=details)


def _started(event: SaveStarted, root: str) -> Act:
    return Act(
        action=Action.SAVE,
        phase=Phase.STARTED,
        outcome=Outcome.UNKNOWN,
        operation=event.attempt,
        root=root,
        run=event.run,
        checkpoint=_name(event),
        details={
            "size_bytes": event.size_bytes,
            "stage_ms": _ms(event.stage_s),
            "wait_ms": _ms(event.wait_s),
        },
    )


def _committed(event: CheckpointCommitted, root: str) -> Act:
    details: dict[str, Detail] = {
        "background_ms": _ms(event.background_s),
        "manifest": event.manifest_digest,
        "size_bytes": event.size_bytes,
    }
    if event.signer:
        details["signer"] = event.signer
    details |= listed("kms_request_id", event.requests)
    return _done(Action.SAVE, event, root, checkpoint=_name(event), operation=event.attempt, details=details)


def _failed(event: SaveFailed, root: str) -> Act:
    return _done(
        Action.SAVE,
        event,
        root,
        checkpoint=_name(event),
        operation=event.attempt,
        outcome=outcome_named(event.error),
        reason=event.reason,
        details={"error": event.error, "failures": event.failures},
    )


def _refused(event: SaveRefused, root: str) -> Act:
    details: dict[str, Detail] = {"error": event.error}
    if event.step is not None:
        details["step"] = event.step
    return _done(
        Action.SAVE,
        event,
        root,
        outcome=outcome_named(event.error),
        reason=event.reason,
        details=details,
    )


def _skipped_save(event: SaveSkipped, root: str) -> Act:
    details: dict[str, Detail] = {"is_skipped": True, "step": event.step}
    return _done(Action.SAVE, event, root, reason=event.reason, details=details)


def _skipped(event: CheckpointSkipped, root: str) -> Act:
    return _done(
        Action.RESTORE,
        event,
        root,
        checkpoint=_name(event),
        outcome=outcome_named(event.error),
        reason=event.reason,
        details={"error": event.error, "is_skipped": True},
    )


def _removing(event: RemovalStarted, root: str) -> Act:
    return Act(
        action=Action.REMOVE,
        phase=Phase.STARTED,
        outcome=Outcome.UNKNOWN,
        operation=event.operation,
        root=event.root or root,
        run=event.run or None,
        checkpoint=_name_in(event.folder),
        path=_path_in(event.folder),
        reason=reason_in(event.reason),
    )


def _removed(event: CheckpointRemoved, root: str) -> Act:
    return _done(
        Action.REMOVE,
        event,
        event.root or root,
        checkpoint=_name(event),
        operation=event.operation or None,
        reason=event.reason,
        details={"kind": "checkpoint"},
    )


def _orphan(event: OrphanRemoved, root: str) -> Act:
    return _done(
        Action.REMOVE,
        event,
        event.root or root,
        checkpoint=_name_in(event.folder),
        path=_path_in(event.folder),
        operation=event.operation or None,
        reason=event.reason,
        details={"kind": "orphan"},
    )


def _unremoved(event: RemovalFailed, root: str) -> Act:
    return _done(
        Action.REMOVE,
        event,
        event.root or root,
        checkpoint=_name_in(event.folder),
        path=_path_in(event.folder),
        outcome=Outcome.FAILURE,
        operation=event.operation or None,
        reason=event.reason,
    )


def _replicated(event: CheckpointReplicated, root: str) -> Act:
    return _done(
        Action.REPLICATE,
        event,
        root,
        checkpoint=_name(event),
        operation=event.operation or None,
        details={
            "lag_ms": _ms(event.lag_s),
            "pending": event.pending,
            "sent_bytes": event.sent_bytes,
            "size_bytes": event.size_bytes,
            "tier": event.tier,
        },
    )


def _unreplicated(event: ReplicationFailed, root: str) -> Act:
    return _done(
        Action.REPLICATE,
        event,
        root,
        checkpoint=_name(event),
        operation=event.operation or None,
        outcome=outcome_named(event.error),
        reason=event.reason,
        details={
            "error": event.error,
            "failures": event.failures,
            "pending": event.pending,
            "tier": event.tier,
        },
    )


def _done(
    action: Action,
    event: Event,
    root: str,
    *,
    checkpoint: CheckpointName | None = None,
    path: str | None = None,
    operation: str | None = None,
    outcome: Outcome = Outcome.SUCCESS,
    reason: str | None = None,
    details: dict[str, Detail] | None = None,
) -> Act:
    return Act(
        action=action,
        phase=Phase.FINISHED,
        outcome=outcome,
        operation=operation or new_operation(),
        root=root,
        run=event.run or None,
        checkpoint=checkpoint,
        path=path,
        reason=None if reason is None else reason_in(reason),
        details=details or {},
    )


def _name(event: Any) -> CheckpointName:
    return CheckpointName(launch=event.launch, step=event.step, attempt=event.attempt)


def _name_in(path: str) -> CheckpointName | None:
    return CheckpointName.parse(path.partition("/")[0])


def _path_in(path: str) -> str | None:
    """The file of a checkpoint, where a path under the root names one."""
    return path.partition("/")[2] or None


_ACTS: Final[dict[type[Event], Callable[[Any, str], Act]]] = {
    CheckpointCommitted: _committed,
    CheckpointRemoved: _removed,
    CheckpointReplicated: _replicated,
    CheckpointSkipped: _skipped,
    LaunchClaimed: _launch,
    OrphanRemoved: _orphan,
    RemovalFailed: _unremoved,
    RemovalStarted: _removing,
    ReplicationFailed: _unreplicated,
    SaveFailed: _failed,
    SaveRefused: _refused,
    SaveSkipped: _skipped_save,
    SaveStarted: _started,
}


class ActSink:
    """An `EventSink` that records what events come to.

    Args:
        root: the URI of the run's root.

    Attributes:
        committed: checkpoints that were recorded as committed by this process.
    """

    def __init__(self, auditor: Auditor, root: str) -> None:
        self.committed: set[CheckpointName] = set()
        self._auditor = auditor
        self._root = root

    def emit(self, event: Event) -> None:
        act = act_of(event, self._root)
        if act is None:
            return
        self._auditor.record(act)
        if isinstance(event, CheckpointCommitted):
            self.committed.add(_name(event))

    def __repr__(self) -> str:
        return f"ActSink({self._root!r})"


def observed(
    history: History,
    root: str,
    is_known: Callable[[str, CheckpointName], bool | None],
    *,
    at_most: int = MAX_OBSERVED,
) -> Iterator[Act]:
    """Commits of which no record is known, the newest first: whoever made them may have died before its word.

    The oldest that is told says how many more there are.

    Args:
        is_known: whether a checkpoint's commit is on record; None: it cannot be told.
    """
    unknown = [
        commit
        for commit in sorted(history.commits.values(), key=lambda commit: -commit.committed_at_ms)
        if is_known(commit.run, commit.name) is not True
    ]
    told = unknown[:at_most]
    for number, commit in enumerate(told, start=1):
        yield _seen(commit, root, untold=len(unknown) - number if number == len(told) else 0)


def _seen(commit: Commit, root: str, *, untold: int) -> Act:
    details: dict[str, Detail] = {
        "committed_at_ms": commit.committed_at_ms,
        "manifest": str(commit.manifest),
        "size_bytes": commit.size_bytes,
    }
    if untold:
        details["untold"] = untold
    return Act(
        action=Action.SAVE,
        phase=Phase.OBSERVED,
        outcome=Outcome.SUCCESS,
        operation=commit.name.attempt,
        root=root,
        run=commit.run,
        checkpoint=commit.name,
        details=details,
    )


def reconcile(auditor: Auditor, history: History, root: str, *, own: Collection[CheckpointName] = ()) -> None:
    """Record the commits that were found as a launch began, and that are not on record as far as is known.

    Args:
        own: those that this process has recorded.
    """
    if not auditor.is_on:
        return

    def is_known(run: str, name: CheckpointName) -> bool | None:
        if name in own:
            return True
        if not isinstance(auditor, Knowing):
            return None
        try:
            return auditor.knows(run, name)
        except Exception:  # noqa: BLE001 - somebody else's code; told once more is better than not at all
            return None

    for act in observed(history, root, is_known):
        auditor.record(act)
