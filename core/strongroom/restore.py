"""Restoring: the newest whole checkpoint, verified, into the caller's state; bounded fall-back.

All ranks of a job go through it together. The coordinator looks at the root and picks what to
try; every rank holds it against its own state, then reads and verifies what it needs, then loads;
and no rank takes the next step before all have taken the last. So damage that one rank finds
makes all fall back, and what one cannot do is an error on all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from strongroom import layout
from strongroom.catalog import Checkpoint, History
from strongroom.digest import sha256_of
from strongroom.errors import (
    CheckpointNotFoundError,
    ConfigError,
    IntegrityError,
    NoWholeCheckpointError,
    ObjectNotFoundError,
    RanksDisagreeError,
    RollbackError,
    StateMismatchError,
    StoreError,
)
from strongroom.events import CheckpointSkipped, Emitter, RestoreFinished
from strongroom.fetch import fetch
from strongroom.fill import match
from strongroom.layout import CheckpointName
from strongroom.manifest import RUN_BOUNDS, Commit
from strongroom.messages import Message
from strongroom.metadata import narrowed
from strongroom.opened import OpenedCheckpoint, open_checkpoint
from strongroom.plan import chunk_of, plan_read
from strongroom.ranks import Ranks, Verdict, name_calls, name_ranks
from strongroom.sealing import Sealing, Unlocked
from strongroom.selection import Selection
from strongroom.stores.base import Store

__all__ = ["Restored", "Source", "check_origin", "restore"]


_LOOKS_S: Final = (0.05, 0.2, 1.0)
"""Pauses between looks for a commit that another rank has read."""

_MAX_LOOKS: Final = 20
"""How often a root is looked at anew because retention took away what was being read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What a restore gave.

    Attributes:
        step: the checkpoint's step.
        state: the caller's state, filled; without a template, everything on the CPU.
        skipped: ``(step, reason)`` for every newer checkpoint that was found damaged.
        missing: names of values that each rank has its own of, and of which the checkpoint holds
            none for this rank, because it was saved by fewer. The caller's stay.
        checkpoint: which checkpoint it was.
        init_from: the root of the other run that it came from; None: this run's own.
    """

    step: int
    state: Any
    skipped: tuple[tuple[int, str], ...]
    missing: tuple[str, ...]
    checkpoint: Checkpoint
    init_from: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A root that a restore may read.

    Attributes:
        store: the root.
        read_history: what it holds now.
        is_other: whether it is another run's, which this one may begin from.
    """

    store: Store
    read_history: Callable[[], History]
    is_other: bool = False


@dataclass(slots=True)
class _Undefined:
    """The caller's tensors that a damaged checkpoint was read into and nothing has overwritten since.

    An optimizer's state is replaced whole by a later load, so it need not be overwritten.
    """

    in_place: set[str] = field(default_factory=set)
    replaceable: set[str] = field(default_factory=set)

    @property
    def names(self) -> list[str]:
        return sorted(self.in_place | self.replaceable)

    def words(self) -> str:
        names = self.names
        if not names:
            return ""
        more = f" and {len(names) - 20} more" if len(names) > 20 else ""
        return (
            f". Undefined now, because a damaged checkpoint was read into them: {', '.join(names[:20])}{more}"
        )


