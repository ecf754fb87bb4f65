"""Restoring: the newest whole checkpoint, verified, into the caller's state; bounded fall-back."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from strongroom.catalog import Checkpoint, History
from strongroom.errors import (
    IntegrityError,
    NoWholeCheckpointError,
    ObjectNotFoundError,
    RollbackError,
    StateMismatchError,
)
from strongroom.events import CheckpointSkipped, Emitter, RestoreFinished
from strongroom.fetch import fetch
from strongroom.fill import match
from strongroom.layout import CheckpointName
from strongroom.manifest import Commit
from strongroom.opened import open_checkpoint
from strongroom.plan import plan_read
from strongroom.ranks import Ranks
from strongroom.selection import Selection
from strongroom.stores.base import Store

__all__ = ["Restored", "restore"]


_MAX_LOOKS: Final = 20
"""How often a root is looked at anew because retention took away what was being read."""


class _RemovedMeanwhileError(Exception):
    """A checkpoint that was being read is none any more; it was not damaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What a restore gave.

    Attributes:
        step: the checkpoint's step.
        state: the caller's state, filled; without a template, everything on the CPU.
        skipped: ``(step, reason)`` for every newer checkpoint that was found damaged.
        missing: names of per-rank values that no rank had stored for this one.
        checkpoint: which checkpoint it was.
    """

    step: int
    state: Any
    skipped: tuple[tuple[int, str], ...]
    missing: tuple[str, ...]
    checkpoint: Checkpoint


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
    store: Store,
    read_history: Callable[[], History],
    template: Any,
    *,
    step: int | None,
    selection: Selection,
    max_fallback: int,
    accept_older: bool,
    ranks: Ranks,
    workers: int,
    emitter: Emitter,
) -> tuple[Restored, Commit] | None:
    """Restore one checkpoint; None only where nothing was ever committed.

    A checkpoint that a running job's retention removes while it is read here is not taken for a
    damaged one: the root is looked at again.

    Args:
        read_history: the root as it is now.
        step: this very step, without fall-back; None: the newest whole one.
        max_fallback: damaged checkpoints that may be skipped.
        accept_older: allow any number.

    Raises:
        CheckpointNotFoundError: no checkpoint of that step.
        IntegrityError: that step is damaged; or, as `NoWholeCheckpointError`, all are.
        RollbackError: more than ``max_fallback`` would be skipped.
        StateMismatchError: the checkpoint does not fit the template.
        StoreError: the store could not be asked: that says nothing about the bytes.
    """
    undefined = _Undefined()
    look = 0
    while True:
        look += 1
        try:
            return _restore(
                store,
                read_history(),
                template,
                step=step,
                selection=selection,
                max_fallback=max_fallback,
                accept_older=accept_older,
                ranks=ranks,
                workers=workers,
                emitter=emitter,
                undefined=undefined,
                may_look_again=look < _MAX_LOOKS,
            )
        except _RemovedMeanwhileError:
            continue


def _restore(
    store: Store,
    history: History,
    template: Any,
    *,
    step: int | None,
    selection: Selection,
    max_fallback: int,
    accept_older: bool,
    ranks: Ranks,
    workers: int,
    emitter: Emitter,
    undefined: _Undefined,
    may_look_again: bool,
) -> tuple[Restored, Commit] | None:
    if step is not None:
        candidates: Sequence[CheckpointName] = (history.at_step(step),)
    elif not history.has_commits:
        return None
    else:
        candidates = history.line.newest_first

    skipped: list[tuple[int, str]] = []
    run = history.run.run if history.run else ""
    for name in candidates:
        began = time.monotonic()
        try:
            commit = _commit_of(history, name)
            state, read_bytes = _load(store, commit, template, selection, ranks, workers, undefined)
        except IntegrityError as error:
            if may_look_again and name in history.commits and _is_gone(store, name):
                raise _RemovedMeanwhileError from error
            if step is not None:
                raise _with_undefined(error, step, undefined) from error
            skipped.append((name.step, str(error)))
            emitter.emit(CheckpointSkipped(run=run, step=name.step, reason=str(error)))
        else:
            emitter.emit(
                RestoreFinished(
                    run=run,
                    step=name.step,
                    launch=name.launch,
                    skipped=len(skipped),
                    size_bytes=read_bytes,
                    seconds=time.monotonic() - began,
                )
            )
            checkpoint = Checkpoint.of(commit, is_superseded=name not in history.line.newest_first)
            return (
                Restored(
                    step=name.step, state=state, skipped=tuple(skipped), missing=(), checkpoint=checkpoint
                ),
                commit,
            )
        if len(skipped) > max_fallback and not accept_older:
            raise RollbackError(
                f"the newest {len(skipped)} checkpoints are damaged, and max_fallback allows to skip "
                f"{max_fallback}: {_reasons(skipped)}. Copy them again from another tier, or pass "
                f"accept_older=True to go back further{undefined.words()}",
                reasons=skipped,
            )
    if history.line.broken is not None:
        skipped.append((candidates[-1].step, f"what is older cannot be told: {history.line.broken}"))
    raise NoWholeCheckpointError(
        f"checkpoints were committed here, and none is whole: {_reasons(skipped)}{undefined.words()}",
        reasons=skipped,
        undefined=undefined.names,
    )


def _is_gone(store: Store, name: CheckpointName) -> bool:
    """Whether a checkpoint was removed, which takes its ``COMMIT`` first."""
    try:
        store.stat(name.commit_key)
    except ObjectNotFoundError:
        return True
    return False


def _commit_of(history: History, name: CheckpointName) -> Commit:
    commit = history.commits.get(name)
    if commit is None:
        raise IntegrityError(history.damaged[name])
    return commit


def _load(
    store: Store,
    commit: Commit,
    template: Any,
    selection: Selection,
    ranks: Ranks,
    workers: int,
    undefined: _Undefined,
) -> tuple[Any, int]:
    """Verify and load one checkpoint; the state, and how many bytes of shards were read."""
    opened = open_checkpoint(store, commit)
    opened.check_unused()
    try:
        filling = match(template, opened.state, opened.rank_state(ranks.rank), opened.index, selection)
    except StateMismatchError as error:
        raise _extended(error, undefined.words() or ". Nothing was changed") from error.__cause__
    uncovered = sorted(undefined.in_place - filling.in_place)
    if uncovered:
        raise StateMismatchError(
            f"{commit.name} holds no value for {', '.join(uncovered[:20])}, which a damaged newer checkpoint "
            "was read into: they are undefined now. Build the state anew and restore step "
            f"{commit.name.step}",
            missing=uncovered,
        )
    touched: set[str] = set()
    try:
        reads = plan_read(filling.targets, filling.records)
        read_bytes = fetch(opened, reads, filling.records, workers=workers, touched=touched)
        state = filling.finish()
    except StateMismatchError as error:
        already = (
            f". Your tensors hold {commit.name} already; what is loaded after them is not" if touched else ""
        )
        raise _extended(error, already) from error.__cause__
    except BaseException:
        undefined.in_place |= touched & filling.in_place
        undefined.replaceable |= touched & filling.replaceable
        raise
    return state, read_bytes


def _extended(error: StateMismatchError, words: str) -> StateMismatchError:
    return StateMismatchError(
        f"{error}{words}", missing=error.missing, unexpected=error.unexpected, different=error.different
    )


def _reasons(skipped: Sequence[tuple[int, str]]) -> str:
    return "; ".join(f"step {step}: {reason}" for step, reason in skipped)


def _with_undefined(error: IntegrityError, step: int, undefined: _Undefined) -> IntegrityError:
    names = undefined.names
    if not names:
        return error
    return NoWholeCheckpointError(
        f"{error}{undefined.words()}", reasons=[(step, str(error))], undefined=names
    )
