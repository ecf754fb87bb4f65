"""Sealed checkpoints made directly, without a training run: as many as a test wants, in little time."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from strongroom import layout
from strongroom.catalog import Catalog
from strongroom.digest import digest_of_bytes, sha256_of
from strongroom.errors import IntegrityError
from strongroom.layout import CheckpointName
from strongroom.manifest import SEGMENT_OVERHEAD_BYTES, Commit, FileRecord, Launch, Manifest, Run
from strongroom.stores.base import Store
from strongroom.stores.open import open_store
from strongroom_security.fields import Context
from strongroom_security.keyring import Keyring, WrapMode
from strongroom_security.recipients.base import Recipient
from strongroom_security.recipients.file import FileKey
from strongroom_security.sealing import EnvelopeSealing
from strongroom_security.secret import Secret

RUN = "run-7f"

_SEGMENT_BYTES = SEGMENT_OVERHEAD_BYTES + 8


@dataclass
class CountedKey:
    """A key service: what it wraps, a key in memory does; every call is counted, and may be made to fail.

    Attributes:
        counts: calls by their names; those that were answered with an error too.
        failing: raised by each call, of the names that it is given for.
    """

    name: str
    kind: str = "counted"
    counts: dict[str, int] = field(default_factory=dict)
    failing: dict[str, Exception] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # As a service would find it again: the same name is the same key in every process.
        self._key = FileKey(Secret(hashlib.sha256(self.name.encode()).digest()), uri=self.uri)

    @property
    def id(self) -> str:
        return f"{self.kind}-{self._key.id.removeprefix('file-')}"

    @property
    def uri(self) -> str:
        return f"{self.kind}:{self.name}"

    @property
    def calls(self) -> int:
        return sum(self.counts.values())

    def wrap(self, key: Secret, context: Context, *, within_s: float) -> bytes:
        self._count("wrap")
        return self._key.wrap(key, context, within_s=within_s)

    def unwrap(self, wrapped: bytes, context: Context, *, within_s: float) -> Secret:
        self._count("unwrap")
        return self._key.unwrap(wrapped, context, within_s=within_s)

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1  # tests that count exactly use one worker
        if what in self.failing:
            raise self.failing[what]


@dataclass
class Reencrypting(CountedKey):
    """A key service that wraps for another of its keys what it unwraps."""

    kind: str = "reenc"

    def rewrap(self, wrapped: bytes, context: Context, to: Recipient, *, within_s: float) -> bytes | None:
        if not isinstance(to, Reencrypting):
            return None
        self._count("rewrap")
        return to._key.wrap(self._key.unwrap(wrapped, context, within_s=within_s), context, within_s=within_s)


def make_root(
    root: Path,
    recipients: Sequence[Recipient],
    *,
    steps: int = 1,
    files: int = 3,
    wrap: WrapMode = "checkpoint",
) -> Store:
    """A run of so many sealed checkpoints, each of so many files of a few bytes."""
    store = open_store(root)
    store.put_if_absent(layout.RUN, Run(run=RUN, created_at_ms=1).encode())
    launch = Launch(run=RUN, launch=1, parent=None, created_at_ms=1, deadline_s=60)
    store.put_if_absent(layout.launch_key(1), launch.encode())
    sealing = EnvelopeSealing(recipients, wrap=wrap, clock=lambda: 1.0)
    for step in range(1, steps + 1):
        make_checkpoint(root, sealing, step, files)
    return store


def make_checkpoint(root: Path, sealing: EnvelopeSealing, step: int, files: int) -> None:
    # Plain files, since what a store does for durability takes minutes for thousands of them.
    name = CheckpointName(launch=1, step=step, attempt=f"{step:016x}")
    seal = sealing.seal_save(RUN, name, None)
    seal.begin_wrapping()
    folder = root / name.folder / layout.DATA
    folder.mkdir(parents=True)
    records = []
    for rank in range(files):
        path = layout.shard_path(rank, 0) + layout.SEALED
        sealer = seal.sealer(path)
        # As long as a file that holds eight bytes. Its one segment is none, which nothing here looks at.
        content = sealer.header + bytes(_SEGMENT_BYTES)
        _write(f"{folder}/{path}", content)
        records.append(
            FileRecord(
                path=path,
                size_bytes=len(content),
                digest=digest_of_bytes("sha256", content),
                header=sealer.header,
            )
        )
    manifest = Manifest(
        run=RUN,
        name=name,
        parent=None,
        created_at_ms=1,
        algorithm="sha256",
        world_size=1,
        files=tuple(records),
    )
    (folder / layout.MANIFEST).write_bytes(manifest.encode())
    keyring = seal.keyring([record.path for record in records], within_s=30.0)
    (root / name.folder / layout.KEYRINGS).mkdir()
    (root / layout.keyring_key(name, 1)).write_bytes(keyring)
    commit = Commit(
        run=RUN,
        name=name,
        manifest=sha256_of(manifest.encode()),
        size_bytes=manifest.size_bytes,
        committed_at_ms=1,
        keyring=sha256_of(keyring),
    )
    (root / name.commit_key).write_bytes(commit.encode())


def commits_of(store: Store) -> list[Commit]:
    """Of every checkpoint, oldest first."""
    commits = Catalog(store).history().commits
    return [commits[name] for name in sorted(commits)]


def keyrings_of(root: Path, step: int = 1) -> dict[int, Keyring]:
    """A checkpoint's generations that are whole, by their numbers."""
    (folder,) = root.glob(f"step-{step:012d}-*/keyring")
    found = {}
    for path in folder.glob("*.json"):
        with suppress(IntegrityError):
            found[int(path.stem)] = Keyring.decode(path.read_bytes(), path.name)
    return found


def what_is_sealed(root: Path) -> dict[str, tuple[bytes, int, int]]:
    """Bytes, time and inode of every file but the keyrings."""
    found = {}
    waiting = [str(root)]
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if entry.is_dir():
                    waiting += [entry.path] * (entry.name != layout.KEYRINGS)
                    continue
                status = entry.stat()
                found[entry.path] = (_read(entry.path), status.st_mtime_ns, status.st_ino)
    return found


# Without objects for files: of some tests these are 64,000.


def _write(path: str, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    os.write(descriptor, data)
    os.close(descriptor)


def _read(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY)
    data = os.read(descriptor, 1 << 24)
    os.close(descriptor)
    return data
