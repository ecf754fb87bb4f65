"""What ranks run in the tests of what they tell the audit log; importable by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from layout_jobs import ROWS, TIMEOUT_S, checkpointer, refusal, truth

from strongroom import PerRank
from strongroom.auditing import NO_AUDIT, Auditor
from strongroom.dcp import StrongroomReader
from strongroom.testing.auditing import RecordingAuditor
from strongroom_security import Seal, SecurityPolicy

__all__ = ["Told", "load_by_dcp", "restore", "save", "without_a_record"]


@dataclass(frozen=True)
class Told:
    """What one rank has told, and what it met.

    Attributes:
        acts: action, phase, outcome, step and operation of each record.
        error: the class and the text of what was raised; empty: nothing.
        secured: how often the record was seen out of the process.
        is_untouched: whether what was to be filled is as it was.
    """

    acts: list[tuple[str, str, str, int | None, str]]
    error: tuple[str, str]
    secured: int
    is_untouched: bool = True


def told(auditor: RecordingAuditor, error: tuple[str, str], *, is_untouched: bool = True) -> Told:
    acts = [
        (
            act.action.value,
            act.phase.value,
            act.outcome.value,
            act.checkpoint.step if act.checkpoint is not None else None,
            act.operation,
        )
        for act in auditor.acts
    ]
    return Told(acts, error, len(auditor.secured), is_untouched)


def state(number: int) -> dict[str, Any]:
    own = PerRank({"rank": dist.get_rank()})
    return {"rows": ROWS.lay(truth((8, 20), seed=number)), "all": truth((5,), seed=number), "own": own}


def empty() -> dict[str, Any]:
    return {"rows": ROWS.lay(torch.zeros(8, 20)), "all": torch.zeros(5), "own": PerRank({"rank": -1})}


def policy(key: Path, auditor: Auditor) -> SecurityPolicy:
    return SecurityPolicy(auditor=auditor, seal=Seal(recipients=[f"file:{key}"]))


def save(root: Path, key: Path, steps: Sequence[int]) -> Told:
    auditor = RecordingAuditor()
    with checkpointer(root, security=policy(key, auditor)) as opened:
        for step in steps:
            opened.save(step, state(step)).result(timeout_s=TIMEOUT_S)
        secured = len(auditor.secured)
    return Told(told(auditor, ("", "")).acts, ("", ""), secured)


def restore(root: Path, key: Path, refused_on: Sequence[int] = ()) -> Told:
    auditor = RecordingAuditor()
    auditor.refuses = dist.get_rank() in refused_on
    target = empty()
    with checkpointer(root, security=policy(key, auditor)) as opened:
        error = refusal(lambda: opened.restore(target))
    rows = target["rows"].to_local()
    is_untouched = bool((rows == 0).all()) and bool((target["all"] == 0).all())
    return told(auditor, error, is_untouched=is_untouched)


def without_a_record(root: Path, key: Path, unrecorded_on: Sequence[int]) -> Told:
    """Restore, and save, where some ranks' policy lacks the record that the others' has."""
    auditor = RecordingAuditor()
    kept = NO_AUDIT if dist.get_rank() in unrecorded_on else auditor
    target = empty()
    with checkpointer(root, security=policy(key, kept)) as opened:
        error = refusal(lambda: opened.restore(target))
        saving = refusal(lambda: opened.save(9, state(9)))
    is_untouched = bool((target["rows"].to_local() == 0).all())
    return told(auditor, (f"{error[0]} {saving[0]}", error[1]), is_untouched=is_untouched)


def load_by_dcp(root: Path, key: Path) -> Told:
    auditor = RecordingAuditor()
    target = {"rows": ROWS.lay(torch.zeros(8, 20))}
    dcp.load(target, storage_reader=StrongroomReader(root, step=1, security=policy(key, auditor)))
    return told(auditor, ("", ""), is_untouched=bool((target["rows"].to_local() == 0).all()))
