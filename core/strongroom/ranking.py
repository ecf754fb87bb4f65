"""Which checkpoints are the best by a figure that was measured on each, and how many of them stay.

Pure decisions over `Scores`, which whoever trains fills and retention looks at from the background.
Measuring is a front end's affair; removing is `strongroom.sweep`'s.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

from strongroom.errors import ConfigError
from strongroom.layout import CheckpointName

__all__ = ["KeepRanked", "RankMode", "Scores", "as_score", "best_first", "check_rank_mode"]

RankMode = Literal["min", "max"]
"""Whether the lowest score is the best, or the highest."""

_MODES: Final[tuple[str, ...]] = get_args(RankMode)


def check_rank_mode(mode: str) -> RankMode:
    """Return ``mode`` if it is one.

    Raises:
        ConfigError: it is none.
    """
    if mode not in _MODES:
        raise ConfigError(f"mode must be one of {', '.join(map(repr, _MODES))}; got {mode!r}")
    return mode  # type: ignore[return-value]  # mypy does not narrow by membership


def as_score(value: float, mode: RankMode) -> float:
    """A measured value to rank by: what is not a number is worse than every number."""
    if math.isnan(value):
        return math.inf if mode == "min" else -math.inf
    return value


def best_first(scores: Mapping[int, float], mode: RankMode) -> list[int]:
    """Steps by their scores; of equal ones the earlier is better, so that nothing is replaced for nothing."""
    sign = 1.0 if mode == "min" else -1.0
    return sorted(scores, key=lambda step: (sign * scores[step], step))


class Scores:
    """What was measured on a run's checkpoints, by step.

    One thread puts scores in and takes them out. Retention looks from another one, and tells what is there:
    a checkpoint that somebody has removed is not the best of anything.

    Args:
        metric: by what is ranked, for people.
        mode: whether low or high is good.

    Attributes:
        others: steps that were among the best by another metric, before the run was ranked by this one.
    """

    def __init__(self, metric: str, mode: RankMode) -> None:
        self.metric = metric
        self.mode: RankMode = mode
        # Both are replaced and never changed, so that each thread always sees a whole one.
        self._by_step: Mapping[int, float] = {}
        self._there: tuple[int, frozenset[int]] = (-1, frozenset())
        self.others: frozenset[int] = frozenset()

    def put(self, step: int, score: float) -> None:
        """Note the score of a checkpoint that is about to be saved."""
        self._by_step = {**self.by_step(), step: as_score(score, self.mode)}

    def drop(self, step: int) -> None:
        """Forget one, of which the save has failed, say."""
        self._by_step = {other: score for other, score in self._by_step.items() if other != step}

    def replace(self, scores: Mapping[int, float], *, others: Iterable[int] = ()) -> None:
        """Forget everything, and begin with these."""
        self._there = (-1, frozenset())
        self.others = frozenset(others)
        self._by_step = {step: as_score(score, self.mode) for step, score in scores.items()}

    def see(self, ranked: Sequence[CheckpointName]) -> None:
        """Learn which checkpoints there are, the current line newest first."""
        if ranked:
            self._there = (ranked[0].step, frozenset(name.step for name in ranked))

    def by_step(self) -> dict[int, float]:
        """The scores of what is there, or newer than all that was there when retention last looked."""
        newest, there = self._there
        return {step: score for step, score in self._by_step.items() if step > newest or step in there}

    def best_first(self, *, without: Collection[int] = ()) -> list[int]:
        """Steps, the best first."""
        return best_first(
            {step: score for step, score in self.by_step().items() if step not in without}, self.mode
        )

    def __repr__(self) -> str:
        return f"Scores({self.metric!r}, {self.mode!r})"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepRanked:
    """Keep the newest ``newest`` checkpoints, to resume from, and the best ``best`` besides.

    Only what is committed is ranked: until a better one is whole, the one that it replaces stays.

    Attributes:
        newest: at least 1.
        best: how many of those that have a score; None: all of them.
        scores: what was measured.
    """

    newest: int
    best: int | None
    scores: Scores

    def __post_init__(self) -> None:
        for name, count, least in (("newest", self.newest, 1), ("best", self.best, 0)):
            if count is not None and (type(count) is not int or count < least):
                raise ConfigError(
                    f"KeepRanked.{name} must be a whole number of at least {least}, got {count!r}"
                )

    def keep(self, ranked: Sequence[CheckpointName]) -> Mapping[CheckpointName, str]:
        """Choose, with the reasons."""
        self.scores.see(ranked)
        kept = dict.fromkeys(ranked[: self.newest], f"one of the newest {self.newest}")
        at_step: dict[int, CheckpointName] = {}
        for name in ranked:
            # A step may have been saved once more on a later line: that one was measured last.
            at_step.setdefault(name.step, name)
        by_step = self.scores.by_step()
        chosen = [step for step in self.scores.best_first() if step in at_step][: self.best]
        for place, step in enumerate(chosen, start=1):
            kept[at_step[step]] = (
                f"number {place} by {self.scores.metric} ({self.scores.mode}): {by_step[step]:g}"
            )
        for step in self.scores.others:
            if step in at_step:
                kept.setdefault(at_step[step], "one of the best by what this run was ranked by before")
        return kept
