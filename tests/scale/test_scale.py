"""A job of many ranks, simulated: what it costs grows with its chunks, and no faster."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import plans
import pytest
from measure import Costs, measure, measure_peer, measure_read

SLACK = 4.0
"""Times of a busy machine differ by less; sixteen times as many chunks at quadratic cost by sixteen."""


@pytest.fixture(scope="module")
def more_ranks() -> list[Costs]:
    return [measure(plans.sharded_parts, 100, ranks, runs=2) for ranks in (16, 64, 256)]


@pytest.fixture(scope="module")
def more_tensors() -> list[Costs]:
    return [measure(plans.small_parts, tensors, 16, runs=2) for tensors in (3_125, 12_500, 50_000)]


def growth(costs: Sequence[Costs], figure: Callable[[Costs], float]) -> float:
    """How much more than the chunks a figure grew, from the smallest job to the largest."""
    return figure(costs[-1]) / figure(costs[0]) / (costs[-1].chunks / costs[0].chunks)


@pytest.mark.parametrize("job", ("more_ranks", "more_tensors"))
def test_what_is_sent_and_stored_grows_with_the_chunks(job: str, request: pytest.FixtureRequest) -> None:
    costs: list[Costs] = request.getfixturevalue(job)
    assert costs[-1].chunks == 16 * costs[0].chunks
    for figure in (
        lambda one: one.plan_bytes,
        lambda one: one.gathered_bytes,
        lambda one: one.index_bytes,
    ):
        assert growth(costs, figure) < 1.2


@pytest.mark.parametrize("job", ("more_ranks", "more_tensors"))
def test_the_coordinators_time_grows_with_the_chunks(job: str, request: pytest.FixtureRequest) -> None:
    costs: list[Costs] = request.getfixturevalue(job)
    assert growth(costs, lambda one: one.plan_s) < SLACK
    assert growth(costs, lambda one: one.merge_s) < SLACK
    assert growth(costs, lambda one: one.encode_s + one.decode_s) < SLACK


def test_the_index_is_a_quarter_of_stock_dcps_metadata_in_size_and_time() -> None:
    ours, peer = (measuring(plans.sharded_parts, 100, 128, runs=2) for measuring in (measure, measure_peer))
    assert ours.index_bytes <= 0.25 * peer.metadata_bytes
    assert ours.encode_s <= 0.25 * peer.pickle_s
    assert ours.decode_s <= 0.25 * peer.unpickle_s


def test_a_ranks_reads_are_planned_without_looking_at_every_other_ranks_chunks() -> None:
    few, many = measure_read(50, 16, runs=2), measure_read(50, 256, runs=2)
    assert few[1] == many[1] == 50
    # All but the columns is the same work; with DCP's objects for every chunk it is sixteen times as much.
    assert many[0] < SLACK * few[0]
