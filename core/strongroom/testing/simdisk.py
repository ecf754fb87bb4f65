"""Every disk that a power cut could leave behind a local store.

A disk keeps what an fsync covered and loses any part of the rest. `SimDisk` stands in for a
local store's system calls: it makes them, on a real folder, and keeps a journal. From that it
rebuilds each disk that could be found after the power comes back, for recovery to run on::

    disk = SimDisk(tmp_path)
    store = LocalStore(disk.folder / "run", calls=disk)
    save(store)
    disk.promise("saved")                       # the call returned: from here on it must hold
    for state in disk.crash_states():
        check(state.store("run"), must_hold="saved" in state.promised)

The model is POSIX's, and as weak as it allows:

- Bytes written to a file are safe once that file was fsynced. Until then each write is lost,
  kept, or kept in its first or second half, on its own; a hole that this leaves reads as zeros.
- A name (made, linked, renamed, removed) is safe once its folder was fsynced: fsync of the file
  says nothing about its name, and fsync of a folder nothing about the folder's own name. Until
  then each change in a folder is lost or kept on its own; a rename is one change.
- What lay in the folder when the `SimDisk` was built is safe.

Every prefix of the journal is looked at, and of what is unsafe then every subset up to
`exhaustive_below` items. Above that, for each new item: alone, with all, with all but one, with
each single other, and with ``samples`` random sets, from ``seed``.

What the caller had been *promised* is part of a state: one and the same disk can be right before a
save returned and wrong after.
"""

from __future__ import annotations

import itertools
import os
import random
import stat
import threading
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from strongroom.stores.calls import OsCalls
from strongroom.stores.memory import MemoryStore

__all__ = ["CrashState", "SimDisk"]

_TOP: Final = 0
"""The node of the folder that the disk began with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CrashState:
    """One disk that a power cut could leave.

    Attributes:
        files: contents by path below the disk's folder, hidden names included.
        folders: every folder's path.
        promised: what `SimDisk.promise` had been told before the power went.
        calls: how many changing calls had been made by then.
    """

    files: dict[str, bytes]
    folders: tuple[str, ...]
    promised: tuple[Hashable, ...]
    calls: int

    def store(self, under: str = "") -> MemoryStore:
        """What recovery finds, as a store in memory, rooted at a folder of the disk."""
        start = f"{under}/" if under else ""
        store = MemoryStore(f"power-cut-after-{self.calls}-calls")
        store.plant(
            {path.removeprefix(start): data for path, data in self.files.items() if path.startswith(start)}
        )
        return store

    def write_to(self, folder: str | os.PathLike[str]) -> Path:
        """What recovery finds, as real files in an empty folder."""
        target = Path(folder)
        for path in sorted(self.folders):
            (target / path).mkdir(parents=True, exist_ok=True)
        for path, data in self.files.items():
            (target / path).write_bytes(data)
        return target


@dataclass(frozen=True, slots=True)
class _Name:
    """Names changed in one folder, at once: node by name, None for a removed one."""

    folder: int
    changes: tuple[tuple[str, int | None], ...]


@dataclass(frozen=True, slots=True)
class _Data:
    """Bytes of one file changed."""

    file: int
    offset_bytes: int
    data: bytes


@dataclass(frozen=True, slots=True)
class _Sync:
    node: int


@dataclass(frozen=True, slots=True)
class _Promise:
    label: Hashable


_Event = _Name | _Data | _Sync | _Promise


@dataclass(slots=True)
class _Image:
    """A disk's content: names by folder, bytes by file."""

    names: dict[int, dict[str, int]] = field(default_factory=lambda: {_TOP: {}})
    data: dict[int, bytes] = field(default_factory=dict)

    def with_items(self, items: Iterable[_Name | _Data]) -> _Image:
        image = _Image({node: dict(names) for node, names in self.names.items()}, dict(self.data))
        for item in items:
            image.apply(item)
        return image

    def apply(self, item: _Name | _Data) -> None:
        if isinstance(item, _Data):
            old = self.data.get(item.file, b"").ljust(item.offset_bytes, b"\0")
            self.data[item.file] = (
                old[: item.offset_bytes] + item.data + old[item.offset_bytes + len(item.data) :]
            )
            return
        names = self.names.setdefault(item.folder, {})
        for name, node in item.changes:
            if node is None:
                names.pop(name, None)
            else:
                names[name] = node

    def tree(self, is_folder: dict[int, bool]) -> tuple[dict[str, bytes], tuple[str, ...]]:
        files: dict[str, bytes] = {}
        folders: list[str] = []
        waiting = [("", _TOP)]
        while waiting:
            start, folder = waiting.pop()
            for name, node in self.names.get(folder, {}).items():
                if is_folder[node]:
                    folders.append(start + name)
                    waiting.append((f"{start}{name}/", node))
                else:
                    files[start + name] = self.data.get(node, b"")
        return files, tuple(sorted(folders))