def restore(
    sources: Sequence[Source],
    template: Any,
    *,
    ready: Callable[[], int | None],
    selection: Selection,
    max_fallback: int,
    accept_older: bool,
    sealing: Sealing | None,
    ranks: Ranks,
    timeout_s: float,
    workers: int,
    emitter: Emitter,
) -> tuple[Restored, Commit] | None:
    """Restore one checkpoint; None only where nothing was ever committed.

    The first source where anything was ever committed is the one: a later one is no stand-in for
    a damaged one before it.

    A checkpoint that a running job's retention removes while it is read here is not taken for a
    damaged one: the root is looked at again.

    Args:
        sources: this run's root, and another run's to begin from, if any.
        ready: this rank's word on whether it can restore at all, and which very step, without
            fall-back; None: the newest whole one.
        max_fallback: damaged checkpoints that may be skipped.
        accept_older: allow any number.
        sealing: how sealed checkpoints are opened; the coordinator unlocks one for all ranks.
        timeout_s: seconds that ranks wait for each other at each step.

    Raises:
        CheckpointNotFoundError: no checkpoint of that step, or none where another run was named.
        IntegrityError: that step is damaged; or, as `NoWholeCheckpointError`, all are.
        RollbackError: more than ``max_fallback`` would be skipped.
        StateMismatchError: the checkpoint does not fit the template.
        StoreError: the store could not be asked: that says nothing about the bytes.
        NoKeyError, KeyServiceError: it is sealed, and cannot be opened here.
        RanksError: another rank is missing, or failed.
    """
    access = _Access(sealing, ranks)
    course = _Course(
        sources, access=access, max_fallback=max_fallback, accept_older=accept_older, emitter=emitter
    )
    lane = ranks.lane("main")
    undefined = _Undefined()
    began = time.monotonic()

    def together(phase: str, act: Callable[[], Message]) -> tuple[Message, Message]:
        """Act, say how it went, and hear what comes next."""

        def propose() -> Message:
            try:
                return act()
            except IntegrityError as error:
                course.own_damage = error
                is_blind = not ranks.is_coordinator and not _is_seen(source.store, reading.commit.name)
                return Message(members={"damaged": str(error), "is_blind": is_blind})

        return lane.agree(phase, propose, course.decide, timeout_s=timeout_s, goes_on=True)

    def look() -> Message:
        course.step = ready()
        roots = [] if ranks.is_alone else [*map(_root_digest, sources)]
        return Message(members={"roots": roots, "step": course.step}, pieces=access.introduce())

    try:
        said, own = lane.agree(
            "looking for a checkpoint",
            look,
            course.begin,
            timeout_s=timeout_s,
        )
        while said.members["do"] == "try":
            began = time.monotonic()
            source = sources[said.members["source"]]
            reading = _Reading(
                source.store, _commit_in(said), template, selection, ranks, workers, undefined, access
            )
            access.begin(own)
            said, own = together(f"opening {reading.commit.name}", reading.match)
            if said.members["do"] == "read":
                access.add(own)
                said, own = together(f"reading {reading.commit.name}", reading.read)
    except (IntegrityError, RollbackError) as error:
        told = _with_undefined(error, course.step, undefined)
        if told is error:
            raise
        raise told from error
    if said.members["do"] == "nothing":
        return None
    # What follows is no longer undone; but nobody goes on before everybody is there.
    lane.agree(
        f"loading {reading.commit.name}",
        reading.load,
        lambda _: Verdict(),
        timeout_s=timeout_s,
        goes_on=True,
    )
    skipped = tuple((step, reason) for step, reason in said.members["skipped"])
    commit = reading.commit
    emitter.emit(
        RestoreFinished(
            run=commit.run,
            step=commit.name.step,
            launch=commit.name.launch,
            skipped=len(skipped),
            size_bytes=reading.read_bytes,
            seconds=time.monotonic() - began,
        )
    )
    restored = Restored(
        step=commit.name.step,
        state=reading.state,
        skipped=skipped,
        missing=reading.missing,
        checkpoint=Checkpoint.of(commit, is_superseded=said.members["is_superseded"]),
        init_from=source.store.uri if source.is_other else None,
    )
    return restored, commit


