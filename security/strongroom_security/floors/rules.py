"""What a floor refuses, whatever it is kept in: sentences and comparisons. It reads and writes nothing."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import unquote_to_bytes, urlsplit

from strongroom.canonical import Json
from strongroom.digest import Digest
from strongroom.errors import FormatError, RollbackError
from strongroom.manifest import CheckpointRef, Commit

__all__ = [
    "FORMAT", "FirstUses", "Remembered", "check_header", "check_position", "check_root", "check_root_to_lift",
    "check_version", "is_inside", "local_path", "tell_equivocation", "text_of", "words_of",
]  # fmt: skip

_LOG: Final = logging.getLogger("strongroom")

FORMAT: Final = "0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Remembered:
    """What a floor remembers, or a part of it.

    Attributes:
        roots: whose run each root was when it was seen last.
        runs: the highest checkpoint of each; several where two histories were written.
        trust: version and digest of the newest list of trusted keys, by what names its root keys.
    """

    roots: Mapping[str, str] = field(default_factory=dict)
    runs: Mapping[str, tuple[CheckpointRef, ...]] = field(default_factory=dict)
    trust: Mapping[str, tuple[int, Digest]] = field(default_factory=dict)


def words_of(launch: int, step: int, digest: Digest | str) -> str:
    return f"launch {launch}, step {step} ({digest})"


def check_root(floor: str, root: str, remembered: str | None, commit: Commit) -> None:
    if remembered is not None and remembered != commit.run:
        raise RollbackError(
            f"{root} holds run {commit.run}, and {floor} remembers that it was run {remembered}'s: the root "
            f"was exchanged for another run's. If it was given to another run on purpose, let the floor "
            f"forget the old one (strongroom floor forget {remembered}), or give accept_older=True once"
        )


def check_root_to_lift(floor: str, root: str, remembered: str | None, commit: Commit) -> None:
    if remembered is not None and remembered != commit.run:
        raise RollbackError(
            f"{floor} remembers {root} as run {remembered}'s, and so remembers nothing of run {commit.run} "
            f"there: until it does, an old copy of {commit.name} would not be told from the newest. If the "
            f"root was given to another run on purpose, let the floor forget the old one (strongroom floor "
            f"forget {remembered})"
        )


def check_position(floor: str, remembered: CheckpointRef | None, commit: Commit) -> None:
    if remembered is None:
        return
    there = (remembered.launch, remembered.step)
    found = (commit.name.launch, commit.name.step)
    seen = words_of(*there, remembered.manifest)
    this = words_of(*found, commit.manifest)
    if found < there:
        raise RollbackError(
            f"run {commit.run} goes back: {this} is what is newest here, and {floor} remembers {seen}. An "
            f"older copy of the root may have been put in place of the newer one; find out why before you "
            f"give accept_older=True, and give it only if going back is meant"
        )
    if found == there and not commit.manifest.matches(remembered.manifest):
        raise RollbackError(
            f"equivocation in run {commit.run}: {this} is another checkpoint than {seen}, which {floor} "
            f"remembers at the same position. Two histories of the run were written; find out which one is "
            f"the true one before you give accept_older=True, and give it only if this one is"
        )


def check_version(floor: str, remembered: tuple[int, Digest] | None, version: int, digest: Digest) -> None:
    if remembered is None:
        return
    newest, its_digest = remembered
    if version < newest:
        raise RollbackError(
            f"the list of trusted keys is version {version}, and {floor} remembers version {newest}: what "
            f"was revoked since would be trusted again. Get the newest list from whoever signs it"
        )
    if version == newest and not digest.matches(its_digest):
        raise RollbackError(
            f"equivocation: this version {version} of the list of trusted keys has digest {digest}, and the "
            f"one that {floor} remembers has {its_digest}. Two lists were signed with one number; ask "
            f"whoever signs them which one is the true one, and have the next version made of it"
        )


def tell_equivocation(floor: str, remembered: CheckpointRef, commit: Commit) -> None:
    _LOG.warning(
        "%s goes on remembering %s: %s of run %s has the same position",
        floor,
        words_of(remembered.launch, remembered.step, remembered.manifest),
        words_of(commit.name.launch, commit.name.step, commit.manifest),
        commit.run,
    )


class FirstUses:
    """Tells once a run that there is nothing to hold it against."""

    def __init__(self) -> None:
        self._told: set[str] = set()
        self._lock = threading.Lock()

    def tell(self, floor: str, run: str) -> None:
        with self._lock:
            if run in self._told:
                return
            self._told.add(run)
        _LOG.warning(
            "%s remembers nothing of run %s yet: what is there now is taken for the newest", floor, run
        )


def check_header(members: dict[str, Json], kind: str, others: set[str], what: str) -> None:
    expected = {"format", "kind", *others}
    if members.keys() != expected:
        odd = min(expected ^ members.keys())
        raise FormatError(f"{what}: the member {odd[:60]!r} is missing or unknown")
    if members["kind"] != kind:
        raise FormatError(f"{what}: 'kind' should be {kind!r}, found {members['kind']!r:.60}")
    if members["format"] != FORMAT:
        raise FormatError(
            f"{what} has format {members['format']!r:.40}, and this release reads {FORMAT}; use the release "
            f"that wrote it"
        )


def text_of(value: Json, what: str) -> str:
    if not isinstance(value, str):
        raise FormatError(f"{what}: expected a string, found {value!r:.60}")
    return value


def local_path(uri: str) -> Path | None:
    """The folder that a store's URI means on this machine; None where it is none."""
    if "://" not in uri:
        return Path(uri)
    parts = urlsplit(uri)
    return Path(os.fsdecode(unquote_to_bytes(parts.path))) if parts.scheme == "file" else None


def is_inside(path: Path, folder: Path) -> bool:
    # Links are followed: what counts is where the bytes lie.
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))
