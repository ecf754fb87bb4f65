"""Restoring: the newest whole checkpoint, verified, into the caller's state; bounded fall-back.

All ranks of a job go through it together. The coordinator looks at the root and picks what to
try; every rank holds it against its own state, then reads and verifies what it needs, then loads;
and no rank takes the next step before all have taken the last. So damage that one rank finds
makes all fall back, and what one cannot do is an error on all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from strongroom import layout
from strongroom.access import Access
from strongroom.auditing import Action, Activity, record_of
from strongroom.catalog import Checkpoint
from strongroom.course import Course, Source
from strongroom.digest import sha256_of
from strongroom.errors import (
    AuditError,
    IntegrityError,
    NoWholeCheckpointError,
    ObjectNotFoundError,
    ProvenanceMismatchError,
    RollbackError,
    StateMismatchError,
    StoreError,
)
from strongroom.events import Emitter, RestoreFinished
from strongroom.fetch import fetch
from strongroom.fill import match
from strongroom.layout import CheckpointName
from strongroom.manifest import RUN_BOUNDS, Commit
from strongroom.messages import Message
from strongroom.metadata import narrowed
from strongroom.opened import OpenedCheckpoint
from strongroom.plan import chunk_of, plan_read
from strongroom.provenance.comparing import Change
from strongroom.ranks import Ranks, Verdict
from strongroom.selection import Selection
from strongroom.signing import Guard
from strongroom.stores.base import Store

__all__ = ["Judge", "Restored", "restore"]

Judge = Callable[[OpenedCheckpoint], Sequence[Change]]

_LOOKS_S: Final = (0.05, 0.2, 1.0)
"""Pauses between looks for a commit that another rank has read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What a restore gave.

    Attributes:
        step: the checkpoint's step.
        state: the caller's state, filled; without a template, everything on the CPU.
        skipped: ``(step, reason)`` for every newer checkpoint that was found damaged.
        missing: names of values that each rank has its own of, and of which the checkpoint holds
            none for this rank, because it was saved by fewer. The caller's stay, or those of the rank
            that stands in are given.
        checkpoint: which checkpoint it was.
        init_from: the root of the other run that it came from; None: this run's own.
        rollback_protection: where the highest verified checkpoint is remembered; ``"none"``: nowhere
            outside of the root, so that an older state of the whole root would be restored as well.
        changes: what the program that restored it has other than the one that saved it, as far as both
            say. Of another run's checkpoint nothing is compared.
    """

    step: int
    state: Any
    skipped: tuple[tuple[int, str], ...]
    missing: tuple[str, ...]
    checkpoint: Checkpoint
    init_from: str | None = None
    rollback_protection: str = "none"
    changes: tuple[Change, ...] = ()


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
    guard: Guard,
    ranks: Ranks,
    timeout_s: float,
    workers: int,
    emitter: Emitter,
    run_id: str | None = None,
    judge: Judge | None = None,
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
        accept_older: allow any number, and to go below the floor.
        guard: what a checkpoint is held to; the coordinator judges and unlocks one for all ranks.
        timeout_s: seconds that ranks wait for each other at each step.
        run_id: the run that the root must be of; None: whichever it is.
        judge: holds a checkpoint of this run against the program that restores it, on the coordinator.

    Raises:
        CheckpointNotFoundError: no checkpoint of that step, or none where another run was named.
        IntegrityError: that step is damaged; or, as `NoWholeCheckpointError`, all are.
        RollbackError: more than ``max_fallback`` would be skipped, or it lies below the floor.
        StateMismatchError: the checkpoint does not fit the template.
        ProvenanceMismatchError: what ``judge`` raised, on every rank.
        StoreError: the store could not be asked: that says nothing about the bytes.
        NoKeyError, KeyServiceError: it is sealed, and cannot be opened here.
        AuditError: a checkpoint could not be put on record first, and was not read.
        RanksError: another rank is missing, or failed.
    """
    with Activity(guard.auditor, Action.RESTORE, root=sources[0].uri) as activity:
        found = _restore(
            sources,
            template,
            ready=ready,
            selection=selection,
            max_fallback=max_fallback,
            accept_older=accept_older,
            guard=guard,
            ranks=ranks,
            timeout_s=timeout_s,
            workers=workers,
            emitter=emitter,
            run_id=run_id,
            judge=judge,
            activity=activity,
        )
        activity.note(is_found=found is not None)
    return found


