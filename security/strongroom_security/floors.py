"""Floors: what remembers, outside of a root, the highest checkpoint that was verified of each run.

A signature says who made a checkpoint, not that it is the newest: whoever can write to a root can put back
the whole of yesterday's. A floor is where such a writer cannot reach: a file of this machine (`FileFloor`),
or a store of its own, for several machines (`FolderFloor`). Both also remember the newest list of trusted
keys.

A position is (launch, step). What is lower than the highest that was seen is refused, and so is another
checkpoint at the same position: two histories were written where there should be one. What has become of a
floor that cannot be read is never guessed.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final
from urllib.parse import unquote_to_bytes, urlsplit

from strongroom import canonical
from strongroom.canonical import Bounds, Json
from strongroom.digest import Digest, sha256_of
from strongroom.errors import (
    ConfigError,
    FormatError,
    ObjectNotFoundError,
    RollbackError,
    StoreError,
    StoreUnavailableError,
)
from strongroom.manifest import CheckpointRef, Commit, check_run_id
from strongroom.stores.base import Store
from strongroom.stores.errnos import explaining
from strongroom.stores.local import LocalStore
from strongroom.stores.open import open_store

__all__ = ["FORMAT", "FileFloor", "FolderFloor", "open_floor"]

_LOG: Final = logging.getLogger("strongroom")

FORMAT: Final = "0.1"

_FILE_BOUNDS: Final = Bounds(length_bytes=16 << 20, depth=4, items=500_000)
"""Some 50,000 runs and their roots."""
_ENTRY_BOUNDS: Final = Bounds(length_bytes=16 << 10, depth=2, items=32)

_LOCK_S: Final = 30.0
"""A holder of the lock writes one small file."""
_LOCK_PAUSE_S: Final = 0.02

_MAX_READ: Final = 8
"""Entries at one position that are read; two are one too many."""
_TRIES: Final = 8

_KINDS: Final = ("file:PATH", "dir:PATH")


def open_floor(text: str, *, base: Path) -> FileFloor | FolderFloor:
    """The floor that a policy names: ``file:PATH`` or ``dir:PATH``.

    Args:
        text: as in the policy.
        base: what relative paths are relative to.

    Raises:
        ConfigError: no such kind, or what is named cannot be a floor.
    """
    kind, _, rest = text.partition(":")
    if kind == "file" and rest:
        return FileFloor(base / rest)
    if kind == "dir" and rest:
        return FolderFloor(open_store(base / rest))
    raise ConfigError(f"{text[:100]!r} names no floor; expected one of {', '.join(_KINDS)}")


# ----------------------------------------------------------------------------------------------- judgement


def _words(launch: int, step: int, digest: Digest | str) -> str:
    return f"launch {launch}, step {step} ({digest})"


def _check_root(floor: str, root: str, remembered: str | None, commit: Commit) -> None:
    if remembered is not None and remembered != commit.run:
        raise RollbackError(
            f"{root} holds run {commit.run}, and {floor} remembers that it was run {remembered}'s: the root "
            f"was exchanged for another run's. Give accept_older=True only if the root was given to another "
            f"run on purpose"
        )


def _check_position(floor: str, remembered: CheckpointRef | None, commit: Commit) -> None:
    if remembered is None:
        return
    there = (remembered.launch, remembered.step)
    found = (commit.name.launch, commit.name.step)
    seen = _words(*there, remembered.manifest)
    this = _words(*found, commit.manifest)
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


def _check_version(floor: str, remembered: tuple[int, Digest] | None, version: int, digest: Digest) -> None:
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


def _tell_equivocation(floor: str, remembered: CheckpointRef, commit: Commit) -> None:
    _LOG.warning(
        "%s goes on remembering %s: %s of run %s has the same position",
        floor,
        _words(remembered.launch, remembered.step, remembered.manifest),
        _words(commit.name.launch, commit.name.step, commit.manifest),
        commit.run,
    )


class _FirstUses:
    """Tells once a run that there is nothing to hold it against."""

    def __init__(self) -> None:
        self._told: set[str] = set()
        self._lock = threading.Lock()

    def tell(self, floor: str, run: str) -> None:
        with self._lock:
            if run in self._told:
                return
            self._told.add(run)
        _LOG.info("%s remembers nothing of run %s yet: what is there now is taken for the newest", floor, run)


# ---------------------------------------------------------------------------------------------- one file


@dataclass(frozen=True, slots=True, kw_only=True)
class _Memory:
    """What a floor's file says."""

    roots: dict[str, str] = field(default_factory=dict)
    runs: dict[str, CheckpointRef] = field(default_factory=dict)
    trust: dict[str, tuple[int, Digest]] = field(default_factory=dict)

    def encode(self, what: str) -> bytes:
        members: dict[str, Json] = {
            "format": FORMAT,
            "kind": "floor",
            "roots": dict(self.roots),
            "runs": {run: ref.to_json() for run, ref in self.runs.items()},
            "trust": {
                key: {"digest": str(digest), "version": version}
                for key, (version, digest) in self.trust.items()
            },
        }
        canonical.encode(members, what=what, bounds=_FILE_BOUNDS)
        return canonical.with_self_digest(members)

    @classmethod
    def decode(cls, data: bytes, what: str) -> _Memory:
        members = canonical.check_self_digest(canonical.decode(data, what, _FILE_BOUNDS), what)
        _check_header(members, "floor", {"roots", "runs", "trust"}, what)
        roots, runs, trust = members["roots"], members["runs"], members["trust"]
        if not (isinstance(roots, dict) and isinstance(runs, dict) and isinstance(trust, dict)):
            raise FormatError(f"{what}: 'roots', 'runs' and 'trust' should be objects")
        return cls(
            roots={root: check_run_id(_text(run, what)) for root, run in roots.items()},
            runs={check_run_id(run): CheckpointRef.from_json(ref, what) for run, ref in runs.items()},
            trust={key: _version(value, what) for key, value in trust.items()},
        )


