"""What happened, as frozen records, and the seam through which others listen.

The core emits; metrics and audit listen. A sink is called on the thread on which the event
happened, and must not block for long; what it raises is logged and goes no further, so that
watching a run can never break it. (An audit sink that must be able to refuse has its own
seam, not this one.)
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final, Protocol

__all__ = [
    "CheckpointCommitted",
    "CheckpointRemoved",
    "CheckpointReplicated",
    "CheckpointSkipped",
    "Emitter",
    "Event",
    "EventSink",
    "LaunchClaimed",
    "OrphanRemoved",
    "RemovalFailed",
    "RemovalStarted",
    "ReplicationFailed",
    "RestoreFinished",
    "SaveFailed",
    "SaveRefused",
    "SaveSkipped",
    "SaveStarted",
    "StoreMeasured",
]

_LOG: Final = logging.getLogger("strongroom")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened in one run."""

    run: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchClaimed(Event):
    """A writer's turn began; ``parent_step`` is None where it took up nothing.

    ``requests`` are the ids of what key services were asked to sign, as their own logs have them.
    """

    launch: int
    parent_step: int | None
    requests: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveStarted(Event):
    """State was staged; training goes on. Times are seconds."""

    step: int
    launch: int
    attempt: str
    size_bytes: int
    wait_s: float
    stage_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSkipped(Event):
    step: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCommitted(Event):
    """A checkpoint stands. ``background_s`` runs from the end of staging to the commit.

    ``requests`` are the ids of what key services were asked to wrap and to sign, as their own logs have them;
    ``signer`` is how the id of the key begins that signed it, or empty.
    """

    step: int
    launch: int
    attempt: str
    size_bytes: int
    background_s: float
    manifest_digest: str
    requests: tuple[str, ...] = ()
    signer: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRefused(Event):
    """A call of ``save`` raised, and nothing of it goes on; ``step`` is None where it was given none."""

    step: int | None
    reason: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFailed(Event):
    """A save did not commit. ``failures`` counts those of this checkpointer so far.

    ``error`` is the class of what ended it.
    """

    step: int
    launch: int
    attempt: str
    reason: str
    error: str
    failures: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSkipped(Event):
    """A restore found a checkpoint damaged and went on to the next older one."""

    step: int
    launch: int
    attempt: str
    reason: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreFinished(Event):
    step: int
    launch: int
    skipped: int
    size_bytes: int
    seconds: float
    rollback_protection: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovalStarted(Event):
    """A checkpoint, or what is left of a save, is about to be removed. Its end has the same ``operation``."""

    folder: str
    root: str
    reason: str
    operation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRemoved(Event):
    """Retention removed a committed checkpoint. ``root`` says from which tier."""

    step: int
    launch: int
    attempt: str
    root: str
    reason: str
    operation: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrphanRemoved(Event):
    """The remains of a save that never committed were removed."""

    folder: str
    root: str
    reason: str
    operation: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovalFailed(Event):
    """Something could not be removed; it is tried again after the next commit."""

    folder: str
    root: str
    reason: str
    operation: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointReplicated(Event):
    """A checkpoint stands on another tier, each of its files read there and found to be the same.

    ``lag_s`` runs from its commit on the first tier to this one; ``sent_bytes`` leaves out what an earlier
    process had sent already; ``pending`` checkpoints still wait for this tier. ``operation`` is that by which
    it was put on record that it would be read; empty: nobody keeps one.
    """

    step: int
    launch: int
    attempt: str
    tier: str
    size_bytes: int
    sent_bytes: int
    seconds: float
    lag_s: float
    pending: int
    operation: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicationFailed(Event):
    """A checkpoint could not be copied to a tier; it is tried again.

    ``lag_s`` is how long the oldest checkpoint that waits for the tier has waited; ``operation`` as of
    `CheckpointReplicated`.
    """

    step: int
    launch: int
    attempt: str
    tier: str
    reason: str
    error: str
    failures: int
    lag_s: float
    pending: int
    operation: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreMeasured(Event):
    """How full a tier is, after a commit; ``used_fraction`` lies between 0 and 1."""

    tier: str
    total_bytes: int
    free_bytes: int
    used_fraction: float


class EventSink(Protocol):
    """Listens to events."""

    def emit(self, event: Event) -> None: ...


class Emitter:
    """Hands each event to the log and to every sink."""

    def __init__(self, sinks: Sequence[EventSink] = ()) -> None:
        self._sinks = tuple(sinks)

    def emit(self, event: Event) -> None:
        level = _LEVELS.get(type(event), logging.INFO)
        if _LOG.isEnabledFor(level):
            fields = asdict(event)
            words = " ".join(f"{name}={value!r}" for name, value in fields.items())
            _LOG.log(level, "%s %s", type(event).__name__, words, extra={"strongroom": fields})
        for sink in self._sinks:
            try:
                sink.emit(event)
            except Exception:  # noqa: BLE001 - whatever a listener does, a save goes on
                _LOG.exception("the event sink %r failed on %s", sink, type(event).__name__)


_LEVELS: Final = {
    SaveStarted: logging.DEBUG,
    RemovalStarted: logging.DEBUG,
    CheckpointRemoved: logging.DEBUG,
    SaveFailed: logging.ERROR,
    # Whoever called it hears of it anyway.
    SaveRefused: logging.DEBUG,
    CheckpointSkipped: logging.WARNING,
    RemovalFailed: logging.WARNING,
    ReplicationFailed: logging.WARNING,
    StoreMeasured: logging.DEBUG,
}