class _Access:
    """How a sealed checkpoint is opened on every rank, though one alone unlocks it.

    On the coordinator it holds the keys of the checkpoint that is tried, and hands each rank those
    of the files that it is about to read; on another rank, what it was handed.
    """

    def __init__(self, sealing: Sealing | None, ranks: Ranks) -> None:
        self._sealing = sealing
        self._ranks = ranks
        self._own = sealing.one_off() if sealing is not None and not ranks.is_alone else None
        self._publics: list[bytes] = []
        self._unlocked: Unlocked | None = None
        self._handed = b""

    def introduce(self) -> dict[str, bytes]:
        """What this rank lets others seal keys to."""
        return {"public": self._own.public} if self._own is not None else {}

    def meet(self, said: Sequence[Message]) -> None:
        """On the coordinator: what each rank lets keys be sealed to; empty where it opens nothing."""
        self._publics = [message.pieces.get("public", b"") for message in said]

    def unlock(self, store: Store, commit: Commit) -> dict[int, Message]:
        """On the coordinator: unlock a checkpoint, and what each rank needs to hold it against its state.

        Raises:
            IntegrityError: it is damaged, or not sealed where it should be.
            NoKeyError, KeyServiceError: it cannot be unlocked here.
        """
        self._unlocked = None
        if self._sealing is None or self._ranks.is_alone or commit.keyring is None:
            # A rank that is alone unlocks when it first needs a key.
            return {}
        opened = open_checkpoint(store, commit, self._sealing)
        self._unlocked = opened.unlocked
        told = {}
        for rank in range(1, self._ranks.world_size):
            paths = (layout.INDEX, layout.STATE, layout.rank_state_path(rank))
            told[rank] = self._hand(rank, [opened.files[path].path for path in paths if path in opened.files])
        return told

    def hand(self, said: Sequence[Message]) -> dict[int, Message]:
        """On the coordinator: the keys of what each rank said that it reads."""
        if self._unlocked is None:
            return {}
        return {
            rank: self._hand(rank, message.members["files"])
            for rank, message in enumerate(said)
            if rank and message.members.get("files")
        }

    def _hand(self, rank: int, paths: Sequence[str]) -> Message:
        public = self._publics[rank]
        if not public or self._unlocked is None:
            # That rank has no policy, and says so itself when it finds the checkpoint sealed.
            return Message()
        return Message(pieces={"keys": self._unlocked.hand_over(public, paths)})

    def begin(self, own: Message) -> None:
        """What this rank was handed for a checkpoint that is tried now."""
        self._handed = own.pieces.get("keys", b"")
        if not self._ranks.is_coordinator:
            self._unlocked = None

    def add(self, own: Message) -> None:
        """Further keys for it."""
        handed = own.pieces.get("keys", b"")
        if handed and self._unlocked is not None and self._own is not None:
            self._unlocked.take_over(self._own, handed)

    def open(self, store: Store, commit: Commit) -> OpenedCheckpoint:
        """Open the checkpoint with what this rank has.

        Raises:
            IntegrityError, NoKeyError, KeyServiceError, StoreError: it cannot be.
        """
        opened = open_checkpoint(store, commit, self._sealing)
        if opened.manifest.is_sealed and self._sealing is not None and not self._ranks.is_alone:
            if self._unlocked is None and self._own is not None:
                self._unlocked = self._sealing.locked(opened.manifest)
                if self._handed:
                    self._unlocked.take_over(self._own, self._handed)
            return replace(opened, keys=self._unlocked)
        return opened