class FileFloor:
    """One local file for all runs of a machine.

    Several processes may use it at once. An absent file in a folder that is there is a first use.

    Args:
        path: of the file. Beside it stands a lock with the ending ``.lock``.

    Raises:
        ConfigError: the folder is absent: a disk that is not mounted is no first use.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(os.path.abspath(path))
        self._first_uses = _FirstUses()
        self._check_folder()

    @property
    def uri(self) -> str:
        return f"file:{self._path}"

    def __repr__(self) -> str:
        return f"FileFloor({str(self._path)!r})"

    def check_apart(self, root: str) -> None:
        """Raise ConfigError where the floor lies inside a root, whose writers could lower it."""
        folder = _local_path(root)
        if folder is not None and _is_inside(self._path, folder):
            raise ConfigError(
                f"the floor {self.uri} lies inside {root}, which it is to protect: whoever puts back an old "
                f"copy of the root puts back the floor, too. Keep it on another disk or machine"
            )

    def check(self, root: str, commit: Commit) -> None:
        self.check_apart(root)
        memory = self._read()
        _check_root(self.uri, root, memory.roots.get(root), commit)
        if commit.run not in memory.runs:
            self._first_uses.tell(self.uri, commit.run)
        _check_position(self.uri, memory.runs.get(commit.run), commit)

    def lift(self, root: str, commit: Commit) -> None:
        self.check_apart(root)
        with self._locked():
            memory = self._read()
            lifted = replace(
                memory,
                roots={**memory.roots, root: commit.run},
                runs={**memory.runs, commit.run: self._higher(memory.runs.get(commit.run), commit)},
            )
            if lifted != memory:
                self._write(lifted)

    def check_trust(self, key: str, version: int, digest: Digest) -> None:
        """Hold a list of trusted keys, of which the signatures were verified, against what is remembered.

        Args:
            key: names the root keys that sign the list (`strongroom_security.trustlist.root_set_id`).
            digest: of what they signed.

        Raises:
            RollbackError: it is older than one that was seen, or another one of the same version.
            ConfigError: what is remembered cannot be read.
        """
        _check_version(self.uri, self._read().trust.get(key), version, digest)

    def lift_trust(self, key: str, version: int, digest: Digest) -> None:
        """Remember a list of trusted keys; never goes down.

        Raises:
            RollbackError: as `check_trust`.
            ConfigError, StoreError: it cannot be remembered.
        """
        with self._locked():
            memory = self._read()
            _check_version(self.uri, memory.trust.get(key), version, digest)
            if key not in memory.trust or memory.trust[key][0] < version:
                self._write(replace(memory, trust={**memory.trust, key: (version, digest)}))

    def forget(self, run: str) -> None:
        """Remember nothing of a run any more: it has gone back on purpose, and goes on from there.

        Raises:
            ConfigError, StoreError: it cannot be forgotten.
        """
        with self._locked():
            memory = self._read()
            self._write(
                replace(
                    memory,
                    roots={root: its_run for root, its_run in memory.roots.items() if its_run != run},
                    runs={each: ref for each, ref in memory.runs.items() if each != run},
                )
            )

    def _higher(self, remembered: CheckpointRef | None, commit: Commit) -> CheckpointRef:
        found = (commit.name.launch, commit.name.step)
        if remembered is None or (remembered.launch, remembered.step) < found:
            return commit.ref
        if (remembered.launch, remembered.step) == found and remembered != commit.ref:
            _tell_equivocation(self.uri, remembered, commit)
        return remembered

    def _check_folder(self) -> None:
        folder = self._path.parent
        if not folder.is_dir():
            raise ConfigError(
                f"the floor {self.uri} cannot be kept: there is no folder {folder}. Mount or make it; if it "
                f"was there before, bring back the floor that was in it"
            )

    def _read(self) -> _Memory:
        self._check_folder()
        data = self._bytes()
        if data is None:
            return _Memory()
        try:
            return _Memory.decode(data, self.uri)
        except FormatError as error:
            raise ConfigError(
                f"the floor cannot be used: {error}. Bring it back from a backup. Without one, find out what "
                f"happened to it, then move it away: the next restore then takes what it finds for the newest"
            ) from error

    def _bytes(self) -> bytes | None:
        try:
            # Without O_NONBLOCK a named pipe would be waited for until somebody writes to it.
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._unreadable(error.strerror or str(error)) from error
        try:
            mode = os.fstat(descriptor).st_mode
            if not stat.S_ISREG(mode):
                raise self._unreadable("it is not a file")
            if mode & stat.S_IWOTH:
                raise self._unreadable(
                    "anyone may write it, and who does can lower it; take that right away (chmod o-w)"
                )
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                data = file.read(_FILE_BOUNDS.length_bytes + 1)
        except OSError as error:
            raise self._unreadable(error.strerror or str(error)) from error
        finally:
            os.close(descriptor)
        return data

    def _unreadable(self, why: str) -> ConfigError:
        return ConfigError(
            f"the floor {self.uri} cannot be read: {why}. Nothing is restored without it; let this user read "
            f"it, or name another floor"
        )

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock of all processes that change the file, for as long as the block runs."""
        self._check_folder()
        path = f"{self._path}.lock"
        with explaining(path, "lock"):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            deadline = time.monotonic() + _LOCK_S
            while not _try_lock(descriptor, path):
                if time.monotonic() > deadline:
                    raise StoreUnavailableError(
                        f"the floor {self.uri} is being changed by another process for {_LOCK_S:.0f} s "
                        f"already; see who holds {path}, and try again"
                    )
                time.sleep(_LOCK_PAUSE_S)
            yield
        finally:
            os.close(descriptor)

    def _write(self, memory: _Memory) -> None:
        try:
            data = memory.encode(self.uri)
        except FormatError as error:
            raise ConfigError(
                f"the floor is full: {error}. Forget runs that are over, or keep a floor for each team"
            ) from error
        temporary = self._path.with_name(f".{self._path.name}.{secrets.token_hex(8)}.tmp")
        try:
            with explaining(str(self._path), "write"):
                with open(temporary, "xb", opener=_private) as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, self._path)
                # A rename is not durable without it.
                folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    os.fsync(folder)
                finally:
                    os.close(folder)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _try_lock(descriptor: int, path: str) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise ConfigError(
            f"the floor's lock {path} cannot be taken ({error.strerror or error}); keep the floor on a file "
            f"system that has locks"
        ) from error
    return True


