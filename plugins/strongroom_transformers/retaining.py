"""Which checkpoints stay, as ``save_total_limit`` and ``metric_for_best_model`` have it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strongroom.layout import CheckpointName
from strongroom.ranking import Scores

__all__ = ["KeepAsTrainer", "best_of", "note_best", "scores_for"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepAsTrainer:
    """Keep ``limit`` checkpoints: the newest, and the best in place of the oldest of them.

    With a limit of one and a best that is not the newest, both stay, as they do under the Trainer.
    """

    limit: int
    scores: Scores

    def keep(self, ranked: Sequence[CheckpointName]) -> Mapping[CheckpointName, str]:
        """Choose, with the reasons."""
        self.scores.see(ranked)
        newest = list(ranked[: self.limit])
        best = next(
            (name for step in self.scores.best_first()[:1] for name in ranked if name.step == step), None
        )
        if best is not None and best not in newest:
            newest = newest[: max(self.limit - 1, 1)]
        kept = dict.fromkeys(newest, f"one of the newest {len(newest)} (save_total_limit={self.limit})")
        if best is not None:
            kept[best] = f"the best by {self.scores.metric} ({self.scores.mode})"
        return kept


def scores_for(args: Any) -> Scores:
    """What a run's checkpoints are ranked by; empty, and for ever, where nothing is."""
    return Scores(args.metric_for_best_model or "nothing", "max" if args.greater_is_better else "min")


def note_best(scores: Scores, state: Any) -> None:
    """The Trainer has just found that the step which is about to be saved is the best so far."""
    if state.best_metric is not None and state.best_global_step == state.global_step:
        scores.put(state.global_step, float(state.best_metric))


def best_of(scores: Scores, state: Any) -> int | None:
    """The best step that is saved, or is about to be; None: there is none.

    A better one that was evaluated, and is not saved, takes nothing from it.
    """
    saved = scores.best_first()
    return state.best_global_step if state.best_global_step in saved else next(iter(saved), None)
