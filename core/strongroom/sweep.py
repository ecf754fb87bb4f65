"""Removing what retention lets go, and what died before it was committed.

`orphans` and `abandoned_uploads` decide, as `strongroom.retention.plan` does; `remove` carries out one
decision. A removal takes ``COMMIT`` first: a sweep that dies halfway leaves an uncommitted folder, never a
checkpoint with holes. And what was never committed is looked at once more right before it goes, behind a mark
that whoever copies to this root sees (`strongroom.incoming`). When all of this happens, and what is told of
it, is `strongroom.keeping`'s.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final, Literal

from strongroom import incoming
from strongroom.catalog import History
from strongroom.errors import AccessDeniedError, IntegrityError, StoreError
from strongroom.layout import COMMIT, CheckpointName
from strongroom.retention import Decision
from strongroom.stores.base import ObjectInfo, Store
from strongroom.stores.offers import Resuming, Unfinished, details_of

__all__ = [
    "DEADLINES_UNTIL_ORPHAN",
    "Kind",
    "Outcome",
    "Plan",
    "Removal",
    "abandoned_uploads",
    "forget_announcements",
    "of_checkpoints",
    "orphans",
    "remove",
]

DEADLINES_UNTIL_ORPHAN: Final = 2
"""An uncommitted folder is left alone until this many of its launch's deadlines have passed."""

_UNKNOWN_DEADLINE_S: Final = 86_400
"""For a folder whose launch record is lost: a day."""

