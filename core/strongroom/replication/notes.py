"""What a root's own notes tell of its copies, to whoever looks at the root alone. No target is contacted."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from strongroom.layout import CheckpointName
from strongroom.replication.ledger import FOLDER, Ledger, Verified, read_note, target_folder
from strongroom.stores.base import Store

__all__ = ["Noted", "Notes", "known_targets", "read_notes"]

_TARGET: Final = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """What is noted of one target.

    Attributes:
        is_tier: whether a job copies there; else copies were made by hand, and none need follow.
        verified: what was verified there.
    """

    is_tier: bool
    verified: Mapping[CheckpointName, Verified]


@dataclass(frozen=True, slots=True, kw_only=True)
class Notes:
    """What is noted of all targets.

    Attributes:
        targets: by their URI.
        unreadable: folders of notes of which it cannot be told what target they are about.
        strange: the URIs of other roots whose notes lie here, as a plain copy of one brings them along.
    """

    targets: Mapping[str, Noted]
    unreadable: tuple[str, ...] = ()
    strange: tuple[str, ...] = ()

    @property
    def tiers(self) -> Mapping[str, Noted]:
        """Those targets to which a job copies."""
        return {uri: noted for uri, noted in self.targets.items() if noted.is_tier}


def read_notes(store: Store) -> Notes:
    """What a root notes of its copies.

    Raises:
        StoreError: the root could not be read.
    """
    targets: dict[str, Noted] = {}
    unreadable: list[str] = []
    strange: set[str] = set()
    for name in store.list_names(FOLDER):
        digits = name.removesuffix("/")
        if not _TARGET.fullmatch(digits):
            continue
        folder = f"{FOLDER}/{digits}"
        there = store.list_names(folder)
        if not there:
            # Of a process that died before it had noted anything, or of somebody who removed it all.
            continue
        is_tier = "tier.json" in there
        whose = {
            _whose(store, folder, file, kind)
            for file, kind in (("tier.json", "replication_tier"), ("target.json", "replication_target"))
            if file in there
        }
        if len(whose) != 1 or None in whose:
            unreadable.append(folder)
            continue
        for source, uri in filter(None, whose):
            if source == store.uri:
                verified = Ledger(store, uri, now_ms=lambda: 0).verified()
                targets[uri] = Noted(is_tier=is_tier, verified=verified)
            else:
                strange.add(source)
    return Notes(targets=targets, unreadable=tuple(sorted(unreadable)), strange=tuple(sorted(strange)))


def known_targets(store: Store) -> Mapping[str, Mapping[CheckpointName, Verified]]:
    """What was verified where, by the target's URI, as far as a root notes it.

    Raises:
        StoreError: the root could not be read.
    """
    return {uri: noted.verified for uri, noted in read_notes(store).targets.items()}


def _whose(store: Store, folder: str, file: str, kind: str) -> tuple[str, str] | None:
    """The source and the target that a document names; None: it cannot be told."""
    members = read_note(store, f"{folder}/{file}", kind) or {}
    source, uri = members.get("source"), members.get("uri")
    if not isinstance(source, str) or not isinstance(uri, str) or target_folder(uri) != folder:
        return None
    return source, uri
