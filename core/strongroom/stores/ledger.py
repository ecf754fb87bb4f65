"""Which names on a file system no fsync covers yet, and which one failed to cover. No I/O.

A name lives in its folder, not in the file: fsync of a file says nothing about its name, and
fsync of a folder says nothing about the folder's own name in the folder above. A failed fsync
may have dropped the change and still let the next one succeed, so what it failed to cover is
remembered as lost, and stays lost.

Paths are keys below the root, ``""`` being the root; what lies above the root is absolute.
"""

from __future__ import annotations

import threading

__all__ = ["NameLedger"]


class NameLedger:
    """One store's account of names; safe to use from several threads."""

    syncing: threading.Lock
    """Held from `names` through the fsync to `settle` or `lose`, so that of two threads at one folder
    the second learns of the first one's failure."""

    def __init__(self) -> None:
        self.syncing = threading.Lock()
        self._lock = threading.Lock()
        self._pending: dict[str, dict[str, bool]] = {}
        self._standing: set[str] = set()
        self._lost: dict[str, str] = {}

    def note_created(self, folder: str, name: str, *, is_folder: bool = False) -> None:
        """A name was made in ``folder`` just now."""
        with self._lock:
            self._pending.setdefault(folder, {})[name] = is_folder
            self._standing.discard(_join(folder, name))

    def note_found(self, folder: str, name: str) -> None:
        """A folder was found, that another process may have made and not yet made durable."""
        with self._lock:
            if _join(folder, name) not in self._standing:
                self._pending.setdefault(folder, {})[name] = True

    def withdraw(self, folder: str, name: str) -> None:
        """A name was removed again, and nobody counts on it."""
        with self._lock:
            pending = self._pending.get(folder, {})
            pending.pop(name, None)
            if not pending:
                self._pending.pop(folder, None)

    def unsettled(self, prefix: str, *, below: bool) -> list[str]:
        """The folders to fsync so that ``prefix`` survives, deepest first.

        They are those on the way to it, and with ``below`` all those under it as well.
        """
        with self._lock:
            folders = [
                folder
                for folder in self._pending
                if _leads_to(folder, prefix) or (below and _leads_to(prefix, folder))
            ]
        # Absolute paths lie above the root, whatever their depth.
        return sorted(folders, key=lambda folder: (folder.startswith("/"), -_depth(folder), folder))

    def names(self, folder: str) -> list[str]:
        """The names in ``folder`` that an fsync beginning now would cover."""
        with self._lock:
            return list(self._pending.get(folder, ()))

    def settle(self, folder: str, names: list[str]) -> None:
        """An fsync of ``folder``, begun after ``names`` were noted, succeeded."""
        with self._lock:
            pending = self._pending.get(folder, {})
            for name in names:
                if pending.pop(name, False):
                    self._standing.add(_join(folder, name))
            if not pending:
                self._pending.pop(folder, None)

    def lose(self, folder: str, names: list[str], reason: str) -> None:
        """An fsync that should have covered ``names`` (or a name's bytes) failed."""
        with self._lock:
            pending = self._pending.get(folder, {})
            for name in names:
                pending.pop(name, None)
                self._lost.setdefault(_join(folder, name), reason)
            if not pending:
                self._pending.pop(folder, None)

    def why_lost(self, prefix: str, *, below: bool) -> str | None:
        """Why ``prefix`` can never be made durable by this store any more, or None."""
        with self._lock:
            for path, reason in self._lost.items():
                if _leads_to(path, prefix) or (below and _leads_to(prefix, path)):
                    return reason
        return None

    def forget(self, prefix: str) -> None:
        """Everything under ``prefix`` was removed, itself too; what was lost stays lost."""
        with self._lock:
            for folder in [folder for folder in self._pending if _leads_to(prefix, folder)]:
                del self._pending[folder]
            self._standing = {path for path in self._standing if not _leads_to(prefix, path)}


def _join(folder: str, name: str) -> str:
    return f"{folder.rstrip('/')}/{name}" if folder else name


def _depth(folder: str) -> int:
    return len([part for part in folder.split("/") if part])


def _leads_to(path: str, other: str) -> bool:
    """Whether ``other`` is ``path`` or lies under it."""
    if path.startswith("/") and not other.startswith("/"):
        return True
    if path == "":
        return not other.startswith("/")
    return other == path or other.startswith(f"{path.rstrip('/')}/")
