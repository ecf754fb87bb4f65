"""Which checkpoint a restore takes: the coordinator's decisions, from what every rank says of each step.

It owns the order in which checkpoints are tried, what counts as damage and what does not, and how far
back a restore may go. What a rank does at each step is `strongroom.restore`'s.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from strongroom.access import Access
from strongroom.alike import check_same_demands, check_same_record
from strongroom.candidates import Candidates
from strongroom.catalog import History
from strongroom.errors import (
    CheckpointNotFoundError,
    ConfigError,
    IntegrityError,
    NoWholeCheckpointError,
    ObjectNotFoundError,
    RollbackError,
    StateMismatchError,
    StoreUnavailableError,
)
from strongroom.events import CheckpointSkipped, Emitter
from strongroom.layout import CheckpointName
from strongroom.manifest import Commit
from strongroom.messages import Message
from strongroom.ranks import Verdict, check_same_call, name_ranks
from strongroom.stores.base import Store

if TYPE_CHECKING:
    from strongroom.tiers import Tiers

__all__ = ["Course", "Source", "check_origin"]

_LOG: Final = logging.getLogger("strongroom")

_MAX_LOOKS: Final = 20
"""How often a root is looked at anew because retention took away what was being read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A root that a restore may read: one place, or several tiers of it.

    Attributes:
        tiers: the root, and what else it is seen together with.
        is_other: whether it is another run's, which this one may begin from.
    """

    tiers: Tiers
    is_other: bool = False

    @property
    def uri(self) -> str:
        """What the root is called, whatever other tiers there are."""
        return self.tiers.first.uri

    def read_history(self) -> History:
        """What it holds now."""
        return self.tiers.history()

    def stores(self, numbers: Sequence[int]) -> tuple[Store, ...]:
        """The tiers of these numbers, for reading."""
        return tuple(self.tiers.readable[number] for number in numbers)


class Course:
    """What the coordinator knows of a restore: what was tried, and what comes next."""

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        access: Access,
        max_fallback: int,
        accept_older: bool,
        emitter: Emitter,
        run_id: str | None = None,
    ) -> None:
        self.step: int | None = None
        self.own_damage: IntegrityError | None = None
        self._sources = sources
        self._access = access
        self._source = 0
        self._max_fallback = max_fallback
        self._accept_older = accept_older
        self._emitter = emitter
        self._run_id = run_id
        self._looks = 0
        self._skipped: list[tuple[int, str]] = []
        self._trying: Commit | None = None
        self._variants: list[Commit] = []
        self._has_matched = False

    def begin(self, said: list[Message]) -> Verdict:
        """The first decision, from every rank's digest of the run record."""
        self._access.meet(said)
        steps = [message.members["step"] for message in said]
        check_same_call([f"restore(step={step})" for step in steps], "looking for a checkpoint")
        check_same_demands([message.members["demands"] for message in said])
        check_same_record([message.members["record"] for message in said])
        for number, source in enumerate(self._sources):
            seen = [message.members["roots"][number : number + 1] for message in said]
            elsewhere = [rank for rank, digest in enumerate(seen) if digest != seen[0]]
            if elsewhere:
                raise ConfigError(
                    f"{name_ranks(elsewhere)} and rank 0 see different things at {source.uri}: the "
                    "root must be one place for all ranks, such as a shared file system"
                )
        return self._look()

    def decide(self, said: list[Message]) -> Verdict:
        """The next decision, from how the last step went on every rank."""
        commit = self._trying
        if commit is None:
            raise StateMismatchError("a rank took a step of a restore that was not decided")
        name, source = commit.name, self._sources[self._source]
        damaged = {
            rank: text for rank, message in enumerate(said) if (text := message.members.get("damaged"))
        }
        if not damaged:
            if not self._has_matched:
                self._has_matched = True
                return Verdict(shared=Message(members={"do": "read"}), own=self._access.hand(said))
            is_superseded = name not in self._history.line.newest_first
            # Every rank has found its part whole: from here on, nothing lower is taken for the newest.
            self._access.remember(source.tiers.uris, commit)
            return _do("load", skipped=self._skipped, is_superseded=is_superseded)
        if self._looks < _MAX_LOOKS and self._is_gone(commit):
            return self._look()
        blind = [rank for rank, message in enumerate(said) if message.members.get("is_blind")]
        if blind:
            raise ConfigError(
                f"{name_ranks(blind)} cannot see {name.commit_key} at {source.uri}, which rank 0 has read: "
                "the root must be one place for all ranks, such as a shared file system"
            )
        rank, reason = next(iter(damaged.items()))
        error = self.own_damage if rank == 0 else None
        self._set_aside(commit, reason if rank == 0 else f"{reason} (found by rank {rank})", error)
        return self._next()

    def _look(self) -> Verdict:
        """Look at the root, anew where a checkpoint went away while it was read."""
        self._looks += 1
        self._skipped, self._variants = [], []
        for number, source in enumerate(self._sources):
            self._source, self._history = number, source.read_history()
            self._check_run(source)
            # A step is one of this run: another run's has no part in its line.
            if self._history.has_commits or self.step is not None:
                break
            if not source.is_other and not self._accept_older:
                self._access.check_emptied(source.tiers.uris, self._history)
                _check_all_seen(source)
        else:
            check_origin(self._sources)
            return _do("nothing")
        self._candidates = Candidates(self._history)
        if self.step is not None:
            self._order: Iterator[CheckpointName] = iter((self._history.at_step(self.step),))
        else:
            self._order = iter(self._candidates)
        return self._next()

    def _check_run(self, source: Source) -> None:
        """Raise ConfigError where the root is another run's than was asked for: it may have been swapped."""
        run = self._history.run
        if self._run_id is None or source.is_other or run is None or run.run == self._run_id:
            return
        raise ConfigError(
            f"{source.uri} holds run {run.run}, and run_id={self._run_id!r} was given: nothing of "
            "another run is restored. Name this run's root, or leave run_id out if this root is meant"
        )

    def _next(self) -> Verdict:
        source = self._sources[self._source]
        for commit in self._commits():
            self._trying, self._has_matched = commit, False
            numbers = source.tiers.holders(commit)
            try:
                own = self._access.admit(
                    source.tiers.uris, source.stores(numbers), commit, accept_older=self._accept_older
                )
            except IntegrityError as error:
                self._candidates.tell(commit.name, error)
                if self._looks < _MAX_LOOKS and self._is_gone(commit):
                    return self._look()
                self._set_aside(commit, str(error), error)
                continue
            except RollbackError as error:
                if not self._skipped:
                    raise
                raise RollbackError(
                    f"{error}. What is newer was skipped: {_reasons(self._skipped)}",
                    reasons=self._skipped,
                ) from error
            self._candidates.tell(commit.name, None)
            members = {"do": "try", "source": self._source, "tiers": list(numbers)}
            return Verdict(shared=Message(members=members, pieces={"commit": commit.encode()}), own=own)
        line = self._history.line
        if line.broken is not None:
            self._skipped.append((line.newest_first[-1].step, f"what is older cannot be told: {line.broken}"))
        raise NoWholeCheckpointError(
            f"checkpoints were committed here, and none is whole: {_reasons(self._skipped)}",
            reasons=self._skipped,
        )

    def _commits(self) -> Iterator[Commit]:
        """What comes next: another tier's commit of the name that was tried last, then the next name's."""
        tiers = self._sources[self._source].tiers
        while True:
            while self._variants:
                yield self._variants.pop(0)
            name = next(self._order, None)
            if name is None:
                return
            self._history = self._candidates.history
            commit = self._history.commits.get(name)
            if commit is None:
                reason = self._history.damaged[name]
                self._candidates.tell(name, IntegrityError(reason))
                self._skip(name, reason, None)
                continue
            self._variants = list(tiers.variants(name) or (commit,))

    def _set_aside(self, commit: Commit, reason: str, error: IntegrityError | None) -> None:
        """Go on without a damaged checkpoint; without this tier's word on it, where another's differs."""
        if not self._variants:
            self._skip(commit.name, reason, error)
            return
        self.own_damage = None
        _LOG.warning(
            "the tiers hold different commits of %s, and this one is not whole: %s", commit.name, reason
        )

    def _is_gone(self, commit: Commit) -> bool:
        """Whether a checkpoint was removed wherever it stood, which takes its ``COMMIT`` first."""
        source = self._sources[self._source]
        return all(_is_gone(store, commit.name) for store in source.stores(source.tiers.holders(commit)))

    def _skip(self, name: CheckpointName, reason: str, error: IntegrityError | None) -> None:
        """Go on without a damaged checkpoint, where that is allowed."""
        self.own_damage = None
        if self.step is not None:
            raise error or IntegrityError(reason)
        self._skipped.append((name.step, reason))
        run = self._history.run.run if self._history.run else ""
        self._emitter.emit(
            CheckpointSkipped(
                run=run,
                step=name.step,
                launch=name.launch,
                attempt=name.attempt,
                reason=reason,
                error=type(error).__name__ if error is not None else IntegrityError.__name__,
            )
        )
        if len(self._skipped) > self._max_fallback and not self._accept_older:
            raise RollbackError(
                f"the newest {len(self._skipped)} checkpoints are damaged, and max_fallback allows to skip "
                f"{self._max_fallback}: {_reasons(self._skipped)}. Copy them again from another tier, or "
                "pass accept_older=True to go back further",
                reasons=self._skipped,
            )


