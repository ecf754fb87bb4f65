"""A floor in a store of its own, for several machines. What it refuses, `floors.rules` says."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable
from typing import Final, TypeVar

from strongroom import canonical
from strongroom.canonical import Bounds, Json
from strongroom.digest import Digest, sha256_of
from strongroom.errors import (
    ConfigError,
    FormatError,
    ObjectNotFoundError,
    StoreError,
    StoreUnavailableError,
)
from strongroom.manifest import CheckpointRef, Commit
from strongroom.stores.base import Store
from strongroom.stores.local import LocalStore
from strongroom_security.floors.rules import (
    FORMAT,
    FirstUses,
    Remembered,
    check_header,
    check_position,
    check_root,
    check_root_to_lift,
    check_version,
    is_inside,
    local_path,
    tell_equivocation,
    text_of,
    words_of,
)

__all__ = ["FolderFloor"]

_LOG: Final = logging.getLogger("strongroom")

_ENTRY_BOUNDS: Final = Bounds(length_bytes=16 << 10, depth=2, items=32)

_MAX_READ: Final = 8
"""Entries at one position that are read; two are one too many."""
_TRIES: Final = 64
_PAUSE_S: Final = 0.005
"""Before an object that was listed, and is gone, is listed anew: someone has lifted the floor meanwhile."""

_Found = TypeVar("_Found")

_POSITION = re.compile(r"([0-9]{6})-([0-9]{12})-([0-9a-f]{64})\.json")
_VERSION = re.compile(r"([0-9]{16})-([0-9a-f]{64})\.json")
_DIGEST = re.compile(r"[0-9a-f]{64}/")
_TURN = re.compile(r"([0-9]{6})\.json")


class FolderFloor:
    """A store of its own, for several machines at once: entries are created once, and the highest one counts.

    Each root and each run has a folder, named by a digest. What is below the highest entry is removed where
    this identity may remove; creating and listing is enough.

    Args:
        store: not the one that it protects.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._first_uses = FirstUses()
        self._check_folder()

    @property
    def uri(self) -> str:
        return f"dir:{self._store.root}" if isinstance(self._store, LocalStore) else self._store.uri

    def __repr__(self) -> str:
        return f"FolderFloor({self._store.uri!r})"

    def check_apart(self, root: str) -> None:
        """Raise ConfigError where the floor lies inside a root, whose writers could lower it."""
        own, folder = local_path(self._store.uri), local_path(root)
        if own is not None and folder is not None:
            lies_inside = is_inside(own, folder)
        else:
            lies_inside = f"{self._store.uri.rstrip('/')}/".startswith(f"{root.rstrip('/')}/")
        if lies_inside:
            raise ConfigError(
                f"the floor {self.uri} lies inside {root}, which it is to protect: whoever puts back an old "
                f"copy of the root puts back the floor, too. Keep it in a store with other writers"
            )

    def check(self, root: str, commit: Commit) -> None:
        self.check_apart(root)
        self._check_folder()
        check_root(self.uri, root, self.run_of(root), commit)
        highest = self._highest(commit.run)
        if not highest:
            self._first_uses.tell(self.uri, commit.run)
        # Where two stand at the highest position, one of them is another one than this.
        for remembered in highest:
            check_position(self.uri, remembered, commit)

    def run_of(self, root: str) -> str | None:
        self.check_apart(root)
        self._check_folder()
        return self._settled(lambda: self._root(root))[1]

    def highest(self, run: str) -> CheckpointRef | None:
        self._check_folder()
        return next(iter(self._highest(run)), None)

    def lift(self, root: str, commit: Commit) -> None:
        self.check_apart(root)
        self._check_folder()
        self._lift_root(root, commit)
        highest = self._highest(commit.run)
        found = (commit.name.launch, commit.name.step)
        for remembered in highest:
            there = (remembered.launch, remembered.step)
            if there > found:
                return
            if there == found:
                if remembered != commit.ref:
                    tell_equivocation(self.uri, remembered, commit)
                return
        folder = _run_folder(commit.run)
        name = f"{found[0]:06d}-{found[1]:012d}-{commit.manifest.value.hex()}.json"
        entry = {"checkpoint": commit.ref.to_json(), "run": commit.run}
        self._create(f"{folder}/{name}", "run", entry)
        self._remove_below(folder, name, _POSITION)

    def check_trust(self, key: str, version: int, digest: Digest) -> None:
        """As `FileFloor.check_trust`."""
        self._check_folder()
        for remembered in self._newest_lists(key):
            check_version(self.uri, remembered, version, digest)

    def lift_trust(self, key: str, version: int, digest: Digest) -> None:
        """As `FileFloor.lift_trust`."""
        self.check_trust(key, version, digest)
        if any(newest >= version for newest, _ in self._newest_lists(key)):
            return
        folder = _trust_folder(key)
        name = f"{version:016d}-{digest.value.hex()}.json"
        self._create(f"{folder}/{name}", "trust", {"digest": str(digest), "roots": key, "version": version})
        self._remove_below(folder, name, _VERSION)

    def remembered(self) -> Remembered:
        """As `FileFloor.remembered`."""
        self._check_folder()
        return Remembered(
            roots={root: run for root, (_, run) in self._known_roots().items()},
            runs=dict(self._settled(self._known_runs)),
            trust=dict(self._settled(self._known_lists)),
        )

    def forget(self, run: str) -> Remembered:
        """As `FileFloor.forget`."""
        self._check_folder()
        roots = {root: folder for root, (folder, its_run) in self._known_roots().items() if its_run == run}
        highest = tuple(self._highest(run))
        for folder in roots.values():
            self._store.delete_tree(folder)
        # Last, so that whoever is interrupted finds the run again, and can repeat it.
        if highest:
            self._store.delete_tree(_run_folder(run))
        return Remembered(roots=dict.fromkeys(roots, run), runs={run: highest} if highest else {})

    def _check_folder(self) -> None:
        # A store in general cannot tell an absent folder from an empty one; this one can.
        if isinstance(self._store, LocalStore) and not os.path.isdir(self._store.root):
            raise ConfigError(
                f"the floor {self.uri} cannot be kept: there is no such folder. Mount or make it; if it was "
                f"there before, bring back what was in it"
            )

    def _settled(self, look: Callable[[], _Found]) -> _Found:
        """What is found by listing and then reading, once nothing that was listed is gone when it is read."""
        for _ in range(_TRIES):
            try:
                return look()
            except ObjectNotFoundError:
                time.sleep(_PAUSE_S)
        raise StoreUnavailableError(
            f"{self.uri} changes again and again while it is read; see who lifts it so often, and try again"
        )

    def _root(self, root: str) -> tuple[int, str | None]:
        """Whose run a root was last, and by which entry; 0 and None where it is not known."""
        turn, found, run = self._last_turn(_root_folder(root))
        if run is not None and found != root:
            raise self._unusable(f"{_root_folder(root)}/{turn:06d}.json is about the root {found!r:.200}")
        return turn, run

    def _last_turn(self, folder: str) -> tuple[int, str | None, str | None]:
        """A root's last entry: its number, the root, and whose run it was; 0 and None where it has none."""
        turns = [int(match[1]) for match in map(_TURN.fullmatch, self._store.list_names(folder)) if match]
        if not turns:
            return 0, None, None
        key = f"{folder}/{max(turns):06d}.json"
        members = self._read(key, "root", {"root", "run"})
        return max(turns), self._text(members["root"], key), self._text(members["run"], key)

    def _lift_root(self, root: str, commit: Commit) -> None:
        for _ in range(_TRIES):
            turn, remembered = self._settled(lambda: self._root(root))
            check_root_to_lift(self.uri, root, remembered, commit)
            if remembered is not None:
                return
            key = f"{_root_folder(root)}/{turn + 1:06d}.json"
            if self._store.put_if_absent(key, _entry("root", {"root": root, "run": commit.run})):
                return
        raise StoreUnavailableError(
            f"{self.uri}: others say and forget at the same time whose run {root} is; see who uses that root"
        )

    def _known_roots(self) -> dict[str, tuple[str, str]]:
        """Every root that is known: its folder, and whose run it was last."""
        found = {}
        for folder in self._folders("roots"):
            _, root, run = self._settled(lambda folder=folder: self._last_turn(folder))  # type: ignore[misc]
            if root is None or run is None:
                continue
            if folder != _root_folder(root):
                raise self._unusable(f"{folder}/ is about the root {root!r:.200}")
            found[root] = (folder, run)
        return found

    def _highest(self, run: str) -> list[CheckpointRef]:
        """What stands at the highest position: one checkpoint, or several where the run has equivocated."""
        folder = _run_folder(run)
        found = []
        for key, its_run, ref in self._settled(lambda: self._positions(folder)):
            if its_run != run:
                raise self._unusable(f"{key} is about {words_of(ref.launch, ref.step, ref.manifest)}")
            found.append(ref)
        return found

    def _positions(self, folder: str) -> list[tuple[str, str, CheckpointRef]]:
        found = []
        for name in self._top(folder, _POSITION):
            key = f"{folder}/{name}"
            members = self._read(key, "run", {"checkpoint", "run"})
            ref = self._parsed(key, members["checkpoint"])
            if f"{ref.launch:06d}-{ref.step:012d}-{ref.manifest.value.hex()}.json" != name:
                raise self._unusable(f"{key} is about {words_of(ref.launch, ref.step, ref.manifest)}")
            found.append((key, self._text(members["run"], key), ref))
        return found

    def _known_runs(self) -> dict[str, tuple[CheckpointRef, ...]]:
        found = {}
        for folder in self._folders("runs"):
            for key, run, _ in self._positions(folder):
                if folder != _run_folder(run):
                    raise self._unusable(f"{key} is about run {run!r:.200}")
                found[run] = tuple(self._highest(run))
        return found

    def _known_lists(self) -> dict[str, tuple[int, Digest]]:
        found = {}
        for folder in self._folders("trust"):
            for version, digest in self._newest(folder):
                key = f"{folder}/{version:016d}-{digest.value.hex()}.json"
                roots = self._text(self._read(key, "trust", {"digest", "roots", "version"})["roots"], key)
                if folder != _trust_folder(roots):
                    raise self._unusable(f"{key} is about the root keys {roots!r:.200}")
                found[roots] = version, digest
        return found

    def _folders(self, kind: str) -> list[str]:
        return [f"{kind}/{name[:-1]}" for name in self._store.list_names(kind) if _DIGEST.fullmatch(name)]

    def _newest_lists(self, key: str) -> list[tuple[int, Digest]]:
        return self._newest(_trust_folder(key))

    def _newest(self, folder: str) -> list[tuple[int, Digest]]:
        names = [_VERSION.fullmatch(name) for name in self._top(folder, _VERSION)]
        return [(int(match[1]), Digest("sha256", bytes.fromhex(match[2]))) for match in names if match]

    def _top(self, folder: str, pattern: re.Pattern[str]) -> list[str]:
        """Names that share the highest position; numbers have a fixed width, so names sort as they do."""
        names = [match for match in map(pattern.fullmatch, self._store.list_names(folder)) if match]
        top = max((match[0][: match.start(pattern.groups)] for match in names), default="")
        return sorted(match[0] for match in names if match[0].startswith(top))[:_MAX_READ]

    def _create(self, key: str, kind: str, members: dict[str, Json]) -> None:
        # Whoever was faster has written the same bytes: the name says all that stands in them.
        self._store.put_if_absent(key, _entry(kind, members))

    def _remove_below(self, folder: str, name: str, pattern: re.Pattern[str]) -> None:
        """Remove what no longer counts; what stands highest is never removed, so a crash here is harmless."""
        match = pattern.fullmatch(name)
        position = name[: match.start(pattern.groups)] if match else ""
        try:
            for other in self._store.list_names(folder):
                found = pattern.fullmatch(other)
                if found and other[: found.start(pattern.groups)] < position:
                    self._store.delete(f"{folder}/{other}")
        except StoreError as error:
            _LOG.debug("%s: what is below the floor stays: %s", self.uri, error)

    def _read(self, key: str, kind: str, members: set[str]) -> dict[str, Json]:
        try:
            data = self._store.read(key, limit_bytes=_ENTRY_BOUNDS.length_bytes)
            found = canonical.check_self_digest(canonical.decode(data, key, _ENTRY_BOUNDS), key)
            check_header(found, f"floor-{kind}", members, key)
        except FormatError as error:
            raise self._unusable(str(error)) from error
        return found

    def _text(self, value: Json, key: str) -> str:
        try:
            return text_of(value, key)
        except FormatError as error:
            raise self._unusable(str(error)) from error

    def _parsed(self, key: str, value: Json) -> CheckpointRef:
        try:
            return CheckpointRef.from_json(value, key)
        except FormatError as error:
            raise self._unusable(str(error)) from error

    def _unusable(self, why: str) -> ConfigError:
        return ConfigError(
            f"the floor {self.uri} cannot be used: {why}. Bring that object back from a backup. Without one, "
            f"find out what happened to it, then remove it: the next restore then goes by what else is there"
        )


def _root_folder(root: str) -> str:
    return f"roots/{sha256_of(root.encode('utf-8', 'surrogateescape')).value.hex()}"


def _run_folder(run: str) -> str:
    # Not by its id, which may differ from another one's by case alone.
    return f"runs/{sha256_of(run.encode('utf-8')).value.hex()}"


def _trust_folder(key: str) -> str:
    return f"trust/{sha256_of(key.encode('utf-8')).value.hex()}"


def _entry(kind: str, members: dict[str, Json]) -> bytes:
    return canonical.with_self_digest({**members, "format": FORMAT, "kind": f"floor-{kind}"})
