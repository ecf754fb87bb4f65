"""Loading a checkpoint by itself: by one process alone, whatever job it is part of.

It is for programs that want a trained model and have no run to go on with. A run resumes by
`strongroom.Checkpointer.restore`, for which all its ranks come together.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from strongroom import restore as restoring
from strongroom.acts import ActSink
from strongroom.arguments import check_step, check_tiers, selection_of
from strongroom.auditing import NO_AUDIT
from strongroom.config import check_count, check_seconds, load_policy
from strongroom.course import Source
from strongroom.errors import CheckpointNotFoundError
from strongroom.events import Emitter
from strongroom.ranks import Ranks
from strongroom.restore import Restored
from strongroom.signing import NO_GUARD
from strongroom.stores.base import Store
from strongroom.tiers import Tier, Tiers
from strongroom.workers import reading_workers

__all__ = ["load"]

_SECURING_S = 5.0
"""How long the end waits at most until the record is out of this process's hands."""


def load(
    root: str | os.PathLike[str] | Store,
    *,
    step: int | None = None,
    only: Sequence[str] | None = None,
    security: Any = None,
    replicate_to: Sequence[str | os.PathLike[str] | Store | Tier] = (),
    timeout_s: float = 1800.0,
    max_fallback: int = 3,
    accept_older: bool = False,
) -> Restored:
    """Everything that a checkpoint holds, or part of it, verified and on the CPU.

    Where ranks saved values of their own, those of rank 0 come back.

    Args:
        root: the run's.
        step: this one and no other; None: the newest whole one.
        only: the state's keys to load, such as ``["model"]``, each of which must be there; None: all.
        security: a policy or its file's path; None: the file that ``STRONGROOM_CONFIG`` names, if it is set.
        replicate_to: further tiers that hold the run.
        timeout_s: seconds that one step of it may take.
        max_fallback: damaged checkpoints that may be skipped.
        accept_older: allow any number, and to go below the policy's floor.

    Raises:
        CheckpointNotFoundError: there is none, or none of that step.
        StateMismatchError: it has not all of the keys.
        IntegrityError, RollbackError, NoKeyError, AuditError, StoreError, ...: as
            `strongroom.Checkpointer.restore`.
    """
    policy = load_policy(security)
    guard = policy.guard if policy is not None else NO_GUARD
    auditor = policy.auditor if policy is not None else NO_AUDIT
    tiers = Tiers(
        root,
        check_tiers(replicate_to),
        role=policy.role if policy is not None else None,
        trust=guard.trust,
        accepts_missing=True,
    )
    sinks = (ActSink(auditor, tiers.first.uri),) if auditor.is_on else ()
    try:
        found = restoring.restore(
            [Source(tiers=tiers)],
            None if only is None else dict.fromkeys(only),
            ready=lambda: None if step is None else check_step(step),
            selection=selection_of(True, only, None),
            max_fallback=check_count("max_fallback", max_fallback),
            accept_older=accept_older,
            guard=guard,
            ranks=Ranks(0, 1),
            timeout_s=check_seconds("timeout_s", timeout_s),
            workers=reading_workers(),
            emitter=Emitter(sinks),
        )
    finally:
        if auditor.is_on:
            auditor.secure(within_s=min(_SECURING_S, timeout_s))
    if found is None:
        raise CheckpointNotFoundError(f"{tiers.first.uri} holds no committed checkpoint")
    return found[0]