Kind = Literal["checkpoint", "orphan", "upload"]
"""A committed checkpoint; a folder that is none (or none any more); an upload that nobody goes on with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """Something that is to go, and why.

    Attributes:
        name: the checkpoint that it is, or would have been, or is a part of.
        size_bytes: the room that it takes; None: nobody knows.
        upload: where it is one.
    """

    kind: Kind
    name: CheckpointName
    reason: str
    size_bytes: int | None = None
    upload: Unfinished | None = None

    @property
    def path(self) -> str:
        """Where it stands under the root: a folder, or the file that an upload would have made."""
        return self.name.folder if self.upload is None else self.upload.key


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What goes and what stays, each with its reason.

    Attributes:
        unknown: what could not be looked at, in words.
    """

    removals: tuple[Removal, ...] = ()
    kept: tuple[Decision, ...] = ()
    unknown: tuple[str, ...] = ()

    def __add__(self, other: Plan) -> Plan:
        return Plan(
            removals=self.removals + other.removals,
            kept=self.kept + other.kept,
            unknown=self.unknown + other.unknown,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a removal.

    Attributes:
        error: why it could not be done; None: it was.
        is_half_done: whether ``COMMIT`` went and the folder may not have gone. It is no checkpoint any more,
            and cannot be told from a save under way by looking.
    """

    removal: Removal
    error: str | None = None
    is_half_done: bool = False


def remove(
    store: Store, removal: Removal, *, marks: bool = True, now_ns: Callable[[], int] = time.time_ns
) -> Outcome:
    """Carry one removal out, as far as the store lets us.

    Args:
        marks: whether somebody may be copying to this root from another tier, who has to see what is going.
        now_ns: the time, by the clock that the store's times are from.
    """
    if removal.upload is not None:
        try:
            if isinstance(store, Resuming):
                store.abort_upload(removal.upload)
        except StoreError as error:
            return Outcome(removal=removal, error=str(error))
        return Outcome(removal=removal)
    mark = incoming.RemovalMark(store, removal.name, now_ns=now_ns)
    try:
        if marks and not mark.set():
            return Outcome(removal=removal, error="somebody else is removing it, and it was left alone")
    except StoreError as error:
        return Outcome(removal=removal, error=str(error))
    try:
        return _remove_folder(store, removal, mark if marks else None)
    finally:
        mark.clear()


def _remove_folder(store: Store, removal: Removal, mark: incoming.RemovalMark | None) -> Outcome:
    name = removal.name
    is_uncommitted = False
    try:
        if removal.kind == "checkpoint":
            store.delete(name.commit_key)
            is_uncommitted = True
        else:
            why = _why_alive(store, name, mark)
            if why is not None:
                return Outcome(removal=removal, error=f"it is {why}, and was left alone")
        store.delete_tree(name.folder)
        if removal.kind == "checkpoint" and mark is not None and COMMIT in store.list_names(name.folder):
            # Of a copy that had looked for a mark just before there was one, and committed right after.
            store.delete(name.commit_key)
            store.delete_tree(name.folder)
    except StoreError as error:
        return Outcome(removal=removal, error=str(error), is_half_done=is_uncommitted)
    return Outcome(removal=removal)


def _why_alive(store: Store, name: CheckpointName, mark: incoming.RemovalMark | None) -> str | None:
    """What a folder turns out to be, that was judged dead when the root was looked at; None: it is dead."""
    if mark is not None and mark.is_wanted():
        return "being copied here from another tier"
    if COMMIT in store.list_names(name.folder):
        # It came after the root was looked at, or something hid it then.
        return "committed after all"
    return None


def forget_announcements(store: Store, history: History, *, now_ns: int) -> None:
    """Remove what announced copies that are committed, or were given up, as far as the store lets us."""
    try:
        for name in incoming.announced(store):
            incoming.forget(store, name, now_ns, is_committed=name in history.commits)
    except StoreError:
        return


def of_checkpoints(decisions: Collection[Decision], history: History) -> Plan:
    """What `strongroom.retention.plan` decided, as a plan."""
    return Plan(
        removals=tuple(
            Removal(
                kind="checkpoint",
                name=decision.name,
                reason=decision.reason,
                size_bytes=history.commits[decision.name].size_bytes,
            )
            for decision in decisions
            if not decision.is_kept
        ),
        kept=tuple(decision for decision in decisions if decision.is_kept),
    )


def orphans(
    store: Store,
    history: History,
    *,
    launch: int,
    now_ns: int,
    in_flight: Collection[CheckpointName] = (),
    half_removed: Collection[CheckpointName] = (),
) -> Plan:
    """Which uncommitted folders can never be committed any more.

    Args:
        launch: the newest launch that may be judged: folders of later ones are left alone.
        now_ns: the time, by the clock that the store's times are from.
        in_flight: attempts that are known to be under way.
        half_removed: those of an `Outcome` that was half done: dead whatever their age.

    Raises:
        StoreError: an age could not be found out.
    """
    plan = Plan()
    for name in history.uncommitted:
        try:
            plan += _judge_folder(store, history, name, launch, now_ns, in_flight, half_removed)
        except IntegrityError as error:
            # A link, for one, which somebody has planted there.
            plan += _left(name, f"left alone: {error}")
    return plan


def abandoned_uploads(
    store: Store,
    history: History,
    *,
    launch: int,
    now_ns: int,
    in_flight: Collection[CheckpointName] = (),
) -> Plan:
    """Which unfinished uploads nobody can be going on with any more.

    An upload's own launch may have had a short deadline, and a later one may be going on with it to bring the
    checkpoint to another tier: the longer one of the two counts. Whose upload is ended all the same begins
    that file anew.

    Args:
        launch: the newest one.
        now_ns, in_flight: as `orphans` has them.

    Raises:
        StoreError: the store could not be asked.
    """
    if not isinstance(store, Resuming):
        return Plan()
    try:
        uploads = store.unfinished_uploads()
    except AccessDeniedError as error:
        # Not everybody may who may delete; a bucket's lifecycle can clear them too.
        return Plan(unknown=(f"whether there are unfinished uploads: {error}",))
    removals = []
    newest_s = history.launches[launch].deadline_s if launch in history.launches else 0
    for upload in uploads:
        name = CheckpointName.parse(upload.key.partition("/")[0])
        if name is None or name in in_flight:
            continue
        deadline_s = max(_deadline_s(history, name), newest_s)
        is_old = now_ns - upload.began_ns > DEADLINES_UNTIL_ORPHAN * deadline_s * 10**9
        if is_old and not incoming.is_announced(store, name, now_ns):
            reason = f"an upload that was begun and not finished, past twice the deadline of {deadline_s:g} s"
            removals.append(Removal(kind="upload", name=name, reason=reason, upload=upload))
    return Plan(removals=tuple(removals))


def _judge_folder(
    store: Store,
    history: History,
    name: CheckpointName,
    launch: int,
    now_ns: int,
    in_flight: Collection[CheckpointName],
    half_removed: Collection[CheckpointName],
) -> Plan:
    if name.launch > launch or name in in_flight:
        return _left(name, "not committed yet: a save is under way")
    if name in half_removed:
        return _dead(name, "what is left of a checkpoint whose removal was cut short")
    deadline_s = _deadline_s(history, name)

    def is_young(found: ObjectInfo) -> bool:
        # Written after the attempt began: where this is long ago, that is longer still.
        return now_ns - found.modified_ns <= DEADLINES_UNTIL_ORPHAN * deadline_s * 10**9

    size_bytes = None
    for found in details_of(store, name.folder):
        # The first mostly tells; all are asked before it goes, since another tier's copy is made at any time.
        if is_young(found):
            return _left(name, f"not committed, and perhaps yet to be: its deadline is {deadline_s:g} s")
        size_bytes = (size_bytes or 0) + found.size_bytes
    if incoming.is_announced(store, name, now_ns):
        return _left(name, "not committed yet: it is being copied here from another tier")
    if incoming.is_being_removed(store, name, now_ns):
        return _left(name, "somebody is removing it, or was until a short while ago")
    if size_bytes is not None:
        return _dead(name, f"never committed, and past twice its deadline of {deadline_s:g} s", size_bytes)
    if name.launch < launch:
        return _dead(name, "never committed, empty, and of a launch that was followed by another", 0)
    return _left(name, "not committed, and empty: a save may just have begun")


def _left(name: CheckpointName, reason: str) -> Plan:
    return Plan(kept=(Decision(name=name, is_kept=True, reason=reason),))


def _dead(name: CheckpointName, reason: str, size_bytes: int | None = None) -> Plan:
    return Plan(removals=(Removal(kind="orphan", name=name, reason=reason, size_bytes=size_bytes),))


def _deadline_s(history: History, name: CheckpointName) -> float:
    record = history.launches.get(name.launch)
    return record.deadline_s if record else _UNKNOWN_DEADLINE_S
