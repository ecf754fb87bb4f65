"""One rank's side of replication: who copies, and how the others learn of it.

The coordinator alone copies, with what `strongroom.replication` has. Another rank looks for a checkpoint's
``COMMIT`` on each tier: it is written there last, once all else was read back.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from strongroom.catalog import Checkpoint, History
from strongroom.errors import AccessDeniedError, ConfigError, ReplicationError, WaitTimeoutError
from strongroom.events import CheckpointReplicated, Emitter, Event
from strongroom.layout import COMMIT, CheckpointName

if TYPE_CHECKING:
    from strongroom.config import Clock
    from strongroom.manifest import Commit
    from strongroom.ranks import Ranks
    from strongroom.replication import Replicator, TargetState
    from strongroom.signing import Guard
    from strongroom.stores.base import Store
    from strongroom.tiers import Tiers

__all__ = ["Replicating"]

_LOOKS_S: Final = (0.05, 0.2, 0.5, 1.0, 2.0)
"""Pauses between looks for a commit on another tier; the last one is repeated."""


class Replicating:
    """Copies what is committed on the first tier to those behind it, on the coordinator.

    Args:
        tiers: at least two.
        guard: what counts as a checkpoint in the retention of a tier.
        timeout_s: how long ranks wait for each other.
        on_arrival: called after each copy, on whichever thread has made it.
    """

    def __init__(
        self,
        tiers: Tiers,
        ranks: Ranks,
        *,
        emitter: Emitter,
        clock: Clock,
        guard: Guard,
        timeout_s: float,
        on_arrival: Callable[[], None],
    ) -> None:
        self._tiers = tiers
        self._timeout_s = timeout_s
        self._process_id = os.getpid()
        self._replicator: Replicator | None = None
        if ranks.is_coordinator:
            from strongroom.replication import Replicator, Target

            self._replicator = Replicator(
                tiers.first,
                [
                    Target(store=store, keep=tier.keep, max_bytes_per_second=tier.max_bytes_per_second)
                    for store, tier in zip(tiers.stores[1:], tiers.settings, strict=True)
                ],
                emitter=_Telling(emitter, on_arrival),
                clock=clock,
                guard=guard,
            )

    def begin(self, launch: int | None) -> None:
        """Take up what an earlier job has left, now that this one has opened the run.

        Args:
            launch: this writer's turn; a later one on a tier ends what is copied there. None: it has none
                yet.
        """
        if self._replicator is not None:
            self._replicator.begin(launch)

    def follow(self, commit: Commit) -> None:
        """Copy what was committed just now."""
        if self._replicator is not None:
            self._replicator.wake(commit)

    def check_fenced(self) -> None:
        """Raise what ended copying to a tier for good: another writer has taken the run over, for one."""
        ended = self._replicator.fenced if self._replicator is not None else None
        if ended is not None:
            raise type(ended)(str(ended)) from ended

    def held(self, history: History) -> Mapping[CheckpointName, str]:
        """Checkpoints of the first tier that must stay, since no tier behind it has them yet, and why."""
        return self._replicator.held(history) if self._replicator is not None else {}

    def wait(self, checkpoint: Checkpoint, timeout_s: float | None) -> None:
        """Return once a checkpoint stands on every tier; see `SaveHandle.replicated`.

        On other ranks than the coordinator no longer than the job's ranks wait for each other: why it does
        not come is known to the coordinator alone.
        """
        if self._process_id != os.getpid():
            raise ConfigError(
                f"copies are made by process {self._process_id}, of which this one is a fork; ask there"
            )
        name = CheckpointName(launch=checkpoint.launch, step=checkpoint.step, attempt=checkpoint.attempt)
        if self._replicator is not None:
            self._replicator.wait(name, timeout_s)
            return
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        ends_at = time.monotonic() + timeout_s
        looks = 0
        for store in self._tiers.stores[1:]:
            while not _stands(store, name.folder):
                pause_s = _LOOKS_S[min(looks, len(_LOOKS_S) - 1)]
                looks += 1
                if time.monotonic() + pause_s > ends_at:
                    raise WaitTimeoutError(
                        f"step {checkpoint.step} is not on {store.uri} after {timeout_s:g} s; rank 0 goes on "
                        "copying it in the background"
                    )
                time.sleep(pause_s)

    def state(self) -> tuple[TargetState, ...]:
        """How far each tier behind the first is; empty on other ranks than the coordinator."""
        return self._replicator.state() if self._replicator is not None else ()

    def close(self, timeout_s: float) -> None:
        """Wait for what is still to be copied, for seconds at most.

        Raises:
            ReplicationError: some of it was not; the next start goes on with it.
        """
        if self._replicator is not None:
            self._replicator.close(timeout_s)


def _stands(store: Store, folder: str) -> bool:
    try:
        return COMMIT in store.list_names(folder)
    except AccessDeniedError as error:
        raise ReplicationError(
            f"whether {folder} stands at {store.uri} cannot be seen from this rank, which may not look "
            "there; ask on rank 0, which copies",
            tiers=(store.uri,),
        ) from error


class _Telling(Emitter):
    """Hands events on, and says of each copy that has arrived that it has."""

    def __init__(self, emitter: Emitter, on_arrival: Callable[[], None]) -> None:
        super().__init__()
        self._emitter = emitter
        self._on_arrival = on_arrival

    def emit(self, event: Event) -> None:
        self._emitter.emit(event)
        if isinstance(event, CheckpointReplicated):
            self._on_arrival()