def _check_all_seen(source: Source) -> None:
    """Raise StoreUnavailableError where nothing is there, and a tier was not seen: it may be there."""
    if source.tiers.missing:
        raise StoreUnavailableError(
            f"no checkpoint is committed where this process can look, and a tier is out of reach: "
            f"{'; '.join(source.tiers.missing)}. To begin anew could cut the run off from all it has saved: "
            "bring the tier back; accept_older=True begins anew"
        )


def check_origin(sources: Sequence[Source]) -> None:
    """Raise CheckpointNotFoundError where another run was named to begin from, and it has no checkpoint.

    To begin anew instead would be a training that nobody asked for, and nobody would notice.
    """
    for source in sources:
        if source.is_other:
            raise CheckpointNotFoundError(
                f"init_from names {source.uri}, where no checkpoint is committed; look at its "
                "spelling, or leave it out to begin anew"
            )


def _do(action: str, **members: Any) -> Verdict:
    return Verdict(shared=Message(members={"do": action, **members}))


def _is_gone(store: Store, name: CheckpointName) -> bool:
    """Whether a checkpoint was removed, which takes its ``COMMIT`` first."""
    try:
        store.stat(name.commit_key)
    except ObjectNotFoundError:
        return True
    return False


def _reasons(skipped: Sequence[tuple[int, str]]) -> str:
    return "; ".join(f"step {step}: {reason}" for step, reason in skipped)
