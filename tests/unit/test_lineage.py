"""Which checkpoint is the newest and what falls back to what, as a pure function of launches and commits."""

from __future__ import annotations

import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strongroom.digest import Digest
from strongroom.errors import StoreError
from strongroom.layout import CheckpointName
from strongroom.lineage import current_line, next_launch
from strongroom.manifest import CheckpointRef
from strongroom.stores import MemoryStore
from strongroom.transaction import claim_launch


def at(launch: int, step: int, attempt: str = "a" * 16) -> CheckpointName:
    return CheckpointName(launch=launch, step=step, attempt=attempt)


def ref(launch: int, step: int) -> CheckpointRef:
    return CheckpointRef(launch=launch, step=step, attempt="a" * 16, manifest=Digest("sha256", bytes(32)))


def shown(names: tuple[CheckpointName, ...]) -> list[tuple[int, int]]:
    return [(name.launch, name.step) for name in names]


def test_nothing_has_no_line() -> None:
    line = current_line([], {})
    assert (line.newest_first, line.superseded, line.broken) == ((), (), None)


def test_one_launch_is_its_steps_highest_first_whatever_order_they_are_listed_in() -> None:
    line = current_line([at(1, 20), at(1, 100), at(1, 3)], {1: None})
    assert shown(line.newest_first) == [(1, 100), (1, 20), (1, 3)]
    assert line.superseded == ()


def test_a_resumed_launch_goes_on_from_its_parent() -> None:
    line = current_line([at(1, 1), at(1, 2), at(2, 3)], {1: None, 2: ref(1, 2)})
    assert shown(line.newest_first) == [(2, 3), (1, 2), (1, 1)]


def test_a_rewind_supersedes_what_was_above_its_parent() -> None:
    line = current_line([at(1, 1), at(1, 2), at(1, 3), at(2, 2)], {1: None, 2: ref(1, 1)})
    assert shown(line.newest_first) == [(2, 2), (1, 1)]
    assert shown(line.superseded) == [(1, 3), (1, 2)]


def test_the_newest_launch_wins_over_a_higher_step() -> None:
    line = current_line([at(1, 1000), at(2, 5)], {1: None, 2: None})
    assert shown(line.newest_first) == [(2, 5)]
    assert shown(line.superseded) == [(1, 1000)]


def test_a_launch_without_a_commit_changes_nothing() -> None:
    before = current_line([at(1, 1), at(1, 2)], {1: None})
    assert current_line([at(1, 1), at(1, 2)], {1: None, 2: ref(1, 1), 3: None}) == before


def test_a_step_saved_again_by_a_later_launch_stands_before_the_older_one() -> None:
    line = current_line([at(1, 5), at(2, 5)], {1: None, 2: ref(1, 5)})
    assert shown(line.newest_first) == [(2, 5), (1, 5)]


def test_two_attempts_at_one_step_are_both_on_the_line_and_in_a_fixed_order() -> None:
    names = [at(1, 5, "0" * 16), at(1, 5, "f" * 16)]
    assert current_line(names, {1: None}).newest_first == (names[1], names[0])
    assert current_line(names[::-1], {1: None}).newest_first == (names[1], names[0])


def test_a_zombies_late_commit_is_never_the_newest() -> None:
    # Launch 2 took the run over from step 1; launch 1 committed step 9 all the same.
    line = current_line([at(1, 1), at(1, 9), at(2, 2)], {1: None, 2: ref(1, 1)})
    assert shown(line.newest_first) == [(2, 2), (1, 1)]
    assert shown(line.superseded) == [(1, 9)]


def test_a_line_passes_through_many_launches_and_over_some() -> None:
    commits = [at(1, 1), at(1, 2), at(2, 3), at(3, 2), at(4, 4), at(5, 3)]
    parents = {1: None, 2: ref(1, 2), 3: ref(1, 1), 4: ref(2, 3), 5: ref(3, 2)}
    line = current_line(commits, parents)
    assert shown(line.newest_first) == [(5, 3), (3, 2), (1, 1)]
    assert shown(line.superseded) == [(4, 4), (2, 3), (1, 2)]


