"""What a replicator remembers on the first tier, so that a process that was killed costs little.

Under ``replication/<16 hex digits>/``, the digits being of SHA-256 over the target's URI, stand small
documents that are created once: which files of a checkpoint have arrived on the target, which upload is under
way, which checkpoints were verified there, and whose turn it is. They are hints: one that is damaged, or
that is not there, makes the replicator start over and never take something for whole.
`docs/format.md`, clause 16.
"""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from strongroom import canonical
from strongroom.canonical import Bounds, Json
from strongroom.digest import Digest
from strongroom.errors import (
    AccessDeniedError,
    FormatError,
    ObjectNotFoundError,
    OutcomeUnknownError,
    StoreError,
    StoreFullError,
)
from strongroom.incoming import VALID_S
from strongroom.layout import CheckpointName
from strongroom.manifest import FORMAT, Commit, FileRecord
from strongroom.stores.base import Store

__all__ = ["FOLDER", "How", "Ledger", "Progress", "Verified", "read_note", "target_folder"]

FOLDER: Final = "replication"

How = Literal["reading", "checksums"]
"""How a checkpoint was verified on a target: by reading it there, or, where that is denied, by the checksums
that the server held against each part."""

_LOG: Final = logging.getLogger("strongroom")

_BOUNDS: Final = Bounds(length_bytes=4 << 20, depth=4, items=40_000)
_FILES_A_NOTE: Final = 4_000
_NUMBERED = re.compile(r"(turn|files|upload|announced)-([0-9]{6,12})\.json")
_MAX_TOKEN_CHARS: Final = 1024
_MAX_CLAIMS: Final = 1000
_NONCE_BYTES: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """That a checkpoint stands on a target, verified.

    Attributes:
        manifest: of which content.
        verified_at_ms: when, by the replicator's clock.
        size_bytes: of all its files.
        how: by what it was verified.
    """

    name: CheckpointName
    manifest: Digest
    verified_at_ms: int
    size_bytes: int
    how: How

    def is_of(self, commit: Commit) -> bool:
        """Whether it is about this checkpoint, and not about another of the same name."""
        return self.name == commit.name and self.manifest.matches(commit.manifest)


@dataclass(slots=True, kw_only=True)
class Progress:
    """How far the copy of one checkpoint has come.

    Attributes:
        sent: files that have arrived, by their path, with the digest that each was sent with.
        tokens: of uploads that were begun, by the file's path.
        is_recent: whether the copy was announced at the target (`strongroom.incoming`) so short a while ago
            that nobody there can have taken it for dead since, and removed what had arrived.
        was_begun: whether anything was noted of it at all.
    """

    sent: dict[str, Digest] = field(default_factory=dict)
    tokens: dict[str, str] = field(default_factory=dict)
    is_recent: bool = False
    was_begun: bool = False


def target_folder(uri: str) -> str:
    """Where the notes about a target stand, which is known by its URI."""
    return f"{FOLDER}/{hashlib.sha256(uri.encode('utf-8', 'surrogateescape')).hexdigest()[:16]}"


