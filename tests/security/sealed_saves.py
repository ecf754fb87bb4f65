"""What the tests of sealed runs share: policies, a state that can be told anywhere, a store that watches."""

from __future__ import annotations

import shutil
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from strongroom import Checkpointer, PerRank, layout
from strongroom.catalog import Catalog
from strongroom.layout import CheckpointName
from strongroom.manifest import Commit, Manifest
from strongroom.sealing import Sealing
from strongroom.stores.local import LocalStore
from strongroom_security import Seal, SecurityPolicy
from strongroom_security.recipients.file import create_key_file

__all__ = [
    "MIB",
    "SEGMENT",
    "Needles",
    "Root",
    "Watched",
    "assert_same",
    "file_policy",
    "is_shard",
    "policy_of",
    "sealing_of",
    "write_policy",
]

MIB = 1 << 20
SEGMENT = MIB - 32
"""What a segment holds: a MiB less its length field, nonce and tag."""


# Policies


def write_policy(folder: Path, *, name: str = "strongroom.toml", top: str = "", seal: str = "") -> Path:
    """A policy file with a key file beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "kek.key").exists():
        create_key_file(folder / "kek.key")
    path = folder / name
    path.write_text(f'{top}\n[seal]\nrecipients = ["file:kek.key"]\n{seal}\n')
    return path


def file_policy(folder: Path, **options: str) -> SecurityPolicy:
    """The policy of `write_policy`."""
    return SecurityPolicy.load(write_policy(folder, **options))


def policy_of(*recipients: Any, **options: Any) -> SecurityPolicy:
    """A policy in code."""
    return SecurityPolicy(seal=Seal(recipients=recipients, **options))


def sealing_of(policy: SecurityPolicy) -> Sealing:
    assert policy.sealing is not None
    return policy.sealing


# Values


def assert_same(found: Any, expected: Any) -> None:
    """Equal in type and value; tensors bit for bit."""
    if isinstance(expected, PerRank):
        expected = expected.value
    if isinstance(expected, torch.nn.Module):
        expected = dict(expected.state_dict())
        found = dict(found.state_dict() if isinstance(found, torch.nn.Module) else found)
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor)
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert raw(found) == raw(expected)
    elif isinstance(expected, Mapping):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert type(found) is type(expected)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert type(found) is type(expected)
        assert found == expected


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


class Needles:
    """Texts and runs of bytes to look for.

    Whatever run of 16 bytes a file shares with one of them holds 8 bytes whole that begin at a multiple
    of 8 in the needle; these are looked for at every position. Shorter needles are looked for whole.
    """

    def __init__(self, needles: Mapping[str, bytes]) -> None:
        self.names = set(needles)
        self._short = {name: needle for name, needle in needles.items() if len(needle) < 16}
        long = {name: needle for name, needle in needles.items() if len(needle) >= 16}
        self._labels = list(long)
        blocks = [np.frombuffer(needle, "<u8", count=len(needle) // 8) for needle in long.values()]
        owners = [np.full(len(block), number) for number, block in enumerate(blocks)]
        self._blocks = np.concatenate([np.empty(0, "<u8"), *blocks])
        self._owners = np.concatenate([np.empty(0, int), *owners])
        # Most positions are told apart by a few of their bits.
        self._may_be = np.zeros(1 << 24, bool)
        self._may_be[self._bits(self._blocks)] = True

    @staticmethod
    def _bits(blocks: Any) -> Any:
        return (blocks ^ (blocks >> np.uint64(29))) & np.uint64((1 << 24) - 1)

    def found_in(self, haystack: bytes) -> list[str]:
        """Those of which some run of 16 bytes occurs in it, and maybe some with a run of 8."""
        found = [name for name, needle in self._short.items() if needle in haystack]
        seen = []
        for start in range(min(8, len(haystack))):
            windows = np.frombuffer(haystack, "<u8", count=(len(haystack) - start) // 8, offset=start)
            seen.append(windows[self._may_be[self._bits(windows)]])
        if seen:
            owners = self._owners[np.isin(self._blocks, np.concatenate(seen))]
            found += [self._labels[number] for number in np.unique(owners)]
        return found


# Stores and roots


def is_shard(key: str) -> bool:
    return layout.parse_shard_path(key.rpartition("/")[2].removesuffix(layout.SEALED)) is not None


class Watched:
    """Any store, of which everything written is kept and everything read is counted.

    Attributes:
        written: by key, whether the object still stands or not.
        reads, read_bytes: how often, and how much, by key.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.written: dict[str, bytearray] = defaultdict(bytearray)
        self.reads: dict[str, int] = defaultdict(int)
        self.read_bytes: dict[str, int] = defaultdict(int)
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def open_writer(self, key: str, *, length_bytes: int) -> Any:
        return _WatchedWriter(self, key, self.inner.open_writer(key, length_bytes=length_bytes))

    def put(self, key: str, data: Any) -> None:
        self.note_written(key, data)
        self.inner.put(key, data)

    def put_if_absent(self, key: str, data: Any) -> bool:
        self.note_written(key, data)
        return bool(self.inner.put_if_absent(key, data))

    def read(self, key: str, *, limit_bytes: int) -> bytes:
        data: bytes = self.inner.read(key, limit_bytes=limit_bytes)
        self.note_read(key, len(data))
        return data

    def open_reader(self, key: str) -> Any:
        return _WatchedReader(self, key, self.inner.open_reader(key))

    def note_written(self, key: str, data: Any) -> None:
        with self._lock:
            self.written[key] += memoryview(data).cast("B")

    def note_read(self, key: str, size_bytes: int) -> None:
        with self._lock:
            self.reads[key] += 1
            self.read_bytes[key] += size_bytes

    @property
    def shard_bytes_read(self) -> int:
        """Of shards; whole or in parts."""
        return sum(count for key, count in self.read_bytes.items() if is_shard(key))

    def forget(self) -> None:
        self.written.clear()
        self.reads.clear()
        self.read_bytes.clear()