class _Course:
    """What the coordinator knows of a restore: what was tried, and what comes next."""

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        access: _Access,
        max_fallback: int,
        accept_older: bool,
        emitter: Emitter,
    ) -> None:
        self.step: int | None = None
        self.own_damage: IntegrityError | None = None
        self._sources = sources
        self._access = access
        self._source = 0
        self._max_fallback = max_fallback
        self._accept_older = accept_older
        self._emitter = emitter
        self._looks = 0
        self._skipped: list[tuple[int, str]] = []
        self._trying: CheckpointName | None = None
        self._has_matched = False

    def begin(self, said: list[Message]) -> Verdict:
        """The first decision, from every rank's digest of the run record."""
        self._access.meet(said)
        steps = [message.members["step"] for message in said]
        other = [rank for rank, step in enumerate(steps) if step != steps[0]]
        if other:
            raise RanksDisagreeError(
                f"{name_calls([f'restore(step={step})' for step in steps])}: all ranks must ask for the same "
                "checkpoint",
                ranks=other,
                phase="looking for a checkpoint",
            )
        for number, source in enumerate(self._sources):
            seen = [message.members["roots"][number : number + 1] for message in said]
            elsewhere = [rank for rank, digest in enumerate(seen) if digest != seen[0]]
            if elsewhere:
                raise ConfigError(
                    f"{name_ranks(elsewhere)} and rank 0 see different things at {source.store.uri}: the "
                    "root must be one place for all ranks, such as a shared file system"
                )
        return self._look()

    def decide(self, said: list[Message]) -> Verdict:
        """The next decision, from how the last step went on every rank."""
        name = self._trying
        if name is None:
            raise StateMismatchError("a rank took a step of a restore that was not decided")
        damaged = {
            rank: text for rank, message in enumerate(said) if (text := message.members.get("damaged"))
        }
        if not damaged:
            if not self._has_matched:
                self._has_matched = True
                return Verdict(shared=Message(members={"do": "read"}), own=self._access.hand(said))
            is_superseded = name not in self._history.line.newest_first
            return _do("load", skipped=self._skipped, is_superseded=is_superseded)
        if (
            self._looks < _MAX_LOOKS
            and name in self._history.commits
            and _is_gone(self._sources[self._source].store, name)
        ):
            return self._look()
        blind = [rank for rank, message in enumerate(said) if message.members.get("is_blind")]
        if blind:
            uri = self._sources[self._source].store.uri
            raise ConfigError(
                f"{name_ranks(blind)} cannot see {name.commit_key} at {uri}, which rank 0 has read: the root "
                "must be one place for all ranks, such as a shared file system"
            )
        rank, reason = next(iter(damaged.items()))
        error = self.own_damage if rank == 0 else None
        self._skip(name, reason if rank == 0 else f"{reason} (found by rank {rank})", error)
        return self._next()

    def _look(self) -> Verdict:
        """Look at the root, anew where a checkpoint went away while it was read."""
        self._looks += 1
        self._skipped = []
        for number, source in enumerate(self._sources):
            self._source, self._history = number, source.read_history()
            # A step is one of this run: another run's has no part in its line.
            if self._history.has_commits or self.step is not None:
                break
        else:
            check_origin(self._sources)
            return _do("nothing")
        if self.step is not None:
            self._candidates: Iterator[CheckpointName] = iter((self._history.at_step(self.step),))
        else:
            self._candidates = iter(self._history.line.newest_first)
        return self._next()

    def _next(self) -> Verdict:
        for name in self._candidates:
            self._trying, self._has_matched = name, False
            if name in self._history.commits:
                commit = self._history.commits[name]
                try:
                    own = self._access.unlock(self._sources[self._source].store, commit)
                except IntegrityError as error:
                    if self._looks < _MAX_LOOKS and _is_gone(self._sources[self._source].store, name):
                        return self._look()
                    self._skip(name, str(error), error)
                    continue
                members = {"do": "try", "source": self._source}
                return Verdict(shared=Message(members=members, pieces={"commit": commit.encode()}), own=own)
            self._skip(name, self._history.damaged[name], None)
        line = self._history.line
        if line.broken is not None:
            self._skipped.append((line.newest_first[-1].step, f"what is older cannot be told: {line.broken}"))
        raise NoWholeCheckpointError(
            f"checkpoints were committed here, and none is whole: {_reasons(self._skipped)}",
            reasons=self._skipped,
        )

    def _skip(self, name: CheckpointName, reason: str, error: IntegrityError | None) -> None:
        """Go on without a damaged checkpoint, where that is allowed."""
        self.own_damage = None
        if self.step is not None:
            raise error or IntegrityError(reason)
        self._skipped.append((name.step, reason))
        run = self._history.run.run if self._history.run else ""
        self._emitter.emit(CheckpointSkipped(run=run, step=name.step, reason=reason))
        if len(self._skipped) > self._max_fallback and not self._accept_older:
            raise RollbackError(
                f"the newest {len(self._skipped)} checkpoints are damaged, and max_fallback allows to skip "
                f"{self._max_fallback}: {_reasons(self._skipped)}. Copy them again from another tier, or "
                "pass accept_older=True to go back further",
                reasons=self._skipped,
            )


def check_origin(sources: Sequence[Source]) -> None:
    """Raise CheckpointNotFoundError where another run was named to begin from, and it has no checkpoint.

    To begin anew instead would be a training that nobody asked for, and nobody would notice.
    """
    for source in sources:
        if source.is_other:
            raise CheckpointNotFoundError(
                f"init_from names {source.store.uri}, where no checkpoint is committed; look at its "
                "spelling, or leave it out to begin anew"
            )


def _do(action: str, **members: Any) -> Verdict:
    return Verdict(shared=Message(members={"do": action, **members}))


def _commit_in(said: Message) -> Commit:
    return Commit.decode(said.pieces["commit"], "the coordinator's choice")


def _root_digest(source: Source) -> str:
    """What this rank sees of a root: a digest of its run record."""
    try:
        return str(sha256_of(source.store.read(layout.RUN, limit_bytes=RUN_BOUNDS.length_bytes)))
    except ObjectNotFoundError:
        return "nothing"


def _is_gone(store: Store, name: CheckpointName) -> bool:
    """Whether a checkpoint was removed, which takes its ``COMMIT`` first."""
    try:
        store.stat(name.commit_key)
    except ObjectNotFoundError:
        return True
    return False


def _is_seen(store: Store, name: CheckpointName) -> bool:
    """Whether this rank sees a checkpoint that another one does; True where it may not look."""
    for pause_s in (*_LOOKS_S, None):
        try:
            store.stat(name.commit_key)
        except ObjectNotFoundError:
            if pause_s is not None:
                # A network file system may take a moment to show a new name to other hosts.
                time.sleep(pause_s)
        except StoreError:
            return True
        else:
            return True
    return False