class Ledger:
    """The notes about one target; safe to use from several threads.

    Notes of another source, which a plain copy of its root has brought along, are nobody's: they are not
    believed, and removed once this root is copied to that target itself.

    Args:
        store: the first tier.
        uri: the target's.
        now_ms: the time.
    """

    def __init__(self, store: Store, uri: str, *, now_ms: Callable[[], int]) -> None:
        self._store = store
        self._uri = uri
        self._folder = target_folder(uri)
        self._now_ms = now_ms
        self._lock = threading.Lock()
        self._verified: dict[CheckpointName, Verified] = {}
        self._is_told = False
        self._is_ours = False
        self._claimed: tuple[str, bytes] | None = None

    # Whose notes these are

    def name_tier(self) -> None:
        """Note that a job copies to the target, so that what is not there yet is known to be expected there.

        Raises:
            StoreError: it could not be noted.
        """
        try:
            self._name("tier.json", "replication_tier")
        except StoreFullError as error:
            # Copying is what makes room on a full tier.
            self._tell(error)

    def withdraw(self) -> None:
        """Note nothing of the target any more: it is none."""
        try:
            self._store.delete_tree(self._folder)
        except StoreError as error:
            self._tell(error)

    def _name(self, file: str, kind: str) -> None:
        """Create a document that says whose notes these are, in the place of any that does not."""
        members = {"source": self._store.uri, "uri": self._uri}
        key = f"{self._folder}/{file}"
        if self._is_foreign():
            # The turns stay: somebody may be at work under another name of this very root.
            self._store.delete_tree(f"{self._folder}/verified")
            self._store.delete_tree(f"{self._folder}/sending")
            self._store.delete(f"{self._folder}/tier.json")
            self._store.delete(f"{self._folder}/target.json")
        if not self._store.put_if_absent(key, _document(kind, members)):
            found = read_note(self._store, key, kind)
            if found is None or any(found.get(name) != value for name, value in members.items()):
                self._store.delete(key)
                self._store.put_if_absent(key, _document(kind, members))

    def _is_foreign(self) -> bool:
        """Whether what is noted of the target is of another source."""
        if self._is_ours:
            return False
        found = read_note(self._store, f"{self._folder}/target.json", "replication_target")
        if found is None:
            return False
        self._is_ours = found.get("source") == self._store.uri
        return not self._is_ours

    # Turns

    def claim_turn(self) -> int | None:
        """Take the target over from whoever copied to it before; None: there is no room to write it down.

        Raises:
            StoreError: it could not be claimed.
        """
        number = self.newest_turn() + 1
        try:
            self._name("target.json", "replication_target")
            for _ in range(_MAX_CLAIMS):
                nonce = secrets.token_hex(_NONCE_BYTES)
                members = {"created_at_ms": self._now_ms(), "nonce": nonce, "turn": number}
                document = _document("replication_turn", members)
                if self._store.put_if_absent(self._turn_key(number), document):
                    self._claimed = (self._turn_key(number), document)
                    self._drop_turns(below=number - 1)
                    return number
                number += 1
        except StoreFullError:
            # Copying is what makes room on a full tier.
            return None
        raise StoreError(f"{_MAX_CLAIMS} turns at copying to {self._uri} were taken while claiming one")

    def is_shown_by(self, target: Store) -> bool:
        """Whether a target shows the very turn that was claimed last: then it is the first tier itself.

        Raises:
            StoreError: it could not be asked, for another reason than that it may not be read.
        """
        if self._claimed is None:
            return False
        key, document = self._claimed
        try:
            return target.read(key, limit_bytes=len(document)) == document
        except (AccessDeniedError, FormatError, ObjectNotFoundError):
            return False

    def newest_turn(self) -> int:
        """The number of the newest turn; 0: there was none.

        Raises:
            StoreError: the store could not be asked.
        """
        return max(self._numbers(f"{self._folder}/turns", "turn"), default=0)

    # What was verified

    def verified(self) -> Mapping[CheckpointName, Verified]:
        """What stands on the target, as far as was noted.

        Raises:
            StoreError: the store could not be asked.
        """
        folder = f"{self._folder}/verified"
        noted_names = () if self._is_foreign() else self._store.list_names(folder)
        names = (
            CheckpointName.parse(name.removesuffix(".json")) for name in noted_names if name.endswith(".json")
        )
        with self._lock:
            known = dict(self._verified)
        found = {}
        for name in names:
            if name is None:
                continue
            noted = known.get(name) or _verified(
                name, read_note(self._store, f"{folder}/{name.folder}.json", "replication_verified")
            )
            if noted is not None:
                found[name] = noted
        with self._lock:
            # What could not be written down is known to this process all the same.
            self._verified = {**self._verified, **found}
            return dict(self._verified)

    def note_verified(self, commit: Commit, how: How) -> None:
        """Note that a checkpoint stands on the target, verified; and forget how it got there."""
        noted = Verified(
            name=commit.name,
            manifest=commit.manifest,
            verified_at_ms=self._now_ms(),
            size_bytes=commit.size_bytes,
            how=how,
        )
        with self._lock:
            before = self._verified.get(commit.name)
            self._verified[commit.name] = noted
        if before is None or not before.is_of(commit):
            key = f"{self._folder}/verified/{commit.name.folder}.json"
            members = {
                "how": how,
                "manifest": str(commit.manifest),
                "size": commit.size_bytes,
                "verified_at_ms": noted.verified_at_ms,
            }
            data = _document("replication_verified", members)
            if not self._put(key, data):
                # A damaged one, or one of other content, stands in its place.
                self._remove(key)
                self._put(key, data)
        self.forget_progress(commit.name)

    def forget(self, name: CheckpointName) -> None:
        """Note nothing of a checkpoint any more: it has gone, from here or from the target."""
        with self._lock:
            self._verified.pop(name, None)
        self._remove(f"{self._folder}/verified/{name.folder}.json")
        self.forget_progress(name)

    def clear_up(self, there: Collection[CheckpointName]) -> None:
        """Remove what is noted of checkpoints that are gone from the first tier, and of copies that are done.

        Args:
            there: what the first tier has.

        Raises:
            StoreError: the store could not be asked.
        """
        verified = self.verified()
        for gone in verified.keys() - there:
            self.forget(gone)
        for folder in self._store.list_names(f"{self._folder}/sending"):
            name = CheckpointName.parse(folder)
            # Of a copy that is done: the process died before it had removed them.
            if name is not None and (name not in there or name in verified):
                self.forget_progress(name)

    # What is under way

    def progress(self, name: CheckpointName) -> Progress:
        """What an earlier process, or this one, has sent of a checkpoint.

        Raises:
            StoreError: the store could not be asked.
        """
        folder = self._sending(name)
        progress = Progress(was_begun=bool(self._store.list_names(folder)))
        if self._is_foreign():
            return progress
        for number in self._numbers(folder, "files"):
            members = read_note(self._store, f"{folder}/files-{number:06d}.json", "replication_files")
            for path, digest in _sent(members):
                progress.sent[path] = digest
        for number in self._numbers(folder, "upload"):
            noted = read_note(self._store, f"{folder}/upload-{number:06d}.json", "replication_upload") or {}
            of, token = noted.get("path"), noted.get("token")
            if isinstance(of, str) and isinstance(token, str) and len(token) <= _MAX_TOKEN_CHARS:
                progress.tokens[of] = token
        for number in self._numbers(folder, "announced"):
            noted = (
                read_note(self._store, f"{folder}/announced-{number:06d}.json", "replication_announced") or {}
            )
            at_ms = noted.get("at_ms")
            if isinstance(at_ms, int) and 0 <= self._now_ms() - at_ms < VALID_S * 1000:
                progress.is_recent = True
        return progress

    def note_announced(self, name: CheckpointName) -> None:
        """Note that a copy has just been announced at the target."""
        document = _document("replication_announced", {"at_ms": self._now_ms()})
        self._append(self._sending(name), "announced", document)

    def note_sent(self, name: CheckpointName, records: Iterable[FileRecord]) -> None:
        """Note files that have arrived whole."""
        files: list[Json] = [{"digest": str(record.digest), "path": record.path} for record in records]
        for start in range(0, len(files), _FILES_A_NOTE):
            part = files[start : start + _FILES_A_NOTE]
            self._append(self._sending(name), "files", _document("replication_files", {"files": part}))

    def note_upload(self, name: CheckpointName, record: FileRecord, token: str) -> bool:
        """Note an upload that was begun, before its first part; whether that could be written down."""
        members = {"path": record.path, "token": token}
        return self._append(self._sending(name), "upload", _document("replication_upload", members))

    def forget_progress(self, name: CheckpointName) -> None:
        """Note nothing of a copy any more: it is done, or starts over."""
        try:
            self._store.delete_tree(self._sending(name))
        except AccessDeniedError:
            return
        except StoreError as error:
            self._tell(error)

    # Writing

    def _append(self, folder: str, kind: str, data: bytes) -> bool:
        try:
            number = max(self._numbers(folder, kind), default=0) + 1
            for _ in range(_MAX_CLAIMS):
                if self._store.put_if_absent(f"{folder}/{kind}-{number:06d}.json", data):
                    return True
                number += 1
        except (StoreError, OutcomeUnknownError) as error:
            self._tell(error)
        return False

    def _put(self, key: str, data: bytes) -> bool:
        """Whether it was created, or could not be: False only where something stands there."""
        try:
            return self._store.put_if_absent(key, data)
        except (StoreError, OutcomeUnknownError) as error:
            self._tell(error)
            return True

    def _remove(self, key: str) -> None:
        try:
            self._store.delete(key)
        except AccessDeniedError:
            # Who may only create leaves its notes lying: they are small, and nothing relies on them.
            return
        except StoreError as error:
            self._tell(error)

    def _tell(self, error: Exception) -> None:
        with self._lock:
            is_told, self._is_told = self._is_told, True
        if not is_told:
            _LOG.warning(
                "how far copies to %s have come cannot be noted in %s, so that a process that follows may "
                "send some files again: %s",
                self._uri,
                self._store.uri,
                error,
            )

    def _drop_turns(self, *, below: int) -> None:
        for number in self._numbers(f"{self._folder}/turns", "turn"):
            if number < below:
                self._remove(self._turn_key(number))

    def _numbers(self, folder: str, kind: str) -> list[int]:
        matches = (_NUMBERED.fullmatch(name) for name in self._store.list_names(folder))
        return sorted(int(match[2]) for match in matches if match is not None and match[1] == kind)

    def _turn_key(self, number: int) -> str:
        return f"{self._folder}/turns/turn-{number:06d}.json"

    def _sending(self, name: CheckpointName) -> str:
        return f"{self._folder}/sending/{name.folder}"


