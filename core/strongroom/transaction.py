"""From nothing to committed: run record, launch, attempt, commit.

A launch is one writer's turn, claimed by creating the next free number; an attempt is one try
at one save, in a folder of its own. Nothing is renamed or overwritten, and nothing of an
attempt counts until `Attempt.commit` has created its ``COMMIT``, once and last.
`docs/format.md`, clause 9, holds the crash analysis.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, replace
from typing import Final

from strongroom import layout
from strongroom.auditing import NO_AUDIT, Auditor
from strongroom.digest import Digest, DigestAlgorithm, sha256_of
from strongroom.errors import (
    AccessDeniedError,
    ConfigError,
    DeadlineExceededError,
    FencedError,
    FormatError,
    ObjectNotFoundError,
    OutcomeUnknownError,
    SaveError,
    StoreError,
    StoreUnavailableError,
    StrongroomError,
)
from strongroom.layout import CheckpointName
from strongroom.lineage import next_launch
from strongroom.manifest import (
    COMMIT_BOUNDS,
    LAUNCH_BOUNDS,
    RUN_BOUNDS,
    CheckpointRef,
    Commit,
    FileRecord,
    Launch,
    Manifest,
    Run,
)
from strongroom.pace import Pace
from strongroom.parallel import start
from strongroom.sealing import SaveSeal, requests_of
from strongroom.shards import WrittenFile, write_file
from strongroom.signing import Signing, sign_telling
from strongroom.stores.base import Store
from strongroom.stores.offers import create_within

__all__ = ["Attempt", "Committed", "Deadline", "begin_run", "claim_launch"]

Buffer = bytes | bytearray | memoryview

_LOG: Final = logging.getLogger("strongroom")
_MAX_CLAIMS: Final = 1000
"""Writers that may claim a launch at the same moment before one of them gives up."""

_SECURING_S: Final = 5.0
"""How long a commit waits at most until "save started" is out of this process's hands."""
_SECURING_GRACE_S: Final = 1.0
"""How much longer for an auditor that does not keep its time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """The moment after which an attempt never commits, by a clock that cannot jump."""

    ends_at: float
    timeout_s: float
    monotonic: Callable[[], float]

    @classmethod
    def after(cls, timeout_s: float, monotonic: Callable[[], float]) -> Deadline:
        return cls(ends_at=monotonic() + timeout_s, timeout_s=timeout_s, monotonic=monotonic)

    @property
    def left_s(self) -> float:
        return self.ends_at - self.monotonic()

    def check(self, doing: str) -> None:
        """Raise DeadlineExceededError once it has passed."""
        if self.left_s <= 0:
            raise DeadlineExceededError(
                f"the save was {doing} when its deadline of {self.timeout_s:g} s passed, so it does not "
                "commit; a larger timeout_s gives a slow store more time"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A checkpoint that stands."""

    commit: Commit
    manifest: Manifest

    @property
    def ref(self) -> CheckpointRef:
        return self.commit.ref


def begin_run(
    store: Store,
    *,
    draw_run_id: Callable[[], str],
    now_ms: int,
    known: Run | None = None,
    is_given: bool = False,
) -> Run:
    """The root's run record, created where there is none.

    Args:
        known: what was found there, or on another tier, for a writer that may not look or that brings a run
            to a further tier.
        is_given: whether ``draw_run_id`` gives what the platform gave: then a writer that may not look takes
            the record that it finds in its way for that run's.

    Raises:
        ConfigError: the store ignores conditional writes, so no commit could rest on it; or, to a writer
            that may not look, that there is a record of a run that it was told nothing of.
        FormatError: the record is there, and damaged.
        StoreError: it could not be read or created.
    """
    try:
        data = store.read(layout.RUN, limit_bytes=RUN_BOUNDS.length_bytes)
    except AccessDeniedError:
        return _begin_unseen(store, known, Run(run=draw_run_id(), created_at_ms=now_ms), is_given=is_given)
    except ObjectNotFoundError:
        data = (known or Run(run=draw_run_id(), created_at_ms=now_ms)).encode()
        if not _create_record(store, layout.RUN, data):
            data = store.read(layout.RUN, limit_bytes=RUN_BOUNDS.length_bytes)
    run = Run.decode(data, layout.RUN)
    # The same bytes again, by every writer. It is the probe that a commit needs, and leaves a store
    # that fails it as it was. And whoever created the record may have died, or met a failed fsync,
    # before its name was durable: every commit rests on it, so a store that doubts it must say so.
    if _create_record(store, layout.RUN, data):
        raise ConfigError(ignores_conditions(store.uri, layout.RUN))
    return run