class _Reading:
    """One checkpoint on its way into one rank's state."""

    def __init__(
        self,
        store: Store,
        commit: Commit,
        template: Any,
        selection: Selection,
        ranks: Ranks,
        workers: int,
        undefined: _Undefined,
        access: _Access,
    ) -> None:
        self.commit = commit
        self.read_bytes = 0
        self.state: Any = None
        self._store = store
        self._template = template
        self._selection = selection
        self._ranks = ranks
        self._workers = workers
        self._undefined = undefined
        self._access = access
        self._touched: set[str] = set()

    @property
    def missing(self) -> tuple[str, ...]:
        return tuple(self._filling.missing_per_rank)

    def match(self) -> Message:
        """Verify what says what there is, and hold it against the state; write nothing.

        Returns:
            the sealed files that this rank is going to read, as stored.

        Raises:
            IntegrityError: it is damaged.
            StateMismatchError: it does not fit.
        """
        self._opened = opened = self._access.open(self._store, self.commit)
        if self._ranks.is_coordinator:
            opened.check_unused()
        rank = self._ranks.rank
        try:
            self._filling = match(
                self._template, opened.state, opened.rank_state(rank), opened.index, self._selection
            )
        except StateMismatchError as error:
            raise _extended(error, self._undefined.words() or ". Nothing was changed") from error.__cause__
        uncovered = sorted(self._undefined.in_place - self._filling.in_place)
        if uncovered:
            raise StateMismatchError(
                f"{self.commit.name} holds no value for {', '.join(uncovered[:20])}, which a damaged newer "
                "checkpoint was read into: they are undefined now. Build the state anew and restore step "
                f"{self.commit.name.step}",
                missing=uncovered,
            )
        # Without the chunks that only other ranks need: there are as many as ranks.
        filling = self._filling
        self._records = narrowed(filling.targets, filling.records)
        try:
            self._reads = plan_read(filling.targets, self._records)
        except StateMismatchError as error:
            raise _extended(error, self._undefined.words() or ". Nothing was changed") from error.__cause__
        if not opened.manifest.is_sealed:
            return Message()
        paths = {chunk_of(self._records, item).path for item, target in self._reads if target.numel()}
        return Message(members={"files": sorted(opened.record(path).path for path in paths)})

    def read(self) -> Message:
        """Fill every tensor, each block verified before it is used, and decode the rest; load nothing.

        Raises:
            IntegrityError: it is damaged; what was touched is undefined.
        """
        filling = self._filling
        try:
            self.read_bytes = fetch(
                self._opened, self._reads, self._records, workers=self._workers, touched=self._touched
            )
            filling.decode()
        except StateMismatchError as error:
            raise self._already(error) from error.__cause__
        finally:
            # Defined only once every rank has found its part whole: then this is forgotten.
            self._undefined.in_place |= self._touched & filling.in_place
            self._undefined.replaceable |= self._touched & filling.replaceable
        return Message()

    def load(self) -> Message:
        """Hand objects their state; what comes back says nothing.

        Raises:
            StateMismatchError: one refuses it.
        """
        try:
            self.state = self._filling.load()
        except StateMismatchError as error:
            raise self._already(error) from error.__cause__
        return Message()

    def _already(self, error: StateMismatchError) -> StateMismatchError:
        already = f". Your tensors hold {self.commit.name} already; what is loaded after them is not"
        return _extended(error, already if self._touched else "")


def _extended(error: StateMismatchError, words: str) -> StateMismatchError:
    return StateMismatchError(
        f"{error}{words}", missing=error.missing, unexpected=error.unexpected, different=error.different
    )


def _reasons(skipped: Sequence[tuple[int, str]]) -> str:
    return "; ".join(f"step {step}: {reason}" for step, reason in skipped)


def _with_undefined(
    error: IntegrityError | RollbackError, step: int | None, undefined: _Undefined
) -> IntegrityError | RollbackError:
    """The same error, which also says what of this rank's state is undefined now."""
    names = undefined.names
    if not names:
        return error
    told = f"{error}{undefined.words()}"
    if isinstance(error, RollbackError):
        return RollbackError(told, reasons=error.reasons)
    reasons = error.reasons if isinstance(error, NoWholeCheckpointError) else [(step or 0, str(error))]
    return NoWholeCheckpointError(told, reasons=reasons, undefined=names)
