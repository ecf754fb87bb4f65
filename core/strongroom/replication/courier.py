"""All that is done for one target, in order: look, take a turn, deliver, clear up. No threads, no retries.

`strongroom.replication.upkeep` does it again and again beside a training job, `strongroom.replication.once`
once for a command.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from strongroom.catalog import Catalog, History
from strongroom.config import Clock, check_count
from strongroom.errors import AccessDeniedError, ConfigError, ObjectNotFoundError
from strongroom.events import CheckpointReplicated, Emitter
from strongroom.keeping import Keeper
from strongroom.layout import CheckpointName
from strongroom.manifest import Commit
from strongroom.pace import Pace
from strongroom.replication.copying import NOTE_BYTES, UPLOAD_FROM_BYTES, Copied, Copier
from strongroom.replication.lag import lag_s
from strongroom.replication.ledger import Ledger
from strongroom.replication.planning import Plan, check_target, plan
from strongroom.replication.transfer import Flow
from strongroom.retention import RetentionPolicy
from strongroom.signing import NO_GUARD, Guard
from strongroom.stores.base import Store

__all__ = ["Courier", "Outlook", "Target"]


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
            Flow(pace=pace, check=check, advance=advance, sent=lambda _: None),
            upload_from_bytes=target.upload_from_bytes,
            note_bytes=target.note_bytes,
        )
        self._keeper = Keeper(
            target.store, self._targets, target.keep, clock=clock, emitter=emitter, guard=guard
        )
        self._has_turn = False

    @property
    def uri(self) -> str:
        """The target's."""
        return self._target.store.uri

    def look(self, left_out: Collection[CheckpointName] = ()) -> Outlook:
        """See what is to be done.

        Args:
            left_out: checkpoints that are known not to be copied.

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
        verified = [
            commit for name, commit in source.commits.items() if name in noted and noted[name].is_of(commit)
        ]
        planned = plan(source, target, self._target.keep, verified=verified, left_out=left_out)
        return Outlook(source=source, target=target, plan=planned)

    def begin(self, outlook: Outlook) -> None:
        """Take a turn at the target, and put the run's records there.

        Raises:
            ConfigError, FencedError: as `look`.
            ReplicationError: another process copies to it now.
            StoreError: it could not be.
        """
        if not self._has_turn:
            self._copier.turn = self._ledger.claim_turn()
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

    def deliver(self, commit: Commit, outlook: Outlook, *, waiting: int = 0) -> Copied:
        """Make one checkpoint stand on the target, or see that it does; then let its retention go.

        Args:
            outlook: of which plan it is one.
            waiting: how many others wait.

        Raises:
            As `Copier.copy` and `Copier.verify`.
        """
        began = self._clock.monotonic()
        if commit in outlook.plan.to_verify:
            copied = self._copier.verify(commit)
        else:
            copied = self._copier.copy(commit)
        self._emitter.emit(
            CheckpointReplicated(
                run=commit.run,
                step=commit.name.step,
                launch=commit.name.launch,
                tier=self.uri,
                size_bytes=commit.size_bytes,
                sent_bytes=copied.sent_bytes,
                seconds=self._clock.monotonic() - began,
                lag_s=lag_s([commit], self._clock.now_ms()),
                pending=waiting,
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