def _restore(
    sources: Sequence[Source],
    template: Any,
    *,
    ready: Callable[[], int | None],
    selection: Selection,
    max_fallback: int,
    accept_older: bool,
    guard: Guard,
    ranks: Ranks,
    timeout_s: float,
    workers: int,
    emitter: Emitter,
    run_id: str | None,
    judge: Judge | None,
    activity: Activity,
) -> tuple[Restored, Commit] | None:
    access = Access(guard, ranks, timeout_s, activity, selection.stand_in)
    course = Course(
        sources,
        access=access,
        max_fallback=max_fallback,
        accept_older=accept_older,
        emitter=emitter,
        run_id=run_id,
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
                is_blind = not ranks.is_coordinator and not reading.is_seen()
                return Message(members={"damaged": str(error), "is_blind": is_blind})

        return lane.agree(phase, propose, course.decide, timeout_s=timeout_s, goes_on=True)

    def look() -> Message:
        course.step = ready()
        roots = [] if ranks.is_alone else [*map(_root_digest, sources)]
        members = {
            "demands": access.fingerprint,
            "record": record_of(guard.auditor),
            "roots": roots,
            "step": course.step,
        }
        return Message(members=members, pieces=access.introduce())

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
                source.stores(said.members["tiers"]),
                _commit_in(said),
                template,
                selection,
                ranks,
                workers,
                undefined,
                access,
                # Another run trains as it likes.
                None if source.is_other else judge,
            )
            access.begin(own)
            said, own = together(f"opening {reading.commit.name}", reading.match)
            if said.members["do"] == "read":
                access.add(own)
                said, own = together(f"reading {reading.commit.name}", reading.read)
    except (AuditError, IntegrityError, RollbackError) as error:
        told = _with_undefined(error, course.step, undefined)
        if told is error:
            raise
        raise told from error
    if said.members["do"] == "nothing":
        return None
    # What follows is no longer undone; but nobody goes on before everybody is there.
    loaded, _ = lane.agree(
        f"loading {reading.commit.name}",
        reading.load,
        lambda told: Verdict(shared=Message(members={"changes": told[0].members.get("changes", [])})),
        timeout_s=timeout_s,
        goes_on=True,
    )
    skipped = tuple((step, reason) for step, reason in said.members["skipped"])
    commit = reading.commit
    seconds = time.monotonic() - began
    activity.note(
        skipped=len(skipped),
        size_bytes=reading.read_bytes,
        restore_ms=round(1000 * seconds),
        rank=ranks.rank,
    )
    emitter.emit(
        RestoreFinished(
            run=commit.run,
            step=commit.name.step,
            launch=commit.name.launch,
            skipped=len(skipped),
            size_bytes=reading.read_bytes,
            seconds=seconds,
            rollback_protection=guard.rollback_protection,
        )
    )
    restored = Restored(
        step=commit.name.step,
        state=reading.state,
        skipped=skipped,
        missing=reading.missing,
        checkpoint=Checkpoint.of(commit, is_superseded=said.members["is_superseded"]),
        init_from=source.uri if source.is_other else None,
        rollback_protection=guard.rollback_protection,
        changes=tuple(Change.from_json(change) for change in loaded.members["changes"]),
    )
    return restored, commit


def _commit_in(said: Message) -> Commit:
    return Commit.decode(said.pieces["commit"], "the coordinator's choice")


def _root_digest(source: Source) -> str:
    """What this rank sees of a root: a digest of its run record, which the first tier that has it tells."""
    for store in source.tiers.readable:
        try:
            return str(sha256_of(store.read(layout.RUN, limit_bytes=RUN_BOUNDS.length_bytes)))
        except ObjectNotFoundError:
            continue
        except StoreError:
            if not source.tiers.accepts_missing:
                raise
    return "nothing"


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
        stores: tuple[Store, ...],
        commit: Commit,
        template: Any,
        selection: Selection,
        ranks: Ranks,
        workers: int,
        undefined: _Undefined,
        access: Access,
        judge: Judge | None,
    ) -> None:
        self.commit = commit
        self.read_bytes = 0
        self.state: Any = None
        self._stores = stores
        self._template = template
        self._selection = selection
        self._ranks = ranks
        self._workers = workers
        self._undefined = undefined
        self._access = access
        self._judge = judge
        self._changes: Sequence[Change] = ()
        self._borrowed: tuple[str, ...] = ()
        self._touched: set[str] = set()

    @property
    def missing(self) -> tuple[str, ...]:
        return (*self._filling.missing_per_rank, *self._borrowed)

    def is_seen(self) -> bool:
        """Whether this rank sees the checkpoint somewhere."""
        return any(_is_seen(store, self.commit.name) for store in self._stores)

    def match(self) -> Message:
        """Verify what says what there is, and hold it against the state; write nothing.

        Returns:
            the sealed files that this rank is going to read, as stored.

        Raises:
            IntegrityError: it is damaged.
            StateMismatchError: it does not fit.
            ProvenanceMismatchError: this program is not to go on from it.
        """
        self._opened = opened = self._access.open(self._stores, self.commit)
        if self._ranks.is_coordinator:
            opened.check_unused()
            if self._judge is not None:
                try:
                    self._changes = self._judge(opened)
                except ProvenanceMismatchError as error:
                    raise ProvenanceMismatchError(
                        f"{error}{self._undefined.words() or '. Nothing was changed'}",
                        different=error.different,
                    ) from error
        owner = opened.owner_for(self._ranks.rank, self._selection.stand_in)
        own_values = opened.rank_state(owner)
        self._borrowed = tuple(own_values) if owner != self._ranks.rank else ()
        try:
            self._filling = match(self._template, opened.state, own_values, opened.index, self._selection)
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
        """Hand objects their state; what comes back says what has changed since it was saved.

        Raises:
            StateMismatchError: one refuses it.
        """
        try:
            self.state = self._filling.load()
        except StateMismatchError as error:
            raise self._already(error) from error.__cause__
        return Message(members={"changes": [change.to_json() for change in self._changes]})

    def _already(self, error: StateMismatchError) -> StateMismatchError:
        already = f". Your tensors hold {self.commit.name} already; what is loaded after them is not"
        return _extended(error, already if self._touched else "")


def _extended(error: StateMismatchError, words: str) -> StateMismatchError:
    return StateMismatchError(
        f"{error}{words}", missing=error.missing, unexpected=error.unexpected, different=error.different
    )


def _with_undefined(
    error: AuditError | IntegrityError | RollbackError, step: int | None, undefined: _Undefined
) -> AuditError | IntegrityError | RollbackError:
    """The same error, which also says what of this rank's state is undefined now."""
    names = undefined.names
    if not names:
        return error
    told = f"{error}{undefined.words()}"
    if isinstance(error, AuditError):
        return AuditError(told)
    if isinstance(error, RollbackError):
        return RollbackError(told, reasons=error.reasons)
    reasons = error.reasons if isinstance(error, NoWholeCheckpointError) else [(step or 0, str(error))]
    return NoWholeCheckpointError(told, reasons=reasons, undefined=names)