class _WatchedWriter:
    def __init__(self, store: Watched, key: str, inner: Any) -> None:
        self._store, self._key, self._inner = store, key, inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __enter__(self) -> _WatchedWriter:
        return self

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)

    def write(self, data: Any) -> None:
        self._store.note_written(self._key, data)
        self._inner.write(data)


class _WatchedReader:
    def __init__(self, store: Watched, key: str, inner: Any) -> None:
        self._store, self._key, self._inner = store, key, inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __enter__(self) -> _WatchedReader:
        return self

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)

    def read_into(self, offset_bytes: int, buffer: memoryview) -> int:
        filled = int(self._inner.read_into(offset_bytes, buffer))
        self._store.note_read(self._key, filled)
        return filled


@dataclass(frozen=True)
class Root:
    """A run on a disk, as someone sees it who can write there."""

    path: Path

    def copy(self, to: Path) -> Root:
        return Root(Path(shutil.copytree(self.path, to)))

    def folder(self, step: int, launch: int | None = None) -> Path:
        pattern = f"step-{step:012d}-{'*' if launch is None else f'{launch:04d}-*'}"
        (found,) = self.path.glob(pattern)
        return found

    def name(self, step: int, launch: int | None = None) -> CheckpointName:
        name = CheckpointName.parse(self.folder(step, launch).name)
        assert name is not None
        return name

    def file(self, step: int, path: str) -> Path:
        """A file by its place in a checkpoint's folder: ``COMMIT``, ``data/state.json.floe``."""
        return self.folder(step) / path

    def manifest(self, step: int) -> Manifest:
        return Manifest.decode(self.file(step, "data/MANIFEST.json").read_bytes(), "manifest")

    def commit(self, step: int) -> Commit:
        return Catalog(LocalStore(self.path)).history().commits[self.name(step)]

    def files(self) -> Iterable[Path]:
        return (path for path in sorted(self.path.rglob("*")) if path.is_file())

    def steps(self) -> list[int]:
        return [checkpoint.step for checkpoint in Checkpointer(self.path).checkpoints()]
