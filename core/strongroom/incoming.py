"""Checkpoints on their way to a root from another tier, and how garbage collection and they keep apart.

A save ends by its deadline, so that an uncommitted folder of twice that age is dead. A copy from another tier
takes as long as it takes. So whoever copies announces it at the target: a small object, created once, under
``replication/incoming/<checkpoint>/``, and another one before that gets old. A copy commits only while its
newest announcement is younger than `VALID_S`, and garbage collection leaves alone what was announced within
twice that: the same rule as for a save and its deadline.

What garbage collection has judged dead may be taken up right then by a process that copies. So who removes a
folder marks it first, ``removing.json`` beside the announcements, then looks for announcements and for
``COMMIT``, then removes the folder, and the mark last. Who copies announces first, then looks for a mark,
then at what stands. On a store in which everybody sees what was created before, one of the two sees the
other. Where the announcement was there before the remover looked, it is seen and the folder stays. Where it
was not, the mark, older than that look, was there before the copier looked; it is seen, or has gone already,
and the folder before it, so that the copier relies on nothing that goes.

A checkpoint that was committed has announcements that were not taken back where that is denied, so that
retention does not look for them: mark, ``COMMIT``, folder. Who copies looks for a mark once more right before
its own ``COMMIT``; one that slips in between that look and the removal is removed as well.
`docs/format.md`, clause 16.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from strongroom import canonical
from strongroom.errors import (
    AccessDeniedError,
    ObjectNotFoundError,
    OutcomeUnknownError,
    ReplicationError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
)
from strongroom.layout import CheckpointName
from strongroom.manifest import FORMAT
from strongroom.stores.base import Store
from strongroom.stores.offers import Detailing

__all__ = [
    "FOLDER",
    "VALID_S",
    "Announcement",
    "RemovalMark",
    "announced",
    "forget",
    "is_announced",
    "is_being_removed",
    "take_back",
]

FOLDER: Final = "replication/incoming"

VALID_S: Final = 3600.0
"""How long after an announcement a copy may be committed."""

_RENEW_S: Final = VALID_S / 4
_VALIDITIES_UNTIL_DEAD: Final = 2
_DEAD_NS: Final = int(_VALIDITIES_UNTIL_DEAD * VALID_S) * 10**9
_NONCE_BYTES: Final = 8
_MARK: Final = "removing.json"
_MARK_TRIES: Final = 3


class Announcement:
    """That a checkpoint is being copied to a root; kept young by whoever copies, from any thread.

    Its age is the longer of two clocks': the monotonic one stands still while a machine is suspended, and the
    other may be set back.

    Args:
        store: the target's root. Creating is enough.
        monotonic: seconds, of a clock that cannot jump.
        wall_ns: the time, nanoseconds since the epoch.
        draw: random hex digits for ``n`` bytes.

    Attributes:
        name: of the checkpoint.
    """

    def __init__(
        self,
        store: Store,
        name: CheckpointName,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        wall_ns: Callable[[], int] = time.time_ns,
        draw: Callable[[int], str] = secrets.token_hex,
    ) -> None:
        self._store = store
        self.name = name
        self._monotonic = monotonic
        self._wall_ns = wall_ns
        self._draw = draw
        self._lock = threading.Lock()
        self._made_at: tuple[float, int] | None = None

    @property
    def is_too_old(self) -> bool:
        """Whether what was copied may have been taken for dead since it was last announced."""
        age = self._age_s()
        return age is not None and age >= VALID_S

    def renew(self) -> bool:
        """Announce it, unless that was done a short while ago; whether it was done now.

        Raises:
            ReplicationError: it was last announced so long ago that what was copied may be gone.
            StoreError: it could not be.
        """
        with self._lock:
            age = self._age_s()
            if age is not None and age < _RENEW_S:
                return False
            self._refuse_old()
            # Before it is sent: the store's time is later.
            began = self._monotonic(), self._wall_ns()
            document = canonical.with_self_digest({"format": FORMAT, "kind": "replication_incoming"})
            self._store.put_if_absent(f"{_folder(self.name)}/{self._draw(_NONCE_BYTES)}.json", document)
            # A request that took that long (the process was stopped within it) has landed at some time.
            self._refuse_old()
            self._made_at = began
            return True

    def check(self) -> None:
        """Raise ReplicationError where it is too old to commit by: what was copied may be going away."""
        if self._made_at is None:
            raise ReplicationError(
                f"the copy of {self.name} to {self._store.uri} was not announced, and is not committed",
                tiers=(self._store.uri,),
            )
        self._refuse_old()

    def refuse_marked(self) -> None:
        """Refuse to go on where the folder is being removed, as far as one may look.

        Asked before it is announced, so that this is not done in vain; after that, before anything that
        stands there is relied on; and right before the commit.

        Raises:
            StoreUnavailableError: it is being removed; other checkpoints can be copied meanwhile.
            StoreError: it could not be found out.
        """
        try:
            seen = _look(self._store, self.name)
        except AccessDeniedError:
            return
        # By the store's clock: what was announced last is at most so much older than now.
        now_ns = seen.announced_ns if self._made_at is not None else None
        if seen.is_being_removed(now_ns if now_ns is not None else self._wall_ns()):
            raise StoreUnavailableError(
                f"{self.name} is being removed at {self._store.uri} by garbage collection or retention; it "
                "is copied later, if it is still wanted"
            )

    def take_back(self) -> None:
        """Remove what was announced, where this identity may."""
        take_back(self._store, self.name)

    def _age_s(self) -> float | None:
        if self._made_at is None:
            return None
        monotonic, wall_ns = self._made_at
        return max(self._monotonic() - monotonic, (self._wall_ns() - wall_ns) / 10**9)

    def _refuse_old(self) -> None:
        if self.is_too_old:
            raise ReplicationError(
                f"the copy of {self.name} to {self._store.uri} was announced more than {VALID_S:g} s ago, so "
                "that it may have been taken for dead there; it is looked through once more",
                tiers=(self._store.uri,),
            )


class RemovalMark:
    """That a checkpoint's folder is being removed.

    Args:
        store: the root.
        now_ns: the time, by the clock that the store's times are from.
    """

    def __init__(
        self, store: Store, name: CheckpointName, *, now_ns: Callable[[], int] = time.time_ns
    ) -> None:
        self._store = store
        self._name = name
        self._now_ns = now_ns
        self._is_set = False

    def set(self) -> bool:
        """Mark it, where that is allowed; False: somebody else is removing it.

        A removal takes less than `VALID_S`: what was marked longer ago is marked anew.

        Raises:
            StoreError: it could not be.
        """
        key = f"{_folder(self._name)}/{_MARK}"
        document = canonical.with_self_digest({"format": FORMAT, "kind": "replication_removing"})
        for _ in range(_MARK_TRIES):
            try:
                self._is_set = self._store.put_if_absent(key, document)
            except (AccessDeniedError, StoreFullError):
                # Removing is what makes room. Who may delete and not create goes without a mark.
                return True
            except OutcomeUnknownError as error:
                raise StoreUnavailableError(
                    f"{key} may have been created in {self._store.uri} or not"
                ) from error
            if self._is_set:
                return True
            marked_ns = _look(self._store, self._name).marked_ns
            if marked_ns is None:
                continue
            if self._now_ns() - marked_ns <= VALID_S * 10**9:
                return False
            self._store.delete(key)
        return False

    def is_wanted(self) -> bool:
        """Whether the checkpoint is on its way here: then nothing may be removed.

        Raises:
            StoreError: it could not be found out.
        """
        seen = _look(self._store, self._name)
        if not self._is_set:
            return seen.is_announced(self._now_ns())
        # Where somebody has taken the mark away, who copies does not see it. It was made a moment ago.
        return seen.marked_ns is None or seen.is_announced(seen.marked_ns)

    def clear(self) -> None:
        """Take the mark away, where it is this one's; what cannot be removed gets old."""
        if not self._is_set:
            return
        self._is_set = False
        try:
            self._store.delete(f"{_folder(self._name)}/{_MARK}")
            _drop_empty(self._store, self._name)
        except StoreError:
            return


