"""Save intervals: what is due, why, and never twice at one step."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strongroom.errors import ConfigError
from strongroom.resume import LastSave, Moment, SaveIntervals

START = LastSave(step=0, epochs_done=0, clock_s=0.0)


def moment(step: int, epochs: int = 0, clock_s: float = 0.0, **ends: bool) -> Moment:
    return Moment(step=step, epochs_done=epochs, clock_s=clock_s, **ends)


def saved_steps(intervals: SaveIntervals, moments: list[Moment], last: LastSave = START) -> list[int]:
    steps = []
    for one in moments:
        if intervals.decide(one, last).save:
            steps.append(one.step)
            last = LastSave.at(one)
    return steps


@given(n=st.integers(1, 7), total=st.integers(0, 60), begin=st.integers(0, 60))
def test_every_n_steps_meets_the_multiples_wherever_the_run_took_up(n: int, total: int, begin: int) -> None:
    last = LastSave(step=begin, epochs_done=0, clock_s=0.0)
    moments = [moment(step) for step in range(begin + 1, begin + total + 1)]
    assert saved_steps(SaveIntervals(every_n_steps=n), moments, last) == [
        step for step in range(begin + 1, begin + total + 1) if step % n == 0
    ]


def test_a_counter_that_moves_by_two_misses_no_multiple() -> None:
    moments = [moment(step) for step in range(2, 21, 2)]
    assert saved_steps(SaveIntervals(every_n_steps=5), moments) == [6, 10, 16, 20]


def test_epochs_count_only_at_their_end() -> None:
    intervals = SaveIntervals(every_n_epochs=2)
    moments = [
        moment(10, 1, is_epoch_end=True),
        moment(15, 1),
        moment(20, 2, is_epoch_end=True),
        moment(21, 2),
        moment(40, 4, is_epoch_end=True),
    ]
    assert saved_steps(intervals, moments) == [20, 40]


def test_a_save_inside_an_epoch_does_not_use_up_the_epochs_own() -> None:
    intervals = SaveIntervals(every_n_steps=7, every_n_epochs=1)
    assert saved_steps(intervals, [moment(7), moment(10, 1, is_epoch_end=True)]) == [7, 10]


def test_time_is_measured_from_the_last_save() -> None:
    intervals = SaveIntervals(every=timedelta(seconds=10))
    moments = [moment(step, clock_s=step * 3.0) for step in range(1, 10)]
    assert saved_steps(intervals, moments) == [4, 8]


def test_the_runs_end_is_saved_unless_asked_otherwise() -> None:
    assert saved_steps(SaveIntervals(), [moment(3), moment(4, is_run_end=True)]) == [4]
    assert saved_steps(SaveIntervals(at_run_end=False), [moment(4, is_run_end=True)]) == []


@given(
    every_n_steps=st.none() | st.integers(1, 3),
    every_n_epochs=st.none() | st.integers(1, 3),
    steps=st.lists(st.integers(0, 20)).map(sorted),
    ends=st.booleans(),
)
def test_no_step_is_ever_saved_twice(
    every_n_steps: int | None, every_n_epochs: int | None, steps: list[int], ends: bool
) -> None:
    intervals = SaveIntervals(every_n_steps=every_n_steps, every_n_epochs=every_n_epochs)
    moments = [
        moment(step, index, is_epoch_end=True, is_run_end=ends) for index, step in enumerate(steps, start=1)
    ]
    saved = saved_steps(intervals, moments)
    assert len(saved) == len(set(saved))
    assert 0 not in saved


def test_a_decision_says_why() -> None:
    intervals = SaveIntervals(every_n_steps=4, every_n_epochs=1, every=timedelta(minutes=1))
    both = intervals.decide(moment(8, 1, 60.0, is_epoch_end=True, is_run_end=True), START)
    assert both.reason == "every 4 steps, every epoch, 0:01:00 since the last save, training ends"
    assert intervals.decide(moment(3), START).reason == "nothing is due"
    assert "step 0" in intervals.decide(moment(0), START).reason


@pytest.mark.parametrize("value", (0, -1, True, 1.5, "10"))
@pytest.mark.parametrize("name", ("every_n_steps", "every_n_epochs"))
def test_an_interval_that_is_no_count_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be a whole number"):
        SaveIntervals(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", (timedelta(0), timedelta(seconds=-1), 5))
def test_a_time_interval_must_be_above_zero(value: object) -> None:
    with pytest.raises(ConfigError, match="timedelta above zero"):
        SaveIntervals(every=value)  # type: ignore[arg-type]


def test_after_validation_an_epoch_is_saved_as_often_as_it_is_validated() -> None:
    intervals = SaveIntervals(every_n_epochs=2, after_validation=True)
    moments = [
        moment(5, 0, is_validated=True),
        moment(10, 1, is_validated=True, is_epoch_end=True),
        moment(12, 1, is_validated=True),
        moment(15, 1),
        moment(20, 2, is_validated=True, is_epoch_end=True),
        moment(40, 4, is_epoch_end=True),
        moment(41, 4, is_run_end=True),
    ]
    assert saved_steps(intervals, moments) == [12, 20, 41]
