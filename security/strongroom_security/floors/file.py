"""A floor in one local file, for all runs of a machine. What it refuses, `floors.rules` says."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from strongroom import canonical
from strongroom.canonical import Bounds, Json
from strongroom.digest import Digest
from strongroom.errors import ConfigError, FormatError, StoreUnavailableError
from strongroom.manifest import CheckpointRef, Commit, check_run_id
from strongroom.stores.errnos import explaining
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
)

__all__ = ["FileFloor"]

_FILE_BOUNDS: Final = Bounds(length_bytes=16 << 20, depth=4, items=500_000)
"""Some 50,000 runs and their roots."""

_LOCK_S: Final = 30.0
"""A holder of the lock writes one small file."""
_LOCK_PAUSE_S: Final = 0.02


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
        check_header(members, "floor", {"roots", "runs", "trust"}, what)
        roots, runs, trust = members["roots"], members["runs"], members["trust"]
        if not (isinstance(roots, dict) and isinstance(runs, dict) and isinstance(trust, dict)):
            raise FormatError(f"{what}: 'roots', 'runs' and 'trust' should be objects")
        return cls(
            roots={root: check_run_id(text_of(run, what)) for root, run in roots.items()},
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
        self._first_uses = FirstUses()
        self._check_folder()

    @property
    def uri(self) -> str:
        return f"file:{self._path}"

    def __repr__(self) -> str:
        return f"FileFloor({str(self._path)!r})"

    def check_apart(self, root: str) -> None:
        """Raise ConfigError where the floor lies inside a root, whose writers could lower it."""
        folder = local_path(root)
        if folder is not None and is_inside(self._path, folder):
            raise ConfigError(
                f"the floor {self.uri} lies inside {root}, which it is to protect: whoever puts back an old "
                f"copy of the root puts back the floor, too. Keep it on another disk or machine"
            )

    def check(self, root: str, commit: Commit) -> None:
        self.check_apart(root)
        memory = self._read()
        check_root(self.uri, root, memory.roots.get(root), commit)
        if commit.run not in memory.runs:
            self._first_uses.tell(self.uri, commit.run)
        check_position(self.uri, memory.runs.get(commit.run), commit)

    def run_of(self, root: str) -> str | None:
        self.check_apart(root)
        return self._read().roots.get(root)

    def highest(self, run: str) -> CheckpointRef | None:
        return self._read().runs.get(run)

    def lift(self, root: str, commit: Commit) -> None:
        self.check_apart(root)
        memory = self._read()
        # Whoever may only read the floor can restore what it remembers.
        if self._lifted(memory, root, commit) != memory:
            with self._locked():
                memory = self._read()
                lifted = self._lifted(memory, root, commit)
                if lifted != memory:
                    self._write(lifted)
        highest = memory.runs.get(commit.run)
        if highest is not None and highest != commit.ref and _position(highest) == _position(commit.ref):
            tell_equivocation(self.uri, highest, commit)

    def check_trust(self, key: str, version: int, digest: Digest) -> None:
        """Hold a list of trusted keys, of which the signatures were verified, against what is remembered.

        Args:
            key: names the root keys that sign the list (`strongroom_security.trustlist.root_set_id`).
            digest: of what they signed.

        Raises:
            RollbackError: it is older than one that was seen, or another one of the same version.
            ConfigError: what is remembered cannot be read.
        """
        check_version(self.uri, self._read().trust.get(key), version, digest)

    def lift_trust(self, key: str, version: int, digest: Digest) -> None:
        """Remember a list of trusted keys; never goes down.

        Raises:
            RollbackError: as `check_trust`.
            ConfigError, StoreError: it cannot be remembered.
        """
        if self._remembers_list(self._read(), key, version, digest):
            return
        with self._locked():
            memory = self._read()
            if not self._remembers_list(memory, key, version, digest):
                self._write(replace(memory, trust={**memory.trust, key: (version, digest)}))

    def remembered(self) -> Remembered:
        """All that is remembered.

        Raises:
            ConfigError: it cannot be read.
        """
        memory = self._read()
        runs = {run: (ref,) for run, ref in memory.runs.items()}
        return Remembered(roots=memory.roots, runs=runs, trust=memory.trust)

    def forget(self, run: str) -> Remembered:
        """Remember nothing of a run any more, nor that roots were its; what was forgotten.

        Raises:
            ConfigError, StoreError: it cannot be forgotten.
        """
        with self._locked():
            memory = self._read()
            roots = {root: its_run for root, its_run in memory.roots.items() if its_run == run}
            runs = {each: ref for each, ref in memory.runs.items() if each == run}
            if roots or runs:
                self._write(
                    replace(
                        memory,
                        roots={root: each for root, each in memory.roots.items() if root not in roots},
                        runs={each: ref for each, ref in memory.runs.items() if each not in runs},
                    )
                )
        return Remembered(roots=roots, runs={each: (ref,) for each, ref in runs.items()})

    def _lifted(self, memory: _Memory, root: str, commit: Commit) -> _Memory:
        check_root_to_lift(self.uri, root, memory.roots.get(root), commit)
        highest = memory.runs.get(commit.run)
        if highest is None or _position(highest) < _position(commit.ref):
            highest = commit.ref
        return replace(
            memory, roots={**memory.roots, root: commit.run}, runs={**memory.runs, commit.run: highest}
        )

    def _remembers_list(self, memory: _Memory, key: str, version: int, digest: Digest) -> bool:
        check_version(self.uri, memory.trust.get(key), version, digest)
        return key in memory.trust and memory.trust[key][0] >= version

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


def _position(ref: CheckpointRef) -> tuple[int, int]:
    return ref.launch, ref.step


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


def _version(value: Json, what: str) -> tuple[int, Digest]:
    if not isinstance(value, dict) or value.keys() != {"digest", "version"}:
        raise FormatError(
            f"{what}: a trusted list should have a 'digest' and a 'version', found {value!r:.60}"
        )
    version = value["version"]
    if type(version) is not int or version < 1:
        raise FormatError(f"{what}: 'version' should be an integer from 1, found {version!r:.60}")
    digest = Digest.parse(text_of(value["digest"], what))
    if digest.algorithm != "sha256":
        raise FormatError(f"{what}: 'digest' should be a sha256 digest, found {digest}")
    return version, digest