# ------------------------------------------------------------------------------------------------- a store

_POSITION = re.compile(r"([0-9]{6})-([0-9]{12})-([0-9a-f]{64})\.json")
_VERSION = re.compile(r"([0-9]{16})-([0-9a-f]{64})\.json")
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
        self._first_uses = _FirstUses()
        self._check_folder()

    @property
    def uri(self) -> str:
        return f"dir:{self._store.root}" if isinstance(self._store, LocalStore) else self._store.uri

    def __repr__(self) -> str:
        return f"FolderFloor({self._store.uri!r})"

    def check_apart(self, root: str) -> None:
        """Raise ConfigError where the floor lies inside a root, whose writers could lower it."""
        own, folder = _local_path(self._store.uri), _local_path(root)
        if own is not None and folder is not None:
            is_inside = _is_inside(own, folder)
        else:
            is_inside = f"{self._store.uri.rstrip('/')}/".startswith(f"{root.rstrip('/')}/")
        if is_inside:
            raise ConfigError(
                f"the floor {self.uri} lies inside {root}, which it is to protect: whoever puts back an old "
                f"copy of the root puts back the floor, too. Keep it in a store with other writers"
            )

    def check(self, root: str, commit: Commit) -> None:
        self.check_apart(root)
        self._check_folder()
        _check_root(self.uri, root, self._root(root)[1], commit)
        highest = self._highest(commit.run)
        if not highest:
            self._first_uses.tell(self.uri, commit.run)
        # Where two stand at the highest position, one of them is another one than this.
        for remembered in highest:
            _check_position(self.uri, remembered, commit)

    def lift(self, root: str, commit: Commit) -> None:
        self.check_apart(root)
        self._check_folder()
        self._lift_root(root, commit.run)
        highest = self._highest(commit.run)
        found = (commit.name.launch, commit.name.step)
        for remembered in highest:
            there = (remembered.launch, remembered.step)
            if there > found:
                return
            if there == found:
                if remembered != commit.ref:
                    _tell_equivocation(self.uri, remembered, commit)
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
            _check_version(self.uri, remembered, version, digest)

    def lift_trust(self, key: str, version: int, digest: Digest) -> None:
        """As `FileFloor.lift_trust`."""
        self.check_trust(key, version, digest)
        if any(newest >= version for newest, _ in self._newest_lists(key)):
            return
        folder = _trust_folder(key)
        name = f"{version:016d}-{digest.value.hex()}.json"
        self._create(f"{folder}/{name}", "trust", {"digest": str(digest), "roots": key, "version": version})
        self._remove_below(folder, name, _VERSION)

    def forget(self, run: str) -> None:
        """As `FileFloor.forget`. Roots go on being known as the run's."""
        self._check_folder()
        self._store.delete_tree(_run_folder(check_run_id(run)))

    def _check_folder(self) -> None:
        # A store in general cannot tell an absent folder from an empty one; this one can.
        if isinstance(self._store, LocalStore) and not os.path.isdir(self._store.root):
            raise ConfigError(
                f"the floor {self.uri} cannot be kept: there is no such folder. Mount or make it; if it was "
                f"there before, bring back what was in it"
            )

    def _root(self, root: str) -> tuple[int, str | None]:
        """Whose run a root was last, and by which entry; 0 and None where it is not known."""
        folder = _root_folder(root)
        turns = [int(match[1]) for match in map(_TURN.fullmatch, self._store.list_names(folder)) if match]
        if not turns:
            return 0, None
        key = f"{folder}/{max(turns):06d}.json"
        members = self._read(key, "root", {"root", "run"})
        if members["root"] != root:
            raise self._unusable(f"{key} is about the root {members['root']!r:.200}")
        return max(turns), _text(members["run"], key)

    def _lift_root(self, root: str, run: str) -> None:
        for _ in range(_TRIES):
            turn, remembered = self._root(root)
            if remembered == run:
                return
            key = f"{_root_folder(root)}/{turn + 1:06d}.json"
            if self._store.put_if_absent(key, _entry("root", {"root": root, "run": run})):
                return
        raise StoreUnavailableError(
            f"{self.uri}: others say at the same time whose run {root} is, and differ; see who uses that root"
        )

    def _highest(self, run: str) -> list[CheckpointRef]:
        """What stands at the highest position: one checkpoint, or several where the run has equivocated."""
        folder = _run_folder(run)
        found = []
        for name in self._top(folder, _POSITION):
            key = f"{folder}/{name}"
            members = self._read(key, "run", {"checkpoint", "run"})
            ref = self._parsed(key, members["checkpoint"])
            if (members["run"], f"{ref.launch:06d}-{ref.step:012d}-{ref.manifest.value.hex()}.json") != (
                run,
                name,
            ):
                raise self._unusable(f"{key} is about {_words(ref.launch, ref.step, ref.manifest)}")
            found.append(ref)
        return found

    def _newest_lists(self, key: str) -> list[tuple[int, Digest]]:
        names = [_VERSION.fullmatch(name) for name in self._top(_trust_folder(key), _VERSION)]
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
            _check_header(found, f"floor-{kind}", members, key)
        except FormatError as error:
            raise self._unusable(str(error)) from error
        except ObjectNotFoundError as error:
            # Someone has lifted the floor between the listing and this; asking again tells.
            raise StoreUnavailableError(
                f"{self.uri} changed while it was read: {error}; try again"
            ) from error
        return found

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


