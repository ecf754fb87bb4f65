"""Copying by hand: some checkpoints to one target, now, with every failure raised or told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import sleep

from strongroom.auditing import Action, Activity, Outcome, outcome_of
from strongroom.catalog import History
from strongroom.config import SYSTEM_CLOCK, Clock
from strongroom.errors import (
    CheckpointNotFoundError,
    IntegrityError,
    StrongroomError,
    UnsupportedFormatError,
)
from strongroom.events import Emitter
from strongroom.layout import CheckpointName
from strongroom.manifest import Commit
from strongroom.replication.copying import Copied
from strongroom.replication.courier import Courier, Target
from strongroom.signing import NO_GUARD, Guard
from strongroom.stores.base import Store

__all__ = ["Progress", "Report", "replicate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far the work is: every byte is sent once, and read back once."""

    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What became of the checkpoints that were asked for.

    Attributes:
        copied: what was sent, or stood there and was verified.
        standing: what stood there already, verified before.
        sidecars: signatures and keyrings that were brought to those.
        damaged: what could not be copied, with the reason.
    """

    run: str
    source: str
    target: str
    copied: tuple[Copied, ...]
    standing: tuple[Commit, ...]
    sidecars: int
    damaged: Mapping[CheckpointName, str]


def replicate(
    source: Store,
    target: Target,
    *,
    step: int | None = None,
    everything: bool = False,
    clock: Clock = SYSTEM_CLOCK,
    emitter: Emitter | None = None,
    guard: Guard = NO_GUARD,
    verify: bool = False,
    on_progress: Callable[[Progress], None] = lambda _: None,
    activity: Activity | None = None,
) -> Report:
    """Copy checkpoints to another tier, and verify them there.

    Args:
        source: where they are.
        target: where they are to be.
        step: which one; None: the newest.
        everything: all of them, as far as the target's policy would keep them.
        guard: whose launches count.
        verify: whether what was verified there before is read there once more, as far as it may be.
        on_progress: hears how far it is, from any thread, one at a time.
        activity: of which this is a part; None: it is one by itself.

    Raises:
        AuditError: what was to be copied could not be put on record first, and was not read.
        CheckpointNotFoundError: there is no such checkpoint.
        ConfigError: the target holds another run, or is the source.
        FencedError: another writer has taken a launch of the same number there.
        ReplicationError: another process copies to the target now.
        StoreError, OutcomeUnknownError: one of the two could not be read or written; once more goes on.
    """
    if activity is None:
        with Activity(guard.auditor, Action.REPLICATE, root=source.uri) as own:
            return replicate(
                source,
                target,
                step=step,
                everything=everything,
                clock=clock,
                emitter=emitter,
                guard=guard,
                verify=verify,
                on_progress=on_progress,
                activity=own,
            )
    activity.note(tier=target.store.uri)
    done = _Counting(on_progress)
    courier = Courier(
        source,
        target,
        clock=clock,
        emitter=emitter if emitter is not None else Emitter(),
        guard=guard,
        check=lambda: None,
        sleep=sleep,
        advance=done.advance,
    )
    outlook = courier.look(believes_notes=not verify)
    history = outlook.source
    if history.run is None:
        raise CheckpointNotFoundError(f"there is no run in {source.uri}: no run.json and no checkpoint")
    activity.about(run=history.run.run)
    chosen = _chosen(history, step, everything)
    damaged = {name: history.damaged[name] for name in chosen if name in history.damaged}
    damaged |= {name: why for name, why in outlook.plan.conflicts.items() if name in chosen}
    waiting = [commit for commit in outlook.plan.waiting if commit.name in chosen]
    standing = tuple(commit for commit in outlook.plan.standing if commit.name in chosen)
    done.total_bytes = sum(
        commit.size_bytes * (1 if commit in outlook.plan.to_verify else 2) for commit in waiting
    )
    courier.begin(outlook)
    copied = []
    for number, commit in enumerate(waiting):
        try:
            left = len(waiting) - number - 1
            activity.intend(commit.run, commit.name)
            copied.append(
                courier.deliver(commit, outlook, settle=partial(int, left), operation=activity.operation)
            )
        except (IntegrityError, UnsupportedFormatError) as error:
            damaged[commit.name] = str(error)
            _tell(activity, commit, error, courier.uri)
        except StrongroomError as error:
            _tell(activity, commit, error, courier.uri)
            raise
        else:
            activity.tell(
                Outcome.SUCCESS,
                checkpoint=commit.name,
                run=commit.run,
                details={
                    "sent_bytes": copied[-1].sent_bytes,
                    "size_bytes": commit.size_bytes,
                    "tier": courier.uri,
                },
            )
    if any(commit.keyring is not None for commit in outlook.plan.standing):
        # Keyrings that came later are brought, and for that they are read.
        activity.intend(history.run.run, None)
    return Report(
        run=history.run.run,
        source=source.uri,
        target=courier.uri,
        copied=tuple(copied),
        standing=standing,
        sidecars=courier.clear_up(outlook),
        damaged=damaged,
    )


def _tell(activity: Activity, commit: Commit, error: StrongroomError, tier: str) -> None:
    activity.tell(
        outcome_of(error),
        checkpoint=commit.name,
        run=commit.run,
        reason=str(error),
        details={"error": type(error).__name__, "tier": tier},
    )


def _chosen(history: History, step: int | None, everything: bool) -> Sequence[CheckpointName]:
    if everything:
        return history.line.ranked
    return [history.at_step(step) if step is not None else history.newest()]


class _Counting:
    def __init__(self, on_progress: Callable[[Progress], None]) -> None:
        self.total_bytes = 0
        self._done_bytes = 0
        self._lock = threading.Lock()
        self._on_progress = on_progress

    def advance(self, length_bytes: int) -> None:
        with self._lock:
            self._done_bytes += length_bytes
            self._on_progress(
                Progress(done_bytes=min(self._done_bytes, self.total_bytes), total_bytes=self.total_bytes)
            )
