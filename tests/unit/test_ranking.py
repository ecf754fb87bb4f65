"""Which checkpoints are the best, and how many of them stay: pure, whatever measured them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strongroom import ConfigError
from strongroom.layout import CheckpointName
from strongroom.ranking import KeepRanked, RankMode, Scores, as_score, best_first, check_rank_mode
from strongroom.retention import plan


def at(step: int, launch: int = 1) -> CheckpointName:
    return CheckpointName(launch=launch, step=step, attempt="a" * 16)


def scored(scores: dict[int, float], mode: RankMode = "min") -> Scores:
    made = Scores("val_loss", mode)
    for step, score in scores.items():
        made.put(step, score)
    return made


def line(*steps: int) -> list[CheckpointName]:
    return [at(step) for step in sorted(steps, reverse=True)]


def kept(ranked: Sequence[CheckpointName], policy: KeepRanked) -> list[int]:
    return sorted(one.name.step for one in plan(ranked, policy) if one.is_kept)


def test_low_is_good_or_high_is() -> None:
    scores = {1: 0.5, 2: 0.1, 3: 0.9}
    assert best_first(scores, "min") == [2, 1, 3]
    assert best_first(scores, "max") == [3, 1, 2]
    with pytest.raises(ConfigError, match="mode must be one of 'min', 'max'; got 'best'"):
        check_rank_mode("best")


@pytest.mark.parametrize("mode", ("min", "max"))
def test_of_equal_ones_the_earlier_is_better(mode: RankMode) -> None:
    assert best_first({3: 1.0, 1: 1.0, 2: 1.0}, mode) == [1, 2, 3]


@pytest.mark.parametrize(("mode", "worst"), (("min", math.inf), ("max", -math.inf)))
def test_what_is_not_a_number_is_worst(mode: RankMode, worst: float) -> None:
    assert as_score(math.nan, mode) == worst
    assert scored({1: math.nan, 2: 5.0}, mode).best_first() == [2, 1]


def test_the_best_stay_beside_the_newest() -> None:
    policy = KeepRanked(newest=1, best=2, scores=scored({1: 0.3, 2: 0.1, 3: 0.2, 4: 0.4}))
    assert kept(line(1, 2, 3, 4), policy) == [2, 3, 4]
    reasons = {one.name.step: one.reason for one in plan(line(1, 2, 3, 4), policy)}
    assert reasons[2] == "number 1 by val_loss (min): 0.1"
    assert reasons[3] == "number 2 by val_loss (min): 0.2"
    assert reasons[4] == "the newest checkpoint"
    assert reasons[1] == "not kept by KeepRanked(newest=1, best=2, scores=Scores('val_loss', 'min'))"


def test_all_of_the_ranked_may_stay_or_none() -> None:
    scores = {1: 0.3, 2: 0.1, 4: 0.4}
    everything = line(1, 2, 3, 4, 5)
    assert kept(everything, KeepRanked(newest=1, best=None, scores=scored(scores))) == [1, 2, 4, 5]
    assert kept(everything, KeepRanked(newest=2, best=0, scores=scored(scores))) == [4, 5]


def test_a_better_one_that_is_not_committed_yet_replaces_nothing() -> None:
    policy = KeepRanked(newest=1, best=1, scores=scored({1: 0.3, 2: 0.2, 3: 0.1}))
    assert kept(line(1, 2), policy) == [2]
    assert kept(line(1, 2, 3), policy) == [3]


def test_what_somebody_has_removed_is_not_the_best_of_anything() -> None:
    scores = scored({1: 0.1, 2: 0.2, 3: 0.3})
    assert scores.best_first() == [1, 2, 3]
    assert kept(line(2, 3), KeepRanked(newest=1, best=1, scores=scores)) == [2, 3]
    assert scores.best_first() == [2, 3]
    scores.put(9, 0.05)  # on its way
    assert scores.best_first() == [9, 2, 3]
    scores.drop(9)
    assert scores.by_step() == {2: 0.2, 3: 0.3}


def test_the_checkpoint_of_the_current_line_is_the_one_that_was_measured() -> None:
    ranked = [at(7, launch=2), at(5, launch=2), at(7), at(6)]
    policy = KeepRanked(newest=1, best=1, scores=scored({5: 0.2, 7: 0.1}))
    assert set(policy.keep(ranked)) == {at(7, launch=2)}


def test_those_of_another_metric_stay() -> None:
    scores = Scores("val_acc", "max")
    scores.replace({3: 0.5}, others=(1, 8))
    decisions = {
        one.name.step: one for one in plan(line(1, 2, 3, 4), KeepRanked(newest=1, best=1, scores=scores))
    }
    assert [step for step, one in sorted(decisions.items()) if one.is_kept] == [1, 3, 4]
    assert "ranked by before" in decisions[1].reason


@pytest.mark.parametrize("counts", ({"newest": 0}, {"best": -1}, {"newest": True}, {"best": 1.5}), ids=str)
def test_counts_are_checked(counts: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=rf"KeepRanked\.{next(iter(counts))} must be a whole number"):
        KeepRanked(**{"newest": 1, "best": 1, "scores": scored({}), **counts})


@given(
    steps=st.sets(st.integers(1, 20), min_size=1),
    scores=st.dictionaries(st.integers(1, 20), st.floats(allow_nan=True)),
    best=st.integers(0, 4),
    newest=st.integers(1, 4),
    mode=st.sampled_from(("min", "max")),
)
def test_nothing_that_goes_is_better_than_what_stays(
    steps: set[int], scores: dict[int, float], best: int, newest: int, mode: RankMode
) -> None:
    policy = KeepRanked(newest=newest, best=best, scores=scored(scores, mode))
    stay = set(kept(line(*steps), policy))
    assert set(sorted(steps)[-newest:]) <= stay
    known = {step: as_score(score, mode) for step, score in scores.items() if step in steps}
    order = best_first(known, mode)
    assert set(order[:best]) <= stay
    assert len(stay) <= newest + best