def _begin_unseen(store: Store, known: Run | None, run: Run, *, is_given: bool) -> Run:
    """The run of a writer that may create objects, and look at none."""
    if known is not None:
        return known
    if not _create_record(store, layout.RUN, run.encode()) and not is_given:
        raise ConfigError(
            f"{store.uri} holds a run already, whose id this process was not given and may not read: give it "
            "run_id=, or credentials for restoring ([role] restore), and restore() before the first save"
        )
    return run


def claim_launch(
    stores: Sequence[Store],
    *,
    run: str,
    parent: CheckpointRef | None,
    taken: Collection[int],
    deadline_s: int,
    now_ms: int,
    signing: Signing | None = None,
    above: int = 0,
    number: int | None = None,
) -> Launch:
    """Claim the next free launch number: this writer's fencing token.

    Args:
        stores: where it is claimed: on every tier, in this order, so that the first is the one that the most
            writers share.
        parent: the checkpoint that this writer goes on from; None: it begins anew.
        taken: numbers known to be taken.
        deadline_s: after which an attempt of this launch never commits.
        signing: who signs its record; None: nobody.
        above: a number that it has to exceed. Those up to it that the root has lost are claimed as well, so
            that none is missing.
        number: the very number, where the platform gives it.

    Raises:
        ConfigError: a store ignores conditional writes; or the number that was given is taken.
        KeyServiceError, NoKeyError: the record could not be signed.
        StoreError: no number could be claimed.
    """
    given, number = number, next_launch(taken) if number is None else number
    for _ in range(_MAX_CLAIMS):
        if number > layout.MAX_LAUNCH:
            raise StoreError(
                f"{stores[0].uri} has no launch number left: {number - 1} is taken, by a record under "
                f"{layout.LAUNCHES}/ or by a folder's name. Nobody starts a run that often: if something "
                "else made it, remove it"
            )
        launch = Launch(run=run, launch=number, parent=parent, created_at_ms=now_ms, deadline_s=deadline_s)
        if signing is not None:
            # Before it is claimed: a record is created once, and without a signature counts for nothing.
            launch = replace(launch, signature=signing.sign_launch(launch, within_s=float(deadline_s)))
        is_claimed = all(_claim(store, launch) for store in stores)
        if is_claimed and number > above:
            return launch
        if given is not None:
            raise ConfigError(
                f"launch {given} of run {run} was given, and is taken or too low (or the answer to an "
                "earlier request for it was lost): each start of a job needs a number of its own, above "
                f"{max(above, given if not is_claimed else 0)}"
            )
        number += 1
    raise StoreError(
        f"{_MAX_CLAIMS} launch numbers from {next_launch(taken)} on were taken while claiming one"
    )


def _claim(store: Store, launch: Launch) -> bool:
    """Create a launch's record, and say whether this call did.

    It is sent twice: a server that does not know conditional writes creates it twice, and would commit twice.
    """
    key, data = layout.launch_key(launch.launch), launch.encode()
    if not _create_record(store, key, data):
        return False
    if _create_record(store, key, data):
        raise ConfigError(ignores_conditions(store.uri, key))
    return True


def _create_record(store: Store, key: str, data: bytes) -> bool:
    """As `Store.put_if_absent`, of a record that commits nothing: whether it stands is no save's outcome."""
    try:
        return store.put_if_absent(key, data)
    except OutcomeUnknownError as error:
        raise StoreUnavailableError(
            f"{store.uri} was asked to create {key} and did not answer, so that it may stand or not: "
            f"{error}. Nothing was saved; try again"
        ) from error


def ignores_conditions(uri: str, key: str) -> str:
    """Why a store cannot be saved to that created one object twice."""
    return (
        f"{uri} created {key} twice: it ignores conditional writes, so two writers could both commit; use a "
        "store that honours If-None-Match, or a file system"
    )


