"""Whether a run that failed can be saved once more: only where that is exact, and only together.

A step that failed half-way leaves weights, counters and random states that belong to no step; saved, they
would resume as something that never was. What stands between two steps on every rank can be saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from strongroom.errors import RanksError
from strongroom.messages import Message
from strongroom.ranks import Ranks, Verdict

__all__ = ["agree_to_save"]

_PHASE: Final = "agreeing to save what a failed run has come to"


def agree_to_save(ranks: Ranks, boundary: int | None, *, within_s: float) -> str | None:
    """Say, on every rank that has failed, whether all save the boundary that they stand at.

    Args:
        boundary: how many this rank has passed, where all that it holds is as it was there; else None.
        within_s: how long ranks are waited for: those that have not failed never come.

    Returns:
        None where all save, or why they do not.
    """

    def decide(said: list[Message]) -> Verdict:
        return Verdict(shared=Message(members={"why_not": _why_not([one.members["at"] for one in said])}))

    try:
        told, _ = ranks.lane("failing").agree(
            _PHASE, lambda: Message(members={"at": boundary}), decide, timeout_s=within_s, linger_s=within_s
        )
    except RanksError as error:
        return f"not every rank stands between two steps ({error!s:.200})"
    why_not = told.members["why_not"]
    return None if why_not is None else str(why_not)


def _why_not(boundaries: Sequence[Any]) -> str | None:
    if any(boundary is None for boundary in boundaries):
        return "the error came in the middle of a step"
    if len(set(boundaries)) > 1:
        return "ranks stand at different steps"
    return None