# --------------------------------------------------------------------------------------------------- shared


def _entry(kind: str, members: dict[str, Json]) -> bytes:
    return canonical.with_self_digest({**members, "format": FORMAT, "kind": f"floor-{kind}"})


def _check_header(members: dict[str, Json], kind: str, others: set[str], what: str) -> None:
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


def _version(value: Json, what: str) -> tuple[int, Digest]:
    if not isinstance(value, dict) or value.keys() != {"digest", "version"}:
        raise FormatError(
            f"{what}: a trusted list should have a 'digest' and a 'version', found {value!r:.60}"
        )
    version = value["version"]
    if type(version) is not int or version < 1:
        raise FormatError(f"{what}: 'version' should be an integer from 1, found {version!r:.60}")
    digest = Digest.parse(_text(value["digest"], what))
    if digest.algorithm != "sha256":
        raise FormatError(f"{what}: 'digest' should be a sha256 digest, found {digest}")
    return version, digest


def _text(value: Json, what: str) -> str:
    if not isinstance(value, str):
        raise FormatError(f"{what}: expected a string, found {value!r:.60}")
    return value


def _local_path(uri: str) -> Path | None:
    """The folder that a store's URI means on this machine; None where it is none."""
    if "://" not in uri:
        return Path(uri)
    parts = urlsplit(uri)
    return Path(os.fsdecode(unquote_to_bytes(parts.path))) if parts.scheme == "file" else None


def _is_inside(path: Path, folder: Path) -> bool:
    # Links are followed: what counts is where the bytes lie.
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))
