"""One checkpoint, from the first tier to another: its files, what stands beside them, and ``COMMIT`` last.

What is copied is bytes: no key is needed, and what is sealed or signed stays as it is. A checkpoint stands
on the target only after each of its files was read there and found to be what the manifest says. Where
reading is denied, as to a writer that may only create, the checksums count that the server held against each
part.

A copy that died leaves an uncommitted folder. What is noted of it as arrived is not sent again; what stands
there and is not noted is taken where the store's objects are there whole or not at all, and its digest is
right, and is removed and sent anew otherwise.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from strongroom import layout
from strongroom.catalog import History
from strongroom.errors import (
    AccessDeniedError,
    ConfigError,
    FencedError,
    FormatError,
    IntegrityError,
    ObjectExistsError,
    ObjectNotFoundError,
    ReplicationError,
    StoreError,
    StoreUnavailableError,
)
from strongroom.incoming import VALID_S, Announcement
from strongroom.layout import CheckpointName
from strongroom.manifest import (
    COMMIT_BOUNDS,
    LAUNCH_BOUNDS,
    RUN_BOUNDS,
    Commit,
    FileRecord,
    Manifest,
)
from strongroom.parallel import run_all
from strongroom.replication.ledger import How, Ledger, Progress
from strongroom.replication.origin import open_checkpoint_files, read_record, sidecars
from strongroom.replication.transfer import (
    PARTS_IN_FLIGHT,
    Flow,
    SourceFile,
    digest_at,
    send_in_parts,
    send_whole,
)
from strongroom.stores.base import Store
from strongroom.stores.offers import Resuming, create_within

__all__ = ["NOTE_BYTES", "REMOVAL_S", "UPLOAD_FROM_BYTES", "Copied", "Copier"]

_LOG: Final = logging.getLogger("strongroom")

UPLOAD_FROM_BYTES: Final = 16 << 20
"""From this length on a file is uploaded in parts, where the target can go on with those."""

REMOVAL_S: Final = 30
"""So long, where nobody may look, a copy waits for removals to end that began before it was announced."""

NOTE_BYTES: Final = 1 << 20
"""Of files that have arrived and are not noted yet: at most so much is sent again after a kill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """A checkpoint that stands on a target, verified.

    Attributes:
        sent_bytes: what went over the line for it, this time.
    """

    commit: Commit
    sent_bytes: int
    how: How