class SimDisk(OsCalls):
    """System calls that are made, and remembered.

    Args:
        folder: an existing folder that holds all that the calls will touch; what lies in it now
            counts as safe. Symbolic links in it are not modelled.
        exhaustive_below: up to how many unsafe items every subset is looked at.
        samples: how many random subsets are looked at above that, a new item.
        seed: where those come from.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        exhaustive_below: int = 12,
        samples: int = 64,
        seed: int = 0,
    ) -> None:
        self.folder: Final = Path(folder).resolve(strict=True)
        self._exhaustive_below = exhaustive_below
        self._samples = samples
        self._seed = seed
        self._lock = threading.RLock()
        self._nodes = itertools.count(_TOP + 1)
        self._is_folder = {_TOP: True}
        self._open: dict[int, int] = {}
        self._offsets: dict[int, int] = {}
        self._journal: list[_Event] = []
        self._base = _Image()
        self._load(self.folder, _TOP)
        self._live = self._base.with_items(())

    def promise(self, label: Hashable) -> None:
        """Remember that the caller was told something now; a later power cut must not undo it."""
        with self._lock:
            self._journal.append(_Promise(label))

    @property
    def calls(self) -> int:
        """How many changing calls were made so far."""
        with self._lock:
            return sum(not isinstance(event, _Promise) for event in self._journal)

    def crash_states(self) -> Iterator[CrashState]:
        """Each different disk, with what had been promised by then."""
        with self._lock:
            journal = list(self._journal)
        randomness = random.Random(self._seed)  # noqa: S311 - samples, not secrets
        base = self._base.with_items(())
        unsafe: list[_Name | _Data] = []
        promised: tuple[Hashable, ...] = ()
        seen: set[Hashable] = set()
        calls = 0
        yield from self._states(base, [()], promised, calls, seen)
        for event in journal:
            if isinstance(event, _Promise):
                promised = (*promised, event.label)
                subsets = self._all_subsets(unsafe, randomness)
            elif isinstance(event, _Sync):
                calls += 1
                was_sampled = len(unsafe) > self._exhaustive_below
                for item in unsafe:
                    if _node_of(item) == event.node:
                        base.apply(item)
                unsafe = [item for item in unsafe if _node_of(item) != event.node]
                # An fsync makes no new disk possible, only fewer; but samples may have missed some.
                subsets = self._all_subsets(unsafe, randomness) if was_sampled else []
            else:
                calls += 1
                # Only what holds the new item is new; without it, a disk of the shorter prefix.
                subsets = []
                for item in _halves(event):
                    subsets += self._subsets_with(item, unsafe, randomness)
                    unsafe.append(item)
            yield from self._states(base, subsets, promised, calls, seen)

    def _states(
        self,
        base: _Image,
        subsets: Iterable[tuple[_Name | _Data, ...]],
        promised: tuple[Hashable, ...],
        calls: int,
        seen: set[Hashable],
    ) -> Iterator[CrashState]:
        for subset in subsets:
            files, folders = base.with_items(subset).tree(self._is_folder)
            key = (frozenset(files.items()), folders, promised)
            if key not in seen:
                seen.add(key)
                yield CrashState(files=files, folders=folders, promised=promised, calls=calls)

    def _all_subsets(
        self, unsafe: list[_Name | _Data], randomness: random.Random
    ) -> list[tuple[_Name | _Data, ...]]:
        subsets: list[tuple[_Name | _Data, ...]] = [()]
        for count, item in enumerate(unsafe):
            subsets += self._subsets_with(item, unsafe[:count], randomness)
        return subsets

    def _subsets_with(
        self, item: _Name | _Data, others: list[_Name | _Data], randomness: random.Random
    ) -> list[tuple[_Name | _Data, ...]]:
        """Sets of unsafe items, in the order they were made, that end in ``item``."""
        if len(others) < self._exhaustive_below:
            return [
                (*chosen, item)
                for count in range(len(others) + 1)
                for chosen in itertools.combinations(others, count)
            ]
        chosen_sets: list[Iterable[_Name | _Data]] = [(), others]
        chosen_sets += [others[:count] + others[count + 1 :] for count in range(len(others))]
        chosen_sets += [(other,) for other in others]
        chosen_sets += [
            [other for other in others if randomness.random() < share]
            for share in (randomness.random() for _ in range(self._samples))
        ]
        return [(*chosen, item) for chosen in chosen_sets]

    # The calls

    def open(self, path: str, flags: int, mode: int = 0o666, *, dir_fd: int | None = None) -> int:
        with self._lock:
            parent, name = self._place(path, dir_fd)
            fd = super().open(path, flags, mode, dir_fd=dir_fd)
            node = self._find(parent, name)
            if node is None and parent is not None and flags & os.O_CREAT:
                node = self._make(parent, name, is_folder=False)
            if node is not None:
                self._open[fd] = node
                self._offsets[fd] = 0
            return fd

    def close(self, fd: int) -> None:
        with self._lock:
            self._open.pop(fd, None)
            self._offsets.pop(fd, None)
            super().close(fd)

    def write(self, fd: int, data: memoryview) -> int:
        with self._lock:
            count = super().write(fd, data)
            self._change(_Data(self._open[fd], self._offsets[fd], bytes(data[:count])))
            self._offsets[fd] += count
            return count

    def start_writeback(self, fd: int, offset_bytes: int, length_bytes: int) -> None:
        # A hint makes nothing safe: to the model it never happened.
        pass

    def fsync(self, fd: int) -> None:
        # The real disk is not asked: what it holds does not matter here, and waiting is slow.
        with self._lock:
            if fd in self._open:
                self._journal.append(_Sync(self._open[fd]))

    def mkdir(self, path: str, *, dir_fd: int | None = None) -> None:
        with self._lock:
            parent, name = self._place(path, dir_fd)
            super().mkdir(path, dir_fd=dir_fd)
            if parent is None:
                raise ValueError(f"{path} lies outside of the simulated disk {self.folder}")
            self._make(parent, name, is_folder=True)

    def link(self, source: str, target: str, *, dir_fd: int) -> None:
        with self._lock:
            super().link(source, target, dir_fd=dir_fd)
            folder = self._open[dir_fd]
            self._change(_Name(folder, ((target, self._live.names[folder][source]),)))

    def rename_no_replace(self, source: str, target: str, *, dir_fd: int) -> None:
        with self._lock:
            super().rename_no_replace(source, target, dir_fd=dir_fd)
            folder = self._open[dir_fd]
            self._change(_Name(folder, ((source, None), (target, self._live.names[folder][source]))))

    def rename(self, source: str, target: str, *, dir_fd: int) -> None:
        with self._lock:
            super().rename(source, target, dir_fd=dir_fd)
            folder = self._open[dir_fd]
            self._change(_Name(folder, ((source, None), (target, self._live.names[folder][source]))))

    def unlink(self, path: str, *, dir_fd: int) -> None:
        with self._lock:
            super().unlink(path, dir_fd=dir_fd)
            self._change(_Name(self._open[dir_fd], ((path, None),)))

    def rmdir(self, path: str, *, dir_fd: int) -> None:
        with self._lock:
            super().rmdir(path, dir_fd=dir_fd)
            self._change(_Name(self._open[dir_fd], ((path, None),)))

    # The model

    def _change(self, item: _Name | _Data) -> None:
        self._journal.append(item)
        self._live.apply(item)

    def _make(self, folder: int, name: str, *, is_folder: bool) -> int:
        node = next(self._nodes)
        self._is_folder[node] = is_folder
        self._change(_Name(folder, ((name, node),)))
        return node

    def _place(self, path: str, dir_fd: int | None) -> tuple[int | None, str]:
        """The folder's node and the name of what a call names; None outside of the disk."""
        if dir_fd is not None:
            return self._open.get(dir_fd), path
        try:
            parts = Path(path).relative_to(self.folder).parts
        except ValueError:
            return None, path
        if not parts:
            return _TOP, "."
        node: int | None = _TOP
        for part in parts[:-1]:
            node = self._find(node, part)
        return node, parts[-1]

    def _find(self, folder: int | None, name: str) -> int | None:
        if folder is None or name == ".":
            return folder
        return self._live.names.get(folder, {}).get(name)

    def _load(self, folder: Path, node: int) -> None:
        for entry in sorted(folder.iterdir()):
            kind = entry.lstat().st_mode
            if not (stat.S_ISDIR(kind) or stat.S_ISREG(kind)):
                continue
            child = next(self._nodes)
            self._is_folder[child] = stat.S_ISDIR(kind)
            self._base.apply(_Name(node, ((entry.name, child),)))
            if stat.S_ISDIR(kind):
                self._load(entry, child)
            else:
                self._base.apply(_Data(child, 0, entry.read_bytes()))


def _node_of(item: _Name | _Data) -> int:
    return item.folder if isinstance(item, _Name) else item.file


def _halves(item: _Name | _Data) -> list[_Name | _Data]:
    """A write in two, since a power cut may tear it; a name whole."""
    if isinstance(item, _Name) or len(item.data) < 2:
        return [item]
    middle = len(item.data) // 2
    return [
        _Data(item.file, item.offset_bytes, item.data[:middle]),
        _Data(item.file, item.offset_bytes + middle, item.data[middle:]),
    ]
