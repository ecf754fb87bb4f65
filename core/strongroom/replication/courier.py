"""All that is done for one target, in order: look, take a turn, deliver, clear up. No threads, no retries.

`strongroom.replication.upkeep` does it again and again beside a training job, `strongroom.replication.once`
once for a command.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final

from strongroom import layout
from strongroom.catalog import Catalog, History
from strongroom.config import Clock, check_count
from strongroom.errors import (
    AccessDeniedError,
    ConfigError,
    IntegrityError,
    ObjectNotFoundError,
    UnsupportedFormatError,
)
from strongroom.events import CheckpointReplicated, Emitter
from strongroom.keeping import Keeper
from strongroom.layout import CheckpointName
from strongroom.manifest import Commit
from strongroom.pace import Pace
from strongroom.replication.copying import NOTE_BYTES, UPLOAD_FROM_BYTES, Copied, Copier
from strongroom.replication.lag import lag_s
from strongroom.replication.ledger import Ledger
from strongroom.replication.origin import open_manifest
from strongroom.replication.planning import Plan, check_apart, check_target, plan
from strongroom.replication.transfer import Flow
from strongroom.retention import RetentionPolicy
from strongroom.signing import NO_GUARD, Guard
from strongroom.stores.base import Store
from strongroom.stores.offers import Detailing

__all__ = ["Courier", "Outlook", "Target"]

_LOG: Final = logging.getLogger("strongroom")

_CHECK_AGAIN_S: Final = 60.0
"""How long it is believed that a copy has all its files, before the first tier may lose its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A tier that checkpoints are copied to.

    Attributes:
        store: its root.
        keep: which checkpoints stay there; None: all of them.
        max_bytes_per_second: how fast it is sent to; None: as fast as it goes.
        upload_from_bytes: from which length on a file is uploaded in parts, where the store can resume those.
        note_bytes: how much of small files may arrive there before it is noted: so much may be sent again
            after a kill.
    """

    store: Store
    keep: RetentionPolicy | None = None
    max_bytes_per_second: float | None = None
    upload_from_bytes: int = UPLOAD_FROM_BYTES
    note_bytes: int = NOTE_BYTES

    def __post_init__(self) -> None:
        if not isinstance(self.store, Store):
            raise ConfigError(f"a target is a Store, got a {type(self.store).__name__}")
        if type(self.upload_from_bytes) is not int or self.upload_from_bytes < 1:
            raise ConfigError(
                f"upload_from_bytes must be a whole number of at least 1, got {self.upload_from_bytes!r}"
            )
        check_count("note_bytes", self.note_bytes)
        Pace(self.max_bytes_per_second)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """Both roots at one moment, and what is to be done.

    Attributes:
        target: None: it may not be looked at.
    """

    source: History
    target: History | None
    plan: Plan


class Courier:
    """Delivers to one target.

    Args:
        source: the first tier.
        target: the other one.
        guard: whose launches count, and whose checkpoints count in the target's retention.
        check: raises where the work is to end, from any thread.
        advance: hears of the length of each piece that was sent, or read back.
        sleep: waits for so many seconds; may return early where the work is to end.

    Attributes:
        launch: of the writer for whom copies are made; None: nobody is writing.
    """

    def __init__(
        self,
        source: Store,
        target: Target,
        *,
        clock: Clock,
        emitter: Emitter,
        check: Callable[[], None],
        sleep: Callable[[float], None],
        advance: Callable[[int], None] = lambda _: None,
        guard: Guard = NO_GUARD,
    ) -> None:
        if source.uri == target.store.uri:
            raise ConfigError(f"{source.uri} cannot be copied onto itself; name another place for the tier")
        check_apart([source.uri, target.store.uri])
        self.launch: int | None = None
        self._source = source
        self._target = target
        self._clock = clock
        self._emitter = emitter
        self._sources = Catalog(source, guard.trust)
        self._targets = Catalog(target.store, guard.trust)
        self._ledger = Ledger(source, target.store.uri, now_ms=clock.now_ms)
        pace = Pace(target.max_bytes_per_second, monotonic=clock.monotonic, sleep=sleep)
        self._copier = Copier(
            source,
            target.store,
            self._ledger,
            Flow(pace=pace, check=check, advance=advance, sent=lambda _: None, sleep=sleep),
            upload_from_bytes=target.upload_from_bytes,
            note_bytes=target.note_bytes,
        )
        self._keeper = Keeper(
            target.store,
            self._targets,
            target.keep,
            clock=clock,
            emitter=emitter,
            guard=guard,
            is_copied_to=True,
        )
        self._has_turn = False
        self._lock = threading.Lock()
        self._checked_at: dict[Commit, float] = {}

    @property
    def uri(self) -> str:
        """The target's."""
        return self._target.store.uri

    def name_tier(self) -> None:
        """Note in the first tier that a job copies to the target, though it may be out of reach.

        Raises:
            StoreError: it could not be noted.
        """
        self._ledger.name_tier()

    def look(self, left_out: Collection[CheckpointName] = (), *, believes_notes: bool = True) -> Outlook:
        """See what is to be done.

        What stands there by the notes is compared once by its files' names and lengths; where one is wrong
        the note goes, and the copy is to be verified again.

        Args:
            left_out: checkpoints that are known not to be copied.
            believes_notes: whether what was verified before need not be again, where one may look.

        Raises:
            ConfigError: the target holds another run.
            FencedError: another writer has taken the run over there.
            IntegrityError: the records of one of the two are damaged.
            StoreError: one of the two could not be looked at.
        """
        source = self._sources.history()
        try:
            target = self._targets.history()
        except AccessDeniedError:
            target = None
        check_target(source, target, source_uri=self._source.uri, uri=self.uri, launch=self.launch)
        noted = self._ledger.verified()
        verified = {
            commit for name, commit in source.commits.items() if name in noted and noted[name].is_of(commit)
        }
        if target is not None:
            if believes_notes:
                standing = {commit for commit in verified if target.commits.get(commit.name) == commit}
                with self._lock:
                    self._checked_at = {
                        commit: at for commit, at in self._checked_at.items() if commit in standing
                    }
                    unchecked = standing - self._checked_at.keys()
                verified -= self._disowned(unchecked)
            else:
                verified = set()
        planned = plan(source, target, self._target.keep, verified=verified, left_out=left_out)
        return Outlook(source=source, target=target, plan=planned)

    def confirm(self, commits: Collection[Commit]) -> Collection[Commit]:
        """Which of some checkpoints, verified there once, stand there now, by the names and lengths of files.

        Safe beside all else. Where the target may not be looked at they all do, as the notes have it.

        Raises:
            StoreError: the target could not be looked at.
        """
        try:
            there = self._targets.history().commits
        except AccessDeniedError:
            return commits
        standing = [commit for commit in commits if there.get(commit.name) == commit]
        since = self._clock.monotonic() - _CHECK_AGAIN_S
        with self._lock:
            aged = [
                commit
                for commit in standing
                if (checked_at := self._checked_at.get(commit)) is None or checked_at < since
            ]
        return set(standing) - self._disowned(aged)

    def _disowned(self, commits: Collection[Commit]) -> set[Commit]:
        """Compare copies with their manifests; those that turned out wrong, whose notes are gone now."""
        wrong = set()
        for commit in commits:
            problem = self._problem(commit)
            if problem is None:
                self._note_checked(commit)
                continue
            _LOG.warning("the copy of %s at %s is not whole any more: %s", commit.name, self.uri, problem)
            self._ledger.forget(commit.name)
            with self._lock:
                self._checked_at.pop(commit, None)
            wrong.add(commit)
        return wrong

    def _note_checked(self, commit: Commit) -> None:
        with self._lock:
            self._checked_at[commit] = self._clock.monotonic()

    def _problem(self, commit: Commit) -> str | None:
        """What is wrong with a copy, by the names and lengths of its files; None: nothing, as far as seen."""
        try:
            manifest, data = open_manifest(self._source, commit)
        except (IntegrityError, UnsupportedFormatError):
            # Damaged here: what stands there may be all that is left of it.
            return None
        try:
            found = _lengths(self._target.store, commit.name.folder)
        except AccessDeniedError:
            return None
        key = layout.data_key(commit.name, layout.MANIFEST)
        expected = {key: len(data)}
        for record in manifest.files:
            expected[layout.data_key(commit.name, record.path)] = record.size_bytes
        for key, size_bytes in expected.items():
            if key not in found:
                return f"{key} is not there"
            if found[key] != size_bytes:
                return f"{key} has {found[key]} bytes, and the manifest says {size_bytes}"
        return None

    def begin(self, outlook: Outlook) -> None:
        """Take a turn at the target, and put the run's records there.

        Raises:
            ConfigError, FencedError: as `look`; or the target is the first tier under another name.
            ReplicationError: another process copies to it now.
            StoreError: it could not be.
        """
        if not self._has_turn:
            self._copier.turn = self._ledger.claim_turn()
            if self._ledger.is_shown_by(self._target.store):
                self._ledger.withdraw()
                raise ConfigError(
                    f"{self.uri} is {self._source.uri} under another name: what is written to the one "
                    "is seen in the other; give the tier a place of its own"
                )
            self._has_turn = self._copier.turn is not None
        self._copier.launch = self.launch
        self._copier.check_turn()
        self.announce(outlook)

    def announce(self, outlook: Outlook) -> None:
        """Put the run's records there, so that whoever looks there sees which writer is the latest.

        Raises:
            ConfigError, FencedError: as `look`.
            StoreError: they could not be.
        """
        self._copier.copy_records(outlook.source, outlook.target)

    def leave(self) -> None:
        """Let another process have its turn; the next `begin` takes a new one."""
        self._has_turn = False

    def deliver(
        self,
        commit: Commit,
        outlook: Outlook,
        *,
        settle: Callable[[], int] = lambda: 0,
        operation: str = "",
    ) -> Copied:
        """Make one checkpoint stand on the target, or see that it does; then let its retention go.

        Args:
            outlook: of which plan it is one.
            settle: called once it stands, before that is told; how many others are to come there, and are
                not known to stand there yet.
            operation: by which it was put on record that it is read; empty: nobody keeps one.

        Raises:
            As `Copier.copy` and `Copier.verify`.
        """
        began = self._clock.monotonic()
        if commit in outlook.plan.to_verify:
            try:
                copied = self._copier.verify(commit)
            except IntegrityError:
                # Verified once, perhaps: not any more.
                self._ledger.forget(commit.name)
                raise
        else:
            copied = self._copier.copy(commit)
        self._note_checked(commit)
        pending = settle()
        self._emitter.emit(
            CheckpointReplicated(
                run=commit.run,
                step=commit.name.step,
                launch=commit.name.launch,
                attempt=commit.name.attempt,
                tier=self.uri,
                size_bytes=commit.size_bytes,
                sent_bytes=copied.sent_bytes,
                seconds=self._clock.monotonic() - began,
                lag_s=lag_s([commit], self._clock.now_ms()),
                pending=pending,
                operation=operation,
            )
        )
        self._keeper.retain(commit, ())
        return copied

    def is_gone(self, commit: Commit) -> bool:
        """Whether a checkpoint has been removed from the first tier.

        Raises:
            StoreError: it could not be found out.
        """
        try:
            self._source.stat(commit.name.commit_key)
        except ObjectNotFoundError:
            return True
        return False

    def clear_up(self, outlook: Outlook) -> int:
        """Bring signatures and keyrings that came later, and forget what is gone; how many were brought.

        Raises:
            StoreError: it could not be.
        """
        self._ledger.clear_up(outlook.source.commits.keys() | outlook.source.damaged.keys())
        return sum(self._copier.copy_sidecars(commit) for commit in outlook.plan.standing)

    def ever_verified(self) -> Mapping[CheckpointName, object]:
        """What was verified on the target at some time, as far as was noted.

        Raises:
            StoreError: it could not be found out.
        """
        return self._ledger.verified()


def _lengths(store: Store, folder: str) -> dict[str, int]:
    """How long each object in a folder and below it is, by key."""
    if isinstance(store, Detailing):
        return {key: info.size_bytes for key, info in store.details(folder).items()}
    found = {}
    for name in store.list_names(folder):
        key = f"{folder}/{name}"
        if name.endswith("/"):
            found.update(_lengths(store, key.removesuffix("/")))
            continue
        try:
            found[key] = store.stat(key).size_bytes
        except ObjectNotFoundError:
            continue
    return found