class Attempt:
    """One try at one save. Files are written by any thread; one thread commits or aborts."""

    def __init__(
        self,
        store: Store,
        *,
        launch: Launch,
        name: CheckpointName,
        parent: CheckpointRef | None,
        algorithm: DigestAlgorithm,
        world_size: int,
        deadline: Deadline,
        now_ms: Callable[[], int],
        seal: SaveSeal | None = None,
        signing: Signing | None = None,
        retention_class: str | None = None,
        best: tuple[int, ...] = (),
        pace: Pace | None = None,
        auditor: Auditor = NO_AUDIT,
    ) -> None:
        self.name = name
        self.run = launch.run
        self.algorithm: DigestAlgorithm = algorithm
        self.deadline = deadline
        self.seal = seal
        self._signing = signing
        self._retention_class = retention_class
        self._best = best
        self._store = store
        self._launch = launch
        self._parent = parent
        self._world_size = world_size
        self._now_ms = now_ms
        self._pace = pace
        self._auditor = auditor
        self._may_be_committed = False
        self._signed_by: tuple[str, ...] = ()

    @property
    def signer(self) -> str:
        """Tells whose key signs it, in a few digits; empty: nobody's."""
        return "" if self._signing is None else self._signing.fingerprint

    @property
    def requests(self) -> tuple[str, ...]:
        """What key services call that they wrapped its key, and signed it, as far as that is known."""
        return (*requests_of(self.seal), *self._signed_by)

    def write(self, path: str, pieces: Iterable[Buffer], *, length_bytes: int) -> WrittenFile:
        """Write one file under ``data/``; it is on stable storage on return.

        Args:
            path: its plain one: where it is sealed it is stored under a name that says so.
        """
        self.deadline.check(f"about to write {path}")
        stored = path if self.seal is None else path + layout.SEALED
        return write_file(
            self._store,
            self.name,
            stored,
            pieces,
            length_bytes=length_bytes,
            algorithm=self.algorithm,
            sealer=None if self.seal is None else self.seal.sealer(stored),
            pace=self._pace,
        )

    def write_whole(self, path: str, data: bytes) -> WrittenFile:
        return self.write(path, [data], length_bytes=len(data))

    def make_durable(self) -> None:
        """Make the names of what this process wrote durable: for a rank that does not commit."""
        self._store.make_durable(self.name.folder)

    def commit(self, files: Iterable[FileRecord]) -> Committed:
        """Make the attempt a checkpoint.

        What was recorded of it until now is out of this process's hands first, as far as that can be had in
        a few seconds: a sink that is out of reach never keeps a save from its commit.

        Args:
            files: every file under ``data/``, of every rank; each is on stable storage.

        Raises:
            DeadlineExceededError: too late.
            KeyServiceError, NoKeyError: it could not be signed, or its key could not be wrapped.
            FencedError: a later writer has taken the run over.
            OutcomeUnknownError: it may stand or not.
            StoreError: it does not stand.
        """
        securing = self._begin_securing()
        manifest = Manifest(
            run=self.run,
            name=self.name,
            parent=self._parent,
            created_at_ms=self._now_ms(),
            algorithm=self.algorithm,
            world_size=self._world_size,
            files=tuple(sorted(files, key=lambda record: record.path)),
            retention_class=self._retention_class,
            best=self._best,
        )
        encoded = manifest.encode()
        # What could not be read back must not be committed.
        Manifest.decode(encoded, layout.MANIFEST)
        self.deadline.check("about to write its manifest")
        self._store.put(layout.data_key(self.name, layout.MANIFEST), encoded)
        signature = self._write_signature(encoded, manifest)
        keyring = self._write_keyring(manifest)
        self._store.make_durable(self.name.folder)
        self._await(securing)
        check_fence(self._store, self._launch)
        commit = Commit(
            run=self.run,
            name=self.name,
            manifest=sha256_of(encoded),
            size_bytes=manifest.size_bytes,
            committed_at_ms=self._now_ms(),
            keyring=keyring,
            signature=signature,
        )
        self.deadline.check("about to commit")
        try:
            is_created = create_within(
                self._store, self.name.commit_key, commit.encode(), self.deadline.left_s
            )
        except OutcomeUnknownError:
            self._may_be_committed = True
            raise
        except StrongroomError:
            raise
        except BaseException as error:
            # Of a store that is not ours to know: whether it was done, it does not say.
            self._may_be_committed = True
            if not isinstance(error, Exception):
                raise
            raise OutcomeUnknownError(
                f"{self.name.commit_key} was sent, and {self._store.uri} failed with {type(error).__name__}: "
                f"{error}; open the root again to see"
            ) from error
        # Only this attempt ever writes this key: "exists" is an earlier answer that was lost.
        self._may_be_committed = True
        if not is_created:
            self._check_is_ours(commit)
        return Committed(commit=commit, manifest=manifest)

    def _begin_securing(self) -> Future[None] | None:
        """Begin to see the record out of this process's hands, while the last files are written."""
        within_s = min(_SECURING_S, self.deadline.left_s)
        if not self._auditor.is_on or within_s <= 0:
            return None
        return start(lambda: self._auditor.secure(within_s=within_s), name="strongroom-audit")

    def _await(self, securing: Future[None] | None) -> None:
        if securing is None:
            return
        bound_s = min(_SECURING_S, max(0.0, self.deadline.left_s)) + _SECURING_GRACE_S
        try:
            error = securing.exception(bound_s)
        except FutureTimeoutError as late:
            error = late
        if error is not None:
            _LOG.warning(
                "%s commits, and it is not known whether what was recorded of it is in safe hands: %s",
                self.name,
                f"{type(error).__name__}: {error}",
            )

    def _write_signature(self, encoded: bytes, manifest: Manifest) -> Digest | None:
        """Sign the manifest and all that it lists, by the digests that were taken as it was written."""
        if self._signing is None:
            return None
        self.deadline.check("about to be signed")
        signature, self._signed_by = sign_telling(
            self._signing, encoded, manifest.files, within_s=self.deadline.left_s
        )
        self._store.put(layout.signature_key(self.name), signature)
        return sha256_of(signature)

    def _write_keyring(self, manifest: Manifest) -> Digest | None:
        """Store the keys of all files, wrapped; None where nothing is sealed."""
        if self.seal is None:
            return None
        if not all(record.header for record in manifest.files):
            raise SaveError(f"{self.name} was to be sealed, and a rank has written files that are not")
        self.deadline.check("about to wrap its keys")
        paths = [record.path for record in manifest.files]
        keyring = self.seal.keyring(paths, within_s=self.deadline.left_s)
        self._store.put(layout.keyring_key(self.name, 1), keyring)
        return sha256_of(keyring)

    def abort(self) -> None:
        """Remove what was written, as far as the store lets us; never what may have been committed."""
        if self.seal is not None:
            self.seal.discard()
        if self._may_be_committed:
            return
        try:
            self._store.delete_tree(self.name.folder)
        except Exception as error:  # noqa: BLE001 - a store of someone else's; the save's own error matters
            _LOG.debug("the remains of %s stay until garbage collection: %s", self.name, error)

    def _check_is_ours(self, commit: Commit) -> None:
        try:
            stored = self._store.read(self.name.commit_key, limit_bytes=COMMIT_BOUNDS.length_bytes)
        except AccessDeniedError:
            # A writer that may not look: the name is this attempt's alone, so that it is its own.
            return
        except StoreError as error:
            raise OutcomeUnknownError(
                f"{self.name.commit_key} stands, and could not be read to see whether it is this save's: "
                f"{error}; open the root again to see"
            ) from error
        if stored != commit.encode():
            raise SaveError(
                f"{self.name.commit_key} exists and is not this save's: {self._store.uri} is written by "
                "something that is not Strongroom; remove that folder by hand"
            )


