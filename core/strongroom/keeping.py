"""Retention and orphans after each commit: decisions of `retention` and `sweep`, carried out."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Final

from strongroom import retention, sweep
from strongroom.catalog import Catalog
from strongroom.config import Clock
from strongroom.errors import IntegrityError, UnsupportedFormatError
from strongroom.events import Emitter, RemovalFailed
from strongroom.layout import CheckpointName
from strongroom.manifest import Commit
from strongroom.opened import open_checkpoint
from strongroom.retention import RetentionPolicy
from strongroom.signing import NO_GUARD, Guard
from strongroom.stores.base import Store

__all__ = ["Keeper"]

_LOG: Final = logging.getLogger("strongroom")


class Keeper:
    """Removes what a policy lets go of, and what dead saves left behind.

    Args:
        keep: the policy; None: nothing is ever removed.
        guard: where it demands signatures, a checkpoint without them counts for nothing and is left alone:
            whoever plants some must not make this remove the true ones.
    """

    def __init__(
        self,
        store: Store,
        catalog: Catalog,
        keep: RetentionPolicy | None,
        *,
        clock: Clock,
        emitter: Emitter,
        guard: Guard = NO_GUARD,
    ) -> None:
        self._store = store
        self._catalog = catalog
        self._keep = keep
        self._clock = clock
        self._emitter = emitter
        self._guard = guard
        self._judged: dict[Commit, bool] = {}
        self._half_removed: set[CheckpointName] = set()

    def retain(self, commit: Commit, verified: Collection[CheckpointName]) -> None:
        """Look at the root after a commit; never raises into training.

        Args:
            commit: what this writer has just committed.
            verified: checkpoints that it has restored, and so found whole.
        """
        if self._keep is None:
            return
        try:
            self._retain(self._keep, commit, verified)
        except Exception as error:  # noqa: BLE001
            # A store that cannot be listed, or a policy with a bug: the checkpoint stands all the same.
            self._emitter.emit(RemovalFailed(run=commit.run, folder="", reason=str(error)))

    def _retain(self, keep: RetentionPolicy, commit: Commit, verified: Collection[CheckpointName]) -> None:
        name = commit.name
        history = self._catalog.history()
        if max(history.launch_numbers) > name.launch:
            # A later writer slipped in between the fence and the commit: what stays is its to say.
            return
        there = set(history.commits.values())
        self._judged = {each: is_ours for each, is_ours in self._judged.items() if each in there}
        self._judged[commit] = True
        ranked = [other for other in history.line.ranked if self._counts(history.commits.get(other))]
        decisions = retention.plan(
            ranked, keep, verified=history.verified.union(verified), just_committed=name
        )
        half_removed = self._half_removed.intersection(history.uncommitted)
        self._half_removed = half_removed.union(
            sweep.remove_checkpoints(self._store, commit.run, decisions, self._emitter)
        )
        orphans = sweep.orphans(
            self._store,
            history,
            launch=name.launch,
            in_flight=(name,),
            now_ns=self._clock.now_ns(),
            half_removed=half_removed,
        )
        sweep.remove_orphans(self._store, commit.run, orphans, self._emitter)

    def _counts(self, commit: Commit | None) -> bool:
        """Whether a commit is a checkpoint of this run, as far as the policy asks: each is judged once."""
        if commit is None or self._guard.trust is None:
            return commit is not None
        if commit not in self._judged:
            try:
                open_checkpoint(self._store, commit, Guard(trust=self._guard.trust))
            except (IntegrityError, UnsupportedFormatError) as error:
                self._judged[commit] = False
                _LOG.warning("%s counts for nothing in retention, and is left alone: %s", commit.name, error)
            else:
                self._judged[commit] = True
        return self._judged[commit]
