"""Sealed checkpoints for the tests, made by the seam alone; and a keeper of keys that does as it is told."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from strongroom import layout
from strongroom.digest import digest_of_bytes, sha256_of
from strongroom.errors import KeyServiceError
from strongroom.layout import CheckpointName
from strongroom.manifest import Commit, FileRecord, Manifest
from strongroom.sealing import Opener, SaveSeal, Sealing, Unlocked
from strongroom.stores.base import Store
from strongroom_security.fields import Context
from strongroom_security.recipients.base import opaque_id
from strongroom_security.recipients.file import FileKey
from strongroom_security.secret import Secret

__all__ = ["FILES", "NAME", "RUN", "Keeper", "contents", "opened", "save", "write_files"]

RUN = "run-7f"
NAME = CheckpointName(launch=3, step=1200, attempt="0123456789abcdef")
FILES: Mapping[str, bytes] = {
    "00000-00.safetensors": b"weights " * 200_000,
    "00000-01.safetensors": b"",
    "index.safetensors": b"index",
    "state.json": b"{}",
}


class Keeper:
    """A key service in this process: it wraps and unwraps, counts, and can be slow, silent or deny.

    Attributes:
        wraps, unwraps: the contexts of the calls that it was asked to make, in order.
        does: called before each answer; what it raises is the answer.
    """

    kind = "keeper"

    def __init__(self, name: str = "one", *, does: Callable[[], None] = lambda: None) -> None:
        self._key = FileKey(Secret(name.encode().ljust(32, b"\0")), uri="file:inside")
        self.id = opaque_id(self.kind, name.encode())
        self.uri = f"keeper:{name}"
        self.does = does
        self.wraps: list[Context] = []
        self.unwraps: list[Context] = []

    def wrap(self, key: Secret, context: Context, *, within_s: float) -> bytes:
        self.wraps.append(context)
        self.does()
        return self._key.wrap(key, context, within_s=within_s)

    def unwrap(self, wrapped: bytes, context: Context, *, within_s: float) -> Secret:
        self.unwraps.append(context)
        self.does()
        return self._key.unwrap(wrapped, context, within_s=within_s)

    def hang(self) -> threading.Event:
        """Answer nothing until the event is set."""
        gate = threading.Event()

        def wait() -> None:
            gate.wait(30)
            raise KeyServiceError(f"{self.uri} was let go")

        self.does = wait
        return gate


def write_files(
    store: Store, seal: SaveSeal, name: CheckpointName = NAME, files: Mapping[str, bytes] = FILES
) -> list[FileRecord]:
    """Seal files and store them."""
    records = []
    for plain, data in files.items():
        path = plain + layout.SEALED
        sealer = seal.sealer(path)
        header = sealer.header
        sealed = b"".join(map(bytes, sealer.seal([data], length_bytes=len(data))))
        store.put(layout.data_key(name, path), sealed)
        records.append(
            FileRecord(
                path=path, size_bytes=len(sealed), digest=digest_of_bytes("blake3", sealed), header=header
            )
        )
    return records


def save(
    store: Store,
    sealing: Sealing,
    *,
    run: str = RUN,
    name: CheckpointName = NAME,
    files: Mapping[str, bytes] = FILES,
) -> tuple[Commit, Manifest]:
    """Write a whole sealed checkpoint, as one rank."""
    seal = sealing.seal_save(run, name, None)
    seal.begin_wrapping()
    records = sorted(write_files(store, seal, name, files), key=lambda record: record.path)
    manifest = Manifest(
        run=run,
        name=name,
        parent=None,
        created_at_ms=int(time.time() * 1000),
        algorithm="blake3",
        world_size=1,
        files=tuple(records),
    )
    store.put(layout.data_key(name, layout.MANIFEST), manifest.encode())
    keyring = seal.keyring([record.path for record in records], within_s=20.0)
    store.put(layout.keyring_key(name, 1), keyring)
    commit = Commit(
        run=run,
        name=name,
        manifest=sha256_of(manifest.encode()),
        size_bytes=manifest.size_bytes,
        committed_at_ms=manifest.created_at_ms,
        keyring=sha256_of(keyring),
    )
    store.put_if_absent(name.commit_key, commit.encode())
    return commit, manifest


def opened(opener: Opener, stored: bytes) -> bytes:
    """What a sealed file holds."""
    plain = bytearray(opener.size_bytes)
    count = max(1, -(-opener.size_bytes // opener.segment_bytes))
    start, end = opener.stored_range(0, count)
    assert end == len(stored)
    assert opener.open_into(0, memoryview(stored)[start:end], memoryview(plain)) == len(plain)
    return bytes(plain)


def contents(store: Store, unlocked: Unlocked, manifest: Manifest) -> dict[str, bytes]:
    """What every file of a checkpoint holds."""
    return {
        record.plain_path: opened(
            unlocked.opener(record),
            store.read(layout.data_key(manifest.name, record.path), limit_bytes=record.size_bytes),
        )
        for record in manifest.files
    }
