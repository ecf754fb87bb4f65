"""Plans: written in one way, and whatever else stands there is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strongroom import canonical
from strongroom.errors import FormatError
from strongroom_security.auditlog.sequencing.plans import Plan, Planned

KEY = f"segments/run-a/20251130T09/{'0' * 32}-000001.jsonl"
PLAN = Plan(size=7, segments=(Planned(key=KEY, digest="a" * 64, lines=3, follows_gap=False),))


def test_a_plan_is_read_as_it_was_written() -> None:
    assert Plan.parse(PLAN.to_bytes(), 7, "the plan") == PLAN
    assert PLAN.end == 10
    with pytest.raises(FormatError, match="size"):
        Plan.parse(PLAN.to_bytes(), 8, "the plan")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-10, 10) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(("key", "sha256", "lines", "follows_gap")), JSON)
def test_no_member_of_a_segment_is_anything_else(name: str, value: object) -> None:
    whole = canonical.decode(PLAN.to_bytes(), "the plan", canonical.Bounds(length_bytes=10_000))
    whole["segments"][0][name] = value
    data = canonical.encode(whole)
    try:
        assert Plan.parse(data, 7, "the plan").to_bytes() == data
    except FormatError:
        return


@given(st.binary(max_size=200) | JSON.map(canonical.encode))
def test_any_bytes_are_a_plan_or_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        Plan.parse(data, 7, "the plan")
