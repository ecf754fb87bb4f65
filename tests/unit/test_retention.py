"""Which checkpoints stay, with the reason: pure decisions, before anything is removed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strongroom import ConfigError, KeepLast
from strongroom.layout import CheckpointName
from strongroom.retention import KeepAll, plan


def at(step: int, launch: int = 1) -> CheckpointName:
    return CheckpointName(launch=launch, step=step, attempt="a" * 16)


RANKED = [at(step) for step in (5, 4, 3, 2, 1)]


class KeepNothing:
    """A policy with a bug."""

    def keep(self, ranked: Sequence[CheckpointName]) -> Collection[CheckpointName]:
        return ()


def kept(decisions: Any) -> list[int]:
    return [decision.name.step for decision in decisions if decision.is_kept]


def test_the_newest_so_many_stay() -> None:
    assert kept(plan(RANKED, KeepLast(count=2))) == [5, 4]
    assert kept(plan(RANKED, KeepLast(count=99))) == [5, 4, 3, 2, 1]
    assert plan([], KeepLast(count=1)) == []


def test_everything_may_stay() -> None:
    assert kept(plan(RANKED, KeepAll())) == [5, 4, 3, 2, 1]


def test_the_newest_stays_whatever_a_policy_says() -> None:
    decisions = plan(RANKED, KeepNothing())
    assert kept(decisions) == [5]
    assert decisions[0].reason == "the newest checkpoint"


def test_the_newest_that_was_verified_by_reading_stays_too() -> None:
    decisions = plan(RANKED, KeepLast(count=1), verified={at(2), at(3)})
    assert kept(decisions) == [5, 3]
    assert "verified by reading" in decisions[2].reason


def test_what_was_verified_and_is_gone_keeps_nothing_else() -> None:
    assert kept(plan(RANKED, KeepLast(count=1), verified={at(9)})) == [5]


def test_superseded_checkpoints_are_replaced_one_by_one() -> None:
    ranked = [at(3, 2), at(2, 2), at(9, 1), at(8, 1)]
    assert kept(plan(ranked, KeepLast(count=3))) == [3, 2, 9]


def test_every_decision_has_a_reason_in_words() -> None:
    for decision in plan(RANKED, KeepLast(count=2), verified={at(3)}):
        assert decision.reason
    assert "KeepLast(count=2)" in plan(RANKED, KeepLast(count=2))[-1].reason


@pytest.mark.parametrize("count", (0, -1, 1.5, "3", None, True))
def test_a_count_is_a_whole_number_of_at_least_one(count: Any) -> None:
    with pytest.raises(ConfigError, match="count must be a whole number of at least 1"):
        KeepLast(count=count)


@given(
    steps=st.lists(st.integers(0, 30), unique=True, min_size=1, max_size=12),
    count=st.integers(1, 5),
    verified=st.sets(st.integers(0, 30)),
)
def test_the_newest_and_the_newest_verified_are_never_let_go(
    steps: list[int], count: int, verified: set[int]
) -> None:
    ranked = [at(step) for step in sorted(steps, reverse=True)]
    decisions = plan(ranked, KeepLast(count=count), verified={at(step) for step in verified})
    assert [decision.name for decision in decisions] == ranked
    stays = {decision.name for decision in decisions if decision.is_kept}
    assert ranked[0] in stays
    once_verified = [name for name in ranked if name.step in verified]
    assert set(once_verified[:1]) <= stays
    assert len(stays) <= count + 1


def test_what_is_held_stays_for_the_reason_that_was_given() -> None:
    held = {at(2): "not on s3://bucket yet", at(5): "never asked"}
    decisions = plan(RANKED, KeepLast(count=1), held=held)
    assert kept(decisions) == [5, 2]
    assert [decision.reason for decision in decisions if decision.is_kept] == [
        "the newest checkpoint",
        "not on s3://bucket yet",
    ]


def test_what_is_held_takes_no_other_checkpoints_place() -> None:
    assert kept(plan(RANKED, KeepLast(count=2), held={at(1): "here alone"})) == [5, 4, 1]
    assert kept(plan(RANKED, KeepLast(count=2), held={at(9): "gone"})) == [5, 4]