def check_fence(store: Store, launch: Launch) -> None:
    """Refuse to commit where another launch has taken over, or the run is not there any more.

    Nothing is said where this role cannot look.

    Raises:
        FencedError: a later launch exists.
        SaveError: this launch's own record is gone, and whatever removed it may have taken more.
    """
    try:
        names = store.list_names(layout.LAUNCHES)
    except AccessDeniedError:
        # A write-only role is outranked instead: its launch is no longer the newest.
        return
    numbers = {number for number in map(layout.parse_launch_name, names) if number is not None}
    later = max(numbers, default=0)
    if later <= launch.launch:
        if launch.launch not in numbers:
            raise SaveError(
                f"{layout.launch_key(launch.launch)} is gone from {store.uri}, where this launch of run "
                f"{launch.run} wrote it: something removes files of the run (a cleaner of old files, say). "
                f"Nothing is committed into what could not be opened again. Stop that, and copy the file "
                f"back from another tier, or train on in a new root"
            )
        return
    raise FencedError(
        f"launch {later} has taken run {launch.run} over; this process is launch {launch.launch} and commits "
        f"nothing more. {_who(store, later)}Stop one of the two, or give each its own root"
    )


def _who(store: Store, number: int) -> str:
    key = layout.launch_key(number)
    try:
        later = Launch.decode(store.read(key, limit_bytes=LAUNCH_BOUNDS.length_bytes), key)
    except (FormatError, StoreError):
        return ""
    origin = f"from step {later.parent.step}" if later.parent else "anew"
    return f"It began {origin}. "