def test_a_parent_that_retention_removed_still_bounds_the_line() -> None:
    line = current_line([at(1, 1), at(1, 3), at(2, 4)], {1: None, 2: ref(1, 2)})
    assert shown(line.newest_first) == [(2, 4), (1, 1)]


def test_a_missing_launch_record_ends_the_line_and_says_so() -> None:
    line = current_line([at(1, 1), at(2, 2), at(3, 3)], {1: None, 3: ref(2, 2)})
    assert shown(line.newest_first) == [(3, 3), (2, 2)]
    assert line.broken == "the record of launch 2 is missing"
    assert shown(line.superseded) == [(1, 1)]


def test_a_damaged_launch_record_ends_the_line_with_its_reason() -> None:
    line = current_line([at(1, 1), at(2, 2)], {1: None}, {2: "launches/000002.json is damaged"})
    assert shown(line.newest_first) == [(2, 2)]
    assert line.broken == "launches/000002.json is damaged"


def test_every_commit_is_ranked_once() -> None:
    line = current_line([at(1, 1), at(1, 2), at(2, 2)], {1: None, 2: ref(1, 1)})
    assert shown(line.ranked) == [(2, 2), (1, 1), (1, 2)]


def test_the_next_launch_is_above_every_number_ever_taken() -> None:
    assert next_launch([]) == 1
    assert next_launch([7, 3]) == 8


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[CheckpointName], dict[int, Any]]:
    attempts = st.text(string.hexdigits.lower()[:16], min_size=16, max_size=16)
    count = draw(st.integers(1, 6))
    parents: dict[int, Any] = {}
    for launch in range(1, count + 1):
        older = (
            st.none()
            if launch == 1
            else st.none() | st.builds(ref, st.integers(1, launch - 1), st.integers(0, 6))
        )
        if draw(st.integers(0, 9)):
            parents[launch] = draw(older)
    commits = draw(
        st.lists(st.builds(at, st.integers(1, count), st.integers(0, 6), attempts), unique=True, max_size=12)
    )
    return commits, parents


@given(histories())
def test_any_history_is_ranked_whole_in_order_and_independently_of_listing(history: Any) -> None:
    commits, parents = history
    line = current_line(commits, parents)
    assert sorted(line.ranked) == sorted(commits)
    assert current_line(commits[::-1], dict(reversed(parents.items()))) == line
    # Launches only ever go down along the line, and steps within one.
    launches = [name.launch for name in line.newest_first]
    assert launches == sorted(launches, reverse=True)
    for launch in set(launches):
        steps = [name for name in line.newest_first if name.launch == launch]
        assert steps == sorted(steps, reverse=True)
    if commits:
        assert line.newest_first[0] == max(name for name in commits)


@given(histories())
def test_a_later_writers_commit_makes_it_the_newest_and_keeps_its_parents_line(history: Any) -> None:
    commits, parents = history
    line = current_line(commits, parents)
    for number, name in enumerate(line.newest_first):
        later = at(99, name.step, "b" * 16)
        grown = current_line([*commits, later], {**parents, 99: ref(name.launch, name.step)})
        assert grown.newest_first[0] == later
        assert name in grown.newest_first
        below = [n for n in line.newest_first[number:] if (n.launch, n.step) != (name.launch, name.step)]
        assert [n for n in grown.newest_first if n in below] == below
        assert not {n for n in line.newest_first if (n.launch, n.step) > (name.launch, name.step)} & set(
            grown.newest_first
        )


def test_a_root_without_a_launch_number_left_says_so() -> None:
    store = MemoryStore()
    with pytest.raises(StoreError, match="no launch number left: 999999 is taken"):
        claim_launch([store], run="r", parent=None, taken={999_999}, deadline_s=1, now_ms=0)