def _document(kind: str, members: dict[str, Json]) -> bytes:
    return canonical.with_self_digest({**members, "format": FORMAT, "kind": kind})


def read_note(store: Store, key: str, kind: str) -> dict[str, Any] | None:
    """A note's members; None where it is absent, damaged, or of another release: then it notes nothing."""
    try:
        data = store.read(key, limit_bytes=_BOUNDS.length_bytes)
        members = canonical.check_self_digest(canonical.decode(data, key, _BOUNDS), key)
    except (FormatError, ObjectNotFoundError):
        return None
    return members if members.get("kind") == kind and members.get("format") == FORMAT else None


def _verified(name: CheckpointName, members: dict[str, Any] | None) -> Verified | None:
    if members is None:
        return None
    how, size, at_ms = members.get("how"), members.get("size"), members.get("verified_at_ms")
    manifest = _digest(members.get("manifest"))
    if manifest is None or type(size) is not int or type(at_ms) is not int:
        return None
    return Verified(
        name=name,
        manifest=manifest,
        verified_at_ms=at_ms,
        size_bytes=size,
        how="checksums" if how == "checksums" else "reading",
    )


def _sent(members: dict[str, Any] | None) -> Iterable[tuple[str, Digest]]:
    files = (members or {}).get("files")
    for file in files if isinstance(files, list) else []:
        path = file.get("path") if isinstance(file, dict) else None
        digest = _digest(file.get("digest")) if isinstance(file, dict) else None
        if isinstance(path, str) and digest is not None:
            yield path, digest


def _digest(text: object) -> Digest | None:
    try:
        return Digest.parse(text) if isinstance(text, str) else None
    except FormatError:
        return None