class Copier:
    """Copies to one target, one checkpoint at a time.

    Args:
        source: the first tier; nothing but notes is ever written there or removed.
        target: the other one.
        ledger: the notes about it.
        flow: how fast, who hears of it, who may end it.
        upload_from_bytes: from which length on files are uploaded in parts.
        note_bytes: how much of small files may arrive before it is noted.

    Attributes:
        turn: the number of this process's turn; None: it could not be noted, so nothing is removed.
        launch: of the writer for whom copies are made; None: nobody is writing.
    """

    def __init__(
        self,
        source: Store,
        target: Store,
        ledger: Ledger,
        flow: Flow,
        *,
        upload_from_bytes: int = UPLOAD_FROM_BYTES,
        note_bytes: int = NOTE_BYTES,
    ) -> None:
        self.turn: int | None = None
        self.launch: int | None = None
        self._source = source
        self._target = target
        self._ledger = ledger
        self._upload_from_bytes = upload_from_bytes
        self._note_bytes = note_bytes
        self._lock = threading.Lock()
        self._sent_bytes = 0
        self._announcement: Announcement | None = None
        self._is_noting = True
        self._flow = Flow(
            pace=flow.pace,
            check=self._announcing(flow.check),
            advance=flow.advance,
            sent=self._count(flow.sent),
            sleep=flow.sleep,
        )
        self._mistrusted: set[CheckpointName] = set()
        self._settled: set[str] = set()
        self._is_denial_told = False

    # The run's records

    def copy_records(self, source: History, target: History | None) -> None:
        """Put the run's record and every launch there that it lacks: no commit means anything without them.

        Raises:
            ConfigError, FencedError: something else stands there.
            StoreError: it could not be.
        """
        if target is None or target.run is None:
            self._copy_record(layout.RUN, RUN_BOUNDS.length_bytes, is_lacking=target is not None)
        known = target.launch_numbers if target is not None else frozenset()
        stands = target.launches.keys() | target.damaged_launches.keys() if target is not None else known
        for number in sorted(source.launches.keys() - stands):
            self._copy_record(
                layout.launch_key(number), LAUNCH_BOUNDS.length_bytes, is_lacking=target is not None
            )

    def _copy_record(self, key: str, limit_bytes: int, *, is_lacking: bool) -> None:
        # What was seen to be gone is put there again: somebody may have emptied the target.
        if key in self._settled and not is_lacking:
            return
        data = read_record(self._source, key, limit_bytes)
        if not self._create(key, data) and self._holds(key, data) is False:
            told = f"{key} at {self._target.uri} is not the one in {self._source.uri}"
            if key == layout.RUN:
                raise ConfigError(f"{told}: each run needs a root of its own on every tier")
            raise FencedError(
                f"{told}: another writer has created it there. Nothing more is copied there; stop one of the "
                f"two, or give each its own root"
            )
        self._settled.add(key)

    # A checkpoint

    def copy(self, commit: Commit) -> Copied:
        """Make a checkpoint stand on the target.

        Raises:
            IntegrityError: it is damaged at the source, or another one of its name stands there.
            FencedError: a later writer has taken the run over on the target.
            ReplicationError: another process copies to the target now.
            StoreError, OutcomeUnknownError: it could not be read, sent, or read back; try again.
        """
        self._sent_bytes = 0
        manifest, beside = open_checkpoint_files(self._source, commit)
        name = commit.name
        # Where it has stood before, it is gone, and all that was beside it.
        self._settled = {key for key in self._settled if not key.startswith(f"{name.folder}/")}
        standing = self._standing(name)
        if standing is not None and name.commit_key in standing:
            return self._see_standing(commit)
        progress = self._ledger.progress(name)
        announcement = Announcement(self._target, name)
        announcement.refuse_marked()
        must_wait = False
        self._is_noting = True
        if standing is None and (not progress.is_recent or name in self._mistrusted):
            # What had arrived cannot be looked at, and may have been taken for dead and removed since. It is
            # forgotten before anything is announced: else who follows would take the new announcement for one
            # that was there all the time.
            must_wait = progress.was_begun
            self._ledger.forget_progress(name)
            progress = Progress()
            # What cannot be removed must not be made recent.
            self._is_noting = not self._ledger.progress(name).was_begun
        self._announcement = announcement
        try:
            self._flow.check()
            self._mistrusted.discard(name)
            announcement.refuse_marked()
            if must_wait:
                self._flow.wait(REMOVAL_S)
            if standing is not None:
                # Only what is seen after that can be relied on.
                standing = self._standing(name) or set()
                if name.commit_key in standing:
                    return self._see_standing(commit)
            self._send_files(manifest, standing, progress)
            for key, data in beside.items():
                self._settle_beside(name, key, data)
            self._target.make_durable(name.folder)
            how, wrong = self._verify(manifest, beside)
            if wrong:
                self._start_over(manifest, wrong)
            self.check_turn()
            self._check_fence()
            self._commit(commit, announcement)
            self._ledger.note_verified(commit, how)
        finally:
            self._announcement = None
            if announcement.is_too_old:
                self._mistrusted.add(name)
        announcement.take_back()
        return Copied(commit=commit, sent_bytes=self._sent_bytes, how=how)

    def _see_standing(self, commit: Commit) -> Copied:
        """What has been committed since it was decided to copy it."""
        key = commit.name.commit_key
        if self._holds(key, read_record(self._source, key, COMMIT_BOUNDS.length_bytes)) is False:
            raise self._is_another(commit)
        return self.verify(commit)

    def _announcing(self, check: Callable[[], None]) -> Callable[[], None]:
        """A check that also keeps what is announced of a copy under way young."""

        def both() -> None:
            check()
            announcement = self._announcement
            if announcement is not None and announcement.renew() and self._is_noting:
                self._ledger.note_announced(announcement.name)

        return both

    def verify(self, commit: Commit) -> Copied:
        """Verify a checkpoint that stands on the target already, and note it.

        Raises:
            IntegrityError: it is damaged there, or at the source.
            StoreError: it could not be read.
        """
        self._sent_bytes = 0
        manifest, beside = open_checkpoint_files(self._source, commit)
        # What was added later may be on its way.
        pinned = {key: data for key, data in beside.items() if key in _pinned(commit)}
        how, wrong = self._verify(manifest, pinned)
        if wrong:
            key, problem = next(iter(wrong.items()))
            raise IntegrityError(
                f"the copy of {commit.name} at {self._target.uri} is damaged: {key} {problem}. Remove "
                f"{commit.name.folder} there, its COMMIT first, and it is copied anew"
            )
        if commit.keyring is not None:
            self._mend_keyrings(commit, beside)
        self._ledger.note_verified(commit, how)
        return Copied(commit=commit, sent_bytes=self._sent_bytes, how=how)

    def _mend_keyrings(self, commit: Commit, beside: Mapping[str, bytes]) -> None:
        """See that a sealed checkpoint has one of the keyrings that are whole at the source."""
        folder = f"{commit.name.folder}/{layout.KEYRINGS}/"
        keyrings = {key: data for key, data in beside.items() if key.startswith(folder)}
        if any(self._holds(key, data) is not False for key, data in keyrings.items()):
            return
        created = [key for key, data in keyrings.items() if self._create(key, data)]
        if not created:
            raise IntegrityError(
                f"{commit.name} at {self._target.uri} is sealed, and none of its keyrings there is one of "
                f"those in {self._source.uri}, so that perhaps nobody can open it. Remove these there, and "
                f"they are copied anew: {', '.join(sorted(keyrings))}"
            )

    def copy_sidecars(self, commit: Commit) -> int:
        """Copy signatures and keyrings that were added since a checkpoint was copied; how many.

        Raises:
            StoreError: one could not be.
        """
        copied = 0
        for key, data in sidecars(self._source, commit).items():
            if key in self._settled:
                continue
            if self._create(key, data):
                copied += 1
            elif self._holds(key, data) is False:
                _LOG.warning(
                    "%s at %s is another one than in %s: each stays where it is",
                    key,
                    self._target.uri,
                    self._source.uri,
                )
            self._settled.add(key)
        return copied

    def check_turn(self) -> None:
        """Raise ReplicationError where another process has taken the copying to this target over."""
        if self.turn is not None and self._ledger.newest_turn() > self.turn:
            raise ReplicationError(
                f"another process copies from {self._source.uri} to {self._target.uri} now, and this "
                f"one leaves it to that",
                tiers=(self._target.uri,),
            )

    # Sending

    def _send_files(self, manifest: Manifest, standing: set[str] | None, progress: Progress) -> None:
        target = self._target
        small = []
        noting = _Noting(self._ledger, manifest.name, self._note_bytes)
        for record in manifest.files:
            if self._has_arrived(manifest, record, standing, progress, noting):
                self._flow.advance(record.size_bytes)
            elif record.size_bytes >= self._upload_from_bytes and isinstance(target, Resuming):
                self._upload(target, manifest.name, record, progress, is_blind=standing is None)
                noting.add(record)
            else:
                small.append(record)
        send = self._send_blind if standing is None else self._send_small

        def task(record: FileRecord) -> Callable[[], None]:
            def run() -> None:
                send(layout.data_key(manifest.name, record.path), record)
                noting.add(record)

            return run

        try:
            run_all([task(record) for record in small], workers=PARTS_IN_FLIGHT, name="strongroom-copy")
        finally:
            noting.flush()

    def _has_arrived(
        self,
        manifest: Manifest,
        record: FileRecord,
        standing: set[str] | None,
        progress: Progress,
        noting: _Noting,
    ) -> bool:
        """Whether a file needs no sending; what stands there and cannot be relied on is removed."""
        key = layout.data_key(manifest.name, record.path)
        is_noted = progress.sent.get(record.path) == record.digest
        if standing is None:
            return is_noted
        if key not in standing:
            return False
        if is_noted:
            return True
        # Of a file system nobody knows whether a file's bytes, though all are there, have reached the disk.
        is_whole_or_absent = isinstance(self._target, Resuming)
        if (
            is_whole_or_absent
            and digest_at(self._target, key, record, manifest.algorithm, self._quiet) is None
        ):
            noting.add(record)
            return True
        self._remove(manifest.name, key)
        return False

    def _send_small(self, key: str, record: FileRecord) -> None:
        send_whole(self._source, self._target, key, record, self._flow)

    def _send_blind(self, key: str, record: FileRecord) -> None:
        """Where what stands there cannot be seen: one that an earlier process sent counts as sent.

        Nobody else writes below an attempt's folder.
        """
        if record.size_bytes >= self._upload_from_bytes:
            try:
                self._send_small(key, record)
            except ObjectExistsError:
                if not isinstance(self._target, Resuming):
                    # Of a file system it may be a torn rest.
                    raise
            return
        room = memoryview(bytearray(max(1, record.size_bytes)))
        with SourceFile(self._source, key, record) as file:
            piece = file.read_next(room)
            file.check()
        self._create(key, piece)
        self._flow.advance(len(piece))

    def _upload(
        self,
        target: Resuming,
        name: CheckpointName,
        record: FileRecord,
        progress: Progress,
        *,
        is_blind: bool,
    ) -> None:
        token = progress.tokens.get(record.path)
        try:
            send_in_parts(
                self._source,
                target,
                layout.data_key(name, record.path),
                record,
                self._flow,
                token=token,
                note_token=lambda new: self._ledger.note_upload(name, record, new),
            )
        except ObjectExistsError:
            # An earlier process has finished it, and died before it could note that. Where it can be looked
            # at, it was.
            if not is_blind:
                raise

    def _settle_beside(self, name: CheckpointName, key: str, data: bytes) -> None:
        """Put a small file beside the others, in the place of any other that stands there."""
        if self._create(key, data) or self._holds(key, data) is not False:
            return
        self._remove(name, key)
        if not self._create(key, data):
            raise StoreUnavailableError(f"{key} at {self._target.uri} is written by somebody else as well")

    def _create(self, key: str, data: bytes | memoryview) -> bool:
        self._flow.check()
        self._flow.pace.spend(len(data))
        # The wait may have been cut short.
        self._flow.check()
        is_created = self._target.put_if_absent(key, data)
        if is_created:
            self._flow.sent(len(data))
        return is_created

    def _commit(self, commit: Commit, announcement: Announcement) -> None:
        key = commit.name.commit_key
        data = read_record(self._source, key, COMMIT_BOUNDS.length_bytes)
        if Commit.decode(data, key) != commit:
            raise IntegrityError(f"{key} in {self._source.uri} is another one than it was")
        announcement.refuse_marked()
        announcement.check()
        # Not after garbage collection may take the copy for dead: that is at twice as long.
        is_created = create_within(self._target, key, data, VALID_S)
        if is_created:
            self._flow.sent(len(data))
        elif self._holds(key, data) is False:
            raise self._is_another(commit)

    def _is_another(self, commit: Commit) -> IntegrityError:
        return IntegrityError(
            f"another {commit.name.commit_key} stands at {self._target.uri}: what it commits is not what was "
            f"copied. Remove {commit.name.folder} there, its COMMIT first, and it is copied anew"
        )

    # What the target holds

    def _standing(self, name: CheckpointName) -> set[str] | None:
        """Keys that stand in a checkpoint's folder; None: it may not be looked at."""
        try:
            return set(_keys(self._target, name.folder))
        except AccessDeniedError as error:
            self._tell_denied(error)
            return None

    def _verify(self, manifest: Manifest, beside: Mapping[str, bytes]) -> tuple[How, dict[str, str]]:
        """How the copy was verified, and what is wrong in it, by key."""
        wrong: dict[str, str] = {}
        denied: list[AccessDeniedError] = []

        def look(key: str, find: Callable[[], str | None]) -> None:
            try:
                problem = find()
            except AccessDeniedError as error:
                denied.append(error)
                return
            if problem is not None:
                wrong[key] = problem

        def task(record: FileRecord) -> Callable[[], None]:
            key = layout.data_key(manifest.name, record.path)
            return lambda: look(
                key, lambda: digest_at(self._target, key, record, manifest.algorithm, self._flow)
            )

        run_all(
            [task(record) for record in manifest.files], workers=PARTS_IN_FLIGHT, name="strongroom-verify"
        )
        for key, data in beside.items():
            look(key, partial(self._difference, key, data))
        if wrong or not denied:
            return "reading", wrong
        if not isinstance(self._target, Resuming) or len(denied) < len(manifest.files) + len(beside):
            # Of a place that shows some of its files the others can be asked for.
            raise denied[0]
        self._tell_denied(denied[0])
        return "checksums", {}

    def _difference(self, key: str, data: bytes) -> str | None:
        return None if self._is(key, data) else "is not what was copied"

    def _start_over(self, manifest: Manifest, wrong: Mapping[str, str]) -> None:
        """Remove what was read back and is wrong, remember what is right, and raise."""
        name = manifest.name
        for key in wrong:
            self._remove(name, key)
        self._ledger.forget_progress(name)
        right = [record for record in manifest.files if layout.data_key(name, record.path) not in wrong]
        self._ledger.note_sent(name, right)
        key, problem = next(iter(wrong.items()))
        raise StoreUnavailableError(
            f"{self._target.uri} does not give back what was written: {key} {problem}; it is copied again"
        )

    def _remove(self, name: CheckpointName, key: str) -> None:
        """Remove a file of an uncommitted copy."""
        if self.turn is None:
            raise StoreUnavailableError(
                f"{key} at {self._target.uri} is left of a copy that died, and is removed only by who has "
                f"noted its turn in {self._source.uri}, where there is no room: make some"
            )
        self.check_turn()
        if layout.COMMIT in self._target.list_names(name.folder):
            raise IntegrityError(
                f"{key} at {self._target.uri} is wrong, and {name} is committed there: remove its folder "
                f"there, its COMMIT first, and it is copied anew"
            )
        self._target.delete(key)

    def _check_fence(self) -> None:
        """Raise FencedError where a later writer has a launch on the target, as far as one may look."""
        if self.launch is None:
            return
        try:
            names = self._target.list_names(layout.LAUNCHES)
        except AccessDeniedError:
            # As with a save: it is outranked instead.
            return
        latest = max((number for number in map(layout.parse_launch_name, names) if number), default=0)
        if latest > self.launch:
            raise FencedError(
                f"launch {latest} has taken the run over at {self._target.uri}; this process is launch "
                f"{self.launch} and commits nothing more there"
            )

    def _holds(self, key: str, data: bytes) -> bool | None:
        """Whether just these bytes stand at a key; None: it may not be read."""
        try:
            return self._is(key, data)
        except AccessDeniedError as error:
            self._tell_denied(error)
            return None

    def _is(self, key: str, data: bytes) -> bool:
        try:
            return self._target.read(key, limit_bytes=max(1, len(data))) == data
        except (FormatError, ObjectNotFoundError):
            return False

    def _tell_denied(self, error: StoreError) -> None:
        with self._lock:
            is_told, self._is_denial_told = self._is_denial_told, True
        if not is_told:
            _LOG.warning(
                "%s may not be read by this identity, so that copies there are verified by the checksums "
                "that the server holds against each part, and not by reading them: %s",
                self._target.uri,
                error,
            )

    @property
    def _quiet(self) -> Flow:
        """For what is read besides: nobody counts it."""
        return replace(self._flow, advance=lambda _: None, sent=lambda _: None)

    def _count(self, tell: Callable[[int], None]) -> Callable[[int], None]:
        def count(length_bytes: int) -> None:
            with self._lock:
                self._sent_bytes += length_bytes
            tell(length_bytes)

        return count


class _Noting:
    """Notes files that have arrived: large ones at once, small ones together."""

    def __init__(self, ledger: Ledger, name: CheckpointName, note_bytes: int) -> None:
        self._ledger = ledger
        self._name = name
        self._note_bytes = note_bytes
        self._lock = threading.Lock()
        self._waiting: list[FileRecord] = []
        self._waiting_bytes = 0

    def add(self, record: FileRecord) -> None:
        with self._lock:
            self._waiting.append(record)
            self._waiting_bytes += record.size_bytes
            is_due = self._waiting_bytes >= self._note_bytes
        if is_due:
            self.flush()

    def flush(self) -> None:
        with self._lock:
            due, self._waiting, self._waiting_bytes = self._waiting, [], 0
        self._ledger.note_sent(self._name, due)


def _pinned(commit: Commit) -> tuple[str, ...]:
    """Keys of what stands beside the data from the first moment on."""
    return (layout.data_key(commit.name, layout.MANIFEST), layout.signature_key(commit.name))


def _keys(store: Store, prefix: str) -> Iterable[str]:
    for name in store.list_names(prefix):
        if name.endswith("/"):
            yield from _keys(store, f"{prefix}/{name[:-1]}")
        else:
            yield f"{prefix}/{name}"