def take_back(store: Store, name: CheckpointName) -> None:
    """Remove the announcements of one checkpoint; it is committed, or gone. What cannot be removed stays."""
    folder = _folder(name)
    try:
        for member in store.list_names(folder):
            if member != _MARK:
                store.delete(f"{folder}/{member}")
        _drop_empty(store, name)
    except StoreError:
        return


def forget(store: Store, name: CheckpointName, now_ns: int, *, is_committed: bool) -> None:
    """Remove announcements of what is committed or was given up, and a mark that counts for nothing any more.

    Args:
        now_ns: as `is_announced` has it.

    Raises:
        StoreError: the store could not be asked.
    """
    seen = _look(store, name)
    if is_committed or not seen.is_announced(now_ns):
        take_back(store, name)
    if seen.marked_ns is not None and not seen.is_being_removed(now_ns):
        store.delete(f"{_folder(name)}/{_MARK}")
        _drop_empty(store, name)


def announced(store: Store) -> list[CheckpointName]:
    """Checkpoints that were announced at some time, or marked.

    Raises:
        StoreError: the store could not be asked.
    """
    found = map(CheckpointName.parse, store.list_names(FOLDER))
    return [name for name in found if name is not None]


def is_announced(store: Store, name: CheckpointName, now_ns: int) -> bool:
    """Whether a checkpoint may be on its way.

    Args:
        now_ns: the time, by the clock that the store's times are from.

    Raises:
        StoreError: the store could not be asked.
    """
    return _look(store, name).is_announced(now_ns)


def is_being_removed(store: Store, name: CheckpointName, now_ns: int) -> bool:
    """Whether somebody may be removing a checkpoint's folder; arguments and errors as `is_announced`."""
    return _look(store, name).is_being_removed(now_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """What stands in a checkpoint's folder of announcements, by the store's clock.

    Attributes:
        announced_ns: when it was last announced.
        marked_ns: when it was marked.
    """

    announced_ns: int | None
    marked_ns: int | None

    def is_announced(self, now_ns: int) -> bool:
        return self.announced_ns is not None and now_ns - self.announced_ns <= _DEAD_NS

    def is_being_removed(self, now_ns: int) -> bool:
        return self.marked_ns is not None and now_ns - self.marked_ns <= _DEAD_NS


def _look(store: Store, name: CheckpointName) -> _Seen:
    folder = _folder(name)
    times = _times(store, folder)
    marked_ns = times.pop(f"{folder}/{_MARK}", None)
    return _Seen(announced_ns=max(times.values(), default=None), marked_ns=marked_ns)


def _times(store: Store, folder: str) -> dict[str, int]:
    """When each object in a folder was written, by its key."""
    if isinstance(store, Detailing):
        return {key: found.modified_ns for key, found in store.details(folder).items()}
    times = {}
    for member in store.list_names(folder):
        try:
            times[f"{folder}/{member}"] = store.stat(f"{folder}/{member}").modified_ns
        except ObjectNotFoundError:
            continue
    return times


def _drop_empty(store: Store, name: CheckpointName) -> None:
    """Of a file system a folder is left, which holds nothing."""
    if not store.list_names(_folder(name)):
        store.delete_tree(_folder(name))


def _folder(name: CheckpointName) -> str:
    return f"{FOLDER}/{name.folder}"
