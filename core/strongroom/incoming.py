"""Checkpoints on their way to a root from another tier, and how garbage collection knows of them.

A save ends by its deadline, so that an uncommitted folder of twice that age is dead. A copy from another tier
takes as long as it takes. So whoever copies announces it at the target: a small object, created once, under
``replication/incoming/<checkpoint>/``, and another one before that gets old. A copy commits only while its
newest announcement is younger than `VALID_S`, and garbage collection leaves alone what was announced within
twice that: the same rule as for a save and its deadline. `docs/format.md`, clause 16.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from typing import Final

from strongroom import canonical
from strongroom.errors import ReplicationError, StoreError
from strongroom.layout import CheckpointName
from strongroom.manifest import FORMAT
from strongroom.stores.base import Store
from strongroom.stores.offers import details_of

__all__ = ["FOLDER", "VALID_S", "Announcement", "announced", "is_announced", "take_back"]

FOLDER: Final = "replication/incoming"

VALID_S: Final = 3600.0
"""How long after an announcement a copy may be committed."""

_RENEW_S: Final = VALID_S / 4
_VALIDITIES_UNTIL_DEAD: Final = 2
_NONCE_BYTES: Final = 8


class Announcement:
    """That a checkpoint is being copied to a root; kept young by whoever copies, from any thread.

    Args:
        store: the target's root. Creating is enough.
        monotonic: seconds, of a clock that cannot jump.
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
        draw: Callable[[int], str] = secrets.token_hex,
    ) -> None:
        self._store = store
        self.name = name
        self._monotonic = monotonic
        self._draw = draw
        self._lock = threading.Lock()
        self._made_at: float | None = None

    def renew(self) -> bool:
        """Announce it, unless that was done a short while ago; whether it was done now.

        Raises:
            StoreError: it could not be.
        """
        with self._lock:
            if self._made_at is not None and self._monotonic() - self._made_at < _RENEW_S:
                return False
            # Before it is sent: the store's time is later.
            began = self._monotonic()
            document = canonical.with_self_digest({"format": FORMAT, "kind": "replication_incoming"})
            self._store.put_if_absent(f"{_folder(self.name)}/{self._draw(_NONCE_BYTES)}.json", document)
            self._made_at = began
            return True

    def check(self) -> None:
        """Raise ReplicationError where it is too old to commit by: what was copied may be going away."""
        if self._made_at is not None and self._monotonic() - self._made_at < VALID_S:
            return
        raise ReplicationError(
            f"the copy of {self.name} to {self._store.uri} was announced more than {VALID_S:g} s ago, so "
            "that it may have been taken for dead there; it is looked through once more",
            tiers=(self._store.uri,),
        )

    def take_back(self) -> None:
        """Remove what was announced, where this identity may."""
        take_back(self._store, self.name)


def take_back(store: Store, name: CheckpointName) -> None:
    """Remove the announcements of one checkpoint; it is committed, or gone. What cannot be removed stays."""
    try:
        store.delete_tree(_folder(name))
    except StoreError:
        return


def announced(store: Store) -> list[CheckpointName]:
    """Checkpoints that were announced at some time.

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
    return any(
        now_ns - made.modified_ns <= _VALIDITIES_UNTIL_DEAD * VALID_S * 10**9
        for made in details_of(store, _folder(name))
    )


def _folder(name: CheckpointName) -> str:
    return f"{FOLDER}/{name.folder}"
