"""Removing what retention lets go, and what died before it was committed.

`orphans` and `strongroom.retention.plan` decide; `remove_checkpoints` and `remove_orphans`
carry out. A removal takes ``COMMIT`` first: a sweep that dies halfway leaves an uncommitted
folder, never a checkpoint with holes. Nothing here raises into training: what cannot be
removed is told as an event and tried again after the next commit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from strongroom import layout
from strongroom.catalog import History
from strongroom.errors import StoreError
from strongroom.events import CheckpointRemoved, Emitter, OrphanRemoved, RemovalFailed
from strongroom.layout import CheckpointName
from strongroom.retention import Decision
from strongroom.stores.base import Store

__all__ = ["DEADLINES_UNTIL_ORPHAN", "orphans", "remove_checkpoints", "remove_orphans"]

DEADLINES_UNTIL_ORPHAN: Final = 2
"""An uncommitted folder is left alone until this many of its launch's deadlines have passed."""

_UNKNOWN_DEADLINE_S: Final = 86_400
"""For a folder whose launch record is lost: a day."""


def remove_checkpoints(
    store: Store, run: str, decisions: Iterable[Decision], emitter: Emitter
) -> list[CheckpointName]:
    """Remove every checkpoint that is not kept, oldest last in the given order.

    Returns:
        Those whose ``COMMIT`` went and whose folder may not have gone: no checkpoints any more,
        and not to be told from a save under way by looking.
    """
    half_removed = []
    for decision in decisions:
        if decision.is_kept:
            continue
        is_committed = True
        try:
            store.delete(decision.name.commit_key)
            is_committed = False
            store.delete_tree(decision.name.folder)
        except StoreError as error:
            if not is_committed:
                half_removed.append(decision.name)
            emitter.emit(RemovalFailed(run=run, folder=decision.name.folder, reason=str(error)))
        else:
            emitter.emit(
                CheckpointRemoved(
                    run=run, step=decision.name.step, launch=decision.name.launch, reason=decision.reason
                )
            )
    return half_removed


def orphans(
    store: Store,
    history: History,
    *,
    launch: int,
    in_flight: Collection[CheckpointName],
    now_ns: int,
    half_removed: Collection[CheckpointName] = (),
) -> list[CheckpointName]:
    """Uncommitted folders that can never be committed any more.

    Args:
        launch: the newest launch, whose writer asks: folders of later ones are left alone.
        in_flight: this writer's own attempts under way.
        now_ns: the time, by the clock that the store's times are from.
        half_removed: what `remove_checkpoints` returned before: dead whatever its age.

    Raises:
        StoreError: an age could not be found out.
    """
    found = []
    for name in history.uncommitted:
        if name.launch > launch or name in in_flight:
            continue
        if name in half_removed:
            found.append(name)
            continue
        record = history.launches.get(name.launch)
        deadline_s = record.deadline_s if record else _UNKNOWN_DEADLINE_S
        written_ns = _written_ns(store, name)
        if written_ns is None:
            is_dead = name.launch < launch
        else:
            is_dead = now_ns - written_ns > DEADLINES_UNTIL_ORPHAN * deadline_s * 10**9
        if is_dead:
            found.append(name)
    return found


def remove_orphans(store: Store, run: str, names: Iterable[CheckpointName], emitter: Emitter) -> None:
    """Remove the remains of saves that died."""
    for name in names:
        try:
            store.delete_tree(name.folder)
        except StoreError as error:
            emitter.emit(RemovalFailed(run=run, folder=name.folder, reason=str(error)))
        else:
            reason = "never committed, and past twice its deadline"
            emitter.emit(OrphanRemoved(run=run, folder=name.folder, reason=reason))


def _written_ns(store: Store, name: CheckpointName) -> int | None:
    """When some file of an attempt was written: never before the attempt began. None: it has no file."""
    folder = f"{name.folder}/{layout.DATA}"
    for file_name in store.list_names(folder):
        if not file_name.endswith("/"):
            return store.stat(f"{folder}/{file_name}").modified_ns
    return None
